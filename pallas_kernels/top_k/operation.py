"""The operation's functions on top of the kernel, for any chip: `plan_for` chooses the kernel's shape.

Scores are float32 or bfloat16; everything else, and what does not fit a block's shared memory, is not carried.
"""

import math

import jax.numpy as jnp
from jax import lax

from pallas_kernels.top_k import kernel
from pallas_kernels.top_k.program import SHARED_MEMORY, Selection


def top_k(
    plan_for, scores, k, *, lengths=None, row_start=None, row_end=None, order="position", return_scores=False
):  # fmt: skip
    """`pallas_kernels.top_k` by the kernel."""
    ends = lengths if row_end is None else row_end
    positions, counts = _select(plan_for, scores, ends, (Selection(k, 0),), row_start)
    if order == "position" and not return_scores:
        return positions, counts
    columns = jnp.maximum(positions, 0)
    if row_start is not None:
        columns = jnp.minimum(columns + jnp.maximum(row_start, 0)[..., None], scores.shape[-1] - 1)
    best = jnp.take_along_axis(scores, columns, axis=-1).astype(jnp.float32)
    best = jnp.where(positions < 0, -jnp.inf, best)
    if order == "score":
        positions, best = _by_score(positions, best)
    return (positions, counts, best) if return_scores else (positions, counts)


def candidate_blocks(plan_for, scores, lengths, topk_blocks, block_size):
    """`pallas_kernels.candidate_blocks` by the kernel."""
    blocks = _blocks(scores, topk_blocks, block_size)
    return _select(plan_for, scores, lengths, (blocks,))[0]


def top_k_and_candidate_blocks(plan_for, scores, k, lengths, topk_blocks, block_size):
    """`pallas_kernels.top_k_and_candidate_blocks` by the kernel, from one read of the scores."""
    blocks = _blocks(scores, topk_blocks, block_size)
    positions, counts, ids, _ = _select(plan_for, scores, lengths, (Selection(k, 0), blocks))
    return positions, counts, ids


def _by_score(positions, best):
    """Sorts by score, best first, then by position; what is not there (-1, -inf) stays last."""
    # As integers: a float comparison would order signed zeros, and on some devices flush subnormals.
    bits = lax.bitcast_convert_type(best, jnp.int32)
    ascending = jnp.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    _, position, best = lax.sort((-ascending, jnp.where(positions < 0, 2**30, positions), best), num_keys=2)
    return jnp.where(position == 2**30, -1, position), best


def _blocks(scores, topk_blocks, block_size):
    vector = 16 // _element_bytes(scores)
    length = scores.shape[-1]
    group = block_size // vector
    if block_size % vector or group & (group - 1) or not 1 <= group <= 32:
        raise NotImplementedError(
            f"block_size={block_size} is not carried for {scores.dtype.name} scores: the kernel takes {vector} times a "
            "power of 2 up to 32."
        )
    if length % vector:
        raise NotImplementedError(
            f"rows of {length} {scores.dtype.name} scores are not carried: candidate blocks need rows of a multiple of "
            f"{vector}."
        )
    return Selection(min(topk_blocks, -(-length // block_size)), 0, group)


def _element_bytes(scores):
    if scores.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(
            f"scores of {scores.dtype.name} are not carried: the kernel takes float32 and bfloat16."
        )
    return scores.dtype.itemsize


def _select(plan_for, scores, lengths, selections, starts=None):
    """Outputs [..., width] of the kernel (counts [...]) for scores [..., L]; the selections' capacities are open."""
    *shape, length = scores.shape
    rows = math.prod(shape)
    if not rows or not length:
        raise NotImplementedError(
            f"scores of shape {tuple(scores.shape)} are not carried: there is nothing to choose from."
        )
    if length >= 2**30:
        raise NotImplementedError(f"rows of {length} scores are not carried: the kernel's positions end at 2^30.")
    plan = plan_for(rows, length, _element_bytes(scores), selections, lengths is not None, starts is not None)
    if plan.shared_bytes() > SHARED_MEMORY:
        raise NotImplementedError(
            f"k={[s.k for s in plan.selections]} is not carried for rows of {length}: its lists take "
            f"{plan.shared_bytes()} bytes of shared memory, and a block has {SHARED_MEMORY}."
        )
    # Positions stay int32 and rows are one axis, so that nothing depends on how the batch is shaped.
    flat = lax.reshape(scores, (rows, length))
    lengths, starts = (None if array is None else array.reshape(rows) for array in (lengths, starts))
    found = kernel.run(flat, lengths, plan, starts)
    widths = [() if i % 2 else array.shape[1:] for i, array in enumerate(found)]  # positions and counts take turns
    return [array.reshape(*shape, *width) for array, width in zip(found, widths)]
