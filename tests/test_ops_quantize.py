"""Number formats: bit equality with the released quantisers and with the NumPy oracle."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tolerances
from conftest import read_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from reference import ops as oracle

from pallas_kernels import quantize

ACT = read_golden("v41/ops/act_quant")
X = jnp.asarray(ACT["x"])
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def same_bits(a, b):
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("scale_kind", ["ue8m0", "fp32scale"])
def test_ac_27_fp8_equals_the_released_quantiser(group, scale_kind):
    stored = {k.rpartition(".")[2]: v for k, v in ACT.items() if k.startswith(f"fp8.block{group}.{scale_kind}.")}
    quantise = jax.jit(functools.partial(quantize.quantize_fp8, group=group, power_of_two=scale_kind == "ue8m0"))
    values, scales = quantise(X)
    same_bits(values, stored["q"])
    same_bits(scales, stored["scale"])
    same_bits(quantize.dequantize_fp8(values, scales, jnp.bfloat16).astype(jnp.float32), stored["dequant"])
    if scale_kind == "ue8m0":
        exponents = jnp.asarray(stored["scale_e8m0"])
        same_bits(quantize.dequantize_fp8(values, exponents, jnp.bfloat16).astype(jnp.float32), stored["dequant"])
        faked = jax.jit(quantize.fake_quantize, static_argnums=1)(X.astype(jnp.bfloat16), f"fp8_{group}")
        same_bits(faked.astype(jnp.float32), stored["dequant"])


@pytest.mark.parametrize("group, kind", [(32, "e8m0"), (16, "e4m3")])
def test_ac_27_fp4_equals_the_released_quantiser(group, kind):
    stored = {k.rpartition(".")[2]: v for k, v in ACT.items() if k.startswith(f"fp4.block{group}.{kind}.")}
    quantise, name = {
        "e8m0": (quantize.quantize_mxfp4, "mxfp4_32"),
        "e4m3": (quantize.quantize_nvfp4, "nvfp4_16"),
    }[kind]
    packed, scales = jax.jit(quantise)(X)
    same_bits(packed, stored["packed"])
    same_bits(scales, stored["scale_raw"])
    same_bits(quantize.dequantize_fp4(packed, scales, jnp.bfloat16).astype(jnp.float32), stored["dequant"])
    faked = jax.jit(quantize.fake_quantize, static_argnums=1)(X.astype(jnp.bfloat16), name)
    same_bits(faked.astype(jnp.float32), stored["dequant"])


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, 64, elements=FINITE), st.booleans())
def test_ac_27_fp8_equals_the_oracle(x, power_of_two):
    values, scales = quantize.quantize_fp8(jnp.asarray(x), 32, power_of_two=power_of_two)
    expected = oracle.quantize_fp8(x, 32, power_of_two)
    same_bits(scales, expected[1])
    same_bits(values, expected[0])


# Values near the ties of E2M1 times an E4M3 scale, where a division that is off by an ulp would go the wrong way.
NEAR_TIES = st.builds(
    lambda tie, scale, step: np.nextafter(np.float32(tie * scale), np.float32(step * np.inf if step else tie * scale)),
    st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]),
    st.sampled_from([1.0, 1.125, 1.375, 1.625, 1.875, 2.0**-9, 3 * 2.0**-9]),
    st.sampled_from([-1, 0, 1]),
)


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(np.float32, 32, elements=st.one_of(FINITE, NEAR_TIES)), st.sampled_from(["e8m0", "e4m3"]))
def test_ac_27_fp4_equals_the_oracle(x, kind):
    quantise, group = {"e8m0": (quantize.quantize_mxfp4, 32), "e4m3": (quantize.quantize_nvfp4, 16)}[kind]
    packed, scales = quantise(jnp.asarray(x))
    expected = oracle.quantize_fp4(x, group, kind)
    same_bits(scales, expected[1])
    same_bits(packed, expected[0])


def test_nvfp4_scale_rounds_a_sixth_correctly_at_every_tie():
    """amax just below, at and just above six times every midpoint of two E4M3 numbers."""
    codes = np.arange(8, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (codes[:-1] + codes[1:]) / 2 * 6
    amax = np.concatenate([np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, np.float32(np.inf))])
    x = np.zeros((len(amax), 16), np.float32)
    x[:, 3] = amax
    _, scales = quantize.quantize_nvfp4(jnp.asarray(x))
    expected = (amax.astype(np.float64) / 6).astype(np.float32)  # not a tie after this rounding unless it was one
    assert np.array_equal(expected == np.repeat((codes[:-1] + codes[1:])[None] / 2, 3, 0).ravel(), np.isin(amax, ties))
    same_bits(scales[:, 0], expected.astype(ml_dtypes.float8_e4m3fn))


@pytest.mark.parametrize(
    "largest, value, exponent",
    [(448, 1e-4, -22), (448, 0.875, -9), (448, 1, -8), (448, 3.5, -7), (448, 7, -6), (448, 448, 0), (448, 449, 1),
     (448, 896, 1), (6, 0.75, -3), (6, 1, -2), (6, 3, -1), (6, 6, 0), (6, float(np.nextafter(np.float32(6), 7)), 1),
     (6, 12, 1)],
)  # fmt: skip
def test_pow2ceil_known_answers(largest, value, exponent):
    product = np.float32(value) * np.float32(1 / largest)
    assert float(quantize.pow2ceil(jnp.asarray(product))) == 2.0**exponent


def test_pow2ceil_keeps_nan():
    assert np.isnan(quantize.pow2ceil(jnp.float32(np.nan)))


def test_ac_28_e8m0_bytes_are_exponents():
    codes = np.array([0, 1, 126, 127, 128, 254, 255], np.uint8)
    values = np.asarray(jax.jit(quantize.e8m0_to_float32)(jnp.asarray(codes)))
    same_bits(values[:-1], np.ldexp(np.float32(1), codes[:-1].astype(int) - 127))
    assert np.isnan(values[-1])


def test_ac_28_every_e8m0_byte():
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(quantize.e8m0_to_float32(jnp.asarray(codes))).view(np.int32)[:-1],
                                  expected.view(np.int32)[:-1])  # fmt: skip


def test_ac_28_float32_scales_are_not_reinterpreted():
    values = jnp.ones((4, 64), jnp.float8_e4m3fn)
    weight = quantize.dequantize_weight(values, jnp.full((1, 2), 3.0, jnp.float32), 32, jnp.float32)
    assert (np.asarray(weight) == 3).all()
    exponents = quantize.dequantize_weight(values, jnp.full((1, 2), 3, jnp.uint8), 32, jnp.float32)
    assert (np.asarray(exponents) == 2.0**-124).all()


@pytest.mark.usefixtures("unchecked")
def test_ac_28_a_float32_scale_is_no_exponent():
    with pytest.raises(ValueError, match="float32 scale needs no decoding"):
        quantize.e8m0_to_float32(jnp.ones(3, jnp.float32))


def test_every_fp4_byte():
    codes = np.arange(256, dtype=np.uint8)
    same_bits(quantize.unpack_fp4(jnp.asarray(codes)), oracle.unpack_fp4(codes))


def test_every_fp8_code_times_every_exponent_is_exact():
    """Results that are subnormal included: 2^-9 * 2^-127 is the least."""
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    exponents = np.arange(256, dtype=np.uint8)
    product = quantize.dequantize_fp8(
        jnp.asarray(np.repeat(values[None], 256, 0)), jnp.asarray(exponents[:, None]), jnp.float32
    )
    with np.errstate(over="ignore"):
        expected = oracle.dequantize(np.repeat(values[None], 256, 0), exponents[:, None]).astype(np.float32)
    product = np.asarray(product)
    assert np.array_equal(np.isnan(product), np.isnan(expected))
    finite = ~np.isnan(expected)
    same_bits(product[finite], expected[finite])


def test_every_bf16_value_rounds_to_fp8_as_ml_dtypes_does():
    x = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    x = x[np.abs(x) <= 448].reshape(-1, 1)
    x = np.concatenate([x, np.full_like(x, 448)], axis=1)  # scale 1
    values, scales = jax.jit(quantize.quantize_fp8, static_argnums=1)(jnp.asarray(x), 2)
    assert (np.asarray(scales) == 1).all()
    same_bits(values, x.astype(ml_dtypes.float8_e4m3fn))


def test_values_are_e4m3_numbers_before_they_are_cast():
    """Every bf16 value, and float32 neighbours of every tie. XLA for GPUs drops a cast to FP8 that is followed by one
    back, so the rounding must not be the cast's."""
    numbers = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (numbers[:-1] + numbers[1:]) / 2
    x = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    x = np.concatenate([x, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(500)), -ties])
    found = np.asarray(jax.jit(quantize.reference.round_e4m3)(jnp.asarray(x)))
    x = np.where(np.isnan(x), np.float32(np.nan), x)
    with np.errstate(invalid="ignore"):
        expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(np.isnan(found), np.isnan(x))
    same_bits(found[~np.isnan(x)], expected[~np.isnan(x)])


