"""Rotary position embedding, with YaRN where the layer has it: interleaved pairs over the last dims of a head, or
half-split pairs over the first."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from dsa_jax.layer_plan import RopeSpec
from dsa_jax.numerics import Numerics, f32

Angles = tuple[Float[Array, "*rows half"], Float[Array, "*rows half"]]  # cosines, sines


def rope_frequencies(width: int, spec: RopeSpec) -> Float[np.ndarray, " half"]:
    """Radians per position for each of the width/2 pairs, float32 (spec deepseek-v41 section 3.6).

    With YaRN, pairs that turn fewer than beta_slow times within the original length are slowed down by the factor,
    pairs that turn more than beta_fast times are kept, and those between are mixed.
    """
    i = np.arange(0, width, 2, dtype=np.float32)
    f = np.float32(1) / np.float32(spec.theta) ** (i / np.float32(width))
    yarn = spec.yarn
    if yarn is None:
        return f

    def pair_turning(times: float) -> float:
        return width * math.log(yarn.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), width - 1)
    span = np.float32(high - low) if high != low else np.float32(1e-3)
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - np.float32(low)) / span, 0, 1)
    return f / np.float32(yarn.factor) * ramp + f * (1 - ramp)


def rope_angles(width: int, spec: RopeSpec, positions: Int32[Array, "*rows"]) -> Angles:
    """Cosine and sine of position times frequency. The angle is the float32 product, as in the reference."""
    angle = f32(positions)[..., None] * rope_frequencies(width, spec)
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x: Array, angles: Angles, numerics: Numerics, *, inverse: bool = False) -> Array:
    """Rotates the last 2·half values of `x` [*rows, .., d] by the angles of its row; the others pass through.

    `x` may have axes (heads) between the rows and d. The rotation is float32, the result is rounded.
    """
    cos, sin = angles
    half = cos.shape[-1]
    between = (1,) * (x.ndim - cos.ndim)
    cos, sin = (a.reshape(*a.shape[:-1], *between, half) for a in (cos, -sin if inverse else sin))
    rest, rotated = x[..., : -2 * half], f32(x[..., -2 * half :])
    a, b = rotated[..., 0::2], rotated[..., 1::2]
    rotated = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(rotated.shape)
    return jnp.concatenate([numerics.round(rest), numerics.round(rotated)], axis=-1)


def apply_rope_half_split(x: Array, angles: Angles, numerics: Numerics) -> Array:
    """Rotates the first 2·half values of `x` [*rows, .., d], pairs (i, i + half); the others pass through.

    Otherwise as `apply_rope`. Source: the indexer of DeepSeek-V3.2's corrected inference code.
    """
    half = angles[0].shape[-1]
    between = (1,) * (x.ndim - angles[0].ndim)
    cos, sin = (a.reshape(*a.shape[:-1], *between, half) for a in angles)
    a, b, rest = f32(x[..., :half]), f32(x[..., half : 2 * half]), x[..., 2 * half :]
    return jnp.concatenate([numerics.round(v) for v in (a * cos - b * sin, a * sin + b * cos, rest)], axis=-1)
