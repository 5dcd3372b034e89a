"""What runs where."""

import contextlib
import functools

import jax
from jax._src import config as jax_config

CORES = 132  # multiprocessors of an H200; grids aim at a multiple of it, and are right with any other number
KERNELS = {9: "sm90", 10: "sm100"}  # major compute capability -> kernel family


def capability() -> tuple[int, int] | None:
    """Compute capability of the default GPU, or None if the default backend is not an NVIDIA GPU."""
    device = jax.devices()[0]
    text = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or not isinstance(text, str) or "." not in text:
        return None
    major, minor = text.split(".")
    return int(major), int(minor)


@functools.cache
def kernel_name() -> str | None:
    """The kernel family of the default GPU: "sm90", "sm100", or None where the reference is all there is."""
    found = capability()
    return KERNELS.get(found[0]) if found else None


def require(name: str) -> None:
    """Raises NotImplementedError if implementation `name` cannot run on the device at hand."""
    if name != "reference" and kernel_name() != name:
        found = capability()
        here = f"a GPU of compute capability {found[0]}.{found[1]}" if found else f"the {jax.default_backend()} backend"
        raise NotImplementedError(
            f"implementation={name!r} needs a GPU of that family, and this process runs on {here}. Use "
            f"implementation='reference', or 'interpret_{name}' to run the kernel in the interpreter."
        )


def is_interpreted() -> bool:
    """Whether a kernel traced now will be interpreted. Part of jax's trace context, so jit caches keep both apart."""
    return jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


@contextlib.contextmanager
def interpreted():
    """Runs Mosaic GPU kernels traced inside it in the GPU interpreter, which reports races.

    Raises NotImplementedError where jax has no Mosaic GPU bindings.
    """
    from pallas_kernels import mosaic

    with mosaic.interpreter():
        yield
