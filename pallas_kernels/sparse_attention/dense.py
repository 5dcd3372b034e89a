"""Attention over listed rows as dense products with a mask: for contexts hardly longer than the lists.

Every query row meets every row of kv, and a row that is listed n times counts n times. Nothing is gathered, so the
products are plain matrix products, which XLA gives to the vendor's library.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import blocks, indexing, platform
from pallas_kernels.sparse_attention import online_softmax

# Rows of kv per entry of the lists up to which dense products are faster, by what runs otherwise. On an H200 they take
# 2.4 to 5 times as long as the kernels where kv has as many rows as the lists entries, or half of them, and about as
# long as the reference, which gathers at 100 TFLOP/s (docs/performance-sparse-attention.md).
FACTORS = {"reference": 1.0, "sm90": 0.0}


def rows_below(implementation: str | None, width: int) -> int:
    """Rows of kv up to which the dense form runs by itself, for lists of `width` entries together.

    0 where an implementation is named, and on a CPU, where the reference is as fast.
    """
    if implementation is not None or platform.capability() is None:
        return 0
    return int(FACTORS.get(platform.kernel_name(), FACTORS["reference"]) * width)


@functools.partial(jax.jit, static_argnames=("v_width", "p_dtype", "lse_prefix"))
def sparse_attention(q, kvs, lists, *, topk_length, sink, scale, v_width, p_dtype, lse_prefix=None):
    """See `pallas_kernels.sparse_attention.sparse_attention`. A row of kv with a NaN or an infinity spoils those query
    rows that list it, and no others."""
    clean = [jnp.all(jnp.isfinite(kv), axis=1) for kv in kvs]
    kvs = [jnp.where(good[:, None], kv, 0) for good, kv in zip(clean, kvs)]
    starts = [sum(indices.shape[1] for indices in lists[:i]) for i in range(len(lists))]
    einsum = functools.partial(jnp.einsum, precision=blocks.HIGHEST, preferred_element_type=jnp.float32)

    def block(arrays):
        q, lists, lengths = arrays
        scores = [einsum("rhd,sd->rhs", *online_softmax.operands(q, kv)) * scale for kv in kvs]

        def weights(prefix):
            """exp(score - maximum) times how often the row is listed, and the maximum, over the first entries."""
            counts = [
                _counts(indices, length, len(kv), None if prefix is None else prefix - start)
                for kv, indices, length, start in zip(kvs, lists, lengths, starts)
            ]
            masked = [jnp.where(n[:, None] > 0, s, -jnp.inf) for n, s in zip(counts, scores)]
            high = functools.reduce(jnp.maximum, [jnp.max(s, axis=-1, initial=online_softmax.START) for s in masked])
            return counts, [n[:, None] * jnp.exp(s - high[..., None]) for n, s in zip(counts, masked)], high

        counts, parts, high = weights(None)
        total = sum(jnp.sum(p, axis=-1) for p in parts)
        acc = sum(
            einsum("rhs,sd->rhd", *online_softmax.operands(blocks.cast(p, p_dtype), kv[:, :v_width]))
            for p, kv in zip(parts, kvs)
        )
        spoilt = sum(jnp.sum(n * ~good, axis=1) for n, good in zip(counts, clean)) > 0
        total = jnp.where(spoilt[:, None], jnp.nan, total)
        results = online_softmax.finish(acc, total, high, sink, q.dtype)
        if lse_prefix is None:
            return results
        _, parts, high = weights(lse_prefix)
        total = jnp.where(spoilt[:, None], jnp.nan, sum(jnp.sum(p, axis=-1) for p in parts))
        return *results, online_softmax.log_sum(total, high)

    rows = sum(len(kv) for kv in kvs)
    together = blocks.rows_at_once(4 * (q.shape[1] * (5 * rows + q.shape[2]) + 2 * rows))
    lengths = (None,) * len(lists) if topk_length is None else topk_length
    return blocks.map_rows(block, together, (q, lists, lengths))


def _counts(indices, length, rows, entries):
    """How often each of `rows` rows is listed in the first `entries` (None: all) of every list, float32 [R, rows]."""
    valid = (indices >= 0) & (indices < rows)
    column = jnp.arange(indices.shape[1])
    if length is not None:
        valid &= column < length[:, None]
    if entries is not None:
        valid &= column < entries
    found = jnp.zeros((len(indices), rows), jnp.float32)
    return jax.vmap(indexing.add_rows)(found, jnp.where(valid, indices, -1), jnp.ones(indices.shape, jnp.float32))
