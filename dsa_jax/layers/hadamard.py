"""The Hadamard rotation of index queries and keys: it spreads outliers before they are quantised to few bits."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dsa_jax.numerics import Numerics, f32, matmul


def hadamard(x: Float[Array, "*rows n"], numerics: Numerics) -> Float[Array, "*rows n"]:
    """x · H / sqrt(n) over the last axis, n a power of two: float32 sums, rounded once.

    Entry (i, j) of H is -1 where i and j have an odd number of bits in common, else 1 (natural order). H / sqrt(n) is
    symmetric and orthogonal, so it leaves products of two rotated vectors as they were.
    Source: DeepSeek-V4's inference code.
    """
    n = x.shape[-1]
    return numerics.round(matmul(f32(x), jnp.asarray(_signs(n))) * np.float32(n**-0.5))


def _signs(n: int) -> Float[np.ndarray, "n n"]:
    if n < 1 or n & (n - 1):
        raise ValueError(f"A Hadamard rotation of {n} values: the width must be a power of two.")
    i = np.arange(n)
    odd = np.bitwise_count(i[:, None] & i) % 2 == 1
    return np.where(odd, -1, 1).astype(np.float32)
