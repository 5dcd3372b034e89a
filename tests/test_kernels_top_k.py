"""The top-k lane program in its simulator, exactly equal to the NumPy oracle; every missing barrier is found."""

import functools
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ops as oracle

import pallas_kernels
from pallas_kernels import aot, mosaic
from pallas_kernels.top_k import kernel, sm90, sm100
from pallas_kernels.top_k.program import SHARED_MEMORY, Plan, Selection
from pallas_kernels.top_k.simulator import Race, Simulator

NAN, INF = np.nan, np.inf

# Rows of scores that radix selection, sampling or a fixed buffer would get wrong.
FAMILIES = {
    "normal": lambda rng, v: v,
    "relu": lambda rng, v: np.maximum(v, 0),
    "few distinct": lambda rng, v: np.round(v),
    "all equal": lambda rng, v: np.full_like(v, 0.5),
    "two values": lambda rng, v: np.where(rng.random(v.size) < 0.5, 1.0, 2.0),
    "signed zeros": lambda rng, v: np.where(rng.random(v.size) < 0.5, -0.0, 0.0),
    "one bin": lambda rng, v: 1 + 1e-6 * v,
    "ascending": lambda rng, v: np.sort(v),
    "descending": lambda rng, v: np.sort(v)[::-1],
    "negative": lambda rng, v: -np.abs(v),
    "subnormal": lambda rng, v: v * np.float32(1e-40),
    "wide": lambda rng, v: np.exp(8 * v),
    "walk": lambda rng, v: np.cumsum(v),
    "with NaN": lambda rng, v: np.where(rng.random(v.size) < 0.3, NAN, v),
    "with +inf": lambda rng, v: np.where(rng.random(v.size) < 0.3, INF, v),
    "almost all -inf": lambda rng, v: np.where(rng.random(v.size) < 0.98, -INF, v),
    "high at the samples' places": lambda rng, v: np.where(np.arange(v.size) % 64 < 4, v + 100, v),
}


def row(family, length, seed):
    rng = np.random.default_rng(seed)
    return FAMILIES[family](rng, rng.standard_normal(length).astype(np.float32)).astype(np.float32)


def simulate(plan, scores, lengths=None, starts=None):
    """Outputs of `plan` on rows, by name."""
    dtype = jnp.float32 if plan.element_bytes == 4 else jnp.bfloat16
    lengths, starts = (None if array is None else jnp.asarray(array, jnp.int32) for array in (lengths, starts))
    with mosaic.interpreter():
        found = jax.block_until_ready(kernel.run(jnp.asarray(scores, dtype), lengths, plan, starts))
    return {name: np.asarray(array) for (name, _), array in zip(plan.outputs(), found)}


def fast_top_k(scores, k, length):
    """The oracle's rule for one row, fast enough for thousands of scores."""
    scores = np.asarray(scores[: max(length, 0)], np.float32)
    allowed = np.flatnonzero(~np.isnan(scores) & (scores > -INF))
    best = np.sort(allowed[np.lexsort((allowed, -scores[allowed]))][:k])
    return best.tolist() + [-1] * (k - best.size)


def check(plan, scores, lengths=None, starts=None):
    found = simulate(plan, scores, lengths, starts)
    k = plan.selections[0].k
    for r, scores_of_row in enumerate(np.asarray(scores, np.float32)):
        start = 0 if starts is None else max(starts[r], 0)
        length = (plan.length if lengths is None else lengths[r]) - start
        expected = fast_top_k(scores_of_row[start:], k, length)
        assert found["out0"][r].tolist() == expected, r
        assert found["count0"][r, 0] == sum(i >= 0 for i in expected)


def plan_of(
    length, k, capacity, *, threads=128, blocks=1, vectors=1, samples=1, element_bytes=4, lengths=False, starts=False,
    prefetch=0,
):  # fmt: skip
    selections = (Selection(k, capacity),)
    return Plan(length, element_bytes, threads, blocks, vectors, samples, selections, lengths, starts, prefetch)


def test_the_fast_oracle_is_the_oracle():
    for seed, family in enumerate(FAMILIES):
        scores = row(family, 300, seed)
        assert fast_top_k(scores, 40, 290) == oracle.top_k(scores, 40, 290)


