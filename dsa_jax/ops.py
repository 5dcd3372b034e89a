"""The one bridge from the models to the kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

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
    split_mixes,
)

import pallas_kernels as _kernels
from pallas_kernels import dispatch as _dispatch
from pallas_kernels import platform as _platform
from pallas_kernels.grouped_gemm import reference as _stored
from pallas_kernels.grouped_gemm.reference import DEQUANTIZED_BYTES, MOST_DENSE_ROWS

__all__ = [
    "DEQUANTIZED_BYTES",
    "MOST_DENSE_ROWS",
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
    "decoded_bytes",
    "dequantize_weight",
    "expand_candidates",
    "fake_quantize",
    "gather_rows",
    "grouped_gemm",
    "has_kernels",
    "make_select_schedule",
    "merge_top_k",
    "multiplies_stored",
    "paged_indexer_logits",
    "positions_to_slots",
    "preferred",
    "quantize_fp8",
    "quantized_matmul",
    "require",
    "scatter_rows",
    "select",
    "sparse_attention",
    "sparse_decode",
    "split_mixes",
]


def has_kernels() -> bool:
    """Whether there are kernels for the GPU at hand."""
    return _platform.kernel_name() is not None


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


def decoded_bytes(slots: int, width: int) -> int:
    """The most that `attend` takes for decoded rows of `width` values, of so many slots that a step may list."""
    return 2 * width * min(slots, _MOST_SLOTS) if has_kernels() else 0


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
    block_tables: tuple[Int32[Array, "B M"] | None, ...] | None = None,
    out_dtype=None,
) -> tuple[Float[Array, "B S H V"], Float32[Array, "B S H"]]:
    """Attention over listed slots of caches, out and lse, by whichever of two operations is faster.

    sparse_decode reads the records. Where a GPU's kernels run and what can be listed is small against the lists of all rows
    together (the chunks of a prefill), it is decoded once and sparse_attention gathers those rows: of a cache with a
    block table, that table's pages, from which its slots must come; of another one all slots. With kernels the two agree
    to the roundings that both document, with the references in every bit. Only the first topk_lengths of a list are looked
    at. `out` is in out_dtype, default q.dtype, to which sparse_attention rounds in any case.
    """
    options = dict(sink=sink, scale=scale, v_width=v_width, p_dtype=p_dtype)
    tables = (None,) * len(caches) if block_tables is None else block_tables
    if not _decodes_once(q, caches, slots, tables):
        return sparse_decode(q, caches, slots, topk_lengths=topk_lengths, out_dtype=out_dtype, **options)
    decoded = [_decoded(*each, q.dtype) for each in zip(caches, slots, tables, strict=True)]
    batch, count = q.shape[:2]
    lists = tuple(listed.reshape(batch * count, -1) for _, listed in decoded)
    lengths = topk_lengths and tuple(None if each is None else each.reshape(-1) for each in topk_lengths)
    out, lse = sparse_attention(
        q.reshape(batch * count, *q.shape[2:]), tuple(rows for rows, _ in decoded), lists, topk_length=lengths, **options
    )
    out = out if out_dtype is None else out.astype(out_dtype)
    return out.reshape(batch, count, *out.shape[1:]), lse.reshape(batch, count, -1)


def _decodes_once(q, caches, slots, tables=None) -> bool:
    """Whether rows are decoded once, decided by shapes. Only for bf16 queries, which is what the kernels take."""
    if not has_kernels() or q.dtype != jnp.bfloat16:
        return False
    held = sum(map(_listable, caches, tables or (None,) * len(caches)))
    listed = sum(each.size for each in slots)
    return held <= _MOST_SLOTS and listed >= _LISTED * held


def _listable(cache: PagedRows, table: Array | None) -> int:
    """Slots that can be listed: those of a table's pages, unless that is more than there are."""
    return cache.num_slots if table is None else min(cache.num_slots, table.size * cache.page_size)


def _decoded(cache: PagedRows, slots: Array, table: Array | None, dtype) -> tuple[Array, Array]:
    """The decoded rows [N, D] of all slots that can be listed, and `slots` as places among them."""
    if table is None or _listable(cache, table) == cache.num_slots:
        return cache.gather(jnp.arange(cache.num_slots, dtype=jnp.int32), dtype), slots
    page, pages = cache.page_size, table.reshape(-1)
    positions = jnp.arange(table.shape[1] * page, dtype=jnp.int32)
    every, _ = positions_to_slots(jnp.broadcast_to(positions, (len(table), 1, len(positions))), table, page)
    rows = cache.gather(every.reshape(-1), dtype)
    # A page that several requests share is decoded for each, and read at the last of those places.
    place = jax.ops.segment_max(jnp.arange(len(pages), dtype=jnp.int32), pages, cache.pages.shape[0])
    place = gather_rows(place, jnp.where(slots < cache.num_slots, slots // page, -1))
    return rows, jnp.where((slots < 0) | (slots >= cache.num_slots), -1, place * page + slots % page)


def quantized_matmul(
    x: Float[Array, "*rows K"],
    weight: Shaped[Array, "N stored"] | tuple[Shaped[Array, "N stored"], ...],
    scale: Shaped[Array, "o i"] | tuple[Shaped[Array, "o i"], ...],
    *,
    block=None,
    out_dtype,
) -> Float[Array, "*rows N"] | tuple[Float[Array, "*rows N"], ...]:
    """pallas_kernels.quantized_matmul; `scale` may also be float32 factors, which no kernel takes."""
    function = _stored if _has_factors(scale) else _kernels
    return function.quantized_matmul(x, weight, scale, block=block, out_dtype=jnp.dtype(out_dtype))


def grouped_gemm(
    x: Float[Array, "tiles R K"],
    weight: Shaped[Array, "E N stored"] | tuple[Shaped[Array, "E N stored"], ...],
    scale: Shaped[Array, "E o i"] | tuple[Shaped[Array, "E o i"], ...],
    group: Int32[Array, " tiles"],
    *,
    block=None,
    out_dtype,
) -> Float[Array, "tiles R N"] | tuple[Float[Array, "tiles R N"], ...]:
    """pallas_kernels.grouped_gemm; `scale` may also be float32 factors, which no kernel takes."""
    function = _stored if _has_factors(scale) else _kernels
    return function.grouped_gemm(x, weight, scale, group, block=block, out_dtype=jnp.dtype(out_dtype))


def _has_factors(scale) -> bool:
    return any(each.dtype == jnp.float32 for each in (scale if isinstance(scale, tuple) else (scale,)))


def multiplies_stored(
    tiles: int,
    rows: int,
    dtype,
    weight: Array | jax.ShapeDtypeStruct,
    scale: Array | jax.ShapeDtypeStruct,
    *,
    block=None,
    out_dtype,
) -> bool:
    """Whether `grouped_gemm` of so many tiles of rows of `dtype` runs on a kernel, which dequantises no weight into memory."""
    if scale.dtype == jnp.float32:
        return False
    inputs = weight.shape[-1] * (2 if weight.dtype == jnp.uint8 else 1)
    shapes = (((tiles, rows, inputs), dtype), (weight.shape, weight.dtype), (scale.shape, scale.dtype), ((tiles,), jnp.int32))
    arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    package = _kernels.grouped_gemm.__module__
    return _dispatch.runs_kernel(package, "grouped_gemm", *arrays, block=block, out_dtype=jnp.dtype(out_dtype))
