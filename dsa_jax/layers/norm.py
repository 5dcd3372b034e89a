"""RMSNorm and LayerNorm."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from dsa_jax.numerics import Numerics, f32


class RMSNorm(nnx.Module):
    """w · x / sqrt(mean(x²) + eps) over the last axis, in float32, rounded once. Weight of `dtype`."""

    def __init__(self, width: int, eps: float, dtype: Any = jnp.bfloat16):
        self.eps = eps
        self.weight = nnx.Param(jnp.zeros((width,), dtype))

    def __call__(self, x: Float[Array, "*rows d"], numerics: Numerics) -> Float[Array, "*rows d"]:
        return numerics.round(f32(self.weight[...]) * (f32(x) * inverse_rms(x, self.eps)))


def inverse_rms(x: Float[Array, "*rows d"], eps: float) -> Float[Array, "*rows 1"]:
    """1 / sqrt(mean(x²) + eps) over the last axis, in float32."""
    return lax.rsqrt(mean_square(x) + eps)


def mean_square(x: Float[Array, "*rows d"]) -> Float[Array, "*rows 1"]:
    """mean(x²) over the last axis, in float32."""
    return jnp.mean(jnp.square(f32(x)), axis=-1, keepdims=True)


class LayerNorm(nnx.Module):
    """w · (x - mean(x)) / sqrt(var(x) + eps) + b over the last axis, in float32, rounded once. Weight and bias float32."""

    def __init__(self, width: int, eps: float):
        self.eps = eps
        self.weight = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((width,), jnp.float32))

    def __call__(self, x: Float[Array, "*rows d"], numerics: Numerics) -> Float[Array, "*rows d"]:
        centred = f32(x) - jnp.mean(f32(x), axis=-1, keepdims=True)
        return numerics.round(centred * inverse_rms(centred, self.eps) * self.weight[...] + self.bias[...])
