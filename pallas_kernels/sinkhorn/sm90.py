"""Sinkhorn's iterations on Hopper."""

from pallas_kernels.sinkhorn.kernel import sinkhorn as sinkhorn
