"""Loops in bounded memory, and rounding that XLA does not undo. Shared by the references."""

import jax
import jax.numpy as jnp
from jax import lax

BUDGET = 64 * 2**20  # bytes of temporaries that a reference may hold
HIGHEST = lax.Precision.HIGHEST


def round_to(x, dtype):
    """Float32 `x` rounded to the precision of `dtype` and kept in float32.

    A cast there and back is not enough: XLA for GPUs drops it (xla_allow_excess_precision).
    """
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def cast(x, dtype):
    """Float32 `x` as `dtype`, rounded also where XLA drops the cast because another follows."""
    dtype = jnp.dtype(dtype)
    return (round_to(x, dtype) if dtype in (jnp.bfloat16, jnp.float16) else x).astype(dtype)


def rows_at_once(bytes_per_row: int) -> int:
    """Rows that a reference takes together, when each needs so many bytes of temporaries.

    As many as the budget holds; on a CPU one, which is as fast there, and makes a row's result the same to the bit
    whatever comes with it: vector and scalar parts of a loop over rows round differently.
    """
    return 1 if jax.default_backend() == "cpu" else max(1, BUDGET // bytes_per_row)


def map_rows(function, rows: int, arrays):
    """`function` on blocks of `rows` along axis 0 of every array in the tree `arrays`; results are concatenated.

    All blocks have the same shape, so a row's result does not depend on where it lies: the last block is filled
    up with zeros, and those results are dropped.
    """
    total = jax.tree.leaves(arrays)[0].shape[0]
    if total <= rows:
        return function(arrays)
    blocks = -(-total // rows)

    def split(array):
        padding = [(0, blocks * rows - total)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(blocks, rows, *array.shape[1:])

    def join(array):
        return array.reshape(blocks * rows, *array.shape[2:])[:total]

    return jax.tree.map(join, lax.map(function, jax.tree.map(split, arrays)))


def map_columns(function, columns: int, total: int, out, stop=None):
    """Fills `out` [..., total] with `function(start)`, the [..., columns] values from column `start` on.

    Needs columns <= total. All blocks have the same width: the last one starts early enough to end at `total`, and
    writes the columns it shares with the block before it a second time. Columns at and beyond `stop` (a traced
    scalar, default `total`) may keep what `out` holds.
    """
    blocks = -(-total // columns)
    if stop is not None:
        blocks = jnp.minimum(blocks, -(-stop // columns))

    def body(i, out):
        start = jnp.minimum(i * columns, total - columns)
        return lax.dynamic_update_slice_in_dim(out, function(start), start, axis=out.ndim - 1)

    return lax.fori_loop(0, blocks, body, out)
