"""top_k, candidate_blocks, merge_top_k and slots against the NumPy oracle, exactly."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import read_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from reference import ops as oracle

from pallas_kernels import (
    candidate_blocks,
    candidate_positions,
    expand_candidates,
    merge_top_k,
    positions_to_slots,
    top_k,
    top_k_and_candidate_blocks,
)

NAN, INF = float("nan"), float("inf")


def lengths_of(*values):
    return jnp.asarray(values, jnp.int32)


def check_rows(scores, k, lengths=None):
    """top_k of every row equals the oracle's in both orders; counts and scores go with it."""
    scores = np.asarray(scores, np.float32)
    given_lengths = None if lengths is None else lengths_of(*lengths)
    for order in ("position", "score"):
        found, counts, values = top_k(
            jnp.asarray(scores), k, lengths=given_lengths, order=order, return_scores=True
        )
        assert found.shape == (len(scores), k) and found.dtype == jnp.int32
        for row, (indices, count, value) in enumerate(zip(np.asarray(found), np.asarray(counts), np.asarray(values))):
            expected = oracle.top_k(scores[row], k, None if lengths is None else max(lengths[row], 0), order)
            assert indices.tolist() == expected, (order, row)
            assert count == sum(i >= 0 for i in expected)
            np.testing.assert_array_equal(value, [scores[row][i] if i >= 0 else -np.inf for i in expected])


# ---------------------------------------------------------------- top_k

# Scores as an indexer makes them: many exact zeros, ties, signed zeros, subnormals, infinities, NaN.
SCORE = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.0, -1.0, INF, -INF, NAN, 1e-40, -1e-40, 3e38]),
    st.floats(width=32, allow_nan=False),
)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_top_k_equals_the_oracle(data):
    length = data.draw(st.sampled_from([1, 8, 33]))
    k = data.draw(st.sampled_from([1, 8, 40]))
    scores = data.draw(hnp.arrays(np.float32, (3, length), elements=SCORE))
    lengths = data.draw(st.none() | st.lists(st.integers(0, length + 2), min_size=3, max_size=3))
    check_rows(scores, k, lengths)


@pytest.mark.parametrize("k", [8, 5])
@pytest.mark.parametrize("difference", [None, -1, 0, 1])
def test_ac_10_width_is_k_whatever_the_length(k, difference):
    length = 1 if difference is None else k + difference
    scores = np.random.default_rng(0).standard_normal((2, length))
    check_rows(scores, k)
    found, counts = top_k(jnp.asarray(scores, jnp.float32), k)
    assert found.shape == (2, k)
    assert (np.asarray(counts) == min(k, length)).all() and (np.asarray(found)[:, length:] == -1).all()


def test_ac_10_no_scores_at_all():
    found, counts = top_k(jnp.zeros((2, 0)), 3)
    assert (np.asarray(found) == -1).all() and (np.asarray(counts) == 0).all()


@pytest.mark.parametrize("k", [3, 2048])
@pytest.mark.parametrize("value", [0.0, -2.5, INF, 1e-40])
def test_ac_11_equal_scores_lowest_positions_first(k, value):
    found, counts = top_k(jnp.full((2, 10 * k), value), k)
    np.testing.assert_array_equal(np.asarray(found), np.tile(np.arange(k), (2, 1)))
    assert (np.asarray(counts) == k).all()


def test_ac_11_ties_at_the_cut_of_a_large_row():
    """The cut falls among equal scores in a row with three values."""
    scores = np.random.default_rng(1).integers(0, 3, (2, 20000)).astype(np.float32)
    check_rows(scores, 2048)


def test_ac_12_infinite_and_equal_scores_stay_inside_the_row():
    rows = np.zeros((6, 24), np.float32)
    rows[0, :] = INF
    rows[1, :] = -INF
    rows[2, :] = 3
    rows[3, 11] = 5
    rows[4, ::2] = INF
    rows[5, 1::2] = -INF
    check_rows(rows, 8)
    check_rows(rows, 8, [24, 24, 3, 12, 5, 0])
    found = np.asarray(top_k(jnp.asarray(rows), 8, lengths=lengths_of(24, 24, 3, 12, 5, 0))[0])
    for row, length in zip(found, [24, 24, 3, 12, 5, 0]):
        chosen = row[row >= 0]
        assert len(set(chosen.tolist())) == len(chosen) and (chosen < length).all()
    assert (found[1] == -1).all() and (found[5] == -1).all()


