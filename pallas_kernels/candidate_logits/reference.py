"""Indexer scores of candidate blocks in plain JAX: one row's blocks at a time, since every row has its own keys."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import blocks, indexing
from pallas_kernels.indexer_logits.reference import COLUMNS, block_scores, unpacked
from pallas_kernels.slots.reference import positions_to_slots


def _rows(function, arrays, candidates, rows):
    """Runs `function(arrays of a row, positions)` -> scores [columns] over all rows [R] and column blocks."""
    size = candidates.block_size
    total = candidates.blocks.shape[-1] * size
    columns = min(total, max(1, COLUMNS // size) * size)
    out = jnp.full((rows, total), -jnp.inf, jnp.float32)
    if out.size == 0:
        return out

    def row(arguments):
        arrays, ids, count, out = arguments

        def column_block(start):
            column = start + jnp.arange(columns, dtype=jnp.int32)
            block = indexing.gather_rows(ids, column // size)
            position = jnp.where(column // size < count, block * size + column % size, -1)
            return function(arrays, position)

        return blocks.map_columns(column_block, columns, total, out, stop=count * size)

    return lax.map(row, (arrays, candidates.blocks, candidates.count, out))


@functools.partial(jax.jit, static_argnames="rounding")
def candidate_logits(
    q, keys, weights, candidates, *, context_lens, block_table, q_scale=None, rounding=None, schedule=None
):
    del schedule  # a kernel's own
    q = unpacked(q, q_scale)
    batch, rows = q.shape[:2]
    flat = jax.tree.map(lambda array: array.reshape(batch * rows, *array.shape[2:]), candidates)
    request = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), rows)
    arrays = (q.reshape(-1, *q.shape[2:]), weights.reshape(-1, weights.shape[-1]), context_lens.reshape(-1), request)

    def scores(arrays, position):
        q, weights, length, request = arrays
        table = indexing.gather_rows(block_table, request)
        slots, _ = positions_to_slots(position[None, None], table[None], keys.page_size)
        found = keys.gather(slots[0, 0], jnp.float32)
        visible = (position >= 0) & (position < length)
        return jnp.where(visible, block_scores(q[None], found, weights[None], rounding)[0], -jnp.inf)

    return _rows(scores, arrays, flat, batch * rows).reshape(batch, rows, -1)


@functools.partial(jax.jit, static_argnames="rounding")
def ragged_candidate_logits(
    q, k, weights, candidates, *, row_start, row_end, k_scale=None, q_scale=None, rounding=None, schedule=None
):
    del schedule  # a kernel's own
    q = unpacked(q, q_scale)

    def scores(arrays, position):
        q, weights, first, last = arrays
        index = jnp.where(position >= 0, first + position, -1)
        found = indexing.gather_rows(k, index)
        scale = None if k_scale is None else indexing.gather_rows(k_scale, index)
        if k.dtype == jnp.uint8:
            found, scale = unpacked(found, scale), None
        score = block_scores(q[None], found.astype(jnp.float32), weights[None], rounding)[0]
        if scale is not None:
            score = score * scale
        return jnp.where((index >= 0) & (index < last), score, -jnp.inf)

    return _rows(scores, (q, weights, row_start, row_end), candidates, q.shape[0])


def make_schedule(candidates, keys, *, context_lens, block_table, heads):
    """None: nothing is shared out here."""
    return None


def make_ragged_schedule(candidates, *, row_start, row_end, heads):
    """None: nothing is shared out here."""
    return None
