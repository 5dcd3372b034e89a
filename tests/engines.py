"""Small engines that share their compiled programs, and what their requests have to give."""

import dataclasses
import functools

import numpy as np
import tiny
import tiny_v4
import tiny_v32
import tolerances

from dsa_jax.decode import LanguageModel
from dsa_jax.engine import Engine

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


def small_engine(family: str = "v41", drafts: int = DRAFTS, **options) -> Engine:
    """An engine of three requests and fewer pages than they could use. With and without drafts its arrays have the same shapes."""
    page, pages = (128, 3) if family == "v4" else (PAGE, PAGES)  # V4's pages hold whole groups of 128 tokens
    sizes = dict(prefill_shapes=((2, 8),), decode_rows=(BATCH,), steps=STEPS, snapshots=4, boundary=8)
    # Rings hold drafts + max_rollback + 1 tokens beyond their window.
    return Engine(
        small_model(family), BATCH, CONTEXT + DRAFTS - drafts, page, drafts=drafts, max_rollback=BACK + DRAFTS - drafts,
        **({"pages": pages} | sizes | options),
    )  # fmt: skip


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
    lm = small_model(family)
    padded = np.zeros((1, ROWS), np.int32)
    padded[0, : len(tokens)] = tokens
    logits, _, _ = lm.forward(lm.new_cache(1, ROWS), padded, np.array([len(tokens)], np.int32))
    return np.asarray(logits)[0, : len(tokens)]


def assert_greedy(family: str, tokens: list[int], places) -> None:
    """Each token at `places` is the best one after all before it, up to what another way of arrival may move logits."""
    logits = one_shot(family, tuple(tokens))
    for place in places:
        best = logits[place - 1].max()
        gap = best - logits[place - 1, tokens[place]]
        assert gap <= tolerances.of("model.arrival.f32"), f"token {place} of {tokens} is {gap} below the best"
