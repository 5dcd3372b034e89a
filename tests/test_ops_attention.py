"""sparse_attention, sparse_decode and combine: released outputs, empty rows, sinks, splits."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tolerances
from conftest import read_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ops as oracle

from pallas_kernels import (
    Model1,
    PagedRows,
    Plain,
    V32,
    V41MXFP8,
    V41NVFP4,
    blocks,
    combine,
    positions_to_slots,
    sparse_attention,
    sparse_decode,
)

BF16, INF = jnp.bfloat16, float("inf")
GOLDEN = read_golden("v41/ops/sparse_attn")


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def int32(values):
    return jnp.asarray(np.asarray(values), jnp.int32)


def close(found, expected, name):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(found[finite], expected[finite], rtol=0, atol=tolerances.of(name))


def ulps(found, expected):
    """Largest number of bf16 numbers between two arrays."""
    def ordinal(x):
        bits = np.asarray(x).astype(ml_dtypes.bfloat16).view(np.int16).astype(np.int32)
        return np.where(bits < 0, -(bits & 0x7FFF), bits)

    return np.abs(ordinal(found) - ordinal(expected)).max()


def attend(q, kv, indices, **kwargs):
    """sparse_attention of one request, NumPy in."""
    kwargs = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in kwargs.items()}
    return sparse_attention(jnp.asarray(q), jnp.asarray(kv), int32(indices), **kwargs)


def some_lists(rng, rows, width, total, none_share=0.3):
    lists = rng.permuted(np.tile(np.arange(total), (rows, 1)), axis=1)[:, :width].astype(np.int32)
    return np.where(rng.random(lists.shape) < none_share, rng.choice([-1, -7, total, total + 5], lists.shape), lists)


# ---------------------------------------------------------------- the released kernel


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    "lists, sink, output",
    [("topk_idxs", "sink", "out"), ("topk_idxs_empty", "sink", "out_empty"), ("topk_idxs_empty", "sink_special", "out_sink_special")],
)  # fmt: skip
def test_outputs_of_the_released_kernel(lists, sink, output, dtype):
    arrays = jnp.float32 if dtype == "f32" else BF16
    expected = GOLDEN[f"{output}_{dtype}"].copy()
    empty = (GOLDEN[lists] < 0).all(-1)
    undefined = np.isnan(expected)
    if output == "out_sink_special":
        # Nothing to attend and a sink of -inf is 0/0 in the released kernel. Ours gives 0.
        assert undefined.any() and undefined[empty][:, 1].all() and undefined.sum() == undefined[empty][:, 1].sum()
        expected[undefined] = 0
    assert not np.isnan(expected).any()
    for b in range(2):
        out, lse = attend(
            jnp.asarray(GOLDEN["q"][b], arrays), jnp.asarray(GOLDEN["kv"][b], arrays), GOLDEN[lists][b],
            sink=GOLDEN[sink], scale=float(GOLDEN["scale"]),
        )  # fmt: skip
        assert out.dtype == arrays and lse.dtype == jnp.float32
        if dtype == "f32":
            close(out, expected[b], "ops.sparse_attn.f32")
        else:
            assert ulps(out, expected[b]) <= tolerances.of("ops.bf16_ulps")
        np.testing.assert_array_equal(np.isneginf(np.asarray(lse)), np.repeat(empty[b][:, None], 6, 1))
        assert not np.asarray(out, np.float32)[empty[b]].any()


# ---------------------------------------------------------------- the oracle


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 999), st.booleans(), st.booleans(), st.sampled_from([None, 3, 16]))
def test_attention_equals_the_oracle(seed, with_sink, with_lengths, v_width):
    """Two lists of rows; indices that are none anywhere, duplicates, lengths, values narrower than keys."""
    rng = np.random.default_rng(seed)
    q, kvs = normal(rng, 3, 2, 16), [normal(rng, 80, 16), normal(rng, 9, 16)]
    lists = [some_lists(rng, 3, 70, 80), some_lists(rng, 3, 6, 9)]
    lists[0][0, 1] = lists[0][0, 0]
    lengths = [rng.integers(0, 71, 3).astype(np.int32), None] if with_lengths else [None, None]
    sink = normal(rng, 2) if with_sink else None
    out, lse = sparse_attention(
        jnp.asarray(q), tuple(map(jnp.asarray, kvs)), tuple(map(int32, lists)),
        topk_length=tuple(None if n is None else int32(n) for n in lengths) if with_lengths else None,
        sink=None if sink is None else jnp.asarray(sink), scale=0.25, v_width=v_width,
    )  # fmt: skip
    expected, expected_lse = oracle.sparse_attention(q, kvs, lists, lengths, sink, 0.25, v_width or 16)
    close(out, expected, "ops.sparse_attn.f32")
    close(lse, expected_lse, "ops.lse.f32")


@pytest.mark.parametrize("leading", [16, 32, 128])
def test_ac_01_leading_entries_of_none(leading):
    """The first entries, up to whole blocks, are none: finite, and equal to the same list compacted to the front."""
    rng = np.random.default_rng(0)
    q, kv = normal(rng, 2, 4, 32), normal(rng, 200, 32)
    lists = some_lists(rng, 2, 64 + leading, 200, none_share=0)
    lists[:, :leading] = -1
    found = attend(q, kv, lists, scale=0.2, sink=np.zeros(4, np.float32))
    compact = attend(q, kv, lists[:, leading:], scale=0.2, sink=np.zeros(4, np.float32))
    for a, b, name in zip(found, compact, ("ops.sparse_attn.f32", "ops.lse.f32")):
        assert np.isfinite(np.asarray(a)).all()
        close(a, b, name)


@pytest.mark.parametrize("sink", [None, [0.0, 1.0, -INF, INF]])
def test_ac_02_an_empty_row_is_zero_and_changes_no_other(sink):
    rng = np.random.default_rng(1)
    q, kv, lists = normal(rng, 3, 4, 32), normal(rng, 50, 32), some_lists(rng, 3, 8, 50)
    sink = None if sink is None else np.array(sink, np.float32)
    full, full_lse = attend(q, kv, lists, scale=0.2, sink=sink)
    lists[0] = -1
    out, lse = attend(q, kv, lists, scale=0.2, sink=sink)
    assert not np.asarray(out[0]).any() and np.isneginf(np.asarray(lse[0])).all()
    np.testing.assert_array_equal(out[1:], full[1:])
    np.testing.assert_array_equal(lse[1:], full_lse[1:])
    assert not np.isnan(np.asarray(out)).any()


def test_ac_06_rows_of_nan_change_no_bit_of_the_others():
    rng = np.random.default_rng(2)
    q, kv, lists = normal(rng, 3, 4, 32), normal(rng, 50, 32), some_lists(rng, 3, 8, 50)
    alone = attend(q, kv, lists, scale=0.2)
    padded = attend(
        np.concatenate([q, np.full((5, 4, 32), np.nan, np.float32)]), kv, np.concatenate([lists, np.full((5, 8), -1)]),
        scale=0.2,
    )  # fmt: skip
    for a, b in zip(alone, padded):
        np.testing.assert_array_equal(a, b[:3])
        np.testing.assert_array_equal(b[3:], np.full(b[3:].shape, 0 if b.ndim == 3 else -np.inf))


def test_ac_07_rows_that_are_not_listed_are_not_read():
    """NaN in every row that no list names, the first and the last included."""
    rng = np.random.default_rng(3)
    q, kv = normal(rng, 2, 4, 32), normal(rng, 50, 32)
    lists = np.array([[3, -1, 8, 50], [8, 3, -1, 9]])
    clean = attend(q, kv, lists, scale=0.2)
    spoilt = kv.copy()
    spoilt[np.setdiff1d(np.arange(50), [3, 8, 9])] = np.nan
    for a, b in zip(clean, attend(q, spoilt, lists, scale=0.2)):
        np.testing.assert_array_equal(a, b)


def test_ac_21_index_equal_to_the_number_of_rows_is_none():
    rng = np.random.default_rng(4)
    q, kv = normal(rng, 1, 2, 16), normal(rng, 10, 16)
    for a, b in zip(attend(q, kv, [[0, 9, 10]], scale=1.0), attend(q, kv, [[0, 9, -1]], scale=1.0)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("heads, width, selected, dtype", [(8, 64, 90, jnp.float32), (4, 64, 28, BF16)])
def test_a_row_does_not_depend_on_what_comes_with_it(heads, width, selected, dtype):
    """One row alone, the first rows, and all of 67: equal to the bit."""
    rng = np.random.default_rng(5)
    q, kv, lists = normal(rng, 67, heads, width), normal(rng, 300, width), some_lists(rng, 67, selected, 300)
    q, kv = jnp.asarray(q, dtype), jnp.asarray(kv, dtype)
    out, lse = attend(q, kv, lists, scale=0.1)
    for rows in (slice(0, 1), slice(33, 34), slice(66, 67), slice(3, 11)):
        some, some_lse = attend(q[rows], kv, lists[rows], scale=0.1)
        np.testing.assert_array_equal(some, out[rows])
        np.testing.assert_array_equal(some_lse, lse[rows])


def test_probabilities_are_rounded_for_the_numerator_only():
    """p_dtype bf16 on float32 inputs: the oracle's sums with rounded p above and exact p below."""
    rng = np.random.default_rng(6)
    q, kv, lists = normal(rng, 2, 2, 16), normal(rng, 40, 16), some_lists(rng, 2, 30, 40, 0)
    out, lse = attend(q, kv, lists, scale=0.5, p_dtype=BF16)
    for t, h in np.ndindex(2, 2):
        rows = kv[lists[t]].astype(np.float64)
        scores = rows @ q[t, h].astype(np.float64) * 0.5
        p = np.exp(scores - scores.max())
        expected = oracle.bf16(p).astype(np.float64) @ rows / p.sum()
        close(out[t, h], expected, "ops.rounded_p.f32")
        assert np.abs(expected - p @ rows / p.sum()).max() > 10 * tolerances.of("ops.rounded_p.f32")
        close(lse[t, h], scores.max() + np.log(p.sum()), "ops.lse.f32")


