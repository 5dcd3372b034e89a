"""Attention over listed slots of paged caches in plain JAX: rows are decoded block by block."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import blocks, indexing
from pallas_kernels.sparse_attention import online_softmax
from pallas_kernels.sparse_attention.reference import rows_at_once
from pallas_kernels.sparse_decode import planning


def sparse_decode(
    q, caches, lists, *, topk_lengths, sink, scale, v_width, num_splits, split_size, schedule, p_dtype, out_dtype
):
    if split_size is not None:
        widths = tuple(slots.shape[-1] for slots in lists)
        lengths = tuple(None if length is None else length.reshape(-1) for length in topk_lengths)
        rows = q.shape[0] * q.shape[1]
        schedule = planning.make_schedule(widths, lengths, rows, q.shape[2], split_size)
    attend = _attend if schedule is None else functools.partial(_attend_parts, schedule=schedule)
    return attend(
        q, caches, lists, topk_lengths=topk_lengths, sink=sink, scale=scale, v_width=v_width,
        num_splits=num_splits or 1, p_dtype=p_dtype, out_dtype=out_dtype,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("v_width", "num_splits", "p_dtype", "out_dtype"))
def _attend(q, caches, lists, *, topk_lengths, sink, scale, v_width, num_splits, p_dtype, out_dtype):
    batch, rows = q.shape[:2]

    def block(arrays):
        q, lists, lengths = arrays
        acc, total, high = online_softmax.attend(
            q, _sources(q, caches, lists, lengths), scale=scale, v_width=v_width, p_dtype=p_dtype, splits=num_splits
        )
        if num_splits == 1:
            return online_softmax.finish(acc[0], total[0], high[0], sink, out_dtype)
        outs, lses = online_softmax.finish(acc, total, high, None, jnp.float32)
        return online_softmax.combine(outs, lses, sink, out_dtype)

    rows_together = rows_at_once(q.shape[2], num_splits * q.shape[3])
    out, lse = blocks.map_rows(block, rows_together, jax.tree.map(_flat, (q, lists, topk_lengths)))
    return out.reshape(batch, rows, *out.shape[1:]), lse.reshape(batch, rows, -1)


@functools.partial(jax.jit, static_argnames=("v_width", "num_splits", "p_dtype", "out_dtype"))
def _attend_parts(q, caches, lists, *, topk_lengths, sink, scale, v_width, num_splits, p_dtype, out_dtype, schedule):
    """Every segment of the schedule apart, then the segments of a row combined."""
    batch, rows = q.shape[:2]
    q, lists, lengths = jax.tree.map(_flat, (q, lists, topk_lengths))
    total_rows = q.shape[0]
    row, begin, end, _ = schedule.segments.T
    starts, widths = [jnp.zeros(total_rows, jnp.int32)], tuple(slots.shape[1] for slots in lists)
    for count in planning.list_blocks(widths, lengths)[:-1]:
        starts.append(starts[-1] + count)

    def block(arrays):
        row, begin, end = arrays
        take = functools.partial(indexing.gather_rows, indices=row)
        q_of, lists_of, lengths_of, starts_of = jax.tree.map(take, (q, lists, lengths, starts))
        sources = []
        for start, (gather, slots, valid) in zip(starts_of, _sources(q_of, caches, lists_of, lengths_of)):
            number = start[:, None] + jnp.arange(slots.shape[1]) // planning.BLOCK
            here = (number >= begin[:, None]) & (number < end[:, None]) & (row < total_rows)[:, None]
            sources.append((gather, slots, valid & here))
        acc, total, high = online_softmax.attend(q_of, sources, scale=scale, v_width=v_width, p_dtype=p_dtype)
        return online_softmax.finish(acc[0], total[0], high[0], None, jnp.float32)

    outs, lses = blocks.map_rows(block, rows_at_once(q.shape[1], q.shape[2]), (row, begin, end))
    high = jnp.maximum(jax.ops.segment_max(lses, row, total_rows), online_softmax.START)
    weights = jnp.exp(lses - indexing.gather_rows(high, row))
    acc = jax.ops.segment_sum(jnp.where(weights[..., None] == 0, 0, outs * weights[..., None]), row, total_rows)
    total = jax.ops.segment_sum(weights, row, total_rows)
    out, lse = online_softmax.finish(acc, total, high, sink, out_dtype)
    return out.reshape(batch, rows, *out.shape[1:]), lse.reshape(batch, rows, -1)


def _flat(array):
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _sources(q, caches, lists, lengths):
    dtype = jnp.bfloat16 if q.dtype == jnp.bfloat16 else jnp.float32
    sources = []
    for cache, slots, length in zip(caches, lists, lengths):
        _, _, valid = indexing.page_and_row(slots, cache.page_size, cache.pages.shape[0])
        if length is not None:
            valid &= jnp.arange(slots.shape[1]) < length[:, None]
        sources.append((functools.partial(cache.gather, dtype=dtype), slots, valid))
    return sources
