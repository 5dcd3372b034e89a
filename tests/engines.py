"""Small engines that share their compiled programs, and what their requests have to give."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import tiny
import tiny_v4
import tiny_v32
import tolerances

from dsa_jax.decode import LanguageModel
from dsa_jax.engine import Engine
from dsa_jax.engine.programs import Slots, taken
from dsa_jax.tap import Tap

NO_STOP = [64]  # outside the vocabulary: never sampled
ROWS = 64  # the one shot that answers are checked with
BATCH, PAGE, PAGES, CONTEXT, STEPS, DRAFTS, BACK = 3, 8, 12, 40, 4, 3, 2


@functools.cache
def small_model(family: str = "v41") -> LanguageModel:
    """Few layers: V4.1 with a ratio-2 source, a candidate source and a consumer, Engrams and one draft stage; V4 and V3.2 as
    their tiny models."""
    if family == "v4":
        return tiny_v4.tiny_model()
    if family == "v32":
        return tiny_v32.tiny_model()
    config = tiny.tiny_config(
        num_hidden_layers=3, compress_ratios=(2, 1, 1, 0), kv_source_layer_ids=(0, 1), index_source_layer_ids=(0, 1, 2),
        candidate_source_layer_id=1, engram_layer_ids=(0, 1), dspark_target_layer_ids=(2,),
    )  # fmt: skip
    return tiny.tiny_model(config=dataclasses.replace(config, dspark_block_size=DRAFTS))


class Watching:
    """A model that also gives the selected positions of its rows to the host: see `WatchedEngine`."""

    def __init__(self, model, see):
        self.model, self.see, self.logits = model, see, model.logits
        self.draft = getattr(model, "draft", None)

    def __call__(self, cache, tokens, count, numerics, image=None):
        tap = Tap(only={"selected"})
        result = self.model(cache, tokens, count, numerics, image, tap)
        jax.debug.callback(self.see, cache.length, count, tap.values, ordered=True)
        return result


@functools.cache
def watched_model(family: str) -> tuple[LanguageModel, list]:
    """`small_model(family)` with compiled programs of its own, and what its rows selected since it was last looked at."""
    lm, seen = copy.copy(small_model(family)), []
    lm.__dict__.pop("programs", None)
    lm.traces, plain = {}, lm.model
    lm.model = lambda leaves=None: Watching(plain(leaves), lambda *step: seen.append(jax.tree.map(np.asarray, step)))
    return lm, seen


class WatchedEngine(Engine):
    """An engine that remembers the positions that every layer selected for every token: `selected[id][position][layer]`.

    What a drafted or taken back token selected is replaced by what the token in its place does.
    """

    def __init__(self, family: str, *arguments, **options):
        lm, self._seen = watched_model(family)
        self.selected, self.ran_ahead = {}, 0
        super().__init__(lm, *arguments, **options)
        self._state.prefill, self._state.decode = self._noting(self._state.prefill), self._noting(self._state.decode)

    def _noting(self, run):
        def noted(requests, *arguments):
            result = run(requests, *arguments)
            self._note(requests)
            return result

        return noted

    def _note(self, requests):
        jax.effects_barrier()
        for length, count, lists in self._seen:
            for b, request in enumerate(requests):
                for i in range(count[b] if request is not None else 0):
                    own = self.selected.setdefault(request.id, {})
                    own[int(length[b]) + i] = {name: positions[b, i] for name, positions in lists.items()}
        self._seen.clear()

    def step(self):
        events = super().step()
        self.ran_ahead += self._ahead is not None
        return events

    def reorder(self, order: list[int]) -> None:
        """Moves every request to another row of the batch, as an engine with another choice of rows would have it."""
        cache, logits, terms = taken(self._state.slots, jnp.array(order, jnp.int32))
        self._state.slots = Slots(cache, logits, terms)
        self._rows = [self._rows[old] for old in order]
        for row, request in enumerate(self._rows):
            if request is not None:
                request.slot = row


def small_engine(
    family: str = "v41", drafts: int = DRAFTS, watched: bool = False, lm: LanguageModel | None = None, **options
) -> Engine:
    """An engine of three requests and fewer pages than they could use, of `lm` (default: `small_model(family)`). With and
    without drafts its arrays have the same shapes."""
    page, pages = (128, 3) if family == "v4" else (PAGE, PAGES)  # V4's pages hold whole groups of 128 tokens
    # Rings hold drafts + max_rollback + 1 tokens beyond their window.
    sizes = dict(
        pages=pages, prefill_shapes=((2, 8),), decode_rows=(BATCH,), steps=STEPS, drafts=drafts,
        max_rollback=BACK + DRAFTS - drafts, snapshots=4, boundary=8,
    )  # fmt: skip
    made = WatchedEngine if watched else Engine
    return made(family if watched else lm or small_model(family), BATCH, CONTEXT + DRAFTS - drafts, page, **(sizes | options))


def prompt(n: int, seed: int = 0) -> list[int]:
    """`n` tokens, the same for a seed; those of a smaller n are the first ones of a larger n's."""
    return np.random.default_rng(seed).integers(3, 60, 200)[:n].tolist()


def run(engine: Engine, steps: int = 400) -> dict[int, list[int]]:
    """The answers' tokens by request, until the engine is idle."""
    answers: dict[int, list[int]] = {}
    for _ in range(steps):
        if engine.is_idle:
            return answers
        for event in engine.step():
            answers.setdefault(event.id, []).extend(event.tokens)
    raise AssertionError(f"the engine is not idle after {steps} steps")


def answer_alone(family: str, tokens: list[int], max_new_tokens: int) -> list[int]:
    """The greedy answer to a prompt, each token the best of a run in one shot over all before it."""
    tokens = list(tokens)
    for _ in range(max_new_tokens):
        tokens.append(int(one_shot(family, tuple(tokens))[-1].argmax()))
    return tokens[-max_new_tokens:]


@functools.lru_cache(maxsize=256)
def one_shot(family: str, tokens: tuple[int, ...]) -> np.ndarray:
    """Logits of every token of a sequence that is run by itself, in one step."""
    return _one_shot(family, tokens)[0]


@functools.lru_cache(maxsize=256)
def _one_shot(family: str, tokens: tuple[int, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    lm = small_model(family)
    padded = np.zeros((1, ROWS), np.int32)
    padded[0, : len(tokens)] = tokens
    logits, _, taps = lm.forward(lm.new_cache(1, ROWS), padded, np.array([len(tokens)], np.int32))
    lists = {name: np.asarray(x)[0, : len(tokens)] for name, x in taps.items() if name.endswith(".selected")}
    return np.asarray(logits)[0, : len(tokens)], lists


def assert_selected(family: str, tokens: list[int], selected: dict[int, dict[str, np.ndarray]]) -> None:
    """The positions that every layer selected for each token are those of the sequence alone, run in one step."""
    _, lists = _one_shot(family, tuple(tokens))
    assert lists
    for position, of_layer in selected.items():
        if position < len(tokens) - 1:  # the last token is sampled, and not run
            assert of_layer.keys() == lists.keys()
            for name, positions in of_layer.items():
                np.testing.assert_array_equal(positions, lists[name][position], f"{name}, token {position} of {tokens}")


def assert_greedy(family: str, tokens: list[int], places) -> None:
    """Each token at `places` is the best one after all before it, up to what another way of arrival may move logits."""
    logits = one_shot(family, tuple(tokens))
    for place in places:
        best = logits[place - 1].max()
        gap = best - logits[place - 1, tokens[place]]
        assert gap <= tolerances.of("model.arrival.f32"), f"token {place} of {tokens} is {gap} below the best"
