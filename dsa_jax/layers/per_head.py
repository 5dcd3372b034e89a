"""Products with a matrix of its own for every head, or for every group of heads."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dsa_jax.numerics import Numerics


def per_head(x: Float[Array, "B S H i"], weight: Float[Array, "H _ _"], axis: int, numerics: Numerics) -> Array:
    """x[.., h, :] times each head's matrix, contracted over `axis` of it; float32 sums, rounded once."""
    product = lax.dot_general(
        x, weight, (((3,), (axis,)), ((2,), (0,))), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return numerics.round(jnp.moveaxis(product, 0, 2))
