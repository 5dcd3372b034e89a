"""Dispatch, the GPU interpreter and the compile report, on kernels of a few lines."""

import logging
import sys
import types

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import aot, dispatch, mosaic


def _double(x, *, racy=False):
    """Twice `x`: one warpgroup loads and doubles, another stores. Racy: it does not wait for the first."""

    def body(x_ref, out_ref, tile, loaded, doubled):
        @pl.when(jax.lax.axis_index("wg") == 0)
        def _():
            plgpu.copy_gmem_to_smem(x_ref, tile, loaded)
            plgpu.barrier_wait(loaded)
            tile[...] = tile[...] * 2
            plgpu.commit_smem()
            if not racy:
                plgpu.barrier_arrive(doubled)

        @pl.when(jax.lax.axis_index("wg") == 1)
        def _():
            if not racy:
                plgpu.barrier_wait(doubled)
            plgpu.copy_smem_to_gmem(tile, out_ref)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(1,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier(), plgpu.Barrier()],
    )(x)


@pytest.fixture
def operation(monkeypatch):
    """A made-up operation with a reference and a Hopper kernel."""
    package = types.ModuleType("made_up")
    package.__path__ = []
    reference = types.ModuleType("made_up.reference")
    reference.double = lambda x: x * 2
    sm90 = types.ModuleType("made_up.sm90")
    sm90.double = _double
    for module in (package, reference, sm90):
        module.__spec__ = types.SimpleNamespace(name=module.__name__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package.__name__


def test_interpreted_kernel_runs_and_is_right(operation):
    x = jnp.arange(128, dtype=jnp.float32)
    np.testing.assert_array_equal(dispatch.call(operation, "double", "interpret_sm90", x), 2 * np.arange(128))
    assert not mosaic.is_interpreted()


def test_the_interpreter_refuses_where_it_would_wait_for_ever(operation, monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    with pytest.raises(RuntimeError, match="Set NPROC=6 in the environment"):
        dispatch.call(operation, "double", "interpret_sm90", jnp.arange(128, dtype=jnp.float32))


def test_a_race_is_an_error_and_the_next_run_is_clean():
    x = jnp.arange(128, dtype=jnp.float32)
    with pytest.raises(Exception, match="RACE DETECTED"), mosaic.interpreter():
        jax.block_until_ready(_double(x, racy=True))
    with mosaic.interpreter():
        np.testing.assert_array_equal(jax.block_until_ready(_double(x)), 2 * np.arange(128))


def test_forced_name_never_falls_back(operation):
    x = jnp.ones(128)
    with pytest.raises(NotImplementedError, match="needs a GPU of that family"):
        dispatch.call(operation, "double", "sm90", x)
    with pytest.raises(NotImplementedError, match="no sm100 kernel"):
        dispatch.call(operation, "double", "interpret_sm100", x)
    with pytest.raises(ValueError, match="Allowed: None, reference, sm90"):
        dispatch.call(operation, "double", "cuda", x)


def test_compile_report_of_a_kernel():
    if (reason := aot.missing()) is not None:
        pytest.skip(reason)
    (kernel,) = aot.compile_for("h200", _double, jax.ShapeDtypeStruct((128,), jnp.float32))
    assert (kernel.spill_stores, kernel.spill_loads) == (0, 0)
    assert 0 < kernel.registers <= 255
    assert kernel.smem >= 512
    assert kernel.instructions["UTMALDG"] + kernel.instructions["UBLKCP"] >= 1
    assert kernel.instructions["UTCxMMA"] == 0
    assert aot.compile_for("h200", _double, jax.ShapeDtypeStruct((128,), jnp.float32)) == (kernel,)


def test_unknown_names_are_named():
    with pytest.raises(ValueError, match="'h100' is not known. Allowed: h200, b200"):
        aot.compile_report(("h100",))
    with pytest.raises(ValueError, match="operation='nothing' is not known"):
        aot.cases("nothing")


def test_a_kernel_that_never_ran_on_the_chip_runs_only_where_it_is_named(operation, monkeypatch, caplog):
    kernel = sys.modules["made_up.sm90"]

    def double(x):
        return f"kernel on {x}"

    double.__module__ = kernel.__name__
    kernel.double = double
    kernel.unproven = lambda function, arguments: f"{function} of {arguments[0]} never ran" if arguments[0] > 1 else None
    monkeypatch.setattr(dispatch.platform, "kernel_name", lambda: "sm90")
    caplog.set_level(logging.INFO)
    dispatch._say_once.cache_clear()
    for _ in range(2):
        assert dispatch.call(operation, "double", None, 1) == "kernel on 1"
        assert dispatch.call(operation, "double", None, 2) == 4
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "made_up.double: the sm90 kernel runs"),
        ("WARNING", "made_up.double: the reference runs instead of sm90: double of 2 never ran"),
    ]
    assert dispatch.call(operation, "double", "sm90", 2) == "kernel on 2"


def test_a_preferred_implementation_serves_calls_that_name_none(operation, monkeypatch):
    monkeypatch.setattr(dispatch.platform, "kernel_name", lambda: "sm90")
    with dispatch.preferred("reference"):
        assert dispatch.call(operation, "double", None, 3) == 6
    with pytest.raises(ValueError, match="'triton' of any operation is not known"), dispatch.preferred("triton"):
        pass


def test_whether_a_kernel_runs_is_known_before_it_is_called(operation, monkeypatch):
    """As `call` decides: by the GPU at hand, what the kernel carries and holds back, and the implementation preferred."""
    x, kernel = jax.ShapeDtypeStruct((128,), jnp.float32), sys.modules["made_up.sm90"]
    assert not dispatch.runs_kernel(operation, "double", x)
    with dispatch.preferred("interpret_sm90"):
        assert dispatch.runs_kernel(operation, "double", x, racy=False)
    monkeypatch.setattr(dispatch.platform, "kernel_name", lambda: "sm90")
    assert dispatch.runs_kernel(operation, "double", x)
    assert not dispatch.runs_kernel(operation, "triple", x)
    with dispatch.preferred("reference"):
        assert not dispatch.runs_kernel(operation, "double", x)
    monkeypatch.setattr(dispatch.platform, "kernel_name", lambda: "sm100")
    assert not dispatch.runs_kernel(operation, "double", x)
    monkeypatch.setattr(dispatch.platform, "kernel_name", lambda: "sm90")

    def double(x):
        if x.dtype != jnp.float32:
            raise NotImplementedError("float32 alone")
        return x

    double.__module__ = kernel.__name__
    kernel.double = double
    assert dispatch.runs_kernel(operation, "double", x)
    assert not dispatch.runs_kernel(operation, "double", jax.ShapeDtypeStruct((128,), jnp.bfloat16))
    kernel.unproven = lambda function, arguments: "never ran"
    assert not dispatch.runs_kernel(operation, "double", x)
    with dispatch.preferred("sm90"):
        assert dispatch.runs_kernel(operation, "double", x)
