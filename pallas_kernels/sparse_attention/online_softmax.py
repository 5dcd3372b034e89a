"""Attention over listed rows with an online softmax: the mathematics that sparse_attention and sparse_decode share."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import blocks

BLOCK = 64  # indices per step
START = -1e30  # of the running maximum: finite, so that a step without any valid row gives exp(-inf - START) = 0


def attend(q, sources, *, scale, v_width, p_dtype, splits=1):
    """Attention of rows q [R, H, D] over several lists of rows.

    sources: (gather, indices [R, K], valid bool [R, K]) of every list; ``gather(indices [R, C])`` gives rows
    [R, C, D], zeros where an index is none. Returns acc [splits, R, H, v_width], the denominator [splits, R, H] and the
    maximum [splits, R, H], all float32, before division. Split i takes the i-th part of every list's blocks.
    """
    parts = []
    for split in range(splits):
        state = (
            jnp.zeros((*q.shape[:2], v_width), jnp.float32),
            jnp.zeros(q.shape[:2], jnp.float32),
            jnp.full(q.shape[:2], START, jnp.float32),
        )
        for gather, indices, valid in sources:
            state = _source(q, gather, indices, valid, state, scale, v_width, p_dtype, split, splits)
        parts.append(state)
    return tuple(jnp.stack(part) for part in zip(*parts))


def _source(q, gather, indices, valid, state, scale, v_width, p_dtype, split, splits):
    rows, width = indices.shape
    count = -(-width // BLOCK)
    first, last = split * count // splits, (split + 1) * count // splits
    if first == last:
        return state
    padding = [(0, 0), (0, count * BLOCK - width)]
    indices = jnp.pad(jnp.where(valid, indices, -1), padding, constant_values=-1)
    valid = jnp.pad(valid, padding)

    def per_block(array):  # [rows, count * BLOCK] -> [blocks of this split, rows, BLOCK]
        return jnp.moveaxis(array.reshape(rows, count, BLOCK), 1, 0)[first:last]

    def step(state, block):
        acc, total, high = state
        indices, valid = block
        k = gather(indices)
        scores = jnp.einsum("rhd,rkd->rhk", *_operands(q, k), precision=blocks.HIGHEST,
                            preferred_element_type=jnp.float32)  # fmt: skip
        scores = jnp.where(valid[:, None], scores * scale, -jnp.inf)
        new = jnp.maximum(high, jnp.max(scores, axis=-1))
        p = jnp.exp(scores - new[..., None])
        shrink = jnp.exp(high - new)
        total = total * shrink + jnp.sum(p, axis=-1)
        rounded = blocks.round_to(p, p_dtype).astype(p_dtype)
        added = jnp.einsum("rhk,rkd->rhd", *_operands(rounded, k[..., :v_width]), precision=blocks.HIGHEST,
                           preferred_element_type=jnp.float32)  # fmt: skip
        return (acc * shrink[..., None] + added, total, new), None

    return lax.scan(step, state, (per_block(indices), per_block(valid)))[0]


def _operands(a, b):
    """Both as they are if their dtypes agree (products of bf16 are exact in float32), else both in float32."""
    return (a, b) if a.dtype == b.dtype else (a.astype(jnp.float32), b.astype(jnp.float32))


def finish(acc, total, high, sink, dtype):
    """Output [R, H, V] in `dtype` and lse [R, H]: the sink enters the denominator here, and only here."""
    lse = jnp.where(total > 0, high + jnp.log(jnp.where(total > 0, total, 1)), jnp.where(total == 0, -jnp.inf, total))
    denominator = total if sink is None else total + jnp.exp(sink.astype(jnp.float32) - high)
    empty = denominator == 0  # nothing to attend, and no sink or one of -inf
    out = jnp.where(empty[..., None], 0, acc / jnp.where(empty, 1, denominator)[..., None])
    return out.astype(dtype), lse


def combine(outs, lses, sink, dtype):
    """Outputs [splits, ..., H, V] and natural-log lses [splits, ..., H] of parts of a list, as if it had been one."""
    high = jnp.max(lses, axis=0)
    high = jnp.where(high == -jnp.inf, START, high)
    weights = jnp.exp(lses - high)
    # A split without anything weighs 0, whatever its output buffer holds.
    acc = jnp.sum(jnp.where(weights[..., None] == 0, 0, outs.astype(jnp.float32) * weights[..., None]), axis=0)
    return finish(acc, jnp.sum(weights, axis=0), high, sink, dtype)
