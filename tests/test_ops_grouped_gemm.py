"""Products with stored weights: the reference against the released model's and the NumPy oracle, and what is refused."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tolerances
from conftest import read_golden
from reference import ops as oracle
from test_ops_quantize import ordinal, same_bits

from pallas_kernels import fake_quantize, grouped_gemm, quantized_matmul
from pallas_kernels.grouped_gemm import reference

E4M3 = ml_dtypes.float8_e4m3fn
FINITE = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)  # E4M3 codes that are numbers
FORMS = {  # experts, outputs, inputs, block of FP8 (None: FP4)
    "fp8, partial tiles": (3, 50, 70, (32, 32)),
    "fp8, tiles that are no squares": (2, 13, 31, (3, 5)),
    "fp8, one partial tile": (2, 100, 120, 128),
    "fp8, one input": (1, 7, 1, (4, 4)),
    "fp4": (3, 33, 96, None),
    "fp4, one output": (2, 1, 32, None),
}


def stored(rng, experts, outputs, inputs, block, scales=(120, 134)):
    """Weights of all codes that are numbers, and E8M0 scales."""
    if block is None:
        weight = rng.permutation(np.resize(np.arange(256), experts * outputs * inputs // 2)).astype(np.uint8)
        weight, tiles = weight.reshape(experts, outputs, inputs // 2), (outputs, inputs // 32)
    else:
        rows, columns = (block, block) if isinstance(block, int) else block
        weight = rng.permutation(np.resize(FINITE, experts * outputs * inputs))
        weight, tiles = weight.reshape(experts, outputs, inputs).view(E4M3), (-(-outputs // rows), -(-inputs // columns))
    return weight, rng.integers(*scales, (experts, *tiles)).astype(np.uint8)


def run(function, *arrays, **options):
    """`function` on NumPy arrays, as NumPy."""
    return np.asarray(function(*map(jnp.asarray, arrays), **options))


def pair(block):
    return (block, block) if isinstance(block, int) else block


def close(found, wanted):
    """float32 results by their largest; bfloat16 ones are what is nearest, up to a tie that a sum's order decides."""
    if found.dtype == jnp.bfloat16:
        wanted = oracle.bf16(wanted)
        step = np.maximum(np.abs(wanted) * 2.0**-7, 1e-30)
        assert (np.abs(found.astype(np.float64) - wanted) <= tolerances.of("ops.bf16_ulps") * step).all()
    else:
        assert np.abs(found - wanted).max(initial=0) <= tolerances.of("ops.gemm.f32") * np.abs(wanted).max(initial=0)


@pytest.mark.parametrize("name, block", [("fp8", 32), ("fp4", None)])
def test_products_of_the_released_model(name, block):
    gemm = read_golden("v41/ops/gemm")
    weight = gemm[f"w_{name}"] if name == "fp4" else gemm["w_fp8"].view(E4M3)
    scale = gemm[f"w_{name}_scale_e8m0"]
    x = fake_quantize(jnp.asarray(gemm["x"]), "fp8_32")
    close(run(quantized_matmul, x, weight, scale, block=block), gemm[f"y_{name}_fp32"])
    rounded = run(quantized_matmul, x.astype(jnp.bfloat16), weight, scale, block=block)
    wanted = gemm[f"y_{name}_bf16"].astype(ml_dtypes.bfloat16)
    assert np.abs(ordinal(rounded) - ordinal(wanted)).max() <= tolerances.of("ops.bf16_ulps")


@pytest.mark.parametrize(
    "dtype, out_dtype",
    [("float32", None), ("bfloat16", None), ("bfloat16", "float32"), ("float32", "bfloat16")],
)
@pytest.mark.parametrize("name", FORMS)
def test_tiles_and_groups(name, dtype, out_dtype):
    """Groups of every kind: repeated, out of order, none at either side. All codes, partial tiles of scales."""
    experts, outputs, inputs, block = FORMS[name]
    rng = np.random.default_rng(1)
    weight, scale = stored(rng, experts, outputs, inputs, block)
    group = np.array([experts - 1, -1, 0, experts, 0, 2**31 - 1, experts // 2, -(2**31)], np.int32)
    x = rng.standard_normal((len(group), 3, inputs)).astype(dtype)
    found = run(grouped_gemm, x, weight, scale, group, block=block, out_dtype=out_dtype)
    assert found.dtype == (out_dtype or dtype)
    wanted = oracle.grouped_gemm(x, weight, scale, group, pair(block))
    none = (group < 0) | (group >= experts)
    assert not found[none].any()
    for tile, expected in zip(found[~none], wanted[~none]):
        close(tile, expected)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,)])