def test_ac_55_zero_blocks():
    zero = jnp.zeros((2, 64))
    for values, scales in (quantize.quantize_fp8(zero, 32), quantize.quantize_mxfp4(zero), quantize.quantize_nvfp4(zero)):
        assert not np.asarray(values).view(np.uint8).any()
        factors = quantize.e8m0_to_float32(scales) if scales.dtype == jnp.uint8 else scales.astype(jnp.float32)
        assert (np.asarray(factors) >= np.finfo(np.float32).tiny).all()
    for kind in quantize.KINDS:
        same_bits(quantize.fake_quantize(jnp.zeros((2, 128)), kind), np.zeros((2, 128), np.float32))


def test_ac_56_scale_is_rounded_up_and_before_the_values():
    assert float(quantize.pow2ceil(jnp.float32(1.1))) == 2
    x = jnp.asarray(np.random.default_rng(0).uniform(1, 448 * 1.1, (1, 4096)), jnp.float32).at[0, 0].set(448 * 1.1)
    values, scales = quantize.quantize_fp8(x, 4096)
    assert float(scales[0, 0]) == 2
    error = np.abs(np.asarray(quantize.dequantize_fp8(values, scales)) - np.asarray(x)) / np.asarray(x)
    assert error.max() <= 2.0**-4  # half the spacing of three mantissa bits