# ---------------------------------------------------------------- the program


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("blocks", [1, 4])
def test_every_family_with_sampling_overflow_and_second_reads(family, blocks):
    # 3000 scores, a list of 300: the guess is used, and most families overflow the list or miss the guess.
    plan = plan_of(3000, 70, 300, blocks=blocks, lengths=True)
    scores = np.stack([row(family, 3000, 7), row(family, 3000, 8)])
    check(plan, scores, [3000, 2001])


def test_ties_of_several_blocks_overflow_the_first_blocks_list():
    # The cut lies among equal scores of the second block, and the lists of all blocks do not fit the first one's: it is
    # shrunk while other warps still read entries of any position.
    plan = plan_of(3957, 510, 510 + 512, blocks=4, vectors=4, samples=0)
    check(plan, np.stack([row("two values", plan.length, seed) for seed in range(8)]))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_shape(data):
    near = st.sampled_from([1, 2, 3, 4, 31, 127, 128, 129, 511, 512, 513, 1023, 1025, 2047, 2049])
    length = data.draw(near | st.integers(1, 2500))
    k = data.draw(st.sampled_from([1, 7, 31, 64, 192, 513]))
    element_bytes = data.draw(st.sampled_from([2, 4]))
    vectors = data.draw(st.sampled_from([1, 2]))
    capacity = k + 32 * vectors * (16 // element_bytes) + data.draw(st.integers(0, 300))
    plan = plan_of(
        length,
        k,
        capacity,
        threads=data.draw(st.sampled_from([128, 256])),
        blocks=data.draw(st.sampled_from([1, 2, 3, 4])),
        vectors=vectors,
        samples=data.draw(st.sampled_from([0, 1, 2])),
        element_bytes=element_bytes,
        lengths=True,
        starts=data.draw(st.booleans()),
        prefetch=data.draw(st.sampled_from([0, 100])),
    )
    families = data.draw(st.lists(st.sampled_from([*FAMILIES]), min_size=3, max_size=3))
    scores = np.stack([row(family, length, seed) for seed, family in enumerate(families)])
    if element_bytes == 2:
        scores = scores.astype(ml_dtypes.bfloat16).astype(np.float32)
    bounds = st.lists(st.integers(-1, length + 2), min_size=3, max_size=3)
    check(plan, scores, data.draw(bounds), data.draw(bounds) if plan.has_starts else None)


def test_rows_longer_than_the_bitmap(monkeypatch):
    # The package's attribute top_k is the function, which hides the folder's modules from a dotted name.
    monkeypatch.setattr(sys.modules["pallas_kernels.top_k.program"], "SHARED_MEMORY", 8 * 1024)
    plan = plan_of(40000, 64, 600, vectors=4, samples=2)
    assert plan.length > 32 * plan.bins * plan.quads
    check(plan, np.stack([row("normal", 40000, 1), row("ascending", 40000, 1)]))


@pytest.mark.parametrize("quads", [2, 4])
def test_a_bitmap_of_several_words_a_lane(quads):
    plan = plan_of(16384 * quads, 300, 1000, vectors=4, samples=2)
    assert plan.quads == quads
    check(plan, row("normal", plan.length, 1)[None])


@pytest.mark.parametrize(
    "blocks, family",
    # ascending: the best scores share blocks, so the guess for the blocks is too high; the samples' places: for scores.
    [(1, "normal"), (3, "with NaN"), (1, "ascending"), (2, "ascending"), (1, "high at the samples' places")],
)
def test_two_lists_from_one_read(blocks, family):
    selections = (Selection(40, 40 + 128, 0), Selection(30, 30 + 32, 2))
    plan = Plan(2048, 4, 128, blocks, 1, 1, selections, True)
    # 100: shorter than what a block reads in one turn, so that every block of the cluster comes upon the newest block.
    scores, lengths = np.stack([row(family, 2048, 3)] * 4), [2048, 1203, 0, 100]
    found = simulate(plan, scores, lengths)
    for r, length in enumerate(lengths):
        assert found["out0"][r].tolist() == fast_top_k(scores[r], 40, length)
        assert found["out1"][r].tolist() == oracle.candidate_blocks(scores[r], length, 30, 8)


def test_a_list_too_small_is_refused():
    with pytest.raises(ValueError, match="cannot hold 128 entries of a warp beyond its k best"):
        plan_of(1000, 64, 191)


# ---------------------------------------------------------------- the simulator


def machine(threads=64, blocks=1, **shared):
    scores = np.zeros(64, np.float32), 0, 4
    return Simulator(threads=threads, blocks=blocks, row=0, scores=scores, globals_={}, shared=shared)


def test_a_missing_barrier_is_a_race():
    m = machine(a=64)
    m.store("a", m.tid, m.tid)
    with pytest.raises(Race, match="a read races a write"):
        m.load("a", m.tid ^ 1)
    m.barrier()
    assert (m.load("a", m.tid ^ 1).raw == np.arange(64) ^ 1).all()
    with pytest.raises(Race, match="a write races a read"):
        m.store("a", m.tid, m.tid)


def test_a_block_barrier_does_not_order_blocks():
    m = machine(blocks=2, a=64)
    m.store("a", m.tid, m.tid + m.rank * 100)
    m.barrier()
    other = m.i32(1) - m.rank
    with pytest.raises(Race, match="a remote races a write"):
        m.load_of(other, "a", m.tid)
    m.cluster_barrier()
    assert (m.load_of(other, "a", m.tid) == m.tid + other * 100).raw.all()
    m.barrier()
    with pytest.raises(Race, match="a write races a remote"):
        m.store("a", m.tid, m.tid)


def test_what_was_not_written_is_not_read_and_two_lanes_do_not_write_one_word():
    m = machine(a=64)
    with pytest.raises(Race, match="nobody wrote"):
        m.load("a", m.tid)
    with pytest.raises(Race, match="two lanes write one word"):
        m.store("a", m.tid & 1, m.tid)
    with pytest.raises(IndexError, match="outside its 64 words"):
        m.store("a", m.tid + 1, m.tid)


def test_half_a_warp_or_block_cannot_meet():
    m = machine(a=64)
    with m.when(m.tid < 40), pytest.raises(Race, match="part of a warp"):
        m.ballot(m.tid > 0)
    m = machine(a=64)
    with m.when(m.tid < 32), pytest.raises(Race, match="part of a block"):
        m.barrier()


# ---------------------------------------------------------------- the public functions, interpreted

INTERPRETED = ["interpret_sm90", "interpret_sm100"]


@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize("k", [1, 7, 192, 513])
def test_ac_17_unusual_k(implementation, k):
    scores = np.stack([row("relu", 700, 1), row("normal", 700, 2)])
    for order in ("position", "score"):
        found, counts, values = pallas_kernels.top_k(
            jnp.asarray(scores), k, order=order, return_scores=True, implementation=implementation
        )
        for r in range(2):
            expected = oracle.top_k(scores[r], k, order=order)
            assert found[r].tolist() == expected and counts[r] == min(k, 700)
            np.testing.assert_array_equal(values[r], [scores[r][i] if i >= 0 else -INF for i in expected])


@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize("length", [1, 47, 48, 49])
def test_ac_10_width_is_k_whatever_the_length(implementation, length):
    found, counts = pallas_kernels.top_k(jnp.ones((2, length)), 48, implementation=implementation)
    assert found.shape == (2, 48) and counts.tolist() == [min(48, length)] * 2
    assert found[0].tolist() == [*range(min(48, length))] + [-1] * max(48 - length, 0)


def test_ac_11_many_ties_at_the_cut():
    found, counts = pallas_kernels.top_k(jnp.full((1, 20480), 0.25), 2048, implementation="interpret_sm90")
    assert found[0].tolist() == [*range(2048)] and counts[0] == 2048


def test_ac_12_infinite_equal_and_single_scores():
    scores = np.full((5, 600), -INF, np.float32)
    scores[0], scores[1], scores[3], scores[4, 599] = INF, 2.0, 0.0, -3.0
    scores[3, 5] = 1.0
    found, counts = pallas_kernels.top_k(jnp.asarray(scores), 64, implementation="interpret_sm90")
    assert counts.tolist() == [64, 64, 0, 64, 1]
    for r in range(5):
        assert found[r].tolist() == oracle.top_k(scores[r], 64)


def test_ac_14_odd_rows_do_not_read_each_other():
    rng = np.random.default_rng(0)
    scores = np.stack([-1 - rng.random(901), 1 + rng.random(901), -1 - rng.random(901)]).astype(np.float32)
    lengths = jnp.asarray([901, 37, 900], jnp.int32)
    found, _ = pallas_kernels.top_k(jnp.asarray(scores), 128, lengths=lengths, implementation="interpret_sm90")
    for r in range(3):
        assert found[r].tolist() == oracle.top_k(scores[r], 128, int(lengths[r]))


def test_ac_15_nan_is_never_chosen_and_repeats_are_equal():
    scores = row("with NaN", 1500, 5)[None]
    call = functools.partial(pallas_kernels.top_k, jnp.asarray(scores), 1200, implementation="interpret_sm90")
    first = call()[0][0].tolist()
    assert first == oracle.top_k(scores[0], 1200) and -1 in first
    assert all(call()[0][0].tolist() == first for _ in range(3))


def test_ac_43_the_newest_block_is_pinned():
    scores = np.zeros((1, 24), np.float32)
    scores[0, 3], scores[0, 10], scores[0, 17:19] = 9.0, 5.0, -7.0
    blocks = pallas_kernels.candidate_blocks(
        jnp.asarray(scores), jnp.asarray([19], jnp.int32), 2, 8, implementation="interpret_sm90"
    )
    assert blocks.tolist() == [[0, 2]]


def test_ac_45_masked_scores_and_candidate_columns_give_the_same_positions():
    kernels = dict(implementation="interpret_sm90")
    for seed, length in [(0, 1024), (1, 1001), (2, 90)]:
        lengths = jnp.asarray([length], jnp.int32)
        scores = jnp.asarray(row("relu", 1024, seed)[None])
        source = jnp.asarray(row("normal", 1024, seed + 100)[None])
        blocks = pallas_kernels.candidate_blocks(source, lengths, 20, 8, **kernels)
        chosen = np.isin(np.arange(1024) // 8, np.asarray(blocks[0])) & (np.arange(1024) < length)
        dense, _ = pallas_kernels.top_k(jnp.where(chosen, scores, -INF), 64, **kernels)
        candidates = pallas_kernels.expand_candidates(blocks[:, None], lengths[:, None], 8)
        columns = np.full((1, 160), -INF, np.float32)
        for i, block in enumerate(np.asarray(blocks[0])):
            visible = np.arange(8 * block, min(8 * block + 8, length)) if block >= 0 else np.arange(0)
            columns[0, 8 * i : 8 * i + visible.size] = np.asarray(scores[0])[visible]
        found, _ = pallas_kernels.top_k(jnp.asarray(columns), 64, **kernels)
        sparse = pallas_kernels.candidate_positions(found[:, None], candidates, 8)
        assert sparse[0, 0].tolist() == dense[0].tolist()


def test_a_row_does_not_depend_on_its_batch():
    scores = np.stack([row(family, 900, 4) for family in ("relu", "with NaN", "walk")])
    together, _ = pallas_kernels.top_k(jnp.asarray(scores), 100, implementation="interpret_sm90")
    for r in range(3):
        alone, _ = pallas_kernels.top_k(jnp.asarray(scores[r : r + 1]), 100, implementation="interpret_sm90")
        assert alone[0].tolist() == together[r].tolist()


@pytest.mark.parametrize(
    "implementation, dtype", [("interpret_sm90", jnp.float32), ("interpret_sm100", jnp.bfloat16)]
)
def test_candidate_blocks(implementation, dtype):
    families = ("normal", "with NaN", "with +inf", "almost all -inf", "relu")
    scores = jnp.asarray(np.stack([row(family, 4096, 3) for family in families]), dtype)
    lengths = [4096, 4001, 1000, 4096, 7]
    found = pallas_kernels.candidate_blocks(
        scores, jnp.asarray(lengths, jnp.int32), 100, 8, implementation=implementation
    )
    for r, length in enumerate(lengths):
        expected = oracle.candidate_blocks(np.asarray(scores[r], np.float32), length, 100, 8)
        assert found[r].tolist() == expected, r


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_top_k_and_candidate_blocks_together(implementation):
    scores, lengths = np.stack([row("normal", 4096, 1), row("walk", 4096, 2)]), jnp.asarray([4096, 3333], jnp.int32)
    positions, counts, blocks = pallas_kernels.top_k_and_candidate_blocks(
        jnp.asarray(scores), 64, lengths, 128, 8, implementation=implementation
    )
    for r in range(2):
        assert positions[r].tolist() == oracle.top_k(scores[r], 64, int(lengths[r])) and counts[r] == 64
        assert blocks[r].tolist() == oracle.candidate_blocks(scores[r], int(lengths[r]), 128, 8)


@pytest.mark.parametrize(
    "implementation, dtype, order",
    [("interpret_sm90", jnp.float32, "score"), ("interpret_sm100", jnp.bfloat16, "position")],
)
def test_ranges_of_packed_keys_count_from_their_start(implementation, dtype, order):
    starts, ends = [3, 17, 403, -5, 300], [402, 40, 403, 500, 200]
    scores = jnp.asarray(np.stack([row("relu", 403, seed) for seed in range(5)]), dtype)
    found, counts, values = pallas_kernels.top_k(
        scores, 64, row_start=jnp.asarray(starts, jnp.int32), row_end=jnp.asarray(ends, jnp.int32), order=order,
        return_scores=True, implementation=implementation,
    )  # fmt: skip
    for r, (start, end) in enumerate(zip(np.clip(starts, 0, None), ends)):
        inside = np.asarray(scores[r], np.float32)[start:end]
        expected = oracle.top_k(inside, 64, order=order)
        assert found[r].tolist() == expected and counts[r] == sum(i >= 0 for i in expected)
        np.testing.assert_array_equal(values[r], [inside[i] if i >= 0 else -INF for i in expected])


def test_jit_and_leading_axes():
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, 300)), jnp.float32)
    call = jax.jit(functools.partial(pallas_kernels.top_k, k=20, implementation="interpret_sm90"))
    found, counts = call(scores)
    assert found.shape == (2, 1, 20) and counts.shape == (2, 1)
    assert found[1, 0].tolist() == oracle.top_k(np.asarray(scores[1, 0]), 20)


