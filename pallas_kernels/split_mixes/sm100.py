"""The mixes of hyper-connections on Blackwell: Hopper's kernel."""

from pallas_kernels.split_mixes.kernel import split_mixes as split_mixes


def unproven(function, args):
    """Why this kernel is not chosen by itself for a call that it carries, or None."""
    return "the sm100 kernel was compiled and simulated, but never run on a GPU; name it to run it."
