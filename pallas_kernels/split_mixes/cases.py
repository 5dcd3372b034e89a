"""Named shapes of the mixes of hyper-connections: the four copies of DeepSeek-V4 and V4.1."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case

ITERATIONS, EPS, NORM_EPS, COPIES = 20, 1e-6, 1e-3, 4


def error(output, values, scale, base, mean_square):
    """The largest difference of a mix from the same arithmetic in float64."""
    values, scale, base, mean_square = (np.asarray(each, np.float64) for each in (values, scale, base, mean_square))
    c = COPIES
    found = values / np.sqrt(mean_square + NORM_EPS) * np.repeat(scale, (c, c, c * c)) + base
    sigmoid = 1 / (1 + np.exp(-found[:, : 2 * c]))
    matrix = found[:, 2 * c :].reshape(-1, c, c)
    matrix = np.exp(matrix - matrix.max(-1, keepdims=True))
    matrix = matrix / matrix.sum(-1, keepdims=True) + EPS
    for axis in (-2, *(-1, -2) * (ITERATIONS - 1)):
        matrix = matrix / (matrix.sum(axis, keepdims=True) + EPS)
    wanted = sigmoid[:, :c] + EPS, 2 * sigmoid[:, c:], matrix
    return max(float(np.abs(np.asarray(ours) - theirs).max()) for ours, theirs in zip(output, wanted, strict=True))


def _case(rows, compiled=False):
    width = COPIES * (2 + COPIES)
    return Case(
        section="Mixes of hyper-connections",
        shape=f"rows{rows}",
        operation="split_mixes",
        function="split_mixes",
        make=lambda key: (
            jax.random.normal(key, (rows, width)), jnp.asarray([1.0, 0.5, 1.5]), jnp.linspace(-1, 1, width),
            jnp.linspace(0.05, 0.5, rows)[:, None],
        ),
        call=lambda function, *arrays: function(*arrays, copies=COPIES, iterations=ITERATIONS, eps=EPS, norm_eps=NORM_EPS),
        check=error,
        flops=0.0,
        bytes=float(8 * rows * width),
        compiled=compiled,
    )


CASES = (_case(1, compiled=True), _case(2048))
