"""Named shapes of Sinkhorn's iterations: the four copies of DeepSeek-V4 and V4.1."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case

ITERATIONS, EPS, COPIES = 20, 1e-6, 4


def error(output, logits):
    """The largest difference of an entry from the same iterations in float64."""
    matrix = np.asarray(logits, np.float64)
    matrix = np.exp(matrix - matrix.max(-1, keepdims=True))
    matrix = matrix / matrix.sum(-1, keepdims=True) + EPS
    for axis in (-2, *(-1, -2) * (ITERATIONS - 1)):
        matrix = matrix / (matrix.sum(axis, keepdims=True) + EPS)
    return float(np.abs(np.asarray(output) - matrix).max())


def _case(rows, compiled=False):
    shape = (rows, COPIES, COPIES)
    return Case(
        section="Sinkhorn's iterations",
        shape=f"rows{rows}",
        operation="sinkhorn",
        function="sinkhorn",
        make=lambda key: (4 * jax.random.normal(key, shape, jnp.float32),),
        call=lambda function, logits: function(logits, iterations=ITERATIONS, eps=EPS),
        check=error,
        flops=0.0,
        bytes=float(8 * rows * COPIES**2),
        compiled=compiled,
    )


CASES = (_case(1, compiled=True), _case(2048))
