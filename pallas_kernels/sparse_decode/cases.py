"""Named shapes of sparse decode."""

import jax
import jax.numpy as jnp

from pallas_kernels import indexing
from pallas_kernels.case import Case
from pallas_kernels.records import V32, Model1, PagedRows, V41MXFP8, V41NVFP4

SECTION = "Sparse decode (fp8 paged caches)"
EXTRA = "Sparse decode, V4.1 records and few heads"
_PAGE = 64
_POOL = 64  # pages of distinct rows; a cache repeats them


def random_cache(key, format, num_pages: int) -> PagedRows:
    """A cache of pages of normal rows with a few outliers."""
    a, b, c = jax.random.split(key, 3)
    rows = jax.random.normal(a, (_POOL * _PAGE, format.width), jnp.float32)
    rows = jnp.where(jax.random.uniform(b, rows.shape) < 1e-3, 8 * rows, rows).astype(jnp.bfloat16)
    pool = PagedRows.zeros(format, _POOL, _PAGE).scatter(jnp.arange(_POOL * _PAGE, dtype=jnp.int32), rows)
    from_pool = jax.random.randint(c, (num_pages,), 0, _POOL)
    return PagedRows(indexing.gather_rows(pool.pages, from_pool), format, _PAGE)


def _case(section, shape, heads, formats, widths, contexts, batch, rows=1, compiled=False):
    width = formats[0].width

    def make(key):
        seeds = jax.random.split(key, 2 + 2 * len(formats))
        q = jax.random.normal(seeds[0], (batch, rows, heads, width)).astype(jnp.bfloat16)
        sink = jax.random.normal(seeds[1], (heads,))
        caches, lists = [], []
        for i, (format, k, context) in enumerate(zip(formats, widths, contexts)):
            caches.append(random_cache(seeds[2 + 2 * i], format, batch * -(-context // _PAGE)))
            scores = jax.random.randint(seeds[3 + 2 * i], (batch, rows, k), 0, context)
            lists.append(scores + jnp.arange(batch, dtype=jnp.int32)[:, None, None] * (-(-context // _PAGE) * _PAGE))
        return q, tuple(caches), tuple(lists), sink

    def call(function, q, caches, lists, sink):
        return function(
            q, caches, lists, topk_lengths=(None,) * len(lists), sink=sink, scale=width**-0.5, v_width=512,
            num_splits=None, split_size=None, schedule=None, p_dtype=jnp.bfloat16, out_dtype=jnp.bfloat16,
        )  # fmt: skip

    def check(output, q, caches, lists, sink):
        out, lse = output
        worst = 0.0
        for b in sorted({0, batch // 2, batch - 1}):
            for n in range(rows):
                kv = [
                    cache.gather(slots[b, n], jnp.bfloat16).astype(jnp.float32) for cache, slots in zip(caches, lists)
                ]
                wanted, wanted_lse = exact(q[b, n].astype(jnp.float32), jnp.concatenate(kv), sink, width**-0.5)
                error = jnp.linalg.norm(out[b, n].astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
                worst = max(worst, float(error), float(jnp.abs(lse[b, n] - wanted_lse).max()) / 10)
        return worst if bool(jnp.isfinite(out).all()) else float("inf")

    k = sum(widths)
    row_bytes = sum(count * (format.row_bytes + 4) for count, format in zip(widths, formats))
    return Case(
        section=section,
        shape=shape,
        operation="sparse_decode",
        function="sparse_decode",
        make=make,
        call=call,
        check=check,
        flops=2.0 * batch * rows * k * heads * (width + 512),
        bytes=float(batch * rows * (row_bytes + heads * (width + 512) * 2)),
        peak="bf16",
        compiled=compiled,
    )


@jax.jit
def exact(q, kv, sink, scale):
    """Attention of q [H, D] over rows kv [K, D] in float32: values of 512 and the log-sum-exp."""
    with jax.default_matmul_precision("highest"):
        scores = q @ kv.T * scale
        lse = jax.nn.logsumexp(scores, axis=1)
        return jnp.exp(scores - jnp.logaddexp(lse, sink)[:, None]) @ kv[:, :512], lse


def _v32(heads, rows, batch, **options):
    shape = f"v32 h{heads} sq{rows} k2048 b{batch} ctx32768 +sink"
    section = options.pop("section", SECTION)
    return _case(section, shape, heads, (V32(),), (2048,), (32768,), batch, rows, **options)


def _model1(heads, rows, k, batch, **options):
    shape = f"m1 h{heads} sq{rows} k128+{k} b{batch} ctx16384 +sink"
    section = options.pop("section", SECTION)
    return _case(section, shape, heads, (Model1(), Model1()), (128, k), (128, 16384), batch, rows, **options)


def _v41(heads, batch, **options):
    shape = f"v41 h{heads} sq1 k128+512 b{batch} ctx16384 +sink"
    return _case(EXTRA, shape, heads, (V41MXFP8(), V41NVFP4()), (128, 512), (128, 16384), batch, **options)


BATCHES = (1, 32, 128)
CASES = (
    *[_v32(128, rows, b, compiled=(rows, b) == (1, 1)) for rows in (1, 2) for b in BATCHES],
    *[_v32(64, 1, b) for b in BATCHES],
    *[_model1(64, 1, 512, b) for b in BATCHES],
    *[_model1(128, 1, k, b) for k in (512, 1024) for b in BATCHES],
    *[_model1(64, 2, 512, b) for b in BATCHES],
    *[_v41(64, b, compiled=b == 32) for b in BATCHES],
    *[_v32(heads, 1, 128, section=EXTRA) for heads in (8, 16)],
    *[_model1(heads, 1, 512, 128, section=EXTRA, compiled=heads == 16) for heads in (8, 16)],
)
