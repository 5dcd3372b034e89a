"""Sinkhorn's iterations on Hopper."""

from pallas_kernels.sinkhorn.kernel import sinkhorn as sinkhorn


def unproven(function, args):
    """Why this kernel is not chosen by itself for a call that it carries, or None."""
    return "the sm90 kernel was compiled and simulated, but never run on a GPU; name it to run it."
