"""Number formats: FP8 (E4M3), MXFP4, NVFP4, E8M0 scales. Quantise, dequantise, and both at once.

Everything here is elementwise work on a group of values and fuses into its neighbours under jit, so there is one
implementation, for every device.

Rules that the formats of cache-formats.md and the released models share: a scale is chosen first (rounded *up* where
it is a power of two), the values are divided by the rounded scale, clamped, and rounded to nearest even. JAX's own
casts do neither: float8_e4m3fn does not saturate, float8_e8m0fnu rounds a scale to the nearest power.
A value of infinity counts as the largest float32; a NaN makes its own group NaN.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped, UInt8

from pallas_kernels.quantize import reference

KINDS = ("fp8_32", "fp8_64", "fp8_128", "mxfp4_32", "nvfp4_16")


def pow2ceil(v: Float32[Array, "*s"]) -> Float32[Array, "*s"]:
    """The smallest power of two >= v, from the bits of v. Defined for positive normal v; NaN stays NaN."""
    return reference.pow2ceil(v)


def quantize_fp8(
    x: Float[Array, "*s n"], group: int, *, power_of_two: bool = True
) -> tuple[Float[Array, "*s n"], Float32[Array, "*s g"]]:
    """FP8 values and one float32 scale per `group` values of the last axis.

    With a = max(amax, 1e-4): scale = 2^ceil(log2(a / 448)), or a / 448 if not `power_of_two`; both take the product
    with the float32 constant 1/448. Returns float8_e4m3fn [..., n] and float32 [..., n / group].
    Source: the act_quant kernel of DeepSeek's released inference code.
    """
    _groups(x, group)
    return reference.quantize_fp8(x, group, power_of_two=power_of_two)


def quantize_mxfp4(x: Float[Array, "*s n"], group: int = 32) -> tuple[UInt8[Array, "*s half"], UInt8[Array, "*s g"]]:
    """Packed E2M1 values and one E8M0 scale per `group` values of the last axis.

    Scale 2^ceil(log2(max(amax, 6 * 2^-126) / 6)). Value 2i lies in the low nibble of byte i, value 2i + 1 in the
    high one. Returns uint8 [..., n / 2] and uint8 [..., n / group], where byte b means 2^(b - 127).
    """
    _groups(x, group, even=True)
    return reference.quantize_mxfp4(x, group)


def quantize_nvfp4(x: Float[Array, "*s n"], group: int = 16) -> tuple[UInt8[Array, "*s half"], Float[Array, "*s g"]]:
    """Packed E2M1 values and one E4M3 scale per `group` values of the last axis; no global scale.

    Scale RNE_E4M3(min(max(amax, 6 * 2^-9) / 6, 448)). Packing as in quantize_mxfp4. Returns uint8 [..., n / 2] and
    float8_e4m3fn [..., n / group].
    """
    _groups(x, group, even=True)
    return reference.quantize_nvfp4(x, group)


def dequantize_fp8(
    values: Float[Array, "*s n"], scales: Shaped[Array, "*s g"], dtype=jnp.float32
) -> Float[Array, "*s n"]:
    """Values times the scales of their groups, multiplied in float32 and rounded once to `dtype`.

    `scales` [..., g] with g dividing n: float32 factors, or uint8 E8M0 exponents.
    """
    _pairs(values.shape[-1], scales)
    return reference.dequantize_fp8(values, scales, dtype)


def dequantize_fp4(
    packed: UInt8[Array, "*s half"], scales: Shaped[Array, "*s g"], dtype=jnp.float32
) -> Float[Array, "*s n"]:
    """Packed E2M1 values [..., n / 2] times the scales of their groups [..., g], rounded once to `dtype`.

    `scales`: uint8 E8M0 exponents, or float8_e4m3fn. The product itself is exact.
    """
    if packed.dtype != jnp.uint8:
        raise ValueError(f"packed has dtype {packed.dtype}; two E2M1 values a byte come as uint8. View int8 as uint8.")
    _pairs(2 * packed.shape[-1], scales)
    return reference.dequantize_fp4(packed, scales, dtype)


def fake_quantize(x: Float[Array, "*s n"], kind: str) -> Float[Array, "*s n"]:
    """`x` quantised and dequantised at once, in x.dtype.

    kind: "fp8_32", "fp8_64", "fp8_128" (power-of-two scales), "mxfp4_32" (E8M0 scales), "nvfp4_16" (E4M3 scales).
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not known. Allowed: {', '.join(KINDS)}.")
    _groups(x, int(kind.rpartition("_")[2]))
    return reference.fake_quantize(x, kind)


def e8m0_to_float32(codes: UInt8[Array, "*s"]) -> Float32[Array, "*s"]:
    """2^(b - 127) for every byte b, exact for b = 0 (a subnormal); 255 is NaN. Never reads a float as a byte."""
    if codes.dtype != jnp.uint8:
        raise ValueError(
            f"codes have dtype {codes.dtype}; E8M0 exponents are uint8. A float32 scale needs no decoding."
        )
    return reference.e8m0_to_float32(codes)


