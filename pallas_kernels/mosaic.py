"""Shared Mosaic GPU pieces, and everything of Mosaic GPU that is private or changes between jax releases.

Kernels import `plgpu` and these helpers; only this file, and `platform.is_interpreted`, may reach into ``jax._src``. Importing it
raises NotImplementedError where jax has no Mosaic GPU bindings; nothing that runs everywhere does. Code that is written in MLIR by
hand, lane by lane (`lane_code`; in files of their own), cannot be simulated, so each such piece carries a twin in plain Pallas that
runs when a kernel is interpreted.
"""

import contextlib
import functools
import os

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np

from pallas_kernels.platform import CORES as CORES, is_interpreted as is_interpreted

try:
    from jax._src.lib import mosaic_gpu as mosaic_gpu_lib
except ModuleNotFoundError as missing:
    raise NotImplementedError(
        "GPU kernels, interpreted ones too, need jax's Mosaic GPU bindings, which are not installed: pip install "
        "'dsa-jax[cuda13]' or 'dsa-jax[cuda12]' with an NVIDIA GPU, 'dsa-jax[interpret]' without one (Linux x86-64). "
        "The references run without them."
    ) from missing

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

INTERPRETER_THREADS = 6  # the largest kernels have five warpgroups


@contextlib.contextmanager
def interpreter():
    """Runs Mosaic GPU kernels called inside it on the CPU in the GPU interpreter; a race is an error.

    Wait for the results (`jax.block_until_ready`) before leaving: the interpreter works asynchronously. Every warpgroup
    takes a thread of XLA's CPU client, and with fewer threads than warpgroups a kernel never ends; where there are few
    cores, set the environment variable NPROC (8 is enough) before jax first runs anything.
    """
    os.environ.setdefault("NPROC", "16")  # in time only if nothing has run yet
    threads = int(os.environ.get("NPROC") or os.cpu_count() or 1)
    if threads < INTERPRETER_THREADS:
        raise RuntimeError(
            f"The GPU interpreter runs a kernel's warpgroups on threads of XLA's CPU client, which has {threads} here, and "
            f"the kernels need {INTERPRETER_THREADS}. Set NPROC={INTERPRETER_THREADS} in the environment before starting Python."
        )
    gpu_callbacks.reset_gpu_interpret_mode_state()  # what a failed run left behind would fail the next one
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    races = gpu_callbacks._races  # of the last kernel; jax 0.12 raises at the race, 0.11 logs it and goes on
    if races is not None and races.races_found:
        raise RuntimeError("RACE DETECTED in an interpreted kernel; the log says between which accesses.")


def lane_code(*, arg_types, return_type=None, twin):
    """Decorator: a function ``(ctx, *args)`` of MLIR builders, inlined in a kernel; `twin(*args)` when interpreted.

    `arg_types` and `return_type` are those of `plgpu.inline_mgpu`. Inlined code gets no implicit warpgroup barriers.
    """

    def wrap(function):
        compiled = plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)(function)

        @functools.wraps(function)
        def call(*args):
            return twin(*args) if is_interpreted() else compiled(*args)

        return call

    return wrap


def row_tile(shape: tuple[int, ...], dtype):
    """Scratch for tiles of rows of 128 bytes [..., rows, 128 bytes] that tensor cores read and TMA fills from any row.

    Tensor cores want a tiling of 8 rows, and TMA into a tiled reference only starts at every eighth row of device
    memory. With rows of 128 bytes both have the same bytes, so the scratch is both: `row_tile_views` takes it apart.
    """
    width = 128 // jnp.dtype(dtype).itemsize
    if shape[-1] != width:
        raise ValueError(f"shape={shape} of {jnp.dtype(dtype)}: rows must have 128 bytes, {width} values.")
    swizzle = plgpu.SwizzleTransform(128)
    tiled = plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), swizzle))
    if is_interpreted():  # where references have no layout, and aliases are not allowed to meet
        return tiled
    return plgpu.RefUnion(tiled, plgpu.SMEM(shape, dtype, transforms=(swizzle,)))


def row_tile_views(ref):
    """The two views of a `row_tile` scratch: for tensor cores, and for TMA."""
    return (ref, ref) if is_interpreted() else tuple(ref)


def fence_proxies():
    """Orders what plain accesses and cp.async did to shared memory, as this thread has seen it, before TMA and MMA.

    `plgpu.commit_smem` without its barrier. In front of an arrival that frees a slot that was read; behind the wait for
    a slot that cp.async filled. Not for a thread with cp.async copies under way: it waits for all of them.
    """

    @lane_code(arg_types=(), twin=plgpu.commit_smem)
    def fence(_):
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    fence()


def synchronize():
    """Waits until all threads of the warpgroup are here, in a kernel without barriers of Pallas's own."""

    @lane_code(arg_types=(), twin=lambda: None)
    def wait(_):
        mgpu.warpgroup_barrier()

    wait()


def accumulate(products, accs):
    """Accumulators (float32, in the layout of a wgmma) and what ``products(*their references)`` adds to them by wgmma."""

    def fresh(*refs):
        products(*refs)
        return [ref[...] for ref in refs]

    if is_interpreted():  # where an accumulator starts at zero
        added = pl.run_scoped(fresh, *[plgpu.ACC(acc.shape, acc.dtype) for acc in accs])
        return [acc + more for acc, more in zip(accs, added)]
    return list(pl.run_state(lambda refs: products(*refs))([plgpu.ACC.init(acc) for acc in accs]))


def scalar(array):
    """Inside lane code: the value of an array argument of shape ()."""
    (register,) = array.registers.flat
    if isinstance(register.type, ir.VectorType):
        return vector.extract(register, [], ir.DenseI64ArrayAttr.get([0]))
    return register


def global_pointer(ref):
    """Inside lane code: a pointer to device memory that says so, for ld.global and st.global, not generic accesses."""
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(ref))


def kernel_times(f, args, iterations: int, before=None) -> list[float]:
    """Device time of all the GPU kernels that one call ``f(*args)`` launches, microseconds, per iteration (CUPTI).

    `before`, if given, is called in front of every iteration (to flush a cache, say) and is not counted. Launch gaps
    between kernels are not counted either.
    """
    before = before or (lambda: ())
    skipped = len(_timed(before, 1))
    launched = _timed(lambda: (before(), f(*args)), iterations)
    if len(launched) % iterations:
        raise RuntimeError(f"{len(launched)} kernels in {iterations} iterations: not the same number in each.")
    each = len(launched) // iterations
    return [1e3 * sum(time for _, time in launched[i * each + skipped : (i + 1) * each]) for i in range(iterations)]


def _timed(f, iterations) -> list[tuple[str, float]]:
    """Name and milliseconds of every kernel, in the order they were launched."""
    cupti = mosaic_gpu_lib._mosaic_gpu_ext
    jax.block_until_ready(f())
    cupti._cupti_init()
    try:
        for _ in range(iterations):
            out = f()
        jax.block_until_ready(out)
    finally:
        timings = cupti._cupti_get_timings(True)
    return timings or []
