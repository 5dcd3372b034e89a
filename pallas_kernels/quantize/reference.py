"""Number formats in plain JAX, exact to the bit on devices that flush subnormals and divide inexactly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import blocks

FP8_MAX = 448.0
FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)
SIGN, EXPONENT, MANTISSA, ONE = np.uint32([0x80000000, 0x7F800000, 0x007FFFFF, 0x00800000])


def _compiled(*static):
    """jax.jit for the small functions of this file: one compilation when called alone, no trace of it inside a jit."""
    return functools.partial(jax.jit, static_argnames=static, inline=True)


def _bits(x):
    return lax.bitcast_convert_type(x, jnp.uint32)


def _float(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)


@_compiled()
def pow2ceil(v):
    bits = _bits(v.astype(jnp.float32))
    up = (bits + MANTISSA) & EXPONENT  # carries into the exponent unless the mantissa is 0
    return jnp.where(jnp.isnan(v), jnp.float32(jnp.nan), _float(up))


def _amax(groups, floor):
    """Largest magnitude of every group, between `floor` and the largest float32. NaN stays."""
    return jnp.clip(jnp.max(jnp.abs(groups), axis=-1, keepdims=True), floor, FLOAT32_MAX)


def _split(x, group):
    return x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _over_power(x, scale):
    """x / scale for a power of two 2^-126 <= scale <= 2^126: exact, also where x is subnormal."""
    inverse = _float(jnp.uint32(0x7F000000) - _bits(scale))
    bits = _bits(x)
    small = (bits & EXPONENT) == 0
    # A device may read a subnormal as 0. Its mantissa, as an integer, is x * 2^149.
    magnitude = (bits & MANTISSA).astype(jnp.float32) * 2.0**-23 * (inverse * 2.0**-126)
    lifted = _float(_bits(magnitude) | (bits & SIGN))
    return jnp.where(small, lifted, x * inverse)


def _divide(x, scale):
    """x / scale for a scale of _amax, as near as float32 has it: a GPU's own division may be off by an ulp.

    The remainder of a first quotient, from products of 12-bit halves, which are exact, corrects it.
    """
    power = _float(_bits(scale) & EXPONENT)
    x, divisor = _over_power(x, power), _float((_bits(scale) & MANTISSA) | np.uint32(0x3F800000))
    quotient = x / divisor
    q_high, s_high = (_float(_bits(v) & np.uint32(0xFFFFF000)) for v in (quotient, divisor))
    q_low, s_low = quotient - q_high, divisor - s_high
    rest = x - q_high * s_high - q_high * s_low - q_low * s_high - q_low * s_low
    return jnp.where(rest == 0, quotient, quotient + rest / divisor)  # keeps the sign of a zero


def round_e4m3(x):
    """Float32 `x` rounded to the nearest E4M3 number, ties to even, 448 at most; kept in float32.

    The cast to float8_e4m3fn that follows is then exact. It has to be: where a cast back follows, XLA for GPUs drops
    both (xla_allow_excess_precision).
    """
    x = jnp.clip(x, -FP8_MAX, FP8_MAX)
    tiny = lax.round(x * 2.0**9, lax.RoundingMethod.TO_NEAREST_EVEN) * 2.0**-9  # below 2^-6, numbers are 2^-9 apart
    return jnp.where(jnp.abs(x) < 2.0**-6, tiny, lax.reduce_precision(x, 8, 3))


@_compiled("group", "power_of_two")
def quantize_fp8(x, group, *, power_of_two=True):
    groups = _split(x, group)
    scale = _amax(groups, 1e-4) * jnp.float32(1 / 448)
    if power_of_two:
        scale = pow2ceil(scale)
        ratio = _over_power(groups, scale)
    else:
        ratio = _divide(groups, scale)
    values = round_e4m3(ratio).astype(jnp.float8_e4m3fn)
    return values.reshape(x.shape), scale[..., 0]


def _e2m1(x, scale):
    """E2M1 codes of x / scale, rounded to nearest even, saturating at 6.

    Comparing |x| with the products (boundary * scale), which are exact, gives what a correctly rounded division
    followed by rounding gives, and needs no division.
    """
    magnitude = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.uint8)
    # A tie goes to the even code: up to 2, 4 and 6, down to 0, 2, 4 and 6.
    for boundary, tie_goes_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        edge = boundary * scale
        code += (magnitude >= edge if tie_goes_up else magnitude > edge).astype(jnp.uint8)
    sign = (_bits(x) >> 31).astype(jnp.uint8)
    return code | (sign << 3)


def _pack(codes, shape):
    codes = codes.reshape(*shape[:-1], shape[-1] // 2, 2)
    return codes[..., 0] | (codes[..., 1] << 4)


def _mxfp4(x, group):
    """E2M1 codes [.., groups, group] and E8M0 exponents [.., groups, 1]."""
    groups = _split(x, group)
    scale = pow2ceil(_amax(groups, 6 * 2.0**-126) * jnp.float32(1 / 6))
    # For a NaN group the exponent bits are 255, which is E8M0's NaN.
    return _e2m1(_over_power(groups, scale), 1.0), ((_bits(scale) & EXPONENT) >> 23).astype(jnp.uint8)


def _nvfp4(x, group):
    """E2M1 codes [.., groups, group] and scales [.., groups, 1], E4M3 numbers in float32."""
    groups = _split(x, group)
    scale = round_e4m3(_sixth(_amax(groups, 6 * 2.0**-9)))
    return _e2m1(groups, scale), scale


@_compiled("group")
def quantize_mxfp4(x, group=32):
    codes, exponents = _mxfp4(x, group)
    return _pack(codes, x.shape), exponents[..., 0]


@_compiled("group")
def quantize_nvfp4(x, group=16):
    codes, scale = _nvfp4(x, group)
    return _pack(codes, x.shape), scale[..., 0].astype(jnp.float8_e4m3fn)


def _sixth(v):
    """A float32 that rounds to E4M3 as v / 6 does, for 2^-20 < v: the quotient's leading bits, and a bit for the rest.

    Integers, because a GPU's float32 division may be off by an ulp, which decides ties.
    """
    bits = _bits(v)
    significand = (bits & MANTISSA) | ONE
    quotient = ((significand // 6) << 1) | (significand % 6 != 0).astype(jnp.uint32)
    power = _float((bits & EXPONENT) - jnp.uint32(24 << 23))  # 2^(e - 151): the significand is v * 2^(150 - e)
    return jnp.where(jnp.isnan(v), v, quotient.astype(jnp.float32) * power)


@_compiled()
def e8m0_to_float32(codes):
    bits = codes.astype(jnp.uint32) << 23
    bits = jnp.where(codes == 0, jnp.uint32(0x00400000), bits)
    return jnp.where(codes == 255, jnp.float32(jnp.nan), _float(bits))


@_compiled()
def unpack_fp4(packed):
    return _e2m1_values(jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1]))


def _e2m1_values(codes):
    magnitude = (codes & 7).astype(jnp.uint32)
    # Codes 2..7 are 1.m * 2^e with one mantissa bit, so they are the top bits of a float32 from 1 on.
    bits = jnp.where(magnitude >= 2, ((magnitude + 252) << 22), jnp.where(magnitude == 1, jnp.uint32(0x3F000000), 0))
    return _float(bits | ((codes >> 3).astype(jnp.uint32) << 31))


def _times_e8m0(values, exponents):
    """values * 2^(exponents - 127), exact also where a result is subnormal.

    `values` are float32 of few mantissa bits (FP8 or FP4), zero or normal; `exponents` uint8 broadcasts to them.
    """
    bits = _bits(values)
    exponent = ((bits & EXPONENT) >> 23).astype(jnp.int32) + exponents.astype(jnp.int32) - 127
    sign, mantissa = bits & SIGN, bits & MANTISSA
    normal = (jnp.clip(exponent, 0, 254).astype(jnp.uint32) << 23) | mantissa
    tiny = (mantissa | ONE) >> jnp.clip(1 - exponent, 0, 31).astype(jnp.uint32)
    product = jnp.where(exponent >= 255, EXPONENT, jnp.where(exponent >= 1, normal, tiny))
    product = jnp.where((bits & ~SIGN) == 0, jnp.uint32(0), product)
    nan = jnp.isnan(values) | (exponents == 255)
    return jnp.where(nan, jnp.float32(jnp.nan), _float(product | sign))


def _scaled(values, scales):
    """float32 values times scales of the same shape or broadcasting to it, exact for E8M0."""
    if scales.dtype == jnp.uint8:
        return _times_e8m0(values, scales)
    return values * scales.astype(jnp.float32)


@_compiled("dtype")
def dequantize_fp8(values, scales, dtype=jnp.float32):
    groups = _split(values, values.shape[-1] // scales.shape[-1])
    return blocks.cast(_scaled(groups, scales[..., None]).reshape(values.shape), dtype)


@_compiled("dtype")
def dequantize_fp4(packed, scales, dtype=jnp.float32):
    return dequantize_fp8(unpack_fp4(packed), scales, dtype)


@_compiled("kind")
def fake_quantize(x, kind):
    name, group = kind.split("_")
    if name == "fp8":
        return dequantize_fp8(*quantize_fp8(x, int(group)), x.dtype)
    codes, scales = {"mxfp4": _mxfp4, "nvfp4": _nvfp4}[name](x, int(group))
    return blocks.cast(_scaled(_e2m1_values(codes), scales).reshape(x.shape), x.dtype)


def _times_power(values, exponents, log2=0):
    """values * 2^(exponents - 127 + log2) in float32, for uint8 exponents of the same shape.

    Two factors, both normal numbers, that a few integer operations make of the exponents: far cheaper than _times_e8m0,
    and cheap enough that XLA makes them where they are used. Only results that are subnormal may differ, on a device that
    flushes them, and there the product that the values go into would flush them too. NaN for 255.
    """
    exponents = exponents.astype(jnp.uint32)
    half = exponents >> 1
    nan = ((exponents + 1) >> 8) * np.uint32(0x7FC00000)
    first, second = (half + 63) << 23, ((exponents - half + np.uint32(64 + log2)) << 23) | nan
    return values * _float(first) * _float(second)


def _spread(scale, rows, columns, shape):
    """One scale per tile of rows x columns, as one per value of a weight [..., *shape]; the last tiles may be partial."""
    out, width = shape
    return jnp.repeat(jnp.repeat(scale, rows, axis=-2)[..., :out, :], columns, axis=-1)[..., :width]


@_compiled("dtype")
def dequantize_fp4_by_parity(weight, scale, dtype):
    # E4M3 with the bits of E2M1 is the value times 2^-6, and GPUs have an instruction for E4M3.
    low, high = ((weight & 7) << 2) | ((weight & 8) << 4), ((weight >> 2) & 0x1C) | (weight & 0x80)
    exponents = jnp.repeat(scale, 16, axis=-1)
    values = (lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32) for codes in (low, high))
    return jnp.concatenate([_times_power(v, exponents, 6).astype(dtype) for v in values], axis=-1)


@_compiled("block", "dtype")
def dequantize_weight(weight, scale, block, dtype):
    if weight.dtype == jnp.uint8 and scale.dtype == jnp.uint8:
        halves = jnp.split(dequantize_fp4_by_parity(weight, scale, dtype), 2, axis=-1)
        return jnp.stack(halves, axis=-1).reshape(*weight.shape[:-1], 2 * weight.shape[-1])
    values, block = (unpack_fp4(weight), (1, 32)) if weight.dtype == jnp.uint8 else (weight.astype(jnp.float32), block)
    spread = _spread(scale, *block, values.shape[-2:])
    if scale.dtype == jnp.uint8:
        return _times_power(values, spread).astype(dtype)  # four significant bits need no rounding
    return blocks.cast(values * spread, dtype)
