"""Single-pass manifold-constrained hyper-connections (mHC): the residual stream in several copies.

A sub-layer reads one mix of the copies and writes back to all of them. The mix it reads was computed by the
sub-layer before it (the first reads copy 0): see `decoder.Block` (spec deepseek-v41 section 4).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dsa_jax import ops
from dsa_jax.layers.norm import inverse_rms, mean_square
from dsa_jax.numerics import Numerics, f32, matmul


Mixes = tuple[Float[Array, "*rows c"], Float[Array, "*rows c"], Float[Array, "*rows c c"]]  # pre, post, comb


def mixes(
    stream: Float[Array, "*rows c d"],
    fn: Float[Array, "n cd"],
    scale: Float[Array, " 3"],
    base: Float[Array, " n"],
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> Mixes:
    """The mixes of a sub-layer from its un-collapsed input stream, in float32: pre (to read), post (to write), comb (old copy
    first, new copy second).

    One statistic over all copies normalises the product, not the input.
    """
    x = f32(stream).reshape(*stream.shape[:-2], -1)
    return ops.split_mixes(
        matmul(x, fn), scale, base, mean_square(x),
        copies=stream.shape[-2], iterations=iterations, eps=eps, norm_eps=norm_eps,
    )  # fmt: skip


def head_mix(
    stream: Float[Array, "*rows c d"],
    fn: Float[Array, "c cd"],
    scale: Float[Array, " 1"],
    base: Float[Array, " c"],
    *,
    eps: float,
    norm_eps: float,
) -> Float[Array, "*rows c"]:
    """The mix that a head reads the stream with, in float32; normalised as in `mixes`."""
    x = f32(stream).reshape(*stream.shape[:-2], -1)
    return jax.nn.sigmoid(matmul(x, fn) * inverse_rms(x, norm_eps) * scale + base) + eps


def collapse(
    stream: Float[Array, "*rows c d"], mix: Float[Array, "*rows c"], numerics: Numerics
) -> Float[Array, "*rows d"]:
    """The mix of the copies that a sub-layer reads; float32 sum, rounded once."""
    return numerics.round(jnp.sum(mix[..., None] * f32(stream), axis=-2))


def expand(
    y: Float[Array, "*rows d"],
    stream: Float[Array, "*rows c d"],
    post: Float[Array, "*rows c"],
    comb: Float[Array, "*rows c c"],
    numerics: Numerics,
) -> Float[Array, "*rows c d"]:
    """New copies: copy k = post[k]·y + Σ_j comb[j,k]·old copy j; float32 sum, rounded once."""
    old = jnp.sum(comb[..., None] * f32(stream)[..., None, :], axis=-3)
    return numerics.round(post[..., None] * f32(y)[..., None, :] + old)


def start_stream(x: Float[Array, "*rows d"], copies: int) -> tuple[Float[Array, "*rows c d"], Float[Array, "*rows c"]]:
    """The stream of equal copies of the embeddings, and the first mix (copy 0 alone)."""
    stream = jnp.repeat(x[..., None, :], copies, axis=-2)
    mix = jnp.broadcast_to(jnp.eye(1, copies, dtype=jnp.float32)[0], (*x.shape[:-1], copies))
    return stream, mix
