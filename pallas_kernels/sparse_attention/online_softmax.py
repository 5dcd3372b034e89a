"""Attention over listed rows with an online softmax: the mathematics that sparse_attention and sparse_decode share."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import blocks

BLOCK = 64  # indices per step
START = -1e30  # of the running maximum: finite, so that a step without any valid row gives exp(-inf - START) = 0


def attend(q, sources, *, scale, v_width, p_dtype, splits=1):
    """Attention of rows q [R, H, D] over several lists of rows, taken as one list: the lists one behind the other.

    sources: (gather, indices [R, K], valid bool [R, K]) of every list; ``gather(indices [R, C])`` gives rows
    [R, C, D], zeros where an index is none. Returns acc [splits, R, H, v_width], the denominator [splits, R, H] and the
    maximum [splits, R, H], all float32, before division. Split i takes the i-th part of the blocks of 64 indices.
    """

    def step(state, k, valid):
        acc, total, high = state
        scores = jnp.einsum("rhd,rkd->rhk", *operands(q, k), precision=blocks.HIGHEST,
                            preferred_element_type=jnp.float32)  # fmt: skip
        scores = jnp.where(valid[:, None], scores * scale, -jnp.inf)
        new = jnp.maximum(high, jnp.max(scores, axis=-1))
        p = jnp.exp(scores - new[..., None])
        shrink = jnp.exp(high - new)
        total = total * shrink + jnp.sum(p, axis=-1)
        added = jnp.einsum("rhk,rkd->rhd", *operands(blocks.cast(p, p_dtype), k[..., :v_width]), precision=blocks.HIGHEST,
                           preferred_element_type=jnp.float32)  # fmt: skip
        return acc * shrink[..., None] + added, total, new

    sources = [(gather, jnp.where(valid, indices, -1), valid) for gather, indices, valid in sources]
    widths = [indices.shape[1] for _, indices, _ in sources]
    count = -(-sum(widths) // BLOCK)
    parts = []
    for split in range(splits):
        state = (
            jnp.zeros((*q.shape[:2], v_width), jnp.float32),
            jnp.zeros(q.shape[:2], jnp.float32),
            jnp.full(q.shape[:2], START, jnp.float32),
        )
        for pieces, repeats in _runs(widths, split * count // splits, (split + 1) * count // splits):
            state = _run(step, state, sources, pieces, repeats)
        parts.append(state)
    return tuple(jnp.stack(part) for part in zip(*parts))


def _runs(widths, first, last):
    """The blocks first .. last-1 of lists of these widths: ([(list, its first column, columns), ..], repeats).

    Blocks that lie in one list and follow one another are one run with repeats; a block that spans lists, or is the
    last and short, has a piece of each.
    """
    block = first
    while block < last:
        pieces, start = [], 0
        low, high = block * BLOCK, (block + 1) * BLOCK
        for number, width in enumerate(widths):
            begin, end = max(low, start), min(high, start + width)
            if begin < end:
                pieces.append((number, begin - start, end - begin))
            start += width
        number, column, columns = pieces[0]
        repeats = max(1, min((widths[number] - column) // BLOCK, last - block)) if columns == BLOCK else 1
        yield pieces, repeats
        block += repeats


def _run(step, state, sources, pieces, repeats):
    if repeats == 1:
        found = [
            (sources[n][0](sources[n][1][:, c : c + w]), sources[n][2][:, c : c + w]) for n, c, w in pieces
        ]
        return step(state, jnp.concatenate([k for k, _ in found], 1), jnp.concatenate([v for _, v in found], 1))
    ((number, column, _),) = pieces
    gather, indices, valid = sources[number]

    def per_block(array):  # -> [repeats, rows, BLOCK]
        part = array[:, column : column + repeats * BLOCK]
        return jnp.moveaxis(part.reshape(len(part), repeats, BLOCK), 1, 0)

    def body(state, block):
        indices, valid = block
        return step(state, gather(indices), valid), None

    return lax.scan(body, state, (per_block(indices), per_block(valid)))[0]


def leading(sources, count):
    """The sources of `attend`, cut to the first `count` entries of their lists."""
    kept = []
    for gather, indices, valid in sources:
        if count > 0:
            kept.append((gather, indices[:, :count], valid[:, :count]))
        count -= indices.shape[1]
    return kept


def operands(a, b):
    """Both as they are if their dtypes agree (products of bf16 are exact in float32), else both in float32."""
    return (a, b) if a.dtype == b.dtype else (a.astype(jnp.float32), b.astype(jnp.float32))


def finish(acc, total, high, sink, dtype):
    """Output [R, H, V] in `dtype` and lse [R, H]: the sink enters the denominator here, and only here."""
    lse = log_sum(total, high)
    denominator = total if sink is None else total + jnp.exp(sink.astype(jnp.float32) - high)
    empty = denominator == 0  # nothing to attend, and no sink or one of -inf
    out = jnp.where(empty[..., None], 0, acc / jnp.where(empty, 1, denominator)[..., None])
    return blocks.cast(out, dtype), lse


def log_sum(total, high):
    """The natural log of total * exp(high): -inf where total is 0, NaN where it is."""
    return jnp.where(total > 0, high + jnp.log(jnp.where(total > 0, total, 1)), jnp.where(total == 0, -jnp.inf, total))


def combine(outs, lses, sink, dtype):
    """Outputs [splits, ..., H, V] and natural-log lses [splits, ..., H] of parts of a list, as if it had been one."""
    high = jnp.max(lses, axis=0)
    high = jnp.where(high == -jnp.inf, START, high)
    weights = jnp.exp(lses - high)
    # A split without anything weighs 0, whatever its output buffer holds.
    acc = jnp.sum(jnp.where(weights[..., None] == 0, 0, outs.astype(jnp.float32) * weights[..., None]), axis=0)
    return finish(acc, jnp.sum(weights, axis=0), high, sink, dtype)