# ---------------------------------------------------------------- splits and the sink


@pytest.mark.parametrize("sink", [None, -INF, 0.0, 20.0, INF])
def test_ac_48_splits_agree_and_the_sink_counts_once(sink):
    rng = np.random.default_rng(7)
    cache = PagedRows.zeros(Plain(32, jnp.float32), 50, 8).scatter(
        jnp.arange(400, dtype=jnp.int32), jnp.asarray(normal(rng, 400, 32))
    )
    q = jnp.asarray(normal(rng, 2, 2, 4, 32))
    slots = (int32(some_lists(rng, 4, 300, 400)).reshape(2, 2, 300), int32(some_lists(rng, 4, 20, 400)).reshape(2, 2, 20))
    slots = (slots[0].at[1, 1].set(-1), slots[1].at[1, 1].set(-1))  # one row attends to nothing
    heads = None if sink is None else jnp.full(4, sink, jnp.float32)
    run = functools.partial(sparse_decode, q, (cache, cache), slots, scale=0.2)
    whole = run(sink=heads)
    for splits in (2, 3, 7) if heads is not None else (3,):
        out, lse = run(sink=heads, num_splits=splits)
        close(out, whole[0], "ops.splits.f32")
        close(lse, whole[1], "ops.lse.f32")
    plain, lse = run()
    np.testing.assert_array_equal(whole[1], lse)  # the lse never contains the sink
    assert not np.asarray(whole[0])[1, 1].any()
    if sink in (None, -INF):
        np.testing.assert_array_equal(whole[0], plain)
    elif sink == INF:
        assert not np.asarray(whole[0]).any()
    else:
        share = 1 / (1 + np.exp(sink - np.asarray(lse, np.float64)))
        close(whole[0], np.asarray(plain, np.float64) * share[..., None], "ops.sparse_attn.f32")


