"""Writing rows to caches in plain JAX: elementwise work that XLA fuses, and a scatter in place."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import blocks, quantize


def write_rows(cache, slots, x, *, rotation, hadamard, rounding):
    return cache.scatter(slots, _prepared(x, rotation, hadamard, rounding))


def quantize_index_queries(q, weights, *, rotation, hadamard, format, rounding):
    q = _prepared(q, rotation, hadamard, rounding)
    if format == "mxfp4":
        return *quantize.quantize_mxfp4(q), weights
    values, scales = quantize.quantize_fp8(q, q.shape[-1])
    return values, None, weights * scales[..., 0]


def _prepared(x, rotation, hadamard, rounding):
    """Rows [M, .., D], rotated, in float32."""

    def rounded(x):
        return x if rounding is None else blocks.round_to(x, rounding)

    x = x.astype(jnp.float32)
    if rotation is not None:
        x = rounded(_rotated(x, rotation))
    if hadamard:
        x = rounded(_hadamard(x))
    return rounded(x)


def _rotated(x, rotation):
    half = rotation.cos.shape[-1]
    between = (1,) * (x.ndim - 2)
    cos, sin = (a.astype(jnp.float32).reshape(a.shape[0], *between, half) for a in (rotation.cos, rotation.sin))
    if rotation.pairs == "half_split":
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=-1)
    rest, turned = x[..., : x.shape[-1] - 2 * half], x[..., x.shape[-1] - 2 * half :]
    a, b = turned[..., 0::2], turned[..., 1::2]
    turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(turned.shape)
    return jnp.concatenate([rest, turned], axis=-1)


def _hadamard(x):
    width = x.shape[-1]
    return jnp.matmul(x, jnp.asarray(_signs(width)), precision=lax.Precision.HIGHEST) * np.float32(width**-0.5)


@functools.cache
def _signs(width):
    """Entry (i, j) is -1 where i and j have an odd number of bits in common, else 1 (natural order)."""
    i = np.arange(width)
    return np.where(np.bitwise_count(i[:, None] & i) % 2 == 1, -1, 1).astype(np.float32)
