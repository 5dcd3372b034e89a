"""Named shapes of prefill attention over listed rows: V3.2 (576 with 512 values) and V4 / V4.1 (512), also sharded."""

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case
from pallas_kernels.indexing import gather_rows

VALUES = 512
_SAMPLE = 6  # query rows that are checked, spread from the first to the last


def exact(q, kvs, lists, sink, scale):
    """q [R, H, D] over lists [R, K] of rows of kvs, in float32: out [R, H, 512]."""
    kv = jnp.concatenate([gather_rows(kv, each) for kv, each in zip(kvs, lists)], axis=1)
    valid = jnp.concatenate([(each >= 0) & (each < len(kv)) for kv, each in zip(kvs, lists)], axis=1)
    kv = kv.astype(jnp.float32)
    scores = jnp.einsum("rhd,rkd->rhk", q.astype(jnp.float32), kv, precision="highest") * scale
    scores = jnp.where(valid[:, None], scores, -jnp.inf)
    high = jnp.max(scores, axis=-1, keepdims=True)
    p = jnp.exp(scores - high)
    total = jnp.sum(p, axis=-1, keepdims=True) + jnp.exp(sink[:, None] - high)
    return jnp.einsum("rhk,rkd->rhd", p / total, kv[..., :VALUES], precision="highest")


def _case(heads, width, selected, rows, window=0, queries=4096, compiled=False):
    """`selected` random rows of `rows`, of which `window` come from a second array as a list of their own."""
    counts = (window, selected - window) if window else (selected,)
    scale = width**-0.5

    def make(key):
        a, b, c, *d = jax.random.split(key, 3 + len(counts))
        q = jax.random.normal(a, (queries, heads, width), jnp.bfloat16)
        arrays = tuple(
            jax.random.normal(k, (rows, width), jnp.bfloat16) for k in jax.random.split(b, len(counts))
        )
        lists = tuple(
            jax.random.randint(k, (queries, count), 0, rows, jnp.int32) for k, count in zip(d, counts)
        )
        return q, arrays, lists, jax.random.normal(c, (heads,), jnp.float32)

    def call(function, q, kvs, lists, sink):
        return function(
            q, kvs, lists, topk_length=(None,) * len(lists), sink=sink, scale=scale, v_width=VALUES,
            p_dtype=jnp.bfloat16,
        )  # fmt: skip

    def check(found, q, kvs, lists, sink):
        at = jnp.linspace(0, queries - 1, _SAMPLE).astype(jnp.int32)
        wanted = exact(q[at], kvs, [each[at] for each in lists], sink, scale)
        error = found[0][at].astype(jnp.float32) - wanted
        return float(jnp.linalg.norm(error) / jnp.linalg.norm(wanted))

    named = f"k{window}+{selected - window}" if window else f"k{selected}"
    return Case(
        section="Sparse attention prefill (bf16 KV, sink)",
        shape=f"h{heads} d{width} {named} sq{queries} skv{rows} +sink",
        operation="sparse_attention", function="sparse_attention", make=make, call=call, check=check,
        flops=2.0 * queries * selected * heads * (width + VALUES),
        bytes=2.0 * min(rows * len(counts), queries * selected) * width + 2.0 * queries * heads * (width + VALUES)
        + 4.0 * queries * selected,
        peak="bf16", compiled=compiled,
    )  # fmt: skip


CASES = (
    *[_case(128, 576, 2048, rows, compiled=rows == 32768) for rows in (8192, 32768, 131072)],
    _case(64, 576, 2048, 32768),
    _case(64, 512, 640, 8192),
    _case(64, 512, 640, 65536, compiled=True),
    _case(64, 512, 1152, 65536),
    _case(128, 512, 640, 65536),
    _case(128, 512, 1152, 65536),
    _case(64, 512, 512, 32768),
    _case(128, 512, 1024, 32768),
    _case(8, 512, 640, 65536),
    _case(16, 512, 640, 65536, compiled=True),
    _case(32, 512, 640, 65536),
    _case(16, 576, 2048, 32768, compiled=True),
    _case(64, 512, 640, 65536, window=128),
)
