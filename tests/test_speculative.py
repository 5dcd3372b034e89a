"""Checking drafts in one pass: what is kept, what is taken back, and that nothing of a rejected draft is ever seen."""

import jax.numpy as jnp
import numpy as np
import pytest
from engines import NO_STOP, prompt, run, small_engine, small_model

from dsa_jax.burst import decode_burst
from dsa_jax.cache.sizes import CacheSizes
from dsa_jax.layers.draft import Draft
from dsa_jax.sampling import Sampling

DRAFTS, ROOM, STEPS = 6, 256, 4


class Proposing:
    """A model whose drafts are given. Everything else is the model's own."""

    def __init__(self, model, ids):
        self.model, self.ids, self.logits = model, ids, model.logits

    def __call__(self, *arguments):
        return self.model(*arguments)

    def draft(self, cache, tokens, numerics):
        return Draft(self.ids, None, None)


def compiled_check(lm):
    def check(model, cache, logits, ids):
        none = jnp.zeros((len(ids),), bool)
        stops, limit = jnp.full((len(ids), 1), -1, jnp.int32), jnp.full((len(ids),), ROOM, jnp.int32)
        return decode_burst(
            Proposing(model, ids), lm.numerics, cache, logits, none, Sampling.of(len(ids)), stops, limit, 1, DRAFTS
        )

    return lm.compiled("check", check)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "lengths"),
    [
        ("v41", [1, 4, 5, 7, 8, 20, 45]),  # groups of 2, candidate blocks of 4, a window of 8
        ("v4", [3, 4, 7, 121, 122, 125, 127, 128, 250]),  # groups of 4 and of 128: boundaries in, before and behind the drafts
        ("v32", [5, 6, 60]),
    ],
)
def test_ac_40_any_number_of_accepted_drafts_leaves_the_state_of_plain_decoding(family, lengths):
    """Request a of seven has its first a drafts accepted, of six; then 12 tokens more. One more request stands idle."""
    lm = small_model(family)
    check, sizes = compiled_check(lm), CacheSizes(max_rollback=DRAFTS)
    requests = DRAFTS + 1
    room = min(ROOM, lm.config.max_position_embeddings)
    for length in lengths:
        if length + DRAFTS + 1 + 3 * STEPS > room:
            continue
        tokens = np.random.default_rng(length).integers(3, 60, length)

        def prefilled():
            cache = lm.new_cache(requests, room, sizes)
            return lm.prefill(cache, [tokens] * requests, chunk=64)

        def plain(cache, logits, steps):
            state, out = (cache, logits, jnp.zeros(requests, bool)), []
            for _ in range(steps):
                *state, new = lm.decode(*state, Sampling.of(requests), jnp.array(NO_STOP, jnp.int32), STEPS)
                out.append(np.asarray(new))
            return np.concatenate(out, axis=1)

        logits, cache = prefilled()
        expected = plain(cache, logits, 5)[0]
        ids = np.tile(expected[: DRAFTS + 1], (requests, 1))
        for accepted in range(DRAFTS):
            ids[accepted, accepted + 1] = (ids[accepted, accepted + 1] - 3 + 11) % 57 + 3
        logits, cache = prefilled()
        cache, logits, done, out = check(lm.leaves, cache, logits, jnp.asarray(ids, jnp.int32))
        assert list(np.asarray(cache.length)) == [length + 1 + a for a in range(requests)] and not np.asarray(done).any()
        after = plain(cache, logits, 3)
        for accepted in range(requests):
            kept = np.asarray(out)[accepted]
            whole = np.concatenate([kept[kept >= 0], after[accepted]])
            assert (kept >= 0).sum() == 1 + accepted
            assert np.array_equal(whole, expected[: len(whole)]), f"{family}, {length} tokens, {accepted} drafts accepted"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["v41", "v4"])
def test_greedy_answers_with_the_model_s_own_drafts_are_those_of_plain_decoding(family):
    """Random weights draft badly, so that nearly all is taken back; the stop and the end of an answer fall inside blocks."""
    answers = []
    for drafts in (0, 1 if family == "v4" else 3):
        engine = small_engine(family, drafts)
        for seed, n in enumerate((5, 17, 24)):
            engine.add(prompt(n, seed), 12, stop_ids=NO_STOP if seed else [answers[0][0][7]] if answers else NO_STOP)
        answers.append(run(engine))
    plain, drafted = answers
    stop = plain[0].index(plain[0][7])
    assert drafted[0] == plain[0][: stop + 1] and [drafted[i] for i in (1, 2)] == [plain[i] for i in (1, 2)]