def test_ac_14_rows_of_an_odd_width_do_not_read_each_other():
    """Width 37: row i + 1 holds far better scores, and is never chosen for row i."""
    scores = np.arange(4)[:, None] * 1000 + np.random.default_rng(2).standard_normal((4, 37))
    check_rows(scores, 16)
    check_rows(scores, 16, [37, 5, 17, 36])


def test_ac_15_nan_is_never_chosen_and_repeats_are_equal():
    scores = np.random.default_rng(3).standard_normal((4, 50)).astype(np.float32)
    scores[0, 10] = scores[1, 0] = scores[2, 49] = NAN
    scores[3, :] = NAN
    check_rows(scores, 49)
    first = np.asarray(top_k(jnp.asarray(scores), 8)[0])
    assert (first[3] == -1).all() and 10 not in first[0]
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(top_k(jnp.asarray(scores), 8)[0]), first)


@pytest.mark.parametrize("k", [1, 7, 192, 513])
def test_ac_17_unusual_k(k):
    scores = np.random.default_rng(k).integers(-40, 40, (3, 700)).astype(np.float32)
    check_rows(scores, k)
    check_rows(scores, k, [700, k, k - 1])


def test_top_k_of_bf16_equals_that_of_the_same_values():
    scores = jnp.asarray(np.random.default_rng(4).standard_normal((3, 300)), jnp.bfloat16)
    assert len(np.unique(np.asarray(scores[0], np.float32))) < 300  # bf16 ties
    check_rows(np.asarray(scores, np.float32), 50)
    np.testing.assert_array_equal(top_k(scores, 50)[0], top_k(scores.astype(jnp.float32), 50)[0])


def test_top_k_leading_axes():
    scores = jnp.asarray(np.random.default_rng(5).standard_normal((2, 3, 20)), jnp.float32)
    lengths = jnp.arange(6, dtype=jnp.int32).reshape(2, 3) * 4
    found, counts = top_k(scores, 6, lengths=lengths)
    flat, flat_counts = top_k(scores.reshape(6, 20), 6, lengths=lengths.reshape(6))
    np.testing.assert_array_equal(found.reshape(6, 6), flat)
    np.testing.assert_array_equal(counts.reshape(6), flat_counts)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_ranges_count_from_their_start(data):
    scores = data.draw(hnp.arrays(np.float32, (3, 33), elements=SCORE))
    bounds = [data.draw(st.lists(st.integers(-2, 36), min_size=3, max_size=3)) for _ in range(2)]
    order = data.draw(st.sampled_from(["position", "score"]))
    found, counts, values = top_k(
        jnp.asarray(scores), 8, row_start=lengths_of(*bounds[0]), row_end=lengths_of(*bounds[1]), order=order,
        return_scores=True,
    )  # fmt: skip
    for row, (start, end) in enumerate(zip(*np.clip(bounds, 0, None))):
        inside = scores[row][start:end]
        expected = oracle.top_k(inside, 8, order=order)
        assert found[row].tolist() == expected and int(counts[row]) == sum(i >= 0 for i in expected)
        np.testing.assert_array_equal(values[row], [inside[i] if i >= 0 else -INF for i in expected])


# ---------------------------------------------------------------- candidate blocks


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_candidate_blocks_equal_the_oracle(data):
    total = data.draw(st.sampled_from([1, 8, 43]))
    topk_blocks = data.draw(st.sampled_from([1, 3, 50]))
    block_size = data.draw(st.sampled_from([1, 8]))
    scores = data.draw(hnp.arrays(np.float32, (3, total), elements=SCORE))
    lengths = data.draw(st.lists(st.integers(0, total), min_size=3, max_size=3))
    found = np.asarray(candidate_blocks(jnp.asarray(scores), lengths_of(*lengths), topk_blocks, block_size))
    for row in range(3):
        assert found[row].tolist() == oracle.candidate_blocks(scores[row], lengths[row], topk_blocks, block_size)


