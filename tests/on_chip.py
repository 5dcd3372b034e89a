"""Which implementation a kernel's test runs: the kernel itself on a GPU of its family, interpreted with races elsewhere."""

import contextlib

from pallas_kernels import mosaic, platform


def implementation(family: str) -> str:
    """The name of an implementation for `implementation=`."""
    return family if platform.kernel_name() == family else f"interpret_{family}"


def place():
    """The context that a kernel called by itself runs in."""
    return contextlib.nullcontext() if platform.kernel_name() is not None else mosaic.interpreter()
