"""Attention over listed rows in plain JAX: blocks of query rows, and 64 indices of them at a time."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import blocks, indexing
from pallas_kernels.sparse_attention import online_softmax


@functools.partial(jax.jit, static_argnames=("v_width", "p_dtype", "lse_prefix"))
def sparse_attention(q, kvs, lists, *, topk_length, sink, scale, v_width, p_dtype, lse_prefix=None):
    lengths = (None,) * len(lists) if topk_length is None else topk_length

    def block(arrays):
        q, lists, lengths = arrays
        sources = []
        for kv, indices, length in zip(kvs, lists, lengths):
            valid = (indices >= 0) & (indices < kv.shape[0])
            if length is not None:
                valid &= jnp.arange(indices.shape[1]) < length[:, None]
            sources.append((functools.partial(indexing.gather_rows, kv), indices, valid))
        acc, total, high = online_softmax.attend(q, sources, scale=scale, v_width=v_width, p_dtype=p_dtype)
        results = online_softmax.finish(acc[0], total[0], high[0], sink, q.dtype)
        if lse_prefix is None:
            return results
        leading = online_softmax.leading(sources, lse_prefix)
        _, total, high = online_softmax.attend(q, leading, scale=scale, v_width=1, p_dtype=p_dtype)
        return *results, online_softmax.log_sum(total[0], high[0])

    return blocks.map_rows(block, rows_at_once(q.shape[1], q.shape[2]), (q, lists, lengths))


def rows_at_once(heads, width):
    """Query rows whose gathered keys, scores and sums fit the budget, three copies of them at once."""
    block = online_softmax.BLOCK
    return blocks.rows_at_once(3 * 4 * (block * width + block * heads + heads * width))