def unpack_fp4(packed: UInt8[Array, "*s half"]) -> Float32[Array, "*s n"]:
    """E2M1 values [..., n] of packed bytes [..., n / 2]: value 2i in the low nibble of byte i, 2i + 1 in the high."""
    if packed.dtype != jnp.uint8:
        raise ValueError(f"packed has dtype {packed.dtype}; two E2M1 values a byte come as uint8. View int8 as uint8.")
    return reference.unpack_fp4(packed)


def dequantize_weight(
    weight: Shaped[Array, "*s out stored"], scale: Shaped[Array, "*s o i"], block: int | tuple[int, int], dtype: Any
) -> Float[Array, "*s out in"]:
    """A stored weight as `dtype` (float32 or bfloat16).

    FP8: weight float8_e4m3fn [..., out, in], scale [..., ceil(out / bo), ceil(in / bi)] for `block` = (bo, bi) or
    one number for square tiles; the last tiles may be partial. FP4: weight uint8 [..., out, in / 2], two values a
    byte, scale [..., out, in / 32]; `block` is not used. Scales are uint8 E8M0 exponents or float32 factors. The
    product is taken in float32 and rounded once to `dtype`. For powers of two it is exact, except that a device which
    flushes subnormal numbers makes a result below 2^-126 zero.
    """
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"dtype={jnp.dtype(dtype)}: a weight dequantises to float32 or bfloat16.")
    if scale.dtype not in (jnp.uint8, jnp.float32):
        raise ValueError(f"scale has dtype {scale.dtype}; it must be uint8 (E8M0 exponents) or float32.")
    out, stored = weight.shape[-2:]
    if weight.dtype == jnp.uint8:
        wanted = (*weight.shape[:-1], stored // 16)
    elif weight.dtype == jnp.float8_e4m3fn:
        rows, columns = tile(block)
        wanted = (*weight.shape[:-2], -(-out // rows), -(-stored // columns))
    else:
        raise ValueError(
            f"weight has dtype {weight.dtype}; it must be float8_e4m3fn, or uint8 with two FP4 values a byte."
        )
    if tuple(scale.shape) != wanted or (weight.dtype == jnp.uint8 and stored % 16):
        raise ValueError(
            f"scale has shape {tuple(scale.shape)} for a {weight.dtype} weight of shape {tuple(weight.shape)} and "
            f"block {block}; it must have shape {wanted}, and packed FP4 rows must be multiples of 16 bytes."
        )
    return reference.dequantize_weight(weight, scale, tile(block), dtype)


def dequantize_fp4_by_parity(
    weight: UInt8[Array, "*s out half"], scale: UInt8[Array, "*s out i"], dtype: Any
) -> Float[Array, "*s out in"]:
    """`dequantize_weight` of an FP4 weight with E8M0 scales, its columns in the order of `by_parity`.

    The two values of a byte then lie far apart, so unpacking writes whole rows of each: a GPU takes a third of the
    instructions that it takes to interleave them. Multiply it with inputs in the same order.
    """
    if weight.dtype != jnp.uint8 or scale.dtype != jnp.uint8:
        raise ValueError(
            f"weight has dtype {weight.dtype} and scale {scale.dtype}; packed FP4 values and E8M0 exponents are uint8."
        )
    if scale.shape != (*weight.shape[:-1], weight.shape[-1] // 16) or weight.shape[-1] % 16:
        raise ValueError(
            f"scale has shape {tuple(scale.shape)} for packed FP4 of shape {tuple(weight.shape)}; it must have one exponent "
            "for 16 bytes, and rows must be multiples of 16 bytes."
        )
    return reference.dequantize_fp4_by_parity(weight, scale, dtype)


def by_parity(x: Shaped[Array, "*s n"]) -> Shaped[Array, "*s n"]:
    """The values of the last axis with those at even indices first, then those at odd ones."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def tile(block) -> tuple[int, int]:
    """(rows, columns) of a tile given as one number or as a pair."""
    rows, columns = (block, block) if isinstance(block, int) else block
    return int(rows), int(columns)


def _groups(x, group, even=False):
    width = x.shape[-1] if x.ndim else 0
    if not isinstance(group, int) or group < 1 or width % group or (even and width % 2):
        raise ValueError(
            f"x has shape {tuple(x.shape)} and group is {group!r}; the last axis must be a multiple of the group"
            f"{' and even' if even else ''}."
        )


def _pairs(width, scales):
    groups = scales.shape[-1] if scales.ndim else 0
    if groups < 1 or width % groups:
        raise ValueError(
            f"scales have shape {tuple(scales.shape)} for rows of {width} values; their last axis must divide {width}."
        )