def test_what_the_kernel_does_not_carry_says_so():
    refused = functools.partial(pytest.raises, NotImplementedError)
    with refused(match="float16 are not carried"):
        sm90.top_k(jnp.zeros((2, 8), jnp.float16), 2)
    with refused(match="bytes of shared memory"):
        sm90.top_k(jnp.zeros((2, 100000)), 60000)
    with refused(match="nothing to choose from"):
        sm90.top_k(jnp.zeros((2, 0)), 3)
    with refused(match="block_size=12 is not carried"):
        sm90.candidate_blocks(jnp.zeros((2, 96)), jnp.asarray([96, 96]), 4, 12)
    with refused(match="rows of 94 float32 scores are not carried"):
        sm90.candidate_blocks(jnp.zeros((2, 94)), jnp.asarray([94, 94]), 4, 8)


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("family", [sm90, sm100])
def test_every_shape_has_a_plan_that_fits(family):
    for rows in (1, 7, 32, 64, 128, 256, 300, 4096):
        for length in (1, 3, 100, 4096, 8191, 16384, 131072, 131077, 1 << 20, (1 << 20) + 1):
            for k in (1, 64, 512, 1024, 2048, 4096):
                for element_bytes in (2, 4):
                    plan = family.plan(rows, length, element_bytes, (Selection(k, 0),), True)
                    assert plan.shared_bytes() <= SHARED_MEMORY, plan
                    assert plan.selections[0].capacity >= k + 32 * plan.vectors * plan.vector


def test_plans_spread_few_long_rows_over_blocks():
    def blocks(rows, length, lengths=False):
        return sm90.plan(rows, length, 4, (Selection(512, 0),), lengths).blocks

    assert [blocks(rows, 131072) for rows in (1, 8, 16, 32, 64, 128, 4096)] == [8, 8, 4, 3, 2, 1, 1]
    assert blocks(32, 131072, lengths=True) == blocks(32, 1 << 20) == 3
    assert blocks(1, 32768) == blocks(32, 8192) == 1


# ---------------------------------------------------------------- the compiler


@pytest.mark.skipif(aot.missing() is not None, reason=aot.missing() or "")
@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "b200"])
def test_every_case_compiles_without_spills(target):
    report = aot.compile_report((target,), "top_k")
    assert report.kernels and not report.unsupported, report.unsupported
    for k in report.kernels:
        assert k.spill_stores == k.spill_loads == k.stack == 0, k
        assert k.smem <= SHARED_MEMORY
        assert 0 < k.registers <= 168
