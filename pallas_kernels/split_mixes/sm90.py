"""The mixes of hyper-connections on Hopper."""

from pallas_kernels.split_mixes.kernel import split_mixes as split_mixes
