"""Sparse decode in parts: schedules that cover every list once, parts of a fixed size, their combination."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances

from pallas_kernels import PagedRows, Plain, make_decode_schedule, sparse_decode
from pallas_kernels.sparse_decode import planning

WAYS = {"shares": {}, "fixed size": {"split_size": 256}, "fixed number": {"num_splits": 3}}


def int32(x):
    return jnp.asarray(x, jnp.int32)


def covers(schedule, blocks):
    """Checks that every block of every row is in one segment, and that parts are numbered as `merged` says.

    Returns the most blocks that a thread block has.
    """
    segments, first, starts = (np.asarray(x) for x in (schedule.segments, schedule.first, schedule.starts))
    found = {row: [] for row in range(len(blocks))}
    loads = []
    for (begin, end), start in zip(zip(first, first[1:]), starts, strict=True):
        assert tuple(start[:2]) == (begin, end) and (begin == end or (start[2:6] == segments[begin]).all())
        loads.append(int((segments[begin:end, 2] - segments[begin:end, 1]).sum()))
        for row, start, stop, part in segments[begin:end]:
            found[row].append((start, stop, part))
    merged = np.asarray(schedule.merged)
    used = []
    for row, parts in found.items():
        parts = sorted(parts)
        assert [p[0] for p in parts] == [0, *[p[1] for p in parts[:-1]]] and parts[-1][1] == blocks[row]
        if len(parts) == 1:
            assert parts[0][2] == -1 and merged[row, 1] == 1
        else:
            numbers = [p[2] for p in parts]
            assert tuple(merged[row]) == (numbers[0], len(parts)) and len(parts) <= schedule.most
            assert numbers == list(range(numbers[0], numbers[0] + len(parts)))
            used += numbers
    assert sorted(used) == list(range(len(used))) and len(used) <= schedule.parts
    return max(loads)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "batch, rows, heads, widths",
    [
        (1, 1, 128, (2048,)), (32, 1, 64, (128, 512)), (128, 2, 128, (2048,)), (3, 1, 8, (20,)), (80, 1, 64, (2048,)),
    ],
)  # fmt: skip
def test_every_block_is_attended_to_once(batch, rows, heads, widths, way):
    schedule = make_decode_schedule(batch, rows, heads, widths, **WAYS[way])
    assert isinstance(schedule.segments, np.ndarray)  # made while tracing: a step does not pay for it
    blocks = np.full(batch * rows, sum(-(-w // 64) for w in widths))
    longest = covers(schedule, blocks)
    if even := schedule.even:
        segments, threads = np.asarray(schedule.segments), len(schedule.first) - 1
        row, begin, end = even.segment(np.arange(len(segments)))
        np.testing.assert_array_equal(segments[:, :3].T, (row, begin, np.minimum(end, blocks[0])))
        np.testing.assert_array_equal(schedule.first, even.share(np.arange(threads + 1), threads))
        assert (schedule.merged[:, 1] == even.parts).all() and (even.parts == 1 or (segments[:, 3] >= 0).all())
    if way == "shares":
        threads = len(schedule.first) - 1
        assert threads == 132 // planning.head_groups(heads)
        assert longest <= -(-blocks.sum() // threads) + 3


@pytest.mark.parametrize("way, batch", [("shares", 5), ("shares", 200), ("fixed size", 32), ("fixed number", 32)])
def test_every_block_of_uneven_lists_is_attended_to_once(way, batch):
    rng = np.random.default_rng(batch)
    widths = (128, 512)
    lengths = [rng.integers(-3, width + 40, (batch, 1)) * (rng.random((batch, 1)) < 0.8) for width in widths]
    schedule = jax.jit(lambda lengths: make_decode_schedule(batch, 1, 64, widths, lengths, **WAYS[way]))(
        tuple(map(int32, lengths))
    )
    blocks = sum((np.clip(n, 0, w) + 63) // 64 for n, w in zip(lengths, widths))[:, 0]
    covers(schedule, np.maximum(blocks, 1))


@functools.cache
def call(batch=3, heads=4):
    """Arguments of a call with lists of two caches, one row of which has nothing."""
    rng = np.random.default_rng(7)
    cache = PagedRows(jnp.asarray(rng.standard_normal((50, 8, 32)), jnp.float32), Plain(32, jnp.float32), 8)
    q = jnp.asarray(rng.standard_normal((batch, 1, heads, 32)), jnp.float32)
    lists = tuple(int32(rng.integers(-60, 400, (batch, 1, k))) for k in (200, 70))
    lengths = tuple(int32(rng.integers(40, k, (batch, 1))).at[1].set(0) for k in (200, 70))
    return q, (cache, cache), lists, lengths, jnp.asarray(rng.standard_normal(heads), jnp.float32)


def attend(q, caches, lists, lengths, sink, **ways):
    return sparse_decode(q, caches, lists, topk_lengths=lengths, sink=sink, scale=0.3, **ways)


@pytest.mark.parametrize(
    "way", ["fixed number", *[pytest.param(w, marks=pytest.mark.slow) for w in ("shares", "fixed size")]]
)
def test_ac_48_parts_of_a_schedule_combine_to_the_whole(way):
    whole, lse = attend(*call())
    schedule = make_decode_schedule(3, 1, 4, (200, 70), call()[3], **WAYS[way])
    found = attend(*call(), schedule=schedule)
    np.testing.assert_allclose(found[0], whole, atol=tolerances.of("ops.splits.f32"))
    np.testing.assert_allclose(found[1], lse, rtol=1e-6)
    assert not np.asarray(found[0])[1].any() and np.isneginf(np.asarray(found[1])[1]).all()


def test_ac_53_parts_of_a_fixed_size_do_not_depend_on_the_batch():
    q, caches, lists, lengths, sink = call()
    together = attend(q, caches, lists, lengths, sink, split_size=128)
    for row in (0, 2):
        alone = attend(*jax.tree.map(lambda a: a[row : row + 1], (q,)), caches, *jax.tree.map(
            lambda a: a[row : row + 1], (lists, lengths)), sink, split_size=128)  # fmt: skip
        for a, b in zip(alone, together):
            np.testing.assert_array_equal(a[0], b[row])


def test_output_dtype():
    q, caches, lists, lengths, sink = call()
    q = q.astype(jnp.bfloat16)
    wide, _ = attend(q, caches, lists, lengths, sink, out_dtype=jnp.float32)
    narrow, _ = attend(q, caches, lists, lengths, sink)
    assert wide.dtype == jnp.float32 and narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(wide.astype(jnp.bfloat16), narrow)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "ways, sentence",
    [
        ({"split_size": 100}, "multiples of 128"),
        ({"split_size": 128, "num_splits": 2}, "give one of them"),
        ({"num_splits": 0}, "num_splits is 0"),
    ],
)
def test_wrong_splits(ways, sentence):
    with pytest.raises(ValueError, match=sentence):
        attend(*call(), **ways)
    if len(ways) == 1:
        with pytest.raises(ValueError, match=sentence):
            make_decode_schedule(1, 1, 8, (64,), **ways)
    with pytest.raises(ValueError, match="one length for each"):
        make_decode_schedule(1, 1, 8, (64,), (None, None))