def test_ac_48_combine_of_shards_is_attention_over_all():
    """Lists dealt to three shards (one has nothing for row 0, and its output is garbage), sink only at the end."""
    rng = np.random.default_rng(8)
    q, kv, lists = normal(rng, 3, 4, 32), normal(rng, 60, 32), some_lists(rng, 3, 30, 60, 0)
    sink = normal(rng, 4)
    whole = attend(q, kv, lists, scale=0.2, sink=sink)
    parts = [np.where(lists % 3 == shard, lists, -1) for shard in range(3)]
    parts[0][0] = np.where(parts[0][0] >= 0, -1, -1)
    parts[1][0] = lists[0]
    parts[2][0] = -1
    results = [attend(q, kv, part, scale=0.2) for part in parts]
    outs, lses = (np.stack([np.asarray(r[i]) for r in results]) for i in range(2))
    assert np.isneginf(lses[2, 0]).all()
    outs[2, 0] = np.nan
    out, lse = combine(jnp.asarray(outs), jnp.asarray(lses), jnp.asarray(sink))
    close(out, whole[0], "ops.splits.f32")
    close(lse, whole[1], "ops.lse.f32")


def test_combine_of_nothing():
    out, lse = combine(jnp.full((3, 2, 4, 8), jnp.nan), jnp.full((3, 2, 4), -INF), jnp.full(4, -INF))
    assert not np.asarray(out).any() and np.isneginf(np.asarray(lse)).all()


