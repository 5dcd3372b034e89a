"""Named shapes of products with stored weights: experts of V4.1 and V3.2, and V4.1's dense FP8 linears."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.case import Case

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _sample(count, of):
    """`count` indices spread over `of`, first and last among them."""
    return np.unique(np.linspace(0, of - 1, count).astype(np.int32))


def random_weight(key, experts, outputs, inputs, block):
    """(weight, scale) of `experts`: every code that is a number, and scales of about 1. block None: FP4."""
    a, b = jax.random.split(key)
    if block is None:
        weight, tiles = jax.random.bits(a, (experts, outputs, inputs // 2), jnp.uint8), (outputs, inputs // 32)
    else:
        codes = jax.random.bits(a, (experts, outputs, inputs), jnp.uint8)
        codes = jnp.where(codes & 0x7F == 0x7F, codes ^ 1, codes)  # no NaN
        weight = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        tiles = -(-outputs // block[0]), -(-inputs // block[1])
    return weight, jax.random.randint(b, (experts, *tiles), 121, 133).astype(jnp.uint8)


def _exact(x, weight, scale, columns, block):
    """Columns `columns` of x [rows, K] times a weight [N, stored], transposed, decoded by table and summed in float32."""
    if block is None:
        packed, block = weight[columns], (1, 32)
        codes = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(len(columns), -1)
        values = jnp.array(_FP4, jnp.float32)[codes.astype(jnp.int32)]
    else:
        values = weight[columns].astype(jnp.float32)
    exponents = scale[columns // block[0]][:, np.arange(values.shape[1]) // block[1]].astype(jnp.int32) - 127
    return jnp.matmul(x.astype(jnp.float32), jnp.ldexp(values, exponents).T, precision=lax.Precision.HIGHEST)


def error(found, x, weight, scale, group, block):
    """Norm of the difference over a sample of tiles, rows and columns, over the norm of the exact products."""
    columns, rows = _sample(64, weight.shape[1]), _sample(8, x.shape[1])
    difference, size = [], []
    for t in _sample(4, len(x)):
        wanted = _exact(x[t, rows], weight[group[t]], scale[group[t]], columns, block)
        difference.append(found[t][rows][:, columns].astype(jnp.float32) - wanted)
        size.append(wanted)
    result = jnp.linalg.norm(jnp.stack(difference)) / jnp.linalg.norm(jnp.stack(size))
    return jnp.where(jnp.isfinite(found).all(), result, jnp.inf)


def _moved(rows, outputs, inputs, weights, block):
    """Bytes of so many rows in and out in bf16, and of so many weights with their scales."""
    if block is None:
        stored, scales = outputs * inputs // 2, outputs * inputs // 32
    else:
        stored, scales = outputs * inputs, -(-outputs // block[0]) * -(-inputs // block[1])
    return float(2 * rows * (inputs + outputs) + weights * (stored + scales))


def _grouped(section, name, outputs, inputs, block, experts, tiles, rows, weights=1, compiled=False):
    """Tiles of as many experts as there are, those of one expert next to each other; `weights` with the same inputs."""

    def make(key):
        a, b, *c = jax.random.split(key, 2 + weights)
        x = jax.random.normal(a, (tiles, rows, inputs)).astype(jnp.bfloat16)
        chosen = jax.random.permutation(b, experts)[:tiles].astype(jnp.int32)
        group = jnp.repeat(chosen, -(-tiles // experts))[:tiles]
        return x, group, *_stacked(random_weight(key, experts, outputs, inputs, block) for key in c)

    def call(function, x, group, weight, scale):
        return function(x, weight, scale, group, block=block, out_dtype=jnp.dtype(jnp.bfloat16))

    def check(found, x, group, weight, scale):
        return _largest_error(found, x, weight, scale, group, block)

    return Case(
        section=section,
        shape=f"{name} {outputs}x{inputs} t{tiles} r{rows}",
        operation="grouped_gemm",
        function="grouped_gemm",
        make=make,
        call=call,
        check=check,
        flops=2.0 * tiles * rows * weights * outputs * inputs,
        bytes=_moved(tiles * rows, weights * outputs, inputs, min(tiles, experts), block),
        peak="bf16",
        compiled=compiled,
        targets=("sm90", "sm100") if weights == 1 else ("sm90",),  # Blackwell's kernel takes one after the other
    )


def _dense(name, outputs, inputs, rows, weights=1, compiled=False):
    block = (32, 32)

    def make(key):
        a, *b = jax.random.split(key, 1 + weights)
        stored = (random_weight(key, 1, outputs, inputs, block) for key in b)
        return jax.random.normal(a, (rows, inputs)).astype(jnp.bfloat16), *_stacked((w[0], s[0]) for w, s in stored)

    def call(function, x, weight, scale):
        return function(x, weight, scale, block=block, out_dtype=jnp.dtype(jnp.bfloat16))

    def check(found, x, weight, scale):
        found, weight, scale = jax.tree.map(lambda each: each[None], (found, weight, scale))
        return _largest_error(found, x[None], weight, scale, jnp.zeros(1, jnp.int32), block)

    return Case(
        section="Dense products, FP8 with a scale per 32 x 32",
        shape=f"{name} {outputs}x{inputs} r{rows}",
        operation="grouped_gemm",
        function="quantized_matmul",
        make=make,
        call=call,
        check=check,
        flops=2.0 * rows * weights * outputs * inputs,
        bytes=_moved(rows, weights * outputs, inputs, 1, block),
        peak="bf16",
        compiled=compiled,
    )


def _stacked(pairs):
    """(weight, scale) of one pair; tuples of weights and of scales of several."""
    weights, scales = zip(*pairs, strict=True)
    return (weights, scales) if len(weights) > 1 else (weights[0], scales[0])


def _largest_error(found, x, weight, scale, group, block):
    if not isinstance(weight, tuple):
        return error(found, x, weight, scale, group, block)
    return jnp.max(jnp.stack([error(f, x, w, s, group, block) for f, w, s in zip(found, weight, scale, strict=True)]))


_EXPERTS, _V32_EXPERTS = "Experts, FP4", "Experts, FP8 with a scale per 128 x 128"
_STEPS = ((6, 8), (32, 16), (96, 128))  # tiles, rows of one request, of 32, of a chunk of 2048 tokens
CASES = (
    *[_grouped(_EXPERTS, "w1", 2304, 5120, None, 32, *step, compiled=True) for step in _STEPS],
    *[_grouped(_EXPERTS, "w1+w3", 2304, 5120, None, 32, *step, weights=2, compiled=True) for step in _STEPS],
    *[_grouped(_EXPERTS, "w2", 5120, 2304, None, 32, *step) for step in _STEPS],
    *[_dense("wq_a", 1280, 5120, rows, compiled=True) for rows in (8, 32, 128, 2048)],
    *[_dense("shared w1+w3", 2304, 5120, rows, weights=2) for rows in (1, 32, 128)],
    *[_dense("wq_b", 32768, 1280, rows) for rows in (8, 32, 128, 2048)],
    *[_dense("wo_b", 5120, 8192, rows) for rows in (8, 32, 128, 2048)],
    _grouped(_V32_EXPERTS, "w1", 2048, 7168, (128, 128), 8, 8, 16, compiled=True),
)
