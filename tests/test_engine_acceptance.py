"""Faults that users of such engines reported (acceptance cases), where one small check beside the engine's own tests is due."""

import copy
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_v4
import tiny_v32
import tolerances
from arrival import prompt, with_another
from engines import BATCH, NO_STOP, small_engine

from dsa_jax.engine import Engine

FAMILIES = {"v41": tiny, "v4": tiny_v4, "v32": tiny_v32}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ac_06_rows_that_pad_a_batch_may_hold_nan(family):
    """Three requests of a batch of eight, a chunk and then one token each. All that belongs to the other five, state and
    pages, is NaN: the results are those with zeros there, to the bit, and those of a batch of three."""
    lm, room = FAMILIES[family].tiny_model(), 128

    def run(batch, active, spoilt):
        cache, count = lm.new_cache(batch, room), np.zeros(batch, np.int32)
        tokens = np.random.default_rng(batch).integers(0, 60, (batch, 24)).astype(np.int32)
        for i, b in enumerate(active):
            tokens[b, :20], count[b] = prompt(20, i), 20
        idle = np.setdiff1d(np.arange(batch), active)
        pages = np.asarray(cache.block_table)[idle].reshape(-1)

        def spoil(x, rows):
            return x.at[rows].set(jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x

        if spoilt:
            cache = cache.map_arrays(lambda x: spoil(x, idle), lambda x: spoil(x, pages))
            assert sum(int(jnp.isnan(x).sum()) for x in jax.tree.leaves(cache)) > 10_000
        found, cache, taps = lm.forward(cache, tokens, count)
        after, _, _ = lm.forward(cache, np.full((batch, 24), 7, np.int32), (count > 0).astype(np.int32))
        lists = {name: np.asarray(x)[active, :20] for name, x in taps.items() if name.endswith(".selected")}
        return np.concatenate([np.asarray(found)[active, :20], np.asarray(after)[active, :1]], axis=1), lists

    (spoilt, ours), (clean, _), (alone, theirs) = (
        run(8, [1, 4, 6], True), run(8, [1, 4, 6], False), run(3, [0, 1, 2], False)
    )  # fmt: skip
    assert np.array_equal(spoilt, clean) and np.abs(spoilt - alone).max() <= tolerances.of("model.arrival.f32")
    assert ours and all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_ac_35_a_later_token_changes_nothing_before_it_across_a_group_of_128():
    """V4 pools 128 tokens into a row: a changed token on either side of the end of a group leaves all before it as it is."""
    lm, tokens = tiny_v4.tiny_model(), prompt(140, seed=5)

    def logits(tokens):
        padded = np.zeros((1, 160), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(lm.forward(lm.new_cache(1, 256), padded, np.array([140], np.int32))[0])[0, :140]

    whole = logits(tokens)
    for t in range(124, 131):
        other = logits(with_another(tokens, t + 1))
        assert np.array_equal(other[: t + 1], whole[: t + 1]), f"token {t + 1} changed"
        assert not np.array_equal(other[t + 1], whole[t + 1])


@pytest.mark.slow
def test_ac_71_no_program_of_the_engine_holds_a_second_pool():
    """Chunks, admission, keeping a state, copying pages and rewinding: what each of them changes is aliased to what it gives
    back, and its temporaries are small beside the pools."""
    engine = small_engine(pages=8000)
    state, programs = engine._state, engine.model.programs
    slots, store = ([leaf.nbytes for leaf in jax.tree.leaves(tree)] for tree in (state.slots, state.store))
    nobody, none = [None] * BATCH, np.full(BATCH, -1, np.int32)
    table = np.full((BATCH, state._table_width), -1, np.int32)
    chunk = state._prefill_arguments(nobody[:2], np.zeros((2, 8), np.int32), np.zeros(2, np.int32), None)
    lowered = {
        "prefill": (programs.prefill.lower(*chunk), slots),
        "admit": (programs.admit.lower(state.slots, state.store, none, none, table, state.slots.terms), slots),
        "keep": (programs.keep.lower(state.store, none, state.slots, none), store),
        "copy": (programs.copy.lower(state.slots, none, none), slots),
        "rewind": (programs.rewind.lower(state.slots, none, table), slots),
    }
    assert sum(slots) > 2**24
    for name, (program, donated) in lowered.items():
        memory = program.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= 0.99 * sum(donated), name
        assert memory.temp_size_in_bytes < 0.1 * sum(slots), name


class Shallow:
    """A model of which nothing runs, though every parameter takes part: what is left of a step is what the host does."""

    def __init__(self, model, leaves):
        self.vocabulary = model.config.vocab_size
        self.sum = sum(jnp.ravel(leaf)[0].astype(jnp.float32) for leaf in leaves)

    def __call__(self, cache, tokens, count, numerics, image=None):
        h = jnp.zeros((*tokens.shape, self.vocabulary)) + self.sum
        return h, dataclasses.replace(cache, length=cache.length + count)

    def logits(self, h, numerics):
        return h


def test_ac_74_sixty_one_layers_cost_the_host_less_than_2_ms_a_step():
    """All parameters and caches of a model of 61 layers go through every call of a burst; its steps are nothing."""
    lm = copy.copy(tiny_v32.tiny_model(config=tiny_v32.tiny_config(num_hidden_layers=61, first_k_dense_replace=3)))
    lm.__dict__.pop("programs", None)
    lm.traces, plain = {}, lm.model
    lm.model = lambda leaves: Shallow(plain(leaves), leaves)
    engine = Engine(lm, 4, 128, prefill_shapes=((4, 8),), decode_rows=(4,), steps=8)
    assert len(lm.leaves) > 61 * 20 and len(jax.tree.leaves(engine._state.slots.cache)) >= 2 * 61
    for seed in range(4):
        engine.add(prompt(6, seed), 110, stop_ids=NO_STOP)
    times = []
    while not engine.is_idle:
        begun = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begun)
    # Of a quarter of the bursts, so that other work on the cores does not count.
    assert engine.stats.decode_tokens == 4 * 110 and sorted(times)[len(times) // 4] / 8 < 2e-3
