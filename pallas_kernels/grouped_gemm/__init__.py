"""Products with weights that stay as they are stored, FP8 or FP4, and are dequantised on the way to the multiplication."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped, UInt8

from pallas_kernels import checks, dispatch
from pallas_kernels.quantize import dequantize_weight, tile

FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


def grouped_gemm(
    x: Float[Array, "tiles R K"],
    weight: Shaped[Array, "E N stored"] | tuple[Shaped[Array, "E N stored"], ...],
    scale: UInt8[Array, "E o i"] | tuple[UInt8[Array, "E o i"], ...],
    group: Int32[Array, " tiles"],
    *,
    block: int | tuple[int, int] | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "tiles R N"] | tuple[Float[Array, "tiles R N"], ...]:
    """Tiles of rows, each times one of several stored weights: y[t] = x[t] · dequantised(weight[group[t]])ᵀ.

    x: bfloat16 or float32, R rows a tile that share a weight. group: the weight of a tile; outside 0..E-1 it has none, and
    its rows are 0. weight and scale, uint8 E8M0 exponents, as in quantize.dequantize_weight: FP8 is float8_e4m3fn
    [E, N, K] with scale [E, ceil(N / bo), ceil(K / bi)] for `block` = (bo, bi) or one number; FP4 is uint8 [E, N, K / 2],
    value 2i in the low nibble of byte i, with scale [E, N, K / 32] and no block. Both may be tuples, of weights of one shape
    that have the same inputs (w1 and w3 of an expert): the result is a tuple then, which takes one kernel.

    Weights are dequantised to x.dtype, products accumulate in float32 and are rounded once to out_dtype: float32 or
    bfloat16, default x.dtype. That is exact for scales of 2^-63 to 2^64; beyond, a device may flush small numbers, and a
    kernel may have infinity for large ones. Raises ValueError for other shapes and dtypes. Source: the FP8 and FP4 linear
    layers of DeepSeek's released inference code.
    """
    sizes = {}
    for which, one, its_scale in _several(weight, scale):
        checks.shape(f"weight{which}", one, "E N stored", sizes)
        checks.shape(f"scale{which}", its_scale, "E o i", sizes)
    checks.shape("x", x, "tiles R K", sizes)
    checks.shape("group", group, "tiles", sizes)
    checks.integer("group", group)
    return _call("grouped_gemm", implementation, x, weight, scale, group, block=block, out_dtype=out_dtype)


def quantized_matmul(
    x: Float[Array, "*rows K"],
    weight: Shaped[Array, "N stored"] | tuple[Shaped[Array, "N stored"], ...],
    scale: UInt8[Array, "o i"] | tuple[UInt8[Array, "o i"], ...],
    *,
    block: int | tuple[int, int] | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "*rows N"] | tuple[Float[Array, "*rows N"], ...]:
    """Rows times one stored weight, x · dequantised(weight)ᵀ: all as in `grouped_gemm`, without E and the groups."""
    sizes = {}
    for which, one, its_scale in _several(weight, scale):
        checks.shape(f"weight{which}", one, "N stored", sizes)
        checks.shape(f"scale{which}", its_scale, "o i", sizes)
    if x.ndim == 0:
        raise ValueError("x is a single number; its last axis must be the K inputs of the weight.")
    return _call("quantized_matmul", implementation, x, weight, scale, block=block, out_dtype=out_dtype)


def _several(weight, scale) -> list[tuple[str, Any, Any]]:
    """(its index as errors name it, weight, scale) of each of several weights, or of one."""
    if isinstance(weight, tuple) != isinstance(scale, tuple):
        raise ValueError("weight and scale must be two arrays or two tuples; one of them is a tuple alone.")
    if not isinstance(weight, tuple):
        return [("", weight, scale)]
    if len(weight) != len(scale) or not weight:
        raise ValueError(f"{len(weight)} weights and {len(scale)} scales are given; give as many of both, and at least one.")
    return [(f"[{n}]", *pair) for n, pair in enumerate(zip(weight, scale, strict=True))]


def _call(function, implementation, x, weight, scale, *group, block, out_dtype):
    several = _several(weight, scale)
    first = several[0][1]
    for which, one, its_scale in several:
        if one.dtype != first.dtype:
            raise ValueError(f"weight{which} has dtype {one.dtype}, and weight[0] {first.dtype}; those of a tuple are alike.")
        block_of_all, dtype = _checked(x, one, its_scale, block, out_dtype)
    if 0 in x.shape or 0 in first.shape:
        nothing = jnp.zeros((*x.shape[:-1], first.shape[-2]), dtype)
        return tuple(nothing for _ in several) if isinstance(weight, tuple) else nothing
    options = {"block": block_of_all, "out_dtype": dtype}
    return dispatch.call(__name__, function, implementation, x, weight, scale, *group, **options)


def _checked(x, weight, scale, block, out_dtype):
    """(block as a pair or None, out_dtype): what both functions ask of their arguments, beside the axes."""
    if x.dtype not in FLOATS:
        raise ValueError(f"x has dtype {x.dtype}; it must be bfloat16 or float32, to which the weight is dequantised.")
    if scale.dtype != jnp.uint8:
        raise ValueError(f"scale has dtype {scale.dtype}; it must be uint8, E8M0 exponents as the checkpoint stores them.")
    if weight.dtype == jnp.uint8 and block is not None:
        raise ValueError(f"block={block!r} for an FP4 weight, which has a scale per 32 inputs of a row. Leave it out.")
    if weight.dtype == jnp.float8_e4m3fn:
        if block is None:
            raise ValueError("block is missing: an FP8 weight has a scale per tile, and block=(rows, columns) is its size.")
        block = tile(block)
        checks.positive("the rows of block", block[0])
        checks.positive("the columns of block", block[1])
    # The weight's own checks, and its shape.
    dense = jax.eval_shape(functools.partial(dequantize_weight, block=block or 1, dtype=x.dtype), weight, scale)
    if x.shape[-1] != dense.shape[-1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, but a {weight.dtype} weight of shape {tuple(weight.shape)} has "
            f"{dense.shape[-1]} inputs. The last axis of x must be those."
        )
    out_dtype = x.dtype if out_dtype is None else jnp.dtype(out_dtype)
    if out_dtype not in FLOATS:
        raise ValueError(f"out_dtype={out_dtype}; it must be float32 or bfloat16, or None for the dtype of x.")
    return block, out_dtype
