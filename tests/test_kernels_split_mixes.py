"""The mixes of hyper-connections: the kernel in the interpreter against the golden data, its lane code, what it refuses, and the
compiler."""

import jax
import jax.numpy as jnp
import lane_emulator as emulator
import numpy as np
import on_chip
import pytest
import tolerances
from conftest import read_golden
from lane_emulator import Memory
from test_layers import compare

import pallas_kernels
from pallas_kernels import aot, lane_ops
from pallas_kernels.split_mixes import cases, kernel

GOLDEN = read_golden("v41/ops/hc_sinkhorn")
CARRIED = sorted({name.rpartition(".")[0] for name in GOLDEN if name.startswith(("hc2", "hc4"))})
OPTIONS = dict(copies=4, iterations=20, eps=1e-6)


@pytest.mark.parametrize("implementation", ["reference", on_chip.implementation("sm90"), "interpret_sm100"])
@pytest.mark.parametrize("name", CARRIED)
def test_golden(name, implementation):
    copies, iterations, eps = name.split("_")
    found = pallas_kernels.split_mixes(
        *(jnp.asarray(GOLDEN[f"{name}.{part}"]) for part in ("mixes", "scale", "base")),
        copies=int(copies[2:]), iterations=int(iterations[2:]), eps=float(eps[3:]), implementation=implementation,
    )  # fmt: skip
    for part, value in zip(("pre", "post", "comb"), found, strict=True):
        compare(value, GOLDEN[f"{name}.{part}"], "model.hc")


def test_more_rows_than_threads_and_none():
    values, scale, base, _ = cases.CASES[1].make(jax.random.key(0))
    values, mean_square = values[:200], jnp.linspace(0.01, 8, 200)[:, None]
    options = OPTIONS | {"norm_eps": cases.NORM_EPS, "implementation": on_chip.implementation("sm90")}
    found = pallas_kernels.split_mixes(values, scale, base, mean_square, **options)
    assert cases.error(found, values, scale, base, mean_square) < tolerances.of("model.hc")
    none = pallas_kernels.split_mixes(values[:0], scale, base, **options)
    assert [each.shape for each in none] == [(0, 4), (0, 4), (0, 4, 4)]


def test_rows_are_read_and_written_by_their_threads():
    """150 rows in two thread blocks: the second reads the last row again, and writes nothing behind it."""
    given = np.random.default_rng(0).standard_normal((150, 6)).astype(np.float32)
    with emulator.emulated(lane_ops, kernel):
        to = Memory(np.zeros((150, 6), np.float32))
        for first in (0, 128):
            x = kernel.load(Memory(given), emulator.value(first), 4)
            kernel.store(to, x, emulator.value(first), 2)
    expected = np.zeros_like(given)
    expected[:, 2] = given[:, 4]
    np.testing.assert_array_equal(to.array, expected)


def test_what_is_refused():
    values, scale, base, _ = cases.CASES[0].make(jax.random.key(0))
    with pytest.raises(ValueError, match=r"\[..., 15\], \[3\] and \[15\]"):
        pallas_kernels.split_mixes(values, scale, base, **OPTIONS | {"copies": 3})
    with pytest.raises(ValueError, match="one for every row"):
        pallas_kernels.split_mixes(values, scale, base, jnp.ones(1), **OPTIONS)
    with pytest.raises(NotImplementedError, match="not 8"):
        pallas_kernels.split_mixes(
            jnp.zeros((1, 80)), scale, jnp.zeros(80), **OPTIONS | {"copies": 8}, implementation=on_chip.implementation("sm90")
        )


@pytest.mark.skipif(aot.missing() is not None, reason=aot.missing() or "")
@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "b200"])
def test_every_case_compiles_without_spills(target):
    report = aot.compile_report((target,), "split_mixes")
    assert report.kernels and not report.unsupported, report.unsupported
    for k in report.kernels:
        assert k.spill_stores == k.spill_loads == k.stack == 0, k
