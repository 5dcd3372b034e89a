"""Sinkhorn's iterations: the kernel in the interpreter against the golden data, what it refuses, and the compiler."""

import jax
import jax.numpy as jnp
import on_chip
import pytest
import tolerances
from conftest import read_golden
from test_layers import compare

import pallas_kernels
from pallas_kernels import aot
from pallas_kernels.sinkhorn import cases

GOLDEN = read_golden("v41/ops/hc_sinkhorn")
CARRIED = sorted({name.rpartition(".")[0] for name in GOLDEN if name.startswith(("hc2", "hc4"))})


@pytest.mark.parametrize("implementation", ["reference", on_chip.implementation("sm90"), "interpret_sm100"])
@pytest.mark.parametrize("name", CARRIED)
def test_golden(name, implementation):
    copies, iterations, eps = name.split("_")
    copies = int(copies[2:])
    values, scale, base, comb = (GOLDEN[f"{name}.{part}"] for part in ("mixes", "scale", "base", "comb"))
    logits = (values * scale[2] + base)[..., 2 * copies :].reshape(comb.shape)
    found = pallas_kernels.sinkhorn(
        jnp.asarray(logits), iterations=int(iterations[2:]), eps=float(eps[3:]), implementation=implementation
    )
    compare(found, comb, "model.hc")


def test_more_matrices_than_threads_and_none():
    logits = jax.random.normal(jax.random.key(0), (200, 4, 4)) * jnp.linspace(0, 8, 200)[:, None, None]
    found = pallas_kernels.sinkhorn(logits, iterations=20, eps=1e-6, implementation=on_chip.implementation("sm90"))
    assert cases.error(found, logits) < tolerances.of("model.hc")
    none = pallas_kernels.sinkhorn(logits[:0], iterations=20, eps=1e-6, implementation=on_chip.implementation("sm90"))
    assert none.shape == (0, 4, 4)


def test_what_is_refused():
    with pytest.raises(ValueError, match="square"):
        pallas_kernels.sinkhorn(jnp.zeros((2, 3, 4)), iterations=1, eps=0.0)
    with pytest.raises(NotImplementedError, match="8 x 8"):
        pallas_kernels.sinkhorn(jnp.zeros((1, 8, 8)), iterations=1, eps=0.0, implementation=on_chip.implementation("sm90"))


@pytest.mark.skipif(aot.missing() is not None, reason=aot.missing() or "")
@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "b200"])
def test_every_case_compiles_without_spills(target):
    report = aot.compile_report((target,), "sinkhorn")
    assert report.kernels and not report.unsupported, report.unsupported
    for k in report.kernels:
        assert k.spill_stores == k.spill_loads == k.stack == 0, k
