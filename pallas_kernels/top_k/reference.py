"""Exact top-k in plain JAX: lax.top_k on a key that encodes the rules.

lax.top_k orders by bits (-0 below +0, NaN first) and gives equal keys to the lower index, so the key replaces -0 by
+0 and everything that must not be chosen by -inf.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LAST = jnp.iinfo(jnp.int32).max


@functools.partial(jax.jit, static_argnames=("k", "order", "return_scores"))
def top_k(scores, k, *, lengths=None, row_start=None, row_end=None, order="position", return_scores=False):
    key = _key(scores)
    columns = jnp.arange(key.shape[-1], dtype=jnp.int32)
    if lengths is not None:
        key = jnp.where(columns < lengths[..., None], key, -jnp.inf)
    if row_start is not None:
        row_start = jnp.maximum(row_start, 0)[..., None]
        key = jnp.where((columns >= row_start) & (columns < row_end[..., None]), key, -jnp.inf)
    width = min(k, key.shape[-1])
    best, positions = lax.top_k(key, width)
    valid = best != -jnp.inf
    counts = jnp.sum(valid, axis=-1, dtype=jnp.int32)
    if row_start is not None:
        positions = positions - row_start
    positions, best = _ordered(jnp.where(valid, positions, LAST), best, order, return_scores)
    padding = [(0, 0)] * (positions.ndim - 1) + [(0, k - width)]
    positions = jnp.pad(positions, padding, constant_values=-1)
    if not return_scores:
        return positions, counts
    return positions, counts, jnp.pad(best, padding, constant_values=-jnp.inf)


@functools.partial(jax.jit, static_argnames=("topk_blocks", "block_size"))
def candidate_blocks(scores, lengths, topk_blocks, block_size):
    lengths = jnp.minimum(lengths, scores.shape[-1])[..., None]
    best = block_scores(scores, lengths[..., 0], block_size)
    blocks = best.shape[-1]
    # The newest block stays out of the ranking, so that no number of infinite ones can push it out.
    newest = jnp.where(lengths > 0, (lengths - 1) // block_size, -1)
    width = min(topk_blocks, blocks)
    if width == 1:
        return newest
    others, _ = top_k(jnp.where(jnp.arange(blocks) == newest, -jnp.inf, best), width - 1)
    ids = jnp.concatenate([others, newest], axis=-1)
    return _ordered(jnp.where(ids < 0, LAST, ids), None, "position", False)[0]


@functools.partial(jax.jit, static_argnames="block_size")
def block_scores(scores, lengths, block_size):
    """What `candidate_blocks` ranks by, float32 [..., ceil(L / block_size)]: the highest visible score of every block."""
    total = scores.shape[-1]
    blocks = -(-total // block_size)
    scores = scores.astype(jnp.float32)
    key = _key(jnp.where(jnp.isnan(scores), jnp.inf, scores))
    key = jnp.where(jnp.arange(total) < lengths[..., None], key, -jnp.inf)
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, blocks * block_size - total)]
    key = jnp.pad(key, padding, constant_values=-jnp.inf).reshape(*scores.shape[:-1], blocks, block_size)
    return _from_ascending(jnp.max(_ascending(key), axis=-1))  # a float maximum may take a subnormal for 0


def top_k_and_candidate_blocks(scores, k, lengths, topk_blocks, block_size):
    return *top_k(scores, k, lengths=lengths), candidate_blocks(scores, lengths, topk_blocks, block_size)


@functools.partial(jax.jit, static_argnames=("k", "order"))
def merge_top_k(scores, ids, k, *, order="position"):
    key = _key(scores)
    valid = (ids >= 0) & (key != -jnp.inf)
    rows = ids.shape[1:-1]

    def flat(array):  # [shards, ..., k] -> [..., shards * k]
        return jnp.moveaxis(array, 0, -2).reshape(*rows, -1)

    down = flat(jnp.where(valid, -_ascending(key), LAST))
    _, ids = lax.sort((down, flat(jnp.where(valid, ids, LAST))), num_keys=2)
    width = min(k, ids.shape[-1])
    ids = ids[..., :width]
    counts = jnp.sum(ids != LAST, axis=-1, dtype=jnp.int32)
    ids, _ = _ordered(ids, None, order, False)
    return jnp.pad(ids, [(0, 0)] * (ids.ndim - 1) + [(0, k - width)], constant_values=-1), counts


def _key(scores):
    scores = scores.astype(jnp.float32)
    bits = lax.bitcast_convert_type(scores, jnp.uint32)
    # By bits, because a device that flushes subnormals would call them equal to 0 too.
    scores = jnp.where(bits == np.uint32(0x80000000), jnp.float32(0), scores)
    return jnp.where(jnp.isnan(scores), -jnp.inf, scores)


def _ascending(key):
    """int32 that orders like the float32 key (no NaN, no -0), symmetric around 0 so that it can be negated."""
    bits = lax.bitcast_convert_type(key, jnp.int32)
    return jnp.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _from_ascending(value):
    """The float32 that _ascending made `value` of."""
    return lax.bitcast_convert_type(jnp.where(value < 0, -value ^ jnp.iinfo(jnp.int32).min, value), jnp.float32)


def _ordered(positions, scores, order, with_scores):
    """Positions (LAST for none) in the asked order, then -1; scores along with them if asked."""
    if order == "position":
        if with_scores:
            positions, scores = lax.sort((positions, scores), num_keys=1)
        else:
            positions = jnp.sort(positions, axis=-1)
    return jnp.where(positions == LAST, -1, positions), scores
