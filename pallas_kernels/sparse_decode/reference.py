"""Attention over listed slots of paged caches in plain JAX: rows are decoded block by block."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import blocks, indexing
from pallas_kernels.sparse_attention import online_softmax
from pallas_kernels.sparse_attention.reference import rows_at_once


@functools.partial(jax.jit, static_argnames=("v_width", "num_splits", "p_dtype"))
def sparse_decode(q, caches, lists, *, topk_lengths, sink, scale, v_width, num_splits, p_dtype):
    dtype = jnp.bfloat16 if q.dtype == jnp.bfloat16 else jnp.float32
    batch, rows = q.shape[:2]

    def flat(array):
        return array.reshape(batch * rows, *array.shape[2:])

    def block(arrays):
        q, lists, lengths = arrays
        sources = []
        for cache, slots, length in zip(caches, lists, lengths):
            _, _, valid = indexing.page_and_row(slots, cache.page_size, cache.pages.shape[0])
            if length is not None:
                valid &= jnp.arange(slots.shape[1]) < length[:, None]
            sources.append((functools.partial(cache.gather, dtype=dtype), slots, valid))
        acc, total, high = online_softmax.attend(
            q, sources, scale=scale, v_width=v_width, p_dtype=p_dtype, splits=num_splits
        )
        if num_splits == 1:
            return online_softmax.finish(acc[0], total[0], high[0], sink, q.dtype)
        outs, lses = online_softmax.finish(acc, total, high, None, jnp.float32)
        return online_softmax.combine(outs, lses, sink, q.dtype)

    rows_together = rows_at_once(q.shape[2], num_splits * q.shape[3])
    out, lse = blocks.map_rows(block, rows_together, jax.tree.map(flat, (q, lists, topk_lengths)))
    return out.reshape(batch, rows, *out.shape[1:]), lse.reshape(batch, rows, -1)
