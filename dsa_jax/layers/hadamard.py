"""Walsh-Hadamard rotation: spreads every value over the whole vector, so that quantising loses less."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dsa_jax.numerics import Numerics, matmul


def hadamard(x: Float[Array, "*rows d"], numerics: Numerics) -> Float[Array, "*rows d"]:
    """`x` times the symmetric orthogonal matrix of entries (-1)^popcount(i & j) / sqrt(d); d is a power of two.

    Sums in float32, scaled and rounded once. Products of rotated vectors are those of the vectors themselves.
    ValueError for another width.
    """
    width = x.shape[-1]
    if width & (width - 1):
        raise ValueError(f"x has shape {tuple(x.shape)}; a Hadamard rotation takes rows of 2, 4, 8, .. values.")
    signs = np.ones((1, 1), np.float32)
    while len(signs) < width:
        signs = np.block([[signs, signs], [signs, -signs]])
    return numerics.round(matmul(x, jnp.asarray(signs, x.dtype)) * width**-0.5)
