"""The one bridge from the models to the kernels."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import (
    Candidates,
    IndexFP8,
    IndexMXFP4,
    Model1,
    PagedRows,
    Plain,
    RecordFormat,
    Selection,
    V32,
    V41MXFP8,
    V41NVFP4,
    dequantize_weight,
    expand_candidates,
    fake_quantize,
    gather_rows,
    make_select_schedule,
    merge_top_k,
    paged_indexer_logits,
    positions_to_slots,
    preferred,
    quantize_fp8,
    scatter_rows,
    select,
    sparse_attention,
    sparse_decode,
)

from pallas_kernels import platform as _platform

__all__ = [
    "Candidates",
    "IndexFP8",
    "IndexMXFP4",
    "Model1",
    "PagedRows",
    "Plain",
    "RecordFormat",
    "Selection",
    "V32",
    "V41MXFP8",
    "V41NVFP4",
    "attend",
    "dequantize_weight",
    "expand_candidates",
    "fake_quantize",
    "gather_rows",
    "make_select_schedule",
    "merge_top_k",
    "paged_indexer_logits",
    "positions_to_slots",
    "preferred",
    "quantize_fp8",
    "require",
    "scatter_rows",
    "select",
    "sparse_attention",
    "sparse_decode",
]


def require(implementation: str | None) -> None:
    """Raises NotImplementedError where a named implementation cannot run on the device at hand, ValueError for a name that
    is not one. None, which takes what there is, and interpreted kernels run everywhere."""
    with preferred(implementation):
        if implementation is not None and not implementation.startswith("interpret_"):
            _platform.require(implementation)


# A row that is listed this many times is cheaper to decode once, store and gather than to decode wherever it is listed.
_LISTED = 4
# Slots whose rows are decoded at most: 0.3 GB of bf16 rows of 576 values.
_MOST_SLOTS = 2**18


def attend(
    q: Float[Array, "B S H D"],
    caches: tuple[PagedRows, ...],
    slots: tuple[Int32[Array, "B S _"], ...],
    *,
    sink: Float[Array, " H"] | None = None,
    scale: float,
    v_width: int | None = None,
    p_dtype=None,
    topk_lengths: tuple[Int32[Array, "B S"] | None, ...] | None = None,
    out_dtype=None,
) -> tuple[Float[Array, "B S H V"], Float32[Array, "B S H"]]:
    """Attention over listed slots of caches, out and lse, by whichever of two operations is faster.

    sparse_decode reads the records. Where a GPU's kernels run and the caches are small against the lists of all rows
    together (the chunks of a prefill), their rows are decoded once and sparse_attention gathers those. With kernels the
    two agree to the roundings that both document, with the references in every bit. Only the first topk_lengths of a
    list are looked at. `out` is in out_dtype, default q.dtype, to which sparse_attention rounds in any case.
    """
    options = dict(sink=sink, scale=scale, v_width=v_width, p_dtype=p_dtype)
    if not _decodes_once(q, caches, slots):
        return sparse_decode(q, caches, slots, topk_lengths=topk_lengths, out_dtype=out_dtype, **options)
    rows = tuple(
        cache.gather(jnp.arange(cache.num_slots, dtype=jnp.int32), jnp.bfloat16 if q.dtype == jnp.bfloat16 else jnp.float32)
        for cache in caches
    )
    batch, count = q.shape[:2]
    lists = tuple(each.reshape(batch * count, -1) for each in slots)
    lengths = topk_lengths and tuple(None if each is None else each.reshape(-1) for each in topk_lengths)
    out, lse = sparse_attention(q.reshape(batch * count, *q.shape[2:]), rows, lists, topk_length=lengths, **options)
    out = out if out_dtype is None else out.astype(out_dtype)
    return out.reshape(batch, count, *out.shape[1:]), lse.reshape(batch, count, -1)


def _decodes_once(q, caches, slots) -> bool:
    """Whether rows are decoded once, decided by shapes. Only for bf16 queries, which is what the kernels take."""
    if _platform.kernel_name() is None or q.dtype != jnp.bfloat16:
        return False
    held = sum(cache.num_slots for cache in caches)
    listed = sum(each.size for each in slots)
    return held <= _MOST_SLOTS and listed >= _LISTED * held