def test_ac_57_encoding_saturates():
    row = jnp.full((5, 32), 448.0).at[:, 0].set(jnp.asarray([447, 448, 460, 500, jnp.inf]))
    values, scales = quantize.quantize_fp8(row, 32)
    assert not np.isnan(np.asarray(values, np.float32)).any()
    assert np.isfinite(np.asarray(scales)).all()
    assert float(values[4, 0]) == 448
    # A clamp is needed where values are encoded with a scale that is too small for them, too.
    plain, scale = quantize.quantize_fp8(jnp.asarray([[np.nextafter(np.float32(448), 449), 1.0]]), 2, power_of_two=False)
    assert float(plain[0, 0]) == 448 and np.isfinite(float(scale[0, 0]))
    for packed, scales in (quantize.quantize_mxfp4(row), quantize.quantize_nvfp4(row)):
        assert np.isfinite(np.asarray(quantize.dequantize_fp4(packed, scales), np.float32)[:4]).all()


def test_ac_06_nan_stays_in_its_group():
    x = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
    spoilt = x.copy()
    spoilt[0, 5] = np.nan
    for kind, group in (("fp8_32", 32), ("mxfp4_32", 32), ("nvfp4_16", 16)):
        clean = np.asarray(quantize.fake_quantize(jnp.asarray(x), kind))
        found = np.asarray(quantize.fake_quantize(jnp.asarray(spoilt), kind))
        assert np.isnan(found[0, :group]).all(), kind
        same_bits(found[0, group:], clean[0, group:])
        same_bits(found[1], clean[1])


