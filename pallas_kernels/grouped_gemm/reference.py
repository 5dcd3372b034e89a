"""Products with stored weights in plain JAX: a weight is dequantised, and XLA multiplies."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import blocks, platform
from pallas_kernels.quantize import by_parity, reference

DEQUANTIZED_BYTES = 512 << 20
"""Most bytes of dequantised weights at one time: 22 experts' w1 at V4.1's widths in bf16."""

MOST_DENSE_ROWS = 256
"""A dense weight is faster dequantised once for more rows than multiplied as it is stored for each of their tiles."""


def one_by_one(function):
    """Decorator: of several weights, in tuples with their scales, a tuple of each one's products."""

    @functools.wraps(function)
    def products(x, weight, scale, *group, **options):
        if not isinstance(weight, tuple):
            return function(x, weight, scale, *group, **options)
        return tuple(function(x, *one, *group, **options) for one in zip(weight, scale, strict=True))

    return products


@one_by_one
def quantized_matmul(x, weight, scale, *, block, out_dtype):
    """x [*rows, K] · dequantised(weight)ᵀ, all rows in one product."""
    if weight.dtype == jnp.uint8:  # the sum runs over even inputs first: in that order a weight is cheap to unpack
        x, weight = by_parity(x), reference.dequantize_fp4_by_parity(weight, scale, x.dtype)
    else:
        weight = reference.dequantize_weight(weight, scale, block, x.dtype)
    y = lax.dot_general(
        x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=blocks.HIGHEST, preferred_element_type=jnp.float32
    )
    return blocks.cast(y, out_dtype)


@functools.partial(jax.jit, static_argnames=("block", "out_dtype"), inline=True)
@one_by_one
def grouped_gemm(x, weight, scale, group, *, block, out_dtype):
    """Tile by tile as `quantized_matmul`, as many at once as DEQUANTIZED_BYTES allows."""
    (tiles, rows, inputs), (experts, outputs) = x.shape, weight.shape[:2]

    def one(x, group):
        # The gather comes first, so that only weights that tiles have are dequantised.
        chosen = jnp.clip(group, 0, experts - 1)
        y = quantized_matmul(x, weight[chosen], scale[chosen], block=block, out_dtype=out_dtype)
        return jnp.where((group >= 0) & (group < experts), y, 0)

    # XLA's products of single rows dequantise on the way on a GPU, and no dequantised weight is stored.
    stores_none = rows == 1 and platform.kernel_name() is not None
    at_once = max(1, DEQUANTIZED_BYTES // (outputs * inputs * x.dtype.itemsize))
    iterations = 1 if stores_none else -(-tiles // at_once)
    at_once = -(-tiles // iterations)
    extra = iterations * at_once - tiles
    x = jnp.pad(x, ((0, extra), (0, 0), (0, 0))).reshape(iterations, at_once, rows, inputs)
    group = jnp.pad(group, (0, extra), constant_values=-1).reshape(iterations, at_once)
    y = lax.map(lambda batch: jax.vmap(one)(*batch), (x, group))
    return y.reshape(iterations * at_once, rows, outputs)[:tiles]
