"""Indexer scores in plain JAX: blocks of rows times blocks of columns, so that the scores per head stay small."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import blocks, indexing, quantize
from pallas_kernels.slots.reference import positions_to_slots

COLUMNS = 2048  # a fixed width, so that a score does not depend on how many columns there are


def block_scores(q, k, weights, rounding):
    """q [R, H, D], k [C, D] float32, weights [R, H] -> [R, C] float32."""
    dots = jnp.einsum(
        "rhd,cd->rhc", q.astype(jnp.float32), k, precision=blocks.HIGHEST, preferred_element_type=jnp.float32
    )
    weights = weights.astype(jnp.float32)[..., None]
    if rounding is None:
        return jnp.sum(jnp.maximum(dots, 0) * weights, axis=1)
    products = blocks.round_to(jnp.maximum(blocks.round_to(dots, rounding), 0) * weights, rounding)
    return blocks.round_to(jnp.sum(products, axis=1), rounding)


def rows_at_once(heads, columns):
    """Query rows whose scores per head fit the budget, three copies of them at once."""
    return blocks.rows_at_once(3 * 4 * heads * columns)


def unpacked(x, scale):
    """Packed MXFP4 `x` as float32; other values as they are."""
    return quantize.dequantize_fp4(x, scale) if x.dtype == jnp.uint8 else x


@functools.partial(jax.jit, static_argnames=("compressed", "dtype", "rounding"))
def indexer_logits(
    q, k, weights, compressed=None, dtype=jnp.float32, *, row_start, row_end, k_scale=None, q_scale=None, rounding=None
):
    q = unpacked(q, q_scale)
    total, columns = k.shape[0], min(k.shape[0], COLUMNS)
    rows, heads, _ = q.shape
    out = jnp.full((rows, total if compressed is None else compressed), -jnp.inf, dtype)
    if 0 in (out.size, total):
        return out

    def column_block(start):
        keys = lax.dynamic_slice_in_dim(k, start, columns)
        scale = 1 if k_scale is None else lax.dynamic_slice_in_dim(k_scale, start, columns)
        if k.dtype == jnp.uint8:
            keys, scale = unpacked(keys, scale), 1
        keys = keys.astype(jnp.float32)
        column = start + jnp.arange(columns)

        def row_block(block):
            q, weights, first, last = block
            scores = block_scores(q, keys, weights, rounding) * scale
            visible = (column >= first[:, None]) & (column < last[:, None])
            return jnp.where(visible, scores, -jnp.inf)

        scores = blocks.map_rows(row_block, rows_at_once(heads, columns), (q, weights, row_start, row_end))
        return blocks.cast(scores, dtype)

    if compressed is None:
        return blocks.map_columns(column_block, columns, total, out, stop=jnp.max(row_end))

    def move(i, out):
        """Scores of one block of keys to the columns that count from every row's start."""
        start = jnp.minimum(i * columns, total - columns)
        key = start + jnp.arange(columns)
        at = key - row_start[:, None]
        visible = (at >= 0) & (key < row_end[:, None])
        return jax.vmap(indexing.scatter_rows)(out, jnp.where(visible, at, -1), column_block(start))

    return lax.fori_loop(0, -(-total // columns), move, out)


@functools.partial(jax.jit, static_argnames="rounding")
def paged_indexer_logits(
    q, keys, weights, *, context_lens, block_table, q_scale=None, rounding=None, schedule=None
):
    del schedule  # a kernel's own
    q = unpacked(q, q_scale)
    total = block_table.shape[1] * keys.page_size
    columns = min(total, COLUMNS)
    batch, rows, heads, _ = q.shape
    out = jnp.full((batch, rows, total), -jnp.inf, jnp.float32)
    if out.size == 0:
        return out

    def request(arrays):
        q, weights, lengths, table, out = arrays

        def column_block(start):
            column = start + jnp.arange(columns, dtype=jnp.int32)
            slots, _ = positions_to_slots(column[None, None], table[None], keys.page_size)
            found = keys.gather(slots[0, 0], jnp.float32)

            def row_block(block):
                q, weights, lengths = block
                return jnp.where(column < lengths[:, None], block_scores(q, found, weights, rounding), -jnp.inf)

            return blocks.map_rows(row_block, rows_at_once(heads, columns), (q, weights, lengths))

        return blocks.map_columns(column_block, columns, total, out, stop=jnp.max(lengths))

    return lax.map(request, (q, weights, context_lens, block_table, out))


def make_schedule(context_lens, heads):
    """None: nothing is shared out here."""
    return None