# ---------------------------------------------------------------- paged caches


@pytest.mark.parametrize(
    "formats, dtype",
    [
        ((V41MXFP8(), V41NVFP4()), jnp.float32),
        ((V41MXFP8(), V41NVFP4()), BF16),
        ((Model1(), Model1()), BF16),
        ((V32(),), BF16),
        ((Plain(64, BF16), Plain(64, BF16)), jnp.float32),
    ],
    ids=["v41-f32", "v41-bf16", "model1", "v32", "plain"],
)
def test_decode_is_attention_over_decoded_rows(formats, dtype):
    """Slots through shuffled pages, lengths, unused entries: equal to sparse_attention on what the cache holds."""
    rng = np.random.default_rng(9)
    width, v_width = formats[0].width, min(512, formats[0].width)
    caches, lists, rows = [], [], []
    for i, format in enumerate(formats):
        page_size = (4, 2)[i]
        table = rng.permutation(12)[:10].reshape(2, 5)
        held = (table[..., None] * page_size + np.arange(page_size)).reshape(2, -1)
        cache = jax.jit(PagedRows.scatter)(
            PagedRows.zeros(format, 12, page_size), int32(held.reshape(-1)), jnp.asarray(oracle.bf16(normal(rng, held.size, width)))
        )
        positions = int32(some_lists(rng, 2, 6, 5 * page_size))[:, None]
        slots, _ = positions_to_slots(positions, int32(table), page_size)
        caches.append(cache)
        lists.append(slots)
        everything = jnp.arange(cache.num_slots, dtype=jnp.int32)
        rows.append(jax.jit(PagedRows.gather, static_argnames="dtype")(cache, everything, dtype=dtype))
    q = jnp.asarray(normal(rng, 2, 1, 4, width), dtype)
    lengths = tuple(int32([[5], [6]]) if i == 0 else None for i in range(len(formats)))
    sink = jnp.asarray(normal(rng, 4))
    out, lse = sparse_decode(
        q, tuple(caches), tuple(lists), topk_lengths=lengths, sink=sink, scale=width**-0.5, v_width=v_width
    )
    assert out.shape == (2, 1, 4, v_width) and out.dtype == dtype
    expected, expected_lse = sparse_attention(
        q[:, 0], tuple(rows), tuple(s[:, 0] for s in lists), topk_length=tuple(n if n is None else n[:, 0] for n in lengths),
        sink=sink, scale=width**-0.5, v_width=v_width,
    )  # fmt: skip
    np.testing.assert_array_equal(out[:, 0], expected)
    np.testing.assert_array_equal(lse[:, 0], expected_lse)
    exact = oracle.sparse_attention(
        np.asarray(q[:, 0], np.float32), [np.asarray(r, np.float32) for r in rows], [np.asarray(s[:, 0]) for s in lists],
        [n if n is None else np.asarray(n[:, 0]) for n in lengths], np.asarray(sink), width**-0.5, v_width,
    )  # fmt: skip
    close(lse[:, 0], exact[1], "ops.lse.f32")
    if dtype == jnp.float32:
        close(out[:, 0], exact[0], "ops.sparse_attn.f32")
    else:
        close(out[:, 0], exact[0], "ops.sparse_attn.bf16")


def test_v_is_the_first_part_of_the_key():
    """V3.2: 576 values a row, of which 512 are the value."""
    rng = np.random.default_rng(10)
    q, kv, lists = normal(rng, 2, 2, 576), normal(rng, 20, 576), some_lists(rng, 2, 7, 20)
    out, lse = attend(q, kv, lists, scale=576**-0.5)
    full, full_lse = attend(q, kv, lists, scale=576**-0.5, v_width=576)
    assert out.shape == (2, 2, 512)
    close(out, full[..., :512], "ops.sparse_attn.f32")
    np.testing.assert_array_equal(lse, full_lse)


