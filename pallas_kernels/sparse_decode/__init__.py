"""Attention of query rows over listed slots of paged caches (decode), and the combination of partial results."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import checks, dispatch
from pallas_kernels.records import PagedRows
from pallas_kernels.sparse_attention import as_tuples, check_v_width, online_softmax


def sparse_decode(
    q: Float[Array, "B N H D"],
    caches: tuple[PagedRows, ...],
    topk_slots: tuple[Int32[Array, "B N _"], ...],
    *,
    topk_lengths: tuple[Int32[Array, "B N"] | None, ...] | None = None,
    sink: Float[Array, " H"] | None = None,
    scale: float,
    v_width: int | None = None,
    num_splits: int = 1,
    p_dtype: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N H V"], Float32[Array, "B N H"]]:
    """sparse_attention over slots of paged caches, one list of slots per cache, under one softmax.

    Rows are decoded as they are gathered, to bf16 where q is bf16 and to float32 otherwise. A slot below 0 or beyond
    the cache is none; only the first ``topk_lengths[i]`` slots of list i are looked at. `num_splits` cuts every list
    into as many parts, attends to them apart and combines; the sink enters once. Outputs, sink, empty rows, rounding
    and precision as in sparse_attention. Source: FlashMLA's sparse decode with an extra cache.
    """
    sizes = {}
    checks.shape("q", q, "B N H D", sizes)
    checks.floating("q", q)
    if not isinstance(caches, tuple):
        raise ValueError("caches must be a tuple of PagedRows; write (cache,) for a single one.")
    caches, lists, lengths = as_tuples(caches, topk_slots, topk_lengths)
    for i, (cache, slots, length) in enumerate(zip(caches, lists, lengths)):
        if cache.format.width != sizes["D"]:
            raise ValueError(f"q has D={sizes['D']}, but caches[{i}] is {cache.format} of width {cache.format.width}.")
        checks.shape(f"topk_slots[{i}]", slots, f"B N K{i}", sizes)
        checks.integer(f"topk_slots[{i}]", slots)
        if length is not None:
            checks.shape(f"topk_lengths[{i}]", length, "B N", sizes)
            checks.integer(f"topk_lengths[{i}]", length)
    if sink is not None:
        checks.shape("sink", sink, "H", sizes)
    checks.positive("num_splits", num_splits)
    v_width = check_v_width(v_width, sizes["D"])
    p_dtype = jnp.dtype(q.dtype if p_dtype is None else p_dtype)
    return dispatch.call(
        __name__, "sparse_decode", implementation, q, caches, lists, topk_lengths=lengths, sink=sink, scale=scale,
        v_width=v_width, num_splits=num_splits, p_dtype=p_dtype,
    )  # fmt: skip


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
