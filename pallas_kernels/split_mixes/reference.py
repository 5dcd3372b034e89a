"""The mixes of hyper-connections in plain JAX."""

import jax


def split_mixes(values, scale, base, mean_square=None, *, copies, iterations, eps, norm_eps=0.0):
    values, c = values if mean_square is None else values * jax.lax.rsqrt(mean_square + norm_eps), copies
    pre = jax.nn.sigmoid(values[..., :c] * scale[0] + base[:c]) + eps
    post = 2 * jax.nn.sigmoid(values[..., c : 2 * c] * scale[1] + base[c : 2 * c])
    comb = (values[..., 2 * c :] * scale[2] + base[2 * c :]).reshape(*values.shape[:-1], c, c)
    return pre, post, sinkhorn(comb, iterations=iterations, eps=eps)


def sinkhorn(logits, *, iterations, eps):
    """Square matrices made nearly doubly stochastic."""

    def normalize(axis, matrix):
        return matrix / (matrix.sum(axis, keepdims=True) + eps)

    start = normalize(-2, jax.nn.softmax(logits, axis=-1) + eps)
    return jax.lax.fori_loop(0, iterations - 1, lambda _, matrix: normalize(-2, normalize(-1, matrix)), start)
