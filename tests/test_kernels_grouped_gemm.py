"""Kernels that multiply with stored weights, interpreted with races or on the chip, and what they compile to."""

import jax
import jax.numpy as jnp
import lane_emulator as emulator
import ml_dtypes
import numpy as np
import on_chip
import pytest
import tolerances
from jax import lax
from lane_emulator import Memory, Value, Vector

from pallas_kernels import aot, dispatch, grouped_gemm, lane_ops, mosaic, quantized_matmul
from pallas_kernels.grouped_gemm import cases, sm90, sm100, tmem

FORMS = {  # outputs, inputs, block of FP8 (None: FP4)
    "fp4": (192, 512, None),
    "fp4, one tile": (64, 256, None),
    "fp8 32": (128, 256, (32, 32)),
    "fp8 128": (192, 384, (128, 128)),
    "fp8 128 x 32": (64, 768, (128, 32)),
}
ROWS = [
    ("fp4", 16), ("fp4", 1), ("fp4", 128), ("fp4, one tile", 64), ("fp8 32", 8), ("fp8 32", 40), ("fp8 32", 128),
    ("fp8 128", 16), ("fp8 128", 64), ("fp8 128 x 32", 5),
]  # fmt: skip


def of_families(names, *, quick):
    """Decorator: a test of either family with every one of `names`; all but the `quick` ones are slow."""
    names = [name if isinstance(name, tuple) else (name,) for name in names]
    runs = [(family, *name) for family in ("sm90", "sm100") for name in names]
    argument = "family, name, rows" if len(names[0]) > 1 else "family, name"
    return pytest.mark.parametrize(argument, [r if r in quick else pytest.param(*r, marks=pytest.mark.slow) for r in runs])


def stored(name, experts=3, seed=1):
    outputs, inputs, block = FORMS[name]
    return *cases.random_weight(jax.random.key(seed), experts, outputs, inputs, block), block


def inputs(tiles, rows, name, seed=2):
    return jax.random.normal(jax.random.key(seed), (tiles, rows, FORMS[name][1])).astype(jnp.bfloat16)


def run(family, x, weight, scale, group, block, out_dtype=jnp.float32):
    implementation = family if family == "reference" else on_chip.implementation(family)
    found = grouped_gemm(
        x, weight, scale, jnp.asarray(group, jnp.int32), block=block, out_dtype=out_dtype, implementation=implementation
    )
    return np.asarray(found)


def close(found, wanted):
    """Float32 results, by the largest of each tile."""
    found, wanted = (np.asarray(each, np.float64).reshape(len(each), -1) for each in (found, wanted))
    bound = tolerances.of("kernels.gemm.f32") * np.abs(wanted).max(axis=1)
    assert (np.abs(found - wanted).max(axis=1) <= bound).all()


@of_families(ROWS, quick=[("sm90", "fp4", 16), ("sm90", "fp8 32", 40), ("sm100", "fp4", 128)])
def test_a_kernel_multiplies_as_the_reference(family, name, rows):
    """Tiles that share a weight, one without, and groups beyond either end; rows of every number."""
    weight, scale, block = stored(name)
    group, x = [2, -1, 0, 3, 0], inputs(5, rows, name)
    wanted, found = (run(each, x, weight, scale, group, block) for each in ("reference", family))
    assert found.shape == wanted.shape and found.dtype == np.float32
    close(found, wanted)
    assert not found[1].any() and not found[3].any()