@pytest.mark.parametrize("name", ["fp8, partial tiles", "fp4"])
def test_a_weight_alone(name, shape):
    _, outputs, inputs, block = FORMS[name]
    rng = np.random.default_rng(2)
    weight, scale = (part[0] for part in stored(rng, 1, outputs, inputs, block))
    x = rng.standard_normal((*shape, inputs)).astype(jnp.bfloat16)
    found = run(quantized_matmul, x, weight, scale, block=block, out_dtype=jnp.float32)
    assert found.shape == (*shape, outputs)
    close(found.reshape(-1, outputs), oracle.quantized_matmul(x.reshape(-1, inputs), weight, scale, pair(block)))


@pytest.mark.parametrize("block", [(1, 32), None])
def test_scales_of_every_size(block):
    """Every exponent, 2^-127 to 2^127, with codes whose values are then neither subnormal nor infinite. A row of x sees the
    inputs of one scale, at a magnitude that keeps its products in the middle of float32."""
    rng = np.random.default_rng(3)
    exponents = np.arange(255)
    at = np.repeat(exponents, 32)
    if block is None:
        low, high = np.select([at == 0, at == 1], [4, 2], 0), np.select([at == 254, at == 253], [4, 6], 8)
        codes = rng.integers(low, high) | rng.integers(0, 2, at.size) << 3
        weight = (codes[0::2] | codes[1::2] << 4).astype(np.uint8)[None]
    else:
        low = np.where(at == 0, 0x40, np.where(at < 10, 0x38, 0))
        high = np.where(at == 254, 0x40, np.where(at > 245, 0x48, 0x7F))
        weight = (rng.integers(low, high) | rng.integers(0, 2, at.size) << 7).astype(np.uint8).view(E4M3)[None]
    x = np.zeros((255, 255, 32))
    x[exponents, exponents] = np.ldexp(rng.standard_normal((255, 32)), ((127 - exponents) // 2)[:, None])
    x, scale = x.reshape(255, -1).astype(jnp.bfloat16), exponents.astype(np.uint8)[None]
    found = run(quantized_matmul, x, weight, scale, block=block, out_dtype=jnp.float32).astype(np.float64)
    wanted = oracle.quantized_matmul(x, weight, scale, block)
    products = np.linalg.norm(x.astype(np.float64) * oracle.dequantize_weight(weight, scale, block), axis=1)
    assert (products > 0).all()
    assert (np.abs(found - wanted)[:, 0] <= tolerances.of("ops.gemm.f32") * products).all()


def test_what_is_no_number_stays_in_its_output():
    weight, scale = stored(np.random.default_rng(4), 1, 64, 64, (32, 32))
    weight.view(np.uint8)[0, [5, 6], [40, 3]] = 0x7F, 0xFF
    x, group = np.ones((1, 2, 64), np.float32), np.zeros(1, np.int32)
    lost = np.isin(np.arange(64), [5, 6])
    assert (np.isnan(run(grouped_gemm, x, weight, scale, group, block=32)) == lost).all()
    scale[0, 1, 0] = 255
    lost |= np.arange(64) >= 32
    assert (np.isnan(run(grouped_gemm, x, weight, scale, group, block=32)) == lost).all()
    assert not run(grouped_gemm, x, weight, scale, group - 1, block=32).any()


@pytest.mark.parametrize("block", [None, (32, 32)])
def test_few_tiles_at_a_time(block, monkeypatch):
    """The same bits, however many dequantised weights there may be at a time; and no more memory than those take."""
    rng = np.random.default_rng(5)
    weight, scale = stored(rng, 3, 40, 96, block)
    arrays = rng.standard_normal((7, 4, 96)).astype(jnp.bfloat16), weight, scale, rng.integers(-1, 4, 7).astype(np.int32)
    together, one = run(grouped_gemm, *arrays, block=block), 2 * 40 * 96
    for tiles in (1, 3):
        monkeypatch.setattr(reference, "DEQUANTIZED_BYTES", tiles * one)
        reference.grouped_gemm.clear_cache()
        same_bits(run(grouped_gemm, *arrays, block=block), together)
    reference.grouped_gemm.clear_cache()
    many = jnp.zeros((64, 4, 96), jnp.bfloat16), weight, scale, jnp.zeros(64, jnp.int32)
    compiled = jax.jit(lambda *a: grouped_gemm(*a, block=block)).lower(*many).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 32 * one


@pytest.mark.parametrize(
    "tiles, rows, experts, outputs, inputs",
    [(0, 4, 2, 8, 32), (3, 0, 2, 8, 32), (3, 4, 0, 8, 32), (3, 4, 2, 0, 32), (3, 4, 2, 8, 0)],
)
@pytest.mark.parametrize("block", [None, 32])
def test_nothing(tiles, rows, experts, outputs, inputs, block):
    """Without tiles, rows, weights, outputs or inputs: zeros of the right shape, whatever runs."""
    weight, scale = stored(np.random.default_rng(6), experts, outputs, inputs, block)
    x, group = np.ones((tiles, rows, inputs), np.float32), np.zeros(tiles, np.int32)
    found = run(grouped_gemm, x, weight, scale, group, block=block)
    assert found.shape == (tiles, rows, outputs) and not found.any()


@pytest.mark.parametrize("block", [None, 32])
def test_several_weights_are_each_alone(block):
    rng = np.random.default_rng(8)
    weights, scales = zip(*(map(jnp.asarray, stored(rng, 2, 8, 64, block)) for _ in range(3)), strict=True)
    x, group = jnp.asarray(rng.standard_normal((3, 4, 64)), jnp.float32), jnp.array([1, -1, 0], jnp.int32)
    found = grouped_gemm(x, weights, scales, group, block=block)
    alone = [grouped_gemm(x, *pair, group, block=block) for pair in zip(weights, scales, strict=True)]
    np.testing.assert_array_equal(np.stack(found), np.stack(alone))
    found = quantized_matmul(x, tuple(w[0] for w in weights), tuple(s[0] for s in scales), block=block)
    alone = [quantized_matmul(x, w[0], s[0], block=block) for w, s in zip(weights, scales, strict=True)]
    np.testing.assert_array_equal(np.stack(found), np.stack(alone))
    nothing = grouped_gemm(x[:0], weights, scales, group[:0], block=block)
    assert [each.shape for each in nothing] == [(0, 4, 8)] * 3


def changed(function=grouped_gemm, block=32, **other):
    """A call with one of its arguments another one."""
    arguments = {
        "x": jnp.zeros((2, 4, 64), jnp.bfloat16), "weight": jnp.zeros((3, 40, 64), jnp.float8_e4m3fn),
        "scale": jnp.zeros((3, 2, 2), jnp.uint8), "group": jnp.zeros(2, jnp.int32),
    }  # fmt: skip
    options = {name: other.pop(name) for name in ("out_dtype", "implementation") if name in other}
    arguments |= other
    if function is quantized_matmul:
        del arguments["group"]
    return function(*arguments.values(), block=block, **options)


FP4 = {"weight": jnp.zeros((3, 40, 32), jnp.uint8), "scale": jnp.zeros((3, 40, 2), jnp.uint8)}
FP8_WEIGHT, FP8_SCALE = jnp.zeros((3, 40, 64), jnp.float8_e4m3fn), jnp.zeros((3, 2, 2), jnp.uint8)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "other, sentence",
    [
        ({"x": jnp.zeros((2, 64), jnp.bfloat16)}, r"it must have 3: \[tiles, R, K\]"),
        ({"x": jnp.zeros((2, 4, 64), jnp.float16)}, "x has dtype float16; it must be bfloat16 or float32"),
        ({"x": jnp.zeros((2, 4, 60), jnp.bfloat16)}, "has 64 inputs. The last axis of x must be those"),
        ({"x": jnp.zeros((2, 4, 32), jnp.bfloat16), **FP4, "block": None}, "has 64 inputs"),
        ({"weight": jnp.zeros((40, 64), jnp.float8_e4m3fn)}, r"it must have 3: \[E, N, stored\]"),
        ({"weight": jnp.zeros((3, 40, 64), jnp.bfloat16)}, "it must be float8_e4m3fn, or uint8 with two FP4 values a byte"),
        ({"scale": jnp.zeros((2, 2, 2), jnp.uint8)}, "E is 3 in the arguments before it"),
        ({"scale": jnp.zeros((3, 2, 3), jnp.uint8)}, r"must have shape \(3, 2, 2\)"),
        ({"scale": jnp.ones((3, 2, 2), jnp.float32)}, "scale has dtype float32; it must be uint8"),
        ({**FP4, "scale": jnp.zeros((3, 40, 4), jnp.uint8), "block": None}, r"must have shape \(3, 40, 2\)"),
        ({"group": jnp.zeros(3, jnp.int32)}, "tiles is 2 in the arguments before it"),
        ({"group": jnp.zeros(2, jnp.uint32)}, "group has dtype uint32; indices and lengths must be int32"),
        ({"block": None}, r"block is missing: an FP8 weight has a scale per tile"),
        ({"block": (0, 32)}, "the rows of block is 0"),
        ({"block": (32, -1)}, "the columns of block is -1"),
        ({**FP4, "block": 32}, "block=32 for an FP4 weight"),
        ({"out_dtype": jnp.float16}, "out_dtype=float16; it must be float32 or bfloat16"),
        ({"implementation": "sm80"}, "implementation='sm80' of grouped_gemm is not known"),
        ({"weight": (FP8_WEIGHT,)}, "weight and scale must be two arrays or two tuples"),
        ({"weight": (FP8_WEIGHT,), "scale": (FP8_SCALE,) * 2}, "1 weights and 2 scales are given"),
        ({"weight": (), "scale": ()}, "0 weights and 0 scales are given"),
        ({"weight": (FP8_WEIGHT, FP8_WEIGHT[:, :32]), "scale": (FP8_SCALE,) * 2}, "N is 40 in the arguments before it"),
        (
            {"weight": (FP8_WEIGHT, jnp.zeros((3, 40, 64), jnp.uint8)), "scale": (FP8_SCALE,) * 2},
            r"weight\[1\] has dtype uint8, and weight\[0\] float8_e4m3fn",
        ),
    ],
)
def test_what_is_refused(other, sentence):
    with pytest.raises(ValueError, match=sentence):
        changed(**other)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "other, sentence",
    [
        ({}, r"weight has shape \(3, 40, 64\), which has 3 axes; it must have 2"),
        ({"weight": jnp.zeros((40, 64), jnp.float8_e4m3fn)}, r"scale has shape \(3, 2, 2\), which has 3 axes"),
        ({"x": jnp.float32(1), "weight": FP4["weight"][0], "scale": FP4["scale"][0]}, "x is a single number"),
        ({"weight": FP4["weight"][0], "scale": FP4["scale"][0]}, "block=32 for an FP4 weight"),
    ],
)
def test_what_a_weight_alone_refuses(other, sentence):
    with pytest.raises(ValueError, match=sentence):
        changed(quantized_matmul, **other)


def test_a_bfloat16_weight_is_the_stored_one():
    """A code times a power of two is exact in bfloat16: the same numbers come out as of float32."""
    weight, scale = (part[0] for part in stored(np.random.default_rng(7), 1, 64, 64, (32, 32)))
    found = run(quantized_matmul, np.eye(64, dtype=jnp.bfloat16), weight, scale, block=32, out_dtype=jnp.float32)
    np.testing.assert_array_equal(found.T, oracle.dequantize_weight(weight, scale, (32, 32)))
