"""Sinkhorn's iterations in plain JAX."""

import jax


def sinkhorn(logits, *, iterations, eps):
    def normalize(axis, matrix):
        return matrix / (matrix.sum(axis, keepdims=True) + eps)

    start = normalize(-2, jax.nn.softmax(logits, axis=-1) + eps)
    return jax.lax.fori_loop(0, iterations - 1, lambda _, matrix: normalize(-2, normalize(-1, matrix)), start)
