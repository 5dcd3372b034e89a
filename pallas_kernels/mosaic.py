"""Shared Mosaic GPU pieces, and everything of Mosaic GPU that is private or changes between jax releases.

Kernels import `plgpu` and these helpers; only this file may reach into ``jax._src`` or write MLIR by hand. Code written
by hand cannot be simulated, so each such helper carries a twin in plain Pallas that runs when a kernel is interpreted.
"""

import contextlib
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax._src import config as jax_config
from jax._src.lib import mosaic_gpu as mosaic_gpu_lib
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks


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


def kernel_times(f, args, iterations: int, before=None) -> list[float]:
    """Device time of all the GPU kernels that one call ``f(*args)`` launches, microseconds, per iteration (CUPTI).

    `before`, if given, is called in front of every iteration (to flush a cache, say) and is not counted. Launch gaps
    between kernels are not counted either.
    """
    before = before or (lambda: ())
    skipped = len(_timed(before, ()))
    times = []
    for _ in range(iterations):
        launched = _timed(lambda: (before(), f(*args)), ())
        times.append(1e3 * sum(milliseconds for _, milliseconds in launched[skipped:]))
    return times


def _timed(f, args) -> list[tuple[str, float]]:
    cupti = mosaic_gpu_lib._mosaic_gpu_ext
    jax.block_until_ready(f(*args))
    cupti._cupti_init()
    try:
        jax.block_until_ready(f(*args))
    finally:
        timings = cupti._cupti_get_timings(True)
    return timings or []
