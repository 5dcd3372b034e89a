"""Shared Mosaic GPU pieces, and everything of Mosaic GPU that is private or changes between jax releases.

Kernels import `plgpu` and these helpers; only this file may reach into ``jax._src`` or write MLIR by hand. Code written
by hand cannot be simulated, so each such helper carries a twin in plain Pallas that runs when a kernel is interpreted.
"""

import contextlib
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src import config as jax_config
from jax._src.lib import mosaic_gpu as mosaic_gpu_lib
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

CORES = 132  # multiprocessors of an H200; grids aim at a multiple of it, and are right with any other number


@contextlib.contextmanager
def interpreter():
    """Runs Mosaic GPU kernels called inside it on the CPU in the GPU interpreter; a race is an error.

    Wait for the results (`jax.block_until_ready`) before leaving: the interpreter works asynchronously.
    """
    gpu_callbacks.reset_gpu_interpret_mode_state()  # what a failed run left behind would fail the next one
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def is_interpreted() -> bool:
    """Whether a kernel traced now will be interpreted. Part of jax's trace context, so jit caches keep both apart."""
    return jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


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
    memory. With rows of 128 bytes both have the same bytes, so the scratch is both: take it apart with `row_tile_views`.
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
