"""Indexer scores, dense and on candidate blocks, and select, against the NumPy oracle."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tolerances
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ops as oracle

from pallas_kernels import (
    IndexFP8,
    IndexMXFP4,
    PagedRows,
    Plain,
    blocks,
    candidate_blocks,
    candidate_logits,
    candidate_positions,
    expand_candidates,
    fake_quantize,
    indexer_logits,
    make_candidate_schedule,
    make_indexer_schedule,
    make_select_schedule,
    paged_indexer_logits,
    platform,
    ragged_candidate_logits,
    select,
    top_k,
)

BF16 = jnp.bfloat16


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def int32(values):
    return jnp.asarray(np.asarray(values), jnp.int32)


def fp4_numbers(rng, *shape):
    """Numbers whose dot products are exact in float32, so that roundings can be compared to the bit."""
    return rng.choice([0, 0.5, 1, -1.5, 2, -3, 4, -6], shape).astype(np.float32)


def close(found, expected, name="ops.scores.f32"):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(found[finite], expected[finite], rtol=0, atol=tolerances.of(name))


class Paged:
    """A paged cache of index keys of several requests, pages shuffled, and the dense keys it holds."""

    def __init__(self, rng, format, batch, pages, page_size, spare=2):
        self.keys = normal(rng, batch, pages * page_size, format.width)
        self.table = rng.permutation(batch * pages + spare)[: batch * pages].reshape(batch, pages)
        slots = self.table[:, :, None] * page_size + np.arange(page_size)
        cache = PagedRows.zeros(format, batch * pages + spare, page_size)
        self.cache = jax.jit(PagedRows.scatter)(cache, int32(slots.reshape(-1)), self.keys.reshape(-1, format.width))
        stored = jax.jit(PagedRows.gather)(self.cache, int32(slots.reshape(-1)))
        self.stored = np.asarray(stored).reshape(self.keys.shape)


# ---------------------------------------------------------------- dense scores


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_ragged_scores_equal_the_oracle(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows, total = data.draw(st.sampled_from([1, 5])), data.draw(st.sampled_from([1, 37]))
    q, k, w = normal(rng, rows, 2, 16), normal(rng, total, 16), normal(rng, rows, 2)
    bounds = [sorted(data.draw(st.tuples(st.integers(-2, total + 2), st.integers(-2, total + 2)))) for _ in range(rows)]
    first, last = np.array(bounds).T
    found = indexer_logits(jnp.asarray(q), jnp.asarray(k), jnp.asarray(w), row_start=int32(first), row_end=int32(last))
    inside = (np.arange(total) >= first[:, None]) & (np.arange(total) < last[:, None])
    close(found, np.where(inside, oracle.index_scores(q, k, w), -np.inf))


@pytest.mark.parametrize("heads, width, dtype", [(2, 16, jnp.float32), (32, 128, BF16), (8, 64, jnp.float8_e4m3fn)])
def test_ragged_scores_of_several_column_blocks(heads, width, dtype):
    """More keys than one block of columns holds, the last block partial; FP8 values with a scale per key."""
    rng = np.random.default_rng(0)
    rows, total = 3, 2048 + 300
    q = jnp.asarray(normal(rng, rows, heads, width) / width**0.5, dtype)
    k, w = jnp.asarray(normal(rng, total, width), dtype), normal(rng, rows, heads) / heads**0.5
    scale = rng.uniform(0.5, 2, total).astype(np.float32) if dtype == jnp.float8_e4m3fn else None
    last = np.array([total, 2100, 5])
    found = indexer_logits(
        q, k, jnp.asarray(w), row_start=int32([0, 2047, 5]), row_end=int32(last),
        k_scale=None if scale is None else jnp.asarray(scale),
    )  # fmt: skip
    expected = oracle.index_scores(np.asarray(q, np.float32), np.asarray(k, np.float32), w)
    if scale is not None:
        expected = expected * scale
    column = np.arange(total)
    inside = (column >= np.array([0, 2047, 5])[:, None]) & (column < last[:, None])
    close(found, np.where(inside, expected, -np.inf))


def test_ac_26_relu_comes_before_the_weighted_sum():
    """Head 0 is strongly negative on key 0: without its own relu it would drag key 0 below key 1."""
    q = jnp.asarray([[[1.0, 0], [0, 1.0]]])
    k = jnp.asarray([[-10.0, 2], [0, 1.0]])
    w = jnp.asarray([[1.0, 1.0]])
    found = np.asarray(indexer_logits(q, k, w, row_start=int32([0]), row_end=int32([2])))
    np.testing.assert_array_equal(found, [[2.0, 1.0]])
    negative = np.asarray(indexer_logits(q, k, -w, row_start=int32([0]), row_end=int32([2])))
    np.testing.assert_array_equal(negative, [[-2.0, -1.0]])


def test_rounding_reproduces_the_released_arithmetic():
    """Dot, product and sum each rounded to bf16, to the bit; and that differs from float32 throughout."""
    rng = np.random.default_rng(1)
    q, k = fp4_numbers(rng, 5, 4, 64), fp4_numbers(rng, 200, 64)
    w = np.asarray(oracle.bf16(normal(rng, 5, 4)))
    whole = dict(row_start=int32([0] * 5), row_end=int32([200] * 5))
    rounded = indexer_logits(*map(jnp.asarray, (q, k, w)), rounding=BF16, **whole)
    np.testing.assert_array_equal(np.asarray(rounded), oracle.index_scores(q, k, w, rounded=True))
    plain = np.asarray(indexer_logits(*map(jnp.asarray, (q, k, w)), **whole))
    assert (plain != np.asarray(rounded)).mean() > 0.5
    close(plain, oracle.index_scores(q, k, w), "ops.scores.exact_products")


def test_ac_25_rotating_both_sides_changes_nothing_rotating_one_does():
    """A Hadamard transform of q and k leaves the scores; of q alone it changes the choice. V4.1 uses none."""
    rng = np.random.default_rng(2)
    hadamard = np.ones((1, 1))
    while len(hadamard) < 64:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    hadamard = (hadamard / 8).astype(np.float32)
    q, k, w = normal(rng, 4, 2, 64), normal(rng, 50, 64), np.abs(normal(rng, 4, 2))
    q[0, :, :], k[7] = 0, 0
    q[0, :, 0], k[7, 0] = 1, 50  # planted: key 7 is row 0's best
    scores = functools.partial(indexer_logits, row_start=int32([0] * 4), row_end=int32([50] * 4))
    plain = np.asarray(scores(*map(jnp.asarray, (q, k, w))))
    both = np.asarray(scores(*map(jnp.asarray, (q @ hadamard, k @ hadamard, w))))
    np.testing.assert_allclose(both, plain, rtol=0, atol=tolerances.of("ops.rotation.f32") * np.abs(plain).max())
    one = scores(*map(jnp.asarray, (q @ hadamard, k, w)))
    assert int(np.argmax(plain[0])) == 7
    assert not np.array_equal(top_k(one, 8)[0], top_k(jnp.asarray(plain), 8)[0])


# ---------------------------------------------------------------- paged scores


@pytest.mark.parametrize("format", [IndexMXFP4(64), IndexFP8(64), Plain(64, jnp.float32)], ids=["mxfp4", "fp8", "plain"])
def test_paged_scores_equal_the_oracle(format):
    rng = np.random.default_rng(3)
    paged = Paged(rng, format, batch=2, pages=5, page_size=4)
    q, w = normal(rng, 2, 3, 4, 64), normal(rng, 2, 3, 4) / 8
    lengths = np.array([[0, 7, 20], [1, 4, 19]])
    found = paged_indexer_logits(
        jnp.asarray(q), paged.cache, jnp.asarray(w), context_lens=int32(lengths), block_table=int32(paged.table)
    )
    expected = np.stack([oracle.index_scores(q[b], paged.stored[b], w[b]) for b in range(2)])
    close(found, np.where(np.arange(20) < lengths[..., None], expected, -np.inf))


def test_paged_scores_of_several_column_blocks():
    rng = np.random.default_rng(4)
    paged = Paged(rng, Plain(16, jnp.float32), batch=2, pages=40, page_size=64)
    q, w = normal(rng, 2, 2, 2, 16), normal(rng, 2, 2, 2)
    lengths = np.array([[2560, 2049], [2048, 3]])
    found = paged_indexer_logits(
        jnp.asarray(q), paged.cache, jnp.asarray(w), context_lens=int32(lengths), block_table=int32(paged.table)
    )
    expected = np.stack([oracle.index_scores(q[b], paged.stored[b], w[b]) for b in range(2)])
    close(found, np.where(np.arange(2560) < lengths[..., None], expected, -np.inf))


def test_ac_08_all_lengths_zero():
    rng = np.random.default_rng(5)
    paged = Paged(rng, IndexFP8(64), batch=3, pages=2, page_size=4)
    q, w = jnp.asarray(normal(rng, 3, 1, 2, 64)), jnp.asarray(normal(rng, 3, 1, 2))
    table = int32(np.where(np.arange(2) == 0, paged.table, 2**31 - 1))  # beyond the cache where it may not matter
    for lengths in ([0, 0, 0], [0, 4, 0]):
        arguments = dict(context_lens=int32(lengths)[:, None], block_table=table)
        scores = np.asarray(paged_indexer_logits(q, paged.cache, w, **arguments))
        assert not np.isnan(scores).any()
        chosen = select(q, paged.cache, w, 3, candidate_topk_blocks=2, candidate_block_size=4, **arguments)
        for row, length in enumerate(lengths):
            assert np.isneginf(scores[row, 0, length:]).all() and np.isfinite(scores[row, 0, :length]).all()
            assert int(chosen.counts[row, 0]) == min(length, 3)
            if length == 0:
                assert (np.asarray(chosen.topk_indices[row]) == -1).all()
                assert (np.asarray(chosen.candidate_blocks[row]) == -1).all()


@pytest.mark.parametrize("format", [IndexFP8(64), IndexMXFP4(64)], ids=["fp8", "mxfp4"])
def test_garbage_behind_the_length_does_not_matter(format):
    """Unused table entries: out of range, negative, or pages of NaN. Same bits as with a clean table and cache."""
    rng = np.random.default_rng(6)
    paged = Paged(rng, format, batch=1, pages=4, page_size=4, spare=1)
    spoilt_page = next(p for p in range(5) if p not in paged.table)
    spoilt = PagedRows(paged.cache.pages.at[spoilt_page, :].set(255), format, 4)
    q, w = jnp.asarray(normal(rng, 1, 2, 2, 64)), jnp.asarray(normal(rng, 1, 2, 2))
    lengths = int32([[5, 8]])
    clean = paged_indexer_logits(q, paged.cache, w, context_lens=lengths, block_table=int32(paged.table))
    for garbage in ([spoilt_page, spoilt_page], [-1, -(2**31)], [2**31 - 1, 77]):
        table = int32([[*paged.table[0, :2], *garbage]])
        found = paged_indexer_logits(q, spoilt, w, context_lens=lengths, block_table=table)
        np.testing.assert_array_equal(found, clean)


def test_ac_06_padding_rows_of_nan_change_no_bit():
    """A batch padded from 3 to 8 with length 0 and NaN inputs: the active rows are equal to the bit."""
    rng = np.random.default_rng(7)
    paged = Paged(rng, IndexMXFP4(64), batch=3, pages=6, page_size=4)
    q, w = normal(rng, 3, 2, 4, 64), normal(rng, 3, 2, 4)
    lengths = rng.integers(1, 24, (3, 2))

    def run(q, w, lengths, table):
        q = fake_quantize(jnp.asarray(q), "mxfp4_32")
        arguments = dict(context_lens=int32(lengths), block_table=int32(table))
        scores = paged_indexer_logits(q, paged.cache, jnp.asarray(w), **arguments)
        return scores, select(q, paged.cache, jnp.asarray(w), 6, **arguments)

    def padded(array, value):
        return np.concatenate([array, np.full((5, *array.shape[1:]), value, array.dtype)])

    scores, chosen = run(q, w, lengths, paged.table)
    more, more_chosen = run(padded(q, np.nan), padded(w, np.nan), padded(lengths, 0), padded(paged.table, -1))
    np.testing.assert_array_equal(np.asarray(more)[:3], scores)
    np.testing.assert_array_equal(np.asarray(more_chosen.topk_indices)[:3], chosen.topk_indices)
    assert (np.asarray(more_chosen.topk_indices)[3:] == -1).all()
    assert np.isneginf(np.asarray(more)[3:]).all()


def test_rows_do_not_depend_on_what_comes_with_them():
    """One row alone or among others, one request alone or in a batch of 8: equal to the bit, dense and candidates."""
    rng, heads = np.random.default_rng(8), 32
    paged = Paged(rng, IndexMXFP4(64), batch=8, pages=30, page_size=4)
    q, w = jnp.asarray(normal(rng, 8, 9, heads, 64)), jnp.asarray(normal(rng, 8, 9, heads))
    lengths, table = int32(rng.integers(60, 120, (8, 9))), int32(paged.table)
    ids = int32(rng.permuted(np.tile(np.arange(15), (8, 9, 1)), axis=2)[..., :6])

    def scores(b, n):
        arguments = dict(context_lens=lengths[b, n], block_table=table[b])
        candidates = expand_candidates(ids[b, n], lengths[b, n], 8)
        dense = paged_indexer_logits(q[b, n], paged.cache, w[b, n], **arguments)
        return np.asarray(dense), np.asarray(candidate_logits(q[b, n], paged.cache, w[b, n], candidates, **arguments))

    everything = slice(None)
    together = scores(everything, everything)
    for b, n in ((slice(3, 4), everything), (slice(7, 8), slice(8, 9))):
        for alone, all_ in zip(scores(b, n), together):
            np.testing.assert_array_equal(alone, all_[b, n])


# ---------------------------------------------------------------- scores of candidate blocks


@pytest.mark.parametrize("format, width", [(IndexMXFP4(64), 64), (Plain(16, jnp.float32), 16)], ids=["mxfp4", "plain"])
@pytest.mark.parametrize("rounding", [None, BF16], ids=["f32", "bf16"])
def test_candidate_scores_are_the_dense_ones_at_their_positions(format, width, rounding):
    rng = np.random.default_rng(9)
    paged = Paged(rng, format, batch=2, pages=12, page_size=4)
    q, w = jnp.asarray(fp4_numbers(rng, 2, 2, 4, width)), jnp.asarray(oracle.bf16(normal(rng, 2, 2, 4)) / 16)
    lengths = int32([[0, 48], [19, 21]])
    ids = int32([[[1, 0, 3], [5, 2, 0]], [[2, 0, 7], [-1, 1, -1]]])  # unsorted, unreachable and none among them
    candidates = expand_candidates(ids, lengths, 8)
    arguments = dict(context_lens=lengths, block_table=int32(paged.table), rounding=rounding)
    dense = np.asarray(paged_indexer_logits(q, paged.cache, w, **arguments))
    found = candidate_logits(q, paged.cache, w, candidates, **arguments)
    assert found.shape == (2, 2, 24)
    columns = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), (2, 2, 24))
    positions = np.asarray(candidate_positions(columns, candidates, 8))
    expected = np.where(positions >= 0, np.take_along_axis(dense, np.where(positions >= 0, positions, 0), -1), -np.inf)
    if rounding is None:
        close(found, expected)
    else:  # queries of FP4 numbers: every dot is exact, so the roundings are the same
        np.testing.assert_array_equal(found, expected)


def test_ragged_candidate_scores():
    rng = np.random.default_rng(10)
    q, k, w = normal(rng, 3, 2, 16), normal(rng, 60, 16), normal(rng, 3, 2)
    scale = rng.uniform(0.5, 2, 60).astype(np.float32)
    first, last = np.array([0, 13, 40]), np.array([30, 60, 40])
    candidates = expand_candidates(int32([[0, 3, 1], [5, 2, 7], [0, 1, 2]]), int32(last - first), 8)
    found = np.asarray(
        ragged_candidate_logits(
            *map(jnp.asarray, (q, k, w)), candidates, row_start=int32(first), row_end=int32(last),
            k_scale=jnp.asarray(scale),
        )  # fmt: skip
    )
    dense = oracle.index_scores(q, k, w) * scale
    for t in range(3):
        expected = np.full(24, -np.inf)
        for c, b in enumerate(np.asarray(candidates.blocks[t])):
            for o in range(8 if b >= 0 else 0):
                key = first[t] + b * 8 + o
                expected[c * 8 + o] = dense[t, key] if key < last[t] else -np.inf
        close(found[t], expected)


def test_ac_45_both_routes_of_a_consumer_agree():
    """100 draws: top-k of dense scores masked to the candidates equals select on the candidates."""
    paged = Paged(np.random.default_rng(11), IndexMXFP4(64), batch=1, pages=24, page_size=4)
    table, k, size = int32(paged.table), 12, 8

    @jax.jit
    def both(q, w, source_w, lengths):
        arguments = dict(context_lens=lengths, block_table=table)
        source = select(q, paged.cache, source_w, k, candidate_topk_blocks=3, candidate_block_size=size, **arguments)
        candidates = expand_candidates(source.candidate_blocks, lengths, size)
        sparse = select(q, paged.cache, w, k, candidates=candidates, **arguments)
        dense = paged_indexer_logits(q, paged.cache, w, **arguments)
        block = jnp.arange(dense.shape[-1]) // size
        kept = (block[:, None] == source.candidate_blocks[..., None, :]).any(-1)
        masked, counts = top_k(jnp.where(kept, dense, -jnp.inf), k, lengths=lengths)
        unbound = select(q, paged.cache, w, k, **arguments)
        return sparse.topk_indices, sparse.counts, masked, counts, unbound.topk_indices

    for seed in range(100):
        rng = np.random.default_rng(seed)
        q = jnp.asarray(normal(rng, 1, 4, 4, 64))
        lengths = int32(rng.integers(0, 97, (1, 4)))
        sparse, counts, masked, masked_counts, unbound = both(
            q, jnp.asarray(normal(rng, 1, 4, 4)), jnp.asarray(normal(rng, 1, 4, 4)), lengths
        )
        np.testing.assert_array_equal(sparse, masked)
        np.testing.assert_array_equal(counts, masked_counts)
        few = np.asarray(lengths[0]) <= 3 * size  # fewer blocks than the count: nothing is masked
        np.testing.assert_array_equal(np.asarray(sparse)[0, few], np.asarray(unbound)[0, few])


# ---------------------------------------------------------------- select


def test_select_equals_the_oracle_whatever_the_budget():
    rng = np.random.default_rng(12)
    paged = Paged(rng, IndexMXFP4(64), batch=2, pages=10, page_size=4)
    q, w = normal(rng, 2, 7, 4, 64), normal(rng, 2, 7, 4)
    lengths = rng.integers(0, 41, (2, 7))
    arguments = dict(context_lens=int32(lengths), block_table=int32(paged.table))
    chosen = functools.partial(
        select, jnp.asarray(q), paged.cache, jnp.asarray(w), 6, candidate_topk_blocks=2, candidate_block_size=8,
        **arguments,
    )  # fmt: skip
    row_bytes = 3 * 4 * 40
    first = chosen()
    scores = np.asarray(paged_indexer_logits(jnp.asarray(q), paged.cache, jnp.asarray(w), **arguments))
    exact = np.stack([oracle.index_scores(q[b], paged.stored[b], w[b]) for b in range(2)])
    close(scores, np.where(np.arange(40) < lengths[..., None], exact, -np.inf))
    for b, n in np.ndindex(2, 7):
        assert np.asarray(first.topk_indices)[b, n].tolist() == oracle.top_k(scores[b, n], 6, lengths[b, n])
        expected = oracle.candidate_blocks(scores[b, n], lengths[b, n], 2, 8)
        assert np.asarray(first.candidate_blocks)[b, n].tolist() == expected
    np.testing.assert_array_equal(first.counts, (np.asarray(first.topk_indices) >= 0).sum(-1))
    for budget in (1, 3 * row_bytes):  # rows one by one, three at a time
        for a, b in zip(jax.tree.leaves(chosen(byte_budget=budget)), jax.tree.leaves(first)):
            np.testing.assert_array_equal(a, b)
    candidates = expand_candidates(first.candidate_blocks, int32(lengths), 8)
    results = [
        select(jnp.asarray(q), paged.cache, jnp.asarray(w), 6, candidates=candidates, byte_budget=budget, **arguments)
        for budget in (3 * row_bytes, 10**9)
    ]
    assert results[0].candidate_blocks is None
    for other in results[1:]:
        np.testing.assert_array_equal(other.topk_indices, results[0].topk_indices)


def test_select_when_k_exceeds_the_context():
    rng = np.random.default_rng(13)
    paged = Paged(rng, IndexFP8(64), batch=1, pages=2, page_size=4)
    q, w = jnp.asarray(normal(rng, 1, 1, 2, 64)), jnp.asarray(normal(rng, 1, 1, 2))
    chosen = select(q, paged.cache, w, 20, context_lens=int32([[5]]), block_table=int32(paged.table))
    assert np.asarray(chosen.topk_indices)[0, 0].tolist() == oracle.padded(range(5), 20)


def abstract(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def temporaries(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("at_once", ["one row", "many rows"])
@pytest.mark.parametrize("with_candidates", [False, True])
def test_select_stays_within_its_budget(with_candidates, at_once, monkeypatch):
    """2048 rows x 131072 keys, V4.1's real sizes: 1 GiB of scores, 32 GiB per head. Compiled, not run.

    As on a CPU, and with the blocks of rows that a GPU gets.
    """
    pages, heads, rows = 131072 // 64, 32, 2048
    if at_once == "many rows":
        monkeypatch.setattr(blocks, "rows_at_once", lambda bytes_per_row: max(1, blocks.BUDGET // bytes_per_row))
        pages += 1  # another shape, so that the trace for a CPU is not found again
    cache = jax.eval_shape(lambda: PagedRows.zeros(IndexMXFP4(), pages, 64))
    arguments = (
        abstract((1, rows, heads, 128), jnp.bfloat16), cache, abstract((1, rows, heads), jnp.bfloat16),
        abstract((1, rows), jnp.int32), abstract((1, pages), jnp.int32),
    )  # fmt: skip

    def chosen(q, keys, w, lengths, table, ids=None):
        candidates = None if ids is None else expand_candidates(ids, lengths, 8)
        own = {} if candidates is not None else dict(candidate_topk_blocks=2048, candidate_block_size=8)
        return select(q, keys, w, 512, context_lens=lengths, block_table=table, candidates=candidates, **own)

    if with_candidates:
        arguments += (abstract((1, rows, 2048), jnp.int32),)
    used = temporaries(chosen, *arguments)
    assert used <= 2 * 64 * 2**20  # the budget for scores, and as much for the scores per head of one block


def test_dense_scores_need_no_array_per_head():
    """512 x 65536: the result is 128 MiB, the scores per head would be 8 GiB."""
    used = temporaries(
        lambda q, k, w, a, b: indexer_logits(q, k, w, row_start=a, row_end=b),
        abstract((512, 64, 128), jnp.bfloat16), abstract((65536, 128), jnp.bfloat16), abstract((512, 64), jnp.float32),
        abstract((512,), jnp.int32), abstract((512,), jnp.int32),
    )  # fmt: skip
    assert used <= 512 * 65536 * 4 + 2 * 64 * 2**20


@pytest.mark.usefixtures("unchecked")
def test_ac_21_wrong_ranks_and_sizes():
    q, k, w, n = jnp.zeros((3, 2, 16)), jnp.zeros((5, 16)), jnp.zeros((3, 2)), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match=r"q has shape \(1, 3, 2, 16\).*\[T, H, D\]"):
        indexer_logits(q[None], k, w, row_start=n, row_end=n)
    with pytest.raises(ValueError, match=r"k has shape \(5, 8\).*D is 16"):
        indexer_logits(q, k[:, :8], w, row_start=n, row_end=n)
    with pytest.raises(ValueError, match="row_end has dtype float32"):
        indexer_logits(q, k, w, row_start=n, row_end=n.astype(jnp.float32))
    with pytest.raises(ValueError, match="rounding"):
        indexer_logits(q, k, w, row_start=n, row_end=n, rounding=jnp.float16)
    cache = PagedRows.zeros(IndexFP8(64), 2, 4)
    with pytest.raises(ValueError, match="D=16, but the keys are IndexFP8"):
        paged_indexer_logits(q[None], cache, w[None], context_lens=n[None], block_table=int32([[0]]))
    cache = PagedRows.zeros(IndexFP8(16), 2, 4)
    arguments = dict(context_lens=n[None], block_table=int32([[0]]))
    with pytest.raises(ValueError, match="give both"):
        select(q[None], cache, w[None], 2, candidate_topk_blocks=2, **arguments)
    with pytest.raises(ValueError, match="do not choose them"):
        candidates = expand_candidates(jnp.zeros((1, 3, 2), jnp.int32), n[None], 8)
        select(q[None], cache, w[None], 2, candidates=candidates, candidate_topk_blocks=2, candidate_block_size=8, **arguments)


def test_fp8_scores_follow_the_deepgemm_formula():
    """Query scales folded into the weights, key scales outside: equal to scores of the dequantised operands."""
    rng = np.random.default_rng(14)
    q = normal(rng, 4, 2, 64).astype(ml_dtypes.float8_e4m3fn)
    k = normal(rng, 30, 64).astype(ml_dtypes.float8_e4m3fn)
    q_scale, k_scale = 2.0 ** rng.integers(-3, 3, (4, 2, 1)), 2.0 ** rng.integers(-3, 3, 30)
    w = normal(rng, 4, 2) / 8
    found = indexer_logits(
        jnp.asarray(q), jnp.asarray(k), jnp.asarray(w * q_scale[..., 0], jnp.float32), row_start=int32([0] * 4),
        row_end=int32([30] * 4), k_scale=jnp.asarray(k_scale, jnp.float32),
    )  # fmt: skip
    expected = oracle.index_scores(q.astype(np.float64) * q_scale, k.astype(np.float64) * k_scale[:, None], w)
    size = np.abs(expected).max()
    close(np.asarray(found) / size, expected / size)


def test_candidate_blocks_come_from_the_same_scores():
    rng = np.random.default_rng(15)
    paged = Paged(rng, IndexMXFP4(64), batch=1, pages=10, page_size=4)
    q, w = jnp.asarray(normal(rng, 1, 3, 4, 64)), jnp.asarray(normal(rng, 1, 3, 4))
    arguments = dict(context_lens=int32([[40, 17, 3]]), block_table=int32(paged.table))
    chosen = select(q, paged.cache, w, 5, candidate_topk_blocks=3, candidate_block_size=8, **arguments)
    scores = paged_indexer_logits(q, paged.cache, w, **arguments)
    np.testing.assert_array_equal(
        chosen.candidate_blocks, candidate_blocks(scores, arguments["context_lens"], 3, 8)
    )
    np.testing.assert_array_equal(chosen.topk_indices, top_k(scores, 5, lengths=arguments["context_lens"])[0])


def test_a_selection_takes_as_many_rows_and_requests_at_once_as_its_budget_allows(monkeypatch):
    """Over 131,072 positions 42 rows fit in the 64 MiB of the references: 200 rows of one request make 5 blocks, and 128
    requests of one row 4 groups of 32. A GPU with kernels takes either at once."""

    def parts(batch, rows):
        lengths, table = abstract((batch, rows), jnp.int32), abstract((batch, 2048), jnp.int32)
        keys = jax.eval_shape(lambda: PagedRows.zeros(IndexMXFP4(128), 2048, 64))
        found = jax.eval_shape(
            lambda *arrays: make_select_schedule(*arrays, 32, implementation="interpret_sm90"), lengths, table, keys
        )
        return {leaf.shape[:2] for leaf in jax.tree.leaves(found)}

    assert parts(1, 200) == {(1, 5)} and parts(128, 1) == {(4, 1)}
    monkeypatch.setattr(platform, "kernel_name", lambda: "sm90")
    assert parts(1, 200) == parts(128, 1) == {(1, 1)}


@pytest.mark.parametrize("with_candidates", [False, True], ids=["dense", "candidates"])
@pytest.mark.parametrize(("rows_at_once", "groups", "blocks"), [(99, 1, 1), (4, 1, 3), (1, 2, 5)])
def test_the_schedule_of_a_selection_is_that_of_each_of_its_parts(rows_at_once, groups, blocks, with_candidates):
    """2 requests of 5 rows, in parts that a budget allows: each part has the schedule that it would make itself."""
    rng = np.random.default_rng(16)
    lengths, table = rng.integers(0, 257, (2, 5)).astype(np.int32), int32(rng.permutation(8).reshape(2, 4))
    keys = PagedRows.zeros(IndexMXFP4(128), 8, 64)
    candidates, width = None, 256
    if with_candidates:
        ids = np.stack([rng.permutation(32)[:10] for _ in range(10)]).reshape(2, 5, 10)
        candidates, width = expand_candidates(int32(ids), int32(lengths), 8), 80
    found = make_select_schedule(
        int32(lengths), table, keys, 32, candidates=candidates, byte_budget=12 * width * rows_at_once,
        implementation="interpret_sm90",
    )  # fmt: skip
    assert {leaf.shape[:2] for leaf in jax.tree.leaves(found)} == {(groups, blocks)}
    per_group, rows = 2 // groups, -(-5 // blocks)
    for g, b in np.ndindex(groups, blocks):
        requests = slice(g * per_group, (g + 1) * per_group)
        part = jax.tree.map(
            lambda x: jnp.pad(x, ((0, 0), (0, 1)) + ((0, 0),) * (x.ndim - 2))[requests, b * rows : (b + 1) * rows],
            (int32(lengths), candidates),
        )
        if with_candidates:
            own = make_candidate_schedule(
                part[1], keys, context_lens=part[0], block_table=table[requests], heads=32, implementation="interpret_sm90"
            )
        else:
            own = make_indexer_schedule(part[0], 32, implementation="interpret_sm90")
        for ours, expected in zip(jax.tree.leaves(found), jax.tree.leaves(own), strict=True):
            np.testing.assert_array_equal(ours[g, b], expected)