@of_families(["fp4", "fp8 32"], quick=[("sm90", "fp4"), ("sm100", "fp8 32")])
def test_sums_are_rounded_once(family, name):
    weight, scale, block = stored(name)
    x = inputs(2, 16, name)
    exact = run("reference", x, weight, scale, [1, 2], block)
    found = run(family, x, weight, scale, [1, 2], block, jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    step = 2.0**-8 * np.abs(exact) + tolerances.of("kernels.gemm.f32") * np.abs(exact).max()
    assert (np.abs(found.astype(np.float64) - exact) <= step).all()


@of_families(["fp4", "fp8 32", "fp8 128"], quick=[("sm90", "fp8 32"), ("sm100", "fp8 128")])
def test_what_is_no_number_stays_in_its_output(family, name):
    weight, scale, block = stored(name, experts=2)
    outputs = FORMS[name][0]
    lost = np.zeros((2, outputs), bool)
    if block is None:
        scale = scale.at[0, 7, 3].set(255)
        lost[0, 7] = True
    else:
        codes = lax.bitcast_convert_type(weight, jnp.uint8)
        codes = codes.at[0, 5, 40].set(0x7F).at[0, 63, 255].set(0xFF).at[1, 9, 0].set(0xFF)
        weight, scale = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), scale.at[1, -1, 0].set(255)
        lost[0, [5, 63]] = lost[1, 9] = lost[1, (outputs - 1) // block[0] * block[0] :] = True
    x = inputs(3, 8, name)
    wanted, found = (run(each, x, weight, scale, [0, 1, -1], block) for each in ("reference", family))
    for tile in range(2):
        assert (np.isnan(found[tile]) == lost[tile]).all()
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    close(np.nan_to_num(found[:2]), np.nan_to_num(wanted[:2]))
    assert not found[2].any()


@of_families(["fp4", "fp8 32"], quick=[("sm90", "fp4")])
def test_large_and_small_scales(family, name):
    """2^-40 and 2^60, each in a weight of its own, and next to one another, where the small ones do not count."""
    weight, scale, block = stored(name)
    scale = scale.at[0].set(127 - 40).at[1].set(127 + 60).at[2].set(127 - 40).at[2, :, 1].set(127 + 60)
    x = inputs(3, 8, name)
    wanted, found = (run(each, x, weight, scale, [0, 1, 2], block) for each in ("reference", family))
    assert np.isfinite(found).all() and (np.abs(wanted).max(axis=(1, 2)) > 0).all()
    close(found, wanted)


@of_families([("fp4", 16), ("fp8 32", 8), ("fp8 128", 16)], quick=[("sm90", "fp8 32", 8)])
def test_a_tile_has_the_same_bits_alone_and_among_others(family, name, rows, monkeypatch):
    """Also where a thread block has many of them, one after another."""
    weight, scale, block = stored(name)
    group, x = np.array([1, 0, -1, 2, 1, 0, 2]), inputs(7, rows, name)
    monkeypatch.setattr(mosaic, "CORES", 2)
    sm90._multiply.clear_cache()
    among = run(family, x, weight, scale, group, block)
    monkeypatch.undo()
    sm90._multiply.clear_cache()
    for tile in (0, 6):
        alone = run(family, x[tile : tile + 1], weight, scale, group[tile : tile + 1], block)
        np.testing.assert_array_equal(among[tile].view(np.uint32), alone[0].view(np.uint32))
    close(among, run("reference", x, weight, scale, group, block))


@of_families(["fp4", "fp8 32"], quick=[("sm90", "fp4")])
def test_several_weights_with_the_same_inputs(family, name):
    """Three in one call: tiles of two experts and one of none, then dense ones."""
    several, block = [stored(name, seed=seed)[:2] for seed in (1, 2, 3)], FORMS[name][2]
    weights, scales = zip(*several, strict=True)
    x, group = inputs(3, 16, name), jnp.array([2, -1, 0], jnp.int32)
    options = dict(block=block, out_dtype=jnp.float32, implementation=on_chip.implementation(family))
    found = grouped_gemm(x, weights, scales, group, **options)
    assert isinstance(found, tuple) and len(found) == 3
    for of_one, pair in zip(found, several, strict=True):
        close(of_one, run("reference", x, *pair, group, block))
    weights, scales = ([each[0] for each in arrays] for arrays in (weights, scales))
    found = quantized_matmul(x[0], tuple(weights), tuple(scales), **options)
    for of_one, weight, scale in zip(found, weights, scales, strict=True):
        close([of_one], run("reference", x[:1], weight[None], scale[None], [0], block))


SHAPES = [("fp8 32", (3, 2)), ("fp4", ()), ("fp8 32", (130,)), ("fp8 128 x 32", (70,))]


@of_families(SHAPES, quick=[(family, *shape) for family in ("sm90", "sm100") for shape in SHAPES[:2]])
def test_a_weight_alone(family, name, rows):
    """`rows`: all axes of x but the last."""
    weight, scale, block = stored(name, experts=1)
    outputs, width, _ = FORMS[name]
    x = jax.random.normal(jax.random.key(3), (*rows, width)).astype(jnp.bfloat16)

    def found(implementation):
        return np.asarray(
            quantized_matmul(x, weight[0], scale[0], block=block, out_dtype=jnp.float32, implementation=implementation)
        )

    wanted, ours = found("reference"), found(on_chip.implementation(family))
    assert ours.shape == wanted.shape == (*rows, outputs)
    close(ours.reshape(1, -1), wanted.reshape(1, -1))


@pytest.mark.parametrize("family", ["sm90", "sm100"])
def test_nothing_but_tiles_without_a_weight(family):
    weight, scale, block = stored("fp8 32")
    assert not run(family, inputs(2, 8, "fp8 32"), weight, scale, [-1, 3], block).any()


@pytest.mark.parametrize(
    "changed, sentence",
    [
        ({"dtype": jnp.float32}, "multiplies bfloat16 inputs, not float32"),
        ({"outputs": 96}, "multiples of 64 rows and 128 columns, not of 96 x 256"),
        ({"inputs": 320}, "multiples of 64 rows and 128 columns, not of 128 x 320"),
        ({"inputs": 384, "block": None}, "multiples of 64 rows and 256 columns, not of 128 x 384"),
        ({"block": (48, 32)}, r"block is \(48, 32\)"),
        ({"block": (32, 16)}, r"block is \(32, 16\)"),
        ({"block": (32, 96)}, r"block is \(32, 96\)"),
    ],
)
@pytest.mark.parametrize("family", ["sm90", "sm100"])
def test_what_a_kernel_does_not_carry(family, changed, sentence):
    shape = {"outputs": 128, "inputs": 256, "block": (32, 32), "dtype": jnp.bfloat16} | changed
    outputs, width, block = shape["outputs"], shape["inputs"], shape["block"]
    weight, scale = cases.random_weight(jax.random.key(1), 1, outputs, width, block)
    x = jnp.zeros((1, 8, width), shape["dtype"])
    with pytest.raises(NotImplementedError, match=sentence):
        run(family, x, weight, scale, [0], block)
    with pytest.raises(NotImplementedError, match=sentence):
        quantized_matmul(x[0], weight[0], scale[0], block=block, implementation=on_chip.implementation(family))


def test_blackwell_is_not_chosen_by_itself():
    with pytest.raises(NotImplementedError, match="never run on a GPU"):
        dispatch._refuse_unproven(sm100.grouped_gemm, "grouped_gemm", ())
    with pytest.raises(NotImplementedError, match="never run on a GPU"):
        dispatch._refuse_unproven(sm100.quantized_matmul, "quantized_matmul", ())


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("width, column", [(128, 0), (320, 128), (320, 256), (64, 0)])
def test_blackwell_stores_sums_transposed(width, column, dtype):
    """The lane code itself, also where a weight ends within its 128 rows."""
    rng = np.random.default_rng(1)
    sums = rng.standard_normal((128, 16)).astype(np.float32)
    if column + 128 > width:
        sums[64:] = sums[:64]
    pairs = [Vector(Value(sums[:, 2 * i + e], "f32") for e in range(2)) for i in range(8)]
    with emulator.emulated(tmem, lane_ops):
        out = Memory(np.full((40, width), 7, dtype))
        registers = emulator.in_registers(pairs)
        registers.shape = sums.shape
        tmem.store(out, registers, 20, column)
        found = out.array
    wanted = np.full((40, width), 7, dtype)
    end = min(column + 128, width)
    wanted[20:36, column:end] = sums[: end - column].T
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("chip, products", [("h200", "HGMMA"), ("b200", "UTCxMMA")])
def test_compiles_for_a_chip(chip, products):
    """Weights and inputs come by TMA, tensor cores multiply, and nothing spills."""
    if (reason := aot.missing()) is not None:
        pytest.skip(reason)
    report = aot.compile_report((chip,), "grouped_gemm")
    assert report.kernels and not report.unsupported, report.text()
    for kernel in report.kernels:
        assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, report.text()
        assert kernel.instructions[products] >= 4 and kernel.instructions["UTMALDG"] >= 2, report.text()
