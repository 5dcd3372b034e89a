"""Named shapes of the indexer's dense scores."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import quantize
from pallas_kernels.case import Case
from pallas_kernels.indexer_logits import sm90
from pallas_kernels.records import IndexFP8, IndexMXFP4, PagedRows

WIDTH = 128
_FP8 = jnp.float8_e4m3fn
_RAGGED = "Indexer logits, ragged prefill (fp8)"
_RAGGED_MXFP4 = "Indexer logits, ragged prefill (mxfp4)"
_PAGED = "Indexer logits, paged decode (fp8)"
_PAGED_MXFP4 = "Indexer logits, paged decode (mxfp4)"


def random_fp8(key, shape):
    """Random FP8 values of every exponent below the largest eight: none is NaN, and few are equal."""
    bits = jax.random.bits(key, shape, jnp.uint8)
    return lax.bitcast_convert_type(bits & 0xBF, _FP8)


def random_pages(key, num_pages, page_size):
    """A cache of IndexFP8 pages of random keys with power-of-two scales."""
    values, scales = jax.random.split(key)
    values = lax.bitcast_convert_type(random_fp8(values, (num_pages, page_size * WIDTH)), jnp.uint8)
    scales = jnp.exp2(jax.random.randint(scales, (num_pages, page_size), -3, 4).astype(jnp.float32))
    scales = lax.bitcast_convert_type(scales, jnp.uint8).reshape(num_pages, -1)
    return PagedRows(jnp.concatenate([values, scales], axis=1), IndexFP8(WIDTH), page_size)


def random_mxfp4(key, *shape):
    """Random MXFP4 rows of 128 values: packed [*shape, 64] and exponents [*shape, 4]."""
    values, exponents = jax.random.split(key)
    packed = jax.random.bits(values, (*shape, WIDTH // 2), jnp.uint8)
    return packed, jax.random.randint(exponents, (*shape, WIDTH // 32), 120, 134).astype(jnp.uint8)


def random_mxfp4_pages(key, num_pages, page_size):
    """A cache of IndexMXFP4 pages of random keys."""
    packed, exponents = random_mxfp4(key, num_pages, page_size)
    pages = jnp.concatenate([packed.reshape(num_pages, -1), exponents.reshape(num_pages, -1)], axis=1)
    return PagedRows(pages, IndexMXFP4(WIDTH), page_size)


def random_queries(key, shape, mxfp4):
    """FP8 queries [*shape, 128]; in bf16 for MXFP4 keys."""
    q = random_fp8(key, (*shape, WIDTH))
    return q.astype(jnp.bfloat16) if mxfp4 else q


def random_packed(key, count, mxfp4):
    """Packed keys [count, ...] and their scales."""
    values, scales = jax.random.split(key)
    if mxfp4:
        return random_mxfp4(values, count)
    scale = jnp.exp2(jax.random.randint(scales, (count,), -3, 4).astype(jnp.float32))
    return random_fp8(values, (count, WIDTH)), scale


def decoded(k, scale):
    """Packed keys and their scales as float32 rows."""
    return quantize.dequantize_fp4(k, scale) if k.dtype == jnp.uint8 else k.astype(jnp.float32) * scale[:, None]


def exact_scores(q, keys, weights, rounded=False):
    """sum_h weights * relu(q . keys) in float32: q [R, H, D], keys [R, S, D] or [S, D], weights [R, H] -> [R, S].

    rounded: dot products, their products with the weights and the sums are rounded to bf16.
    """
    as_bf16 = lambda x: lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) if rounded else x  # noqa: E731
    keys = jnp.broadcast_to(keys, (q.shape[0], *keys.shape[-2:]))

    def row(arrays):
        q, keys, weights = arrays
        dots = jnp.einsum("hd,sd->hs", q.astype(jnp.float32), keys, precision=lax.Precision.HIGHEST)
        products = as_bf16(weights.astype(jnp.float32)[:, None] * jnp.maximum(as_bf16(dots), 0))
        return as_bf16(jnp.sum(products, axis=0))

    return lax.map(row, (q, keys, weights))


def relative_error(found, wanted, visible):
    """Norm of the difference over the norm of `wanted`, where `visible`; infinite unless exactly the rest is -inf."""
    masked = jnp.all(jnp.where(visible, jnp.isfinite(found), found == -jnp.inf))
    difference = jnp.linalg.norm(jnp.where(visible, found - wanted, 0))
    error = difference / jnp.linalg.norm(jnp.where(visible, wanted, 0))
    return jnp.where(masked, error, jnp.inf)


def sample(count, of):
    """`count` indices spread over `of`, first and last among them."""
    return np.unique(np.linspace(0, of - 1, count).astype(np.int32))


def _ragged(heads, rows, keys, compiled=False, mxfp4=False, dtype=jnp.float32):
    def make(key):
        a, b, c = jax.random.split(key, 3)
        start = jnp.zeros(rows, jnp.int32)
        end = keys - rows + 1 + jnp.arange(rows, dtype=jnp.int32)
        q, weights = random_queries(a, (rows, heads), mxfp4), jax.random.normal(c, (rows, heads))
        k, scale = random_packed(b, keys, mxfp4)
        return q, k, weights, start, end, scale

    def call(function, q, k, weights, start, end, scale):
        return function(q, k, weights, row_start=start, row_end=end, k_scale=scale, dtype=dtype)

    def check(found, q, k, weights, start, end, scale):
        at = sample(12, rows)
        wanted = exact_scores(q[at], decoded(k, scale), weights[at])
        column = jnp.arange(keys)
        return relative_error(found[at], wanted, (column >= start[at, None]) & (column < end[at, None]))

    pairs = sum(keys - rows + 1 + i for i in range(rows))
    q_bytes, row_bytes = (2 * WIDTH, 68) if mxfp4 else (WIDTH, WIDTH + 4)
    return Case(
        section=_RAGGED_MXFP4 if mxfp4 else _RAGGED, shape=f"h{heads} sq{rows} skv{keys} causal {jnp.dtype(dtype)}",
        operation="indexer_logits", function="indexer_logits", make=make, call=call, check=check,
        flops=2.0 * pairs * heads * WIDTH,
        bytes=rows * heads * (q_bytes + 4) + keys * row_bytes + float(jnp.dtype(dtype).itemsize * pairs),
        peak="bf16" if mxfp4 else "fp8", compiled=compiled,
    )  # fmt: skip


def _paged(heads, batch, rows, context, page_size=64, compiled=False, mxfp4=False, rounded=False):
    """rounded: as DeepSeek-V4.1 takes its scores, with bf16 weights and roundings."""
    pages = context // page_size

    def make(key):
        a, b, c, d = jax.random.split(key, 4)
        table = jax.random.permutation(d, batch * pages).reshape(batch, pages).astype(jnp.int32)
        lengths = jnp.full((batch, rows), context, jnp.int32)
        keys = (random_mxfp4_pages if mxfp4 else random_pages)(b, batch * pages, page_size)
        weights = jax.random.normal(c, (batch, rows, heads), jnp.bfloat16 if rounded else jnp.float32)
        schedule = sm90.make_schedule(lengths, heads)
        return random_queries(a, (batch, rows, heads), mxfp4), keys, weights, lengths, table, schedule

    def call(function, q, keys, weights, lengths, table, schedule):
        rounding = jnp.bfloat16 if rounded else None
        return function(
            q, keys, weights, context_lens=lengths, block_table=table, schedule=schedule, rounding=rounding
        )

    def check(found, q, keys, weights, lengths, table, schedule):
        at = sample(4, batch)
        row = jnp.arange(context, dtype=jnp.int32)
        error = 0.0
        for b in at:
            slots = table[b][row // page_size] * page_size + row % page_size
            wanted = exact_scores(q[b], keys.gather(slots), weights[b], rounded)
            error = jnp.maximum(error, relative_error(found[b], wanted, row < lengths[b][:, None]))
        return error

    name = f"h{heads} b{batch} next_n{rows} ctx{context} float32" + ("" if page_size == 64 else f" page{page_size}")
    name += " rounded" * rounded
    pairs = batch * rows * context
    q_bytes = 2 * WIDTH if mxfp4 else WIDTH
    row_bytes = (IndexMXFP4 if mxfp4 else IndexFP8)(WIDTH).row_bytes
    return Case(
        section=_PAGED_MXFP4 if mxfp4 else _PAGED, shape=name, operation="indexer_logits",
        function="paged_indexer_logits", make=make, call=call,
        check=check, flops=2.0 * pairs * heads * WIDTH,
        bytes=batch * rows * heads * (q_bytes + 4) + batch * context * row_bytes + 4.0 * pairs,
        peak="bf16" if mxfp4 else "fp8", compiled=compiled,
    )  # fmt: skip


def _packed_queries(heads, batch, context):
    """As a shape of paged decode with MXFP4 keys, but the queries are packed MXFP4 too."""
    base = _paged(heads, batch, 1, context, mxfp4=True)

    def make(key):
        _, *rest = base.make(key)
        return *random_mxfp4(jax.random.fold_in(key, 1), batch, 1, heads), *rest

    def call(function, q, q_scale, keys, weights, lengths, table, schedule):
        return function(
            q, keys, weights, context_lens=lengths, block_table=table, q_scale=q_scale, schedule=schedule
        )

    def check(found, q, q_scale, *rest):
        return base.check(found, quantize.dequantize_fp4(q, q_scale), *rest)

    return dataclasses.replace(
        base, shape=base.shape + " packed", make=make, call=call, check=check, compiled=True, targets=("sm100",)
    )


_LENGTHS = {64: (4096, 8192, 16384, 32768, 65536, 131072), 32: (4096, 16384, 65536, 131072)}
_STANDARD = {(64, 2048, 32768), (32, 4096, 131072)}

CASES = (
    *[
        _ragged(heads, rows, keys, compiled=(heads, rows, keys) in _STANDARD)
        for heads, lengths in _LENGTHS.items()
        for rows in (2048, 4096)
        for keys in lengths
    ],
    *[_ragged(heads, 2048, 32768, compiled=True, mxfp4=True) for heads in (64, 32)],
    _ragged(32, 4096, 131072, mxfp4=True),
    _ragged(8, 2048, 32768, mxfp4=True),
    _ragged(32, 4096, 16384, compiled=True, dtype=jnp.bfloat16),
    _ragged(16, 2048, 32768),
    _ragged(8, 2048, 32768, compiled=True),
    *[
        _paged(heads, batch, 1, context, compiled=(batch, context) == (32, 65536))
        for heads in (64, 32)
        for batch in (1, 32, 128)
        for context in (4096, 16384, 65536, 131072)
    ],
    *[_paged(64, batch, 2, 65536, compiled=batch == 32) for batch in (1, 32, 128)],
    _paged(64, 32, 3, 65536, compiled=True),
    _paged(64, 32, 8, 65536),
    _paged(16, 32, 1, 65536),
    _paged(8, 32, 1, 65536, compiled=True),
    _paged(64, 32, 1, 65536, page_size=32, compiled=True),
    _paged(64, 32, 1, 65536, page_size=128, compiled=True),
    *[_paged(heads, 32, 1, 65536, compiled=True, mxfp4=True) for heads in (64, 32)],
    _paged(32, 1, 1, 65536, mxfp4=True),
    _paged(32, 32, 1, 65536, page_size=32, compiled=True, mxfp4=True),
    _paged(64, 32, 2, 65536, compiled=True, mxfp4=True),
    *[_paged(32, *sizes, compiled=True, mxfp4=True, rounded=True) for sizes in ((1, 256, 65536), (32, 1, 65536))],
    _packed_queries(32, 32, 65536),
)