def test_ac_43_the_rule_has_an_order():
    """Blocks of 8, 19 visible (3 in the newest), 2 candidates: the newest is in, block 0 wins the other place."""
    scores = np.full((1, 32), -5.0, np.float32)
    scores[0, 3], scores[0, 9], scores[0, 18], scores[0, 20] = 4, 3, -9, 100  # 20 is not visible
    found = np.asarray(candidate_blocks(jnp.asarray(scores), lengths_of(19), 2, 8))
    assert found.tolist() == [[0, 2]]
    candidates = expand_candidates(jnp.asarray(found), lengths_of(19), 8)
    masked = np.where(np.isin(np.arange(32) // 8, found[0]), scores, -np.inf)
    indices, counts = top_k(jnp.asarray(masked), 12, lengths=lengths_of(19))
    assert np.asarray(indices).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, -1]] and int(counts[0]) == 11
    columns = jnp.arange(16, dtype=jnp.int32)[None]
    assert np.asarray(candidate_positions(columns, candidates, 8)).tolist() == [[*range(8), *range(16, 24)]]


def test_ac_43_the_newest_block_beats_any_number_of_infinite_ones():
    scores = jnp.full((1, 40), INF).at[0, 32:].set(-1.0)
    assert np.asarray(candidate_blocks(scores, lengths_of(40), 2, 8)).tolist() == [[0, 4]]
    assert np.asarray(candidate_blocks(scores, lengths_of(40), 1, 8)).tolist() == [[4]]


def test_top_k_and_candidate_blocks_are_the_two():
    scores, lengths = jnp.asarray(np.random.default_rng(1).standard_normal((2, 43)), jnp.float32), lengths_of(43, 17)
    positions, counts, blocks = top_k_and_candidate_blocks(scores, 8, lengths, 3, 8)
    expected, expected_counts = top_k(scores, 8, lengths=lengths)
    np.testing.assert_array_equal(positions, expected)
    np.testing.assert_array_equal(counts, expected_counts)
    np.testing.assert_array_equal(blocks, candidate_blocks(scores, lengths, 3, 8))


def test_candidate_blocks_with_nan_are_pinned():
    scores = jnp.zeros((1, 40)).at[0, 17].set(NAN).at[0, 3].set(3e38)
    assert np.asarray(candidate_blocks(scores, lengths_of(40), 2, 8)).tolist() == [[2, 4]]


GOLDEN = read_golden("v41/ops/candidate_blocks")
CASES = sorted({name.partition(".")[0] for name in GOLDEN})