@pytest.mark.parametrize("leading", [(), (3,)])
@pytest.mark.parametrize("scales", ["e8m0", "float32"])
@pytest.mark.parametrize("shape, block", [((40, 70), 32), ((40, 70), (16, 64)), ((5, 32), (1, 32)), ((130, 257), 128)])
def test_dequantize_weight_fp8(shape, block, scales, leading):
    rng = np.random.default_rng(2)
    rows, columns = (block, block) if isinstance(block, int) else block
    weight = rng.standard_normal((*leading, *shape)).astype(ml_dtypes.float8_e4m3fn)
    tiles = (*leading, -(-shape[0] // rows), -(-shape[1] // columns))
    if scales == "e8m0":
        scale = rng.integers(110, 140, tiles).astype(np.uint8)
    else:
        scale = rng.uniform(0.5, 2, tiles).astype(np.float32)
    expected = np.stack(
        [
            oracle.dequantize_weight(w, s, (rows, columns))
            for w, s in zip(weight.reshape(-1, *shape), scale.reshape(-1, *tiles[-2:]))
        ]
    ).reshape(weight.shape)
    for dtype in (jnp.float32, jnp.bfloat16):
        found = quantize.dequantize_weight(jnp.asarray(weight), jnp.asarray(scale), block, dtype)
        assert found.dtype == dtype
        same_bits(found, expected.astype(np.float32).astype(dtype))


def test_ac_28_weights_under_every_exponent():
    """Every E8M0 byte as the scale of 448, 1 and 2^-9; subnormal results may be flushed, nothing else may differ."""
    values = np.array([448, 1, -(2.0**-9)], np.float32)
    weight = jnp.asarray(np.tile(values, (256, 1)), jnp.float8_e4m3fn)
    found = np.asarray(quantize.dequantize_weight(weight, jnp.arange(256, dtype=jnp.uint8)[:, None], (1, 3), jnp.float32))
    assert np.isnan(found[255]).all()
    with np.errstate(over="ignore"):
        expected = (values * np.exp2(np.arange(255.0)[:, None] - 127)).astype(np.float32)
    normal = np.abs(expected) >= 2.0**-126
    np.testing.assert_array_equal(found[:255][normal], expected[normal])
    assert normal[0, 0] and not normal[0, 1]
    np.testing.assert_allclose(found[:255][~normal], 0, rtol=0, atol=2.0**-126)


def test_dequantize_weight_fp4():
    rng = np.random.default_rng(3)
    weight = rng.integers(0, 256, (2, 6, 48)).astype(np.uint8)
    scale = rng.integers(100, 140, (2, 6, 3)).astype(np.uint8)
    found = quantize.dequantize_weight(jnp.asarray(weight), jnp.asarray(scale), (1, 32), jnp.bfloat16)
    expected = np.stack([oracle.dequantize_weight(w, s, None) for w, s in zip(weight, scale)])
    np.testing.assert_array_equal(np.asarray(found, np.float64), expected)


def test_fp4_weights_by_parity():
    """All codes under every exponent are what the interleaved weight has, in the order of `by_parity`; so products agree."""
    rng = np.random.default_rng(4)
    weight = jnp.asarray(np.tile(np.arange(256), (256, 1)).astype(np.uint8))
    scale = jnp.asarray(np.repeat(np.arange(256)[:, None], 16, axis=1).astype(np.uint8))
    for dtype in (jnp.float32, jnp.bfloat16):
        found = np.asarray(quantize.dequantize_fp4_by_parity(weight, scale, dtype), np.float64)
        expected = np.stack([oracle.dequantize_weight(w, s, None) for w, s in zip(np.asarray(weight), np.asarray(scale))])
        with np.errstate(over="ignore"):
            expected = expected.astype(dtype).astype(np.float64)
        expected = np.concatenate([expected[:, 0::2], expected[:, 1::2]], axis=1)
        assert np.isnan(found[255]).all()
        normal = np.abs(expected) >= 2.0**-126
        normal[255] = False
        np.testing.assert_array_equal(found[normal], expected[normal])
        np.testing.assert_allclose(found[:255][~normal[:255]], 0, rtol=0, atol=2.0**-126)
    x = rng.integers(-4, 5, (3, 512))
    ours = np.asarray(quantize.by_parity(jnp.asarray(x))) @ np.asarray(quantize.dequantize_fp4_by_parity(weight[:4], scale[124:128], jnp.float32)).T
    np.testing.assert_array_equal(ours, x @ np.asarray(quantize.dequantize_weight(weight[:4], scale[124:128], 32, jnp.float32)).T)


@pytest.mark.parametrize("name, block", [("fp8", 32), ("fp4", (1, 32))])
def test_gemm_of_the_released_model(name, block):
    gemm = read_golden("v41/ops/gemm")
    weight = gemm[f"w_{name}"] if name == "fp4" else gemm["w_fp8"].view(ml_dtypes.float8_e4m3fn)
    weight = quantize.dequantize_weight(jnp.asarray(weight), jnp.asarray(gemm[f"w_{name}_scale_e8m0"]), block, jnp.float32)
    x = quantize.fake_quantize(jnp.asarray(gemm["x"]), "fp8_32")
    y = np.asarray(jnp.matmul(x, weight.T, precision=jax.lax.Precision.HIGHEST))
    expected = gemm[f"y_{name}_fp32"]
    assert np.abs(y - expected).max() <= tolerances.of("ops.gemm.f32") * np.abs(expected).max()
    rounded = gemm[f"y_{name}_bf16"].astype(ml_dtypes.bfloat16)
    assert np.abs(ordinal(y.astype(ml_dtypes.bfloat16)) - ordinal(rounded)).max() <= tolerances.of("ops.bf16_ulps")


def ordinal(x):
    """bf16 numbers as integers whose difference counts the representable numbers between them."""
    bits = x.view(np.int16).astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: quantize.quantize_fp8(jnp.zeros((2, 30)), 32), "multiple of the group"),
        (lambda: quantize.quantize_mxfp4(jnp.zeros((2, 30)), 15.0), "multiple of the group"),
        (lambda: quantize.fake_quantize(jnp.zeros(32), "fp8_16"), "Allowed: fp8_32"),
        (lambda: quantize.dequantize_fp4(jnp.zeros(16, jnp.int8), jnp.zeros(1, jnp.uint8)), "View int8 as uint8"),
        (lambda: quantize.dequantize_fp8(jnp.zeros(30), jnp.zeros(4)), "must divide 30"),
        (
            lambda: quantize.dequantize_weight(
                jnp.zeros((64, 64), jnp.float8_e4m3fn), jnp.zeros((2, 1)), 32, jnp.float32
            ),
            r"must have shape \(2, 2\)",
        ),
        (
            lambda: quantize.dequantize_weight(jnp.zeros((4, 4)), jnp.zeros((1, 1)), 32, jnp.float32),
            "must be float8_e4m3fn",
        ),
        (
            lambda: quantize.dequantize_weight(
                jnp.zeros((4, 4), jnp.float8_e4m3fn), jnp.zeros((1, 1)), 32, jnp.float16
            ),
            "float32 or bfloat16",
        ),
    ],
)
def test_wrong_arguments(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize("ulps", [-2, -1, 0, 1, 2])
def test_a_quotient_is_right_whatever_the_device_divides(ulps, monkeypatch):
    """GPUs divide to within two ulps, which decided ties in amax / 448 scales: the correction has to absorb that."""
    from pallas_kernels.quantize import reference

    rng = np.random.default_rng(0)
    x = (rng.standard_normal(4096) * 2.0 ** rng.integers(-20, 40, 4096)).astype(np.float32)
    scale = (np.abs(rng.standard_normal(4096)) * 2.0 ** rng.integers(-10, 30, 4096)).astype(np.float32)
    ties = np.float32(2.0) ** rng.integers(-6, 8, 512) * np.float32(1.0625) * scale[:512]
    x = np.concatenate([x, ties.astype(np.float32)])
    scale = np.concatenate([scale, scale[:512]])

    class Inexact(np.ndarray):
        def __truediv__(self, other):
            exact = np.asarray(self) / np.asarray(other)
            return (exact.view(np.int32) + np.where(exact == 0, 0, ulps)).astype(np.int32).view(np.float32).view(Inexact)

    monkeypatch.setattr(reference, "_over_power", lambda a, p: (np.asarray(a) / np.asarray(p)).astype(np.float32).view(Inexact))
    monkeypatch.setattr(reference, "_bits", lambda a: np.asarray(a).view(np.uint32))
    monkeypatch.setattr(reference, "_float", lambda b: np.asarray(b).view(np.float32).view(Inexact))
    with np.errstate(all="ignore"):
        ours = np.asarray(reference._divide(x, scale))
    np.testing.assert_array_equal(ours, (x.astype(np.float64) / scale).astype(np.float32))
