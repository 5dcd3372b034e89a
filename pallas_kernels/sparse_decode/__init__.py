"""Attention of query rows over listed slots of paged caches (decode), and the combination of partial results."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import checks, dispatch
from pallas_kernels.records import PagedRows
from pallas_kernels.sparse_attention import as_tuples, check_v_width, online_softmax
from pallas_kernels.sparse_decode import planning
from pallas_kernels.sparse_decode.planning import DecodeSchedule


def sparse_decode(
    q: Float[Array, "B N H D"],
    caches: tuple[PagedRows, ...],
    topk_indices: tuple[Int32[Array, "B N _"], ...],
    *,
    topk_lengths: tuple[Int32[Array, "B N"] | None, ...] | None = None,
    sink: Float[Array, " H"] | None = None,
    scale: float,
    v_width: int | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    schedule: DecodeSchedule | None = None,
    p_dtype: Any = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N H V"], Float32[Array, "B N H"]]:
    """sparse_attention over slots of paged caches, one list of slots per cache, under one softmax.

    topk_indices are slots (see positions_to_slots). A slot below 0 or beyond its cache is none; only the first
    ``topk_lengths[i]`` slots of list i are looked at. Rows are decoded as they are read, to bf16 where q is bf16 and to
    float32 otherwise. Outputs (`out` in `out_dtype`, default q.dtype), sink, empty rows, rounding and precision as in
    sparse_attention.

    The lists may be attended to in parts that are combined; the sink enters once. At most one of: `schedule`, of
    make_decode_schedule for the same shapes and lengths, shared by the layers of a step; `split_size`, slots of a part
    (a multiple of 128), with which a row's bits do not depend on what else is in the batch; `num_splits`, parts of
    every row. None of them leaves the choice to the implementation; it then depends on shapes and lengths only, so
    that the same call gives the same bits. Source: FlashMLA's sparse decode with an extra cache.
    """
    sizes = {}
    checks.shape("q", q, "B N H D", sizes)
    checks.floating("q", q)
    if not isinstance(caches, tuple):
        raise ValueError("caches must be a tuple of PagedRows; write (cache,) for a single one.")
    caches, lists, lengths = as_tuples(caches, topk_indices, topk_lengths)
    for i, (cache, slots) in enumerate(zip(caches, lists)):
        if cache.format.width != sizes["D"]:
            raise ValueError(f"q has D={sizes['D']}, but caches[{i}] is {cache.format} of width {cache.format.width}.")
        checks.shape(f"topk_indices[{i}]", slots, f"B N K{i}", sizes)
        checks.integer(f"topk_indices[{i}]", slots)
    _check_lengths(lengths, sizes)
    if sink is not None:
        checks.shape("sink", sink, "H", sizes)
    if (num_splits is not None) + (split_size is not None) + (schedule is not None) > 1:
        raise ValueError("num_splits, split_size and schedule each say how lists are split; give one of them.")
    _check_splits(split_size, num_splits)
    v_width = check_v_width(v_width, sizes["D"])
    p_dtype = jnp.dtype(q.dtype if p_dtype is None else p_dtype)
    out_dtype = jnp.dtype(q.dtype if out_dtype is None else out_dtype)
    return dispatch.call(
        __name__, "sparse_decode", implementation, q, caches, lists, topk_lengths=lengths, sink=sink, scale=scale,
        v_width=v_width, num_splits=num_splits, split_size=split_size, schedule=schedule, p_dtype=p_dtype,
        out_dtype=out_dtype,
    )  # fmt: skip


def make_decode_schedule(
    batch: int,
    rows: int,
    heads: int,
    widths: tuple[int, ...],
    topk_lengths: tuple[Int32[Array, "B N"] | None, ...] | None = None,
    *,
    split_size: int | None = None,
    num_splits: int | None = None,
) -> DecodeSchedule:
    """How the thread blocks of a GPU divide a call of sparse_decode: once per step, for all layers of one shape.

    `widths` are the widths of the lists, `topk_lengths` as in sparse_decode; a schedule without lengths is made while
    tracing and costs a step nothing. split_size: parts of so many slots, cut and combined the same whatever the
    batch. num_splits: so many parts of every row. Neither: what is expected to be done first of whole rows, rows in
    equal parts, one for every multiprocessor, and equal shares in which one may serve several rows.
    """
    lengths = (None,) * len(widths) if topk_lengths is None else topk_lengths
    if len(lengths) != len(widths):
        raise ValueError(f"widths has {len(widths)} lists and topk_lengths {len(lengths)}; give one length for each.")
    sizes = {"B": batch, "N": rows}
    _check_lengths(lengths, sizes)
    _check_splits(split_size, num_splits)
    for name, value in (("batch", batch), ("rows", rows), ("heads", heads)):
        checks.positive(name, value)
    flat = tuple(None if length is None else length.reshape(-1) for length in lengths)
    return planning.make_schedule(tuple(widths), flat, batch * rows, heads, split_size, num_splits)


def combine(
    outs: Float[Array, "splits *rows H V"],
    lses: Float32[Array, "splits *rows H"],
    sink: Float[Array, " H"] | None = None,
) -> tuple[Float[Array, "*rows H V"], Float32[Array, "*rows H"]]:
    """Partial attention results over disjoint parts of a list as the result over the whole list.

    outs and lses as sparse_attention returns them without a sink (natural log; -inf for a part that had nothing, whose
    output is not read). Returns out in the dtype of `outs` and lse without the sink. The sink enters here, once.
    Sums are float32.
    """
    if outs.ndim < 3 or lses.shape != outs.shape[:-1]:
        raise ValueError(
            f"outs have shape {tuple(outs.shape)} and lses {tuple(lses.shape)}; they must be [splits, ..., H, V] and "
            "[splits, ..., H]."
        )
    if sink is not None:
        checks.shape("sink", sink, "H", {"H": outs.shape[-2]})
    return online_softmax.combine(outs, lses, sink, outs.dtype)


def _check_lengths(lengths, sizes):
    for i, length in enumerate(lengths):
        if length is not None:
            checks.shape(f"topk_lengths[{i}]", length, "B N", sizes)
            checks.integer(f"topk_lengths[{i}]", length)


def _check_splits(split_size, num_splits):
    if num_splits is not None:
        checks.positive("num_splits", num_splits)
    if split_size is not None and (not isinstance(split_size, int) or split_size < 1 or split_size % planning.UNIT):
        raise ValueError(f"split_size is {split_size!r}; parts are multiples of {planning.UNIT} slots.")
    if split_size is not None and num_splits is not None:
        raise ValueError(f"split_size={split_size} and num_splits={num_splits} both say how lists are split; give one.")