def test_ac_19_slots_of_a_cache_beyond_2_to_31_bytes():
    """A V4.1 cache of 4.3 million slots is lowered and compiled without an index that cannot hold them."""
    cache = jax.eval_shape(lambda: PagedRows.zeros(Model1(), 2**26 // 16, 64))  # 2^28 slots, 157 GB
    q = jax.ShapeDtypeStruct((1, 1, 4, 512), BF16)
    slots = jax.ShapeDtypeStruct((1, 1, 64), jnp.int32)
    out, _ = jax.eval_shape(lambda q, cache, slots: sparse_decode(q, (cache,), (slots,), scale=0.1), q, cache, slots)
    assert out.shape == (1, 1, 4, 512)


@pytest.mark.parametrize("at_once", ["one row", "many rows"])
@pytest.mark.parametrize("heads, width, rows, selected", [(64, 512, 2048, 640), (128, 576, 256, 2048)])
def test_memory_stays_bounded(heads, width, rows, selected, at_once, monkeypatch):
    """V4.1 and V3.2 prefill sizes: gathering all keys at once would take 2.7 and 1.2 GB. Compiled, not run.

    As on a CPU, and with the blocks of rows that a GPU gets.
    """
    if at_once == "many rows":
        monkeypatch.setattr(blocks, "rows_at_once", lambda bytes_per_row: max(1, blocks.BUDGET // bytes_per_row))
        rows += 1  # another shape, so that the trace for a CPU is not found again
    q = jax.ShapeDtypeStruct((rows, heads, width), BF16)
    kv = jax.ShapeDtypeStruct((8192, width), BF16)
    indices = jax.ShapeDtypeStruct((rows, selected), jnp.int32)
    run = jax.jit(lambda q, kv, i: sparse_attention(q, kv, i, scale=0.1, v_width=512))
    used = run.lower(q, kv, indices).compile().memory_analysis().temp_size_in_bytes
    operands = rows * heads * (width + 512) * 2  # q and out, cut into and joined from blocks of rows
    assert used <= 64 * 2**20 + operands + 2 * rows * selected * 4


@pytest.mark.usefixtures("unchecked")
def test_ac_21_wrong_arguments():
    q, kv, lists = jnp.zeros((3, 2, 16)), jnp.zeros((5, 16)), jnp.zeros((3, 4), jnp.int32)
    cache = PagedRows.zeros(Plain(16, jnp.float32), 2, 4)
    cases = [
        (lambda: sparse_attention(q, kv, lists[None], scale=1.0), r"topk_indices\[0\] has shape \(1, 3, 4\).*\[T, K0\]"),
        (lambda: sparse_attention(q[None], kv, lists, scale=1.0), r"q has shape \(1, 3, 2, 16\)"),
        (lambda: sparse_attention(q, kv[:, :8], lists, scale=1.0), "D is 16"),
        (lambda: sparse_attention(q, kv, lists.astype(jnp.float32), scale=1.0), "must be int32"),
        (lambda: sparse_attention(q, (kv, kv), (lists,), scale=1.0), "tuple of 1 of indices"),
        (lambda: sparse_attention(q, (), (), scale=1.0), "at least one array"),
        (lambda: sparse_attention(q, kv, lists, scale=1.0, v_width=17), "v_width is 17"),
        (lambda: sparse_attention(q, kv, lists, scale=1.0, sink=jnp.zeros(3)), "H is 2"),
        (lambda: sparse_decode(q[None], cache, (lists[None],), scale=1.0), r"write \(cache,\)"),
        (lambda: sparse_decode(q[None], (cache,), (lists,), scale=1.0), r"\[B, N, K0\]"),
        (lambda: sparse_decode(q[None, :, :, :8], (cache,), (lists[None],), scale=1.0), "q has D=8"),
        (lambda: sparse_decode(q[None], (cache,), (lists[None],), scale=1.0, num_splits=0), "num_splits is 0"),
        (lambda: combine(q[None], jnp.zeros((1, 3))), r"\[splits, ..., H\]"),
    ]
    for call, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            call()