@pytest.mark.parametrize("case", CASES)
def test_ac_43_candidate_blocks_of_the_released_model(case):
    tensors = {k.removeprefix(case + "."): v for k, v in GOLDEN.items() if k.startswith(case + ".")}
    topk_blocks, block_size = (int(n) for n in tensors["topk_blocks_block_size"])
    logits = tensors["logits"]
    lengths = np.broadcast_to(tensors["compress_lens"].reshape(-1), logits.shape[:2]).astype(np.int32)
    found = np.asarray(candidate_blocks(jnp.asarray(logits), jnp.asarray(lengths), topk_blocks, block_size))
    for b, t in np.ndindex(*logits.shape[:2]):
        chosen = found[b, t][found[b, t] >= 0]
        assert (np.diff(chosen) > 0).all()
        keep = np.flatnonzero(tensors["keep"][b, t])
        expected = np.unique(keep // block_size)
        if not tensors["row_has_boundary_tie"][b, t]:
            assert chosen.tolist() == expected.tolist()
        else:  # which of several equal blocks were kept is not defined: their number and their scores are
            scores = tensors["block_scores"][b, t]
            assert len(chosen) == len(expected)
            assert sorted(scores[chosen].tolist()) == sorted(scores[expected].tolist())
            assert (lengths[b, t] - 1) // block_size in chosen


# ---------------------------------------------------------------- candidates as columns


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_expand_candidates_and_positions(data):
    block_size, total = 4, 30
    length = data.draw(st.integers(0, total))
    blocks = data.draw(st.lists(st.integers(0, 9), unique=True, max_size=5))
    given_blocks = data.draw(st.permutations(oracle.padded(blocks, 6)))
    candidates = expand_candidates(jnp.asarray([given_blocks], jnp.int32), lengths_of(length), block_size)
    reachable = sorted(b for b in blocks if b * block_size < length)
    assert np.asarray(candidates.blocks)[0].tolist() == oracle.padded(reachable, 6)
    assert int(candidates.count[0]) == len(reachable)
    columns = data.draw(st.lists(st.integers(-3, 30), min_size=8, max_size=8))
    found = np.asarray(candidate_positions(jnp.asarray([columns], jnp.int32), candidates, block_size))[0]
    positions = [b * block_size + o for b in reachable for o in range(block_size)]
    assert found.tolist() == [positions[c] if 0 <= c < len(positions) else -1 for c in columns]


# ---------------------------------------------------------------- merging shards


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_merge_top_k_equals_the_oracle(data):
    shards, k = data.draw(st.sampled_from([1, 3])), data.draw(st.sampled_from([1, 4, 9]))
    ids = data.draw(st.lists(st.integers(0, 2**31 - 2), unique=True, min_size=shards * 4, max_size=shards * 4))
    ids = [i if data.draw(st.integers(0, 4)) else -1 for i in ids]
    scores = data.draw(hnp.arrays(np.float32, (shards, 1, 4), elements=SCORE))
    merged, counts = merge_top_k(jnp.asarray(scores), jnp.asarray(ids, jnp.int32).reshape(shards, 1, 4), k)
    scores = np.where(scores == 0, 0, scores)
    expected = oracle.merge(scores, ids, k)
    assert np.asarray(merged)[0].tolist() == expected and int(counts[0]) == sum(i >= 0 for i in expected)


def test_merge_of_shards_is_the_top_k_of_the_whole():
    """Interleaved shards of a row with many ties: exact, ids beyond 2^24 kept apart."""
    rng, k = np.random.default_rng(6), 16
    scores = rng.integers(0, 5, (3, 120)).astype(np.float32)
    base = 2**24 + 1  # consecutive numbers from here are not all float32 numbers
    parts, ids = [], []
    for shard in range(4):
        own = np.arange(shard, 120, 4)
        found, _, values = top_k(jnp.asarray(scores[:, own]), k, return_scores=True)
        ids.append(np.where(np.asarray(found) >= 0, base + own[np.asarray(found)], -1))
        parts.append(np.asarray(values))
    merged, counts = merge_top_k(jnp.asarray(np.stack(parts)), jnp.asarray(np.stack(ids), jnp.int32), k)
    np.testing.assert_array_equal(np.asarray(merged) - base, top_k(jnp.asarray(scores), k)[0])
    assert (np.asarray(counts) == k).all()
    best_first, _ = merge_top_k(jnp.asarray(np.stack(parts)), jnp.asarray(np.stack(ids), jnp.int32), k, order="score")
    np.testing.assert_array_equal(np.asarray(best_first) - base, top_k(jnp.asarray(scores), k, order="score")[0])


def test_merge_under_shard_map():
    """Every shard of a mesh gathers the others' results and has the top k of the whole, ids beyond 2^24 apart."""
    code = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from pallas_kernels import merge_top_k, top_k

shards, k, base = 4, 16, 2**24 + 1
mesh = Mesh(np.asarray(jax.devices()), ("context",))
scores = jnp.asarray(np.random.default_rng(6).integers(0, 5, (3, 120)), jnp.float32)

@jax.jit
@functools.partial(jax.shard_map, mesh=mesh, in_specs=P(None, "context"), out_specs=P("context"))
def select(own):
    found, _, values = top_k(own, k, return_scores=True)
    first = base + jax.lax.axis_index("context") * own.shape[1]
    merged, counts = merge_top_k(values, jnp.where(found < 0, -1, first + found), k, axis_name="context")
    return merged[None], counts[None]

merged, counts = select(scores)
expected = np.asarray(top_k(scores, k)[0])
assert merged.shape == (shards, 3, k)
for shard in np.asarray(merged):
    np.testing.assert_array_equal(shard - base, expected)
assert (np.asarray(counts) == k).all()
print("equal")
"""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.stdout.split() == ["equal"], run.stderr


# ---------------------------------------------------------------- slots


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slots_equal_the_oracle(data):
    page_size = data.draw(st.sampled_from([1, 64]))
    table = data.draw(st.lists(st.integers(-1, 2**31 // page_size - 2), min_size=3, max_size=3))
    positions = data.draw(st.lists(st.integers(-2, 4 * page_size), min_size=6, max_size=6))
    length = data.draw(st.none() | st.integers(0, 3 * page_size + 1))
    found, counts = positions_to_slots(
        jnp.asarray([[positions]], jnp.int32),
        jnp.asarray([table], jnp.int32),
        page_size,
        None if length is None else jnp.asarray([[length]], jnp.int32),
    )
    expected = oracle.slots(positions, table, page_size, length)
    assert np.asarray(found)[0, 0].tolist() == expected
    assert int(counts[0, 0]) == sum(s >= 0 for s in expected)


def test_ac_19_slots_beyond_what_int32_bytes_reach():
    table = jnp.asarray([[4_000_000 // 64, 2**31 // 64 - 1]], jnp.int32)
    found, _ = positions_to_slots(jnp.asarray([[[3, 127]]], jnp.int32), table, 64)
    assert np.asarray(found).tolist() == [[[4_000_003, 2**31 - 1]]]
    wrapped = jnp.asarray([[2**31 // 64, 0]], jnp.int32)  # a page whose slots no int32 can name is none, not slot 0
    assert np.asarray(positions_to_slots(jnp.asarray([[[3]]], jnp.int32), wrapped, 64)[0]).tolist() == [[[-1]]]


def test_ac_21_index_equal_to_the_length_is_none():
    table, positions = jnp.asarray([[5, 9]], jnp.int32), jnp.asarray([[[0, 6, 7, 8]]], jnp.int32)
    found, counts = positions_to_slots(positions, table, 4, jnp.asarray([[7]], jnp.int32))
    assert np.asarray(found).tolist() == [[[20, 38, -1, -1]]] and int(counts[0, 0]) == 2
    unbounded, _ = positions_to_slots(positions, table, 4)
    assert np.asarray(unbounded).tolist() == [[[20, 38, 39, -1]]]  # 8 is beyond the table


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: top_k(jnp.zeros((2, 8)), 0), "k is 0"),
        (lambda: top_k(jnp.zeros((2, 8), jnp.int32), 2), "floating dtype"),
        (lambda: top_k(jnp.zeros((2, 8)), 2, order="best"), "Allowed: position, score"),
        (lambda: top_k(jnp.zeros((2, 8)), 2, lengths=jnp.zeros(3, jnp.int32)), r"\(3,\) and scores \(2, 8\)"),
        (lambda: top_k(jnp.zeros((2, 8)), 2, lengths=jnp.zeros(2)), "must be int32"),
        (lambda: top_k(jnp.zeros((2, 8)), 2, row_start=lengths_of(0, 1)), "row_start given; give lengths, or both"),
        (
            lambda: top_k(jnp.zeros((1, 8)), 2, lengths=lengths_of(3), row_start=lengths_of(0), row_end=lengths_of(9)),
            "lengths and row_start and row_end given",
        ),
        (lambda: top_k(jnp.zeros((2, 8)), 2, implementation="cuda"), "implementation='cuda'"),
        (lambda: candidate_blocks(jnp.zeros((2, 8)), jnp.zeros(2, jnp.int32), 2, 0), "block_size is 0"),
        (lambda: merge_top_k(jnp.zeros((2, 3, 4)), jnp.zeros((2, 4), jnp.int32), 2), r"both must be \[shards"),
        (
            lambda: candidate_positions(
                jnp.zeros((1, 2), jnp.int32), expand_candidates(jnp.zeros((1, 2), jnp.int32), lengths_of(9), 8), 4
            ),
            "expanded for 8",
        ),
    ],
)
def test_wrong_arguments(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.usefixtures("unchecked")
def test_ac_21_wrong_rank_names_shape_and_axes():
    with pytest.raises(ValueError, match=r"topk_indices has shape \(1, 4\).*\[B, N, K\]"):
        positions_to_slots(jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 2), jnp.int32), 4)


def test_ac_17_a_forced_kernel_never_falls_back():
    with pytest.raises(NotImplementedError, match="reference"):
        jax.jit(functools.partial(top_k, k=7, implementation="sm100"))(jnp.zeros((2, 8)))
