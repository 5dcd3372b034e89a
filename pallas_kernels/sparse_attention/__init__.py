"""Attention of query rows over listed rows of unpaged arrays (prefill)."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import checks, dispatch


def sparse_attention(
    q: Float[Array, "T H D"],
    kv: Float[Array, "S D"] | tuple[Float[Array, "_ D"], ...],
    topk_indices: Int32[Array, "T K"] | tuple[Int32[Array, "T _"], ...],
    *,
    topk_length: Int32[Array, " T"] | tuple[Int32[Array, " T"] | None, ...] | None = None,
    sink: Float[Array, " H"] | None = None,
    scale: float,
    v_width: int | None = None,
    p_dtype: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H V"], Float32[Array, "T H"]]:
    """Softmax attention of every query row over its listed rows; all heads share one key, whose first v_width values
    are the value.

    kv, topk_indices and topk_length are one array each, or tuples of equal length (several caches under one softmax,
    in this order). An index below 0 or at least S is none; one listed twice counts twice. Only the first topk_length
    entries of a list are looked at. Returns out in q.dtype and lse: the natural log of the sum of exp(scale * q.k),
    without the sink. Row t of head h is sum exp(s) v / (sum exp(s) + exp(sink[h])): the sink is not scaled and enters
    once. Nothing to attend: out 0, lse -inf, whatever the sink; a sink of +inf gives 0, one of -inf is none.
    Sums are float32, blocks of 64 indices with a running maximum; the probabilities are rounded to p_dtype (default
    q.dtype) for the numerator only. Source: the sparse_attn kernel of DeepSeek-V4.1's released code.
    """
    sizes = {}
    checks.shape("q", q, "T H D", sizes)
    checks.floating("q", q)
    kvs, lists, lengths = as_tuples(kv, topk_indices, topk_length)
    for i, (rows, indices, length) in enumerate(zip(kvs, lists, lengths)):
        checks.shape(f"kv[{i}]", rows, f"S{i} D", sizes)
        checks.floating(f"kv[{i}]", rows)
        checks.shape(f"topk_indices[{i}]", indices, f"T K{i}", sizes)
        checks.integer(f"topk_indices[{i}]", indices)
        if length is not None:
            checks.shape(f"topk_length[{i}]", length, "T", sizes)
            checks.integer(f"topk_length[{i}]", length)
    if sink is not None:
        checks.shape("sink", sink, "H", sizes)
    v_width = check_v_width(v_width, sizes["D"])
    p_dtype = jnp.dtype(q.dtype if p_dtype is None else p_dtype)
    return dispatch.call(
        __name__, "sparse_attention", implementation, q, kvs, lists, topk_length=lengths, sink=sink, scale=scale,
        v_width=v_width, p_dtype=p_dtype,
    )  # fmt: skip


def as_tuples(kv, indices, lengths):
    """(kv, indices, lengths) as three tuples of one length. Raises ValueError where their lengths differ."""
    if not isinstance(kv, tuple):
        kv, indices = (kv,), (indices,)
        lengths = (lengths,)
    elif lengths is None:
        lengths = (None,) * len(kv)
    if not isinstance(indices, tuple) or not isinstance(lengths, tuple) or not len(kv) == len(indices) == len(lengths):
        raise ValueError(
            f"{len(kv)} arrays of rows came with {_count(indices)} of indices and {_count(lengths)} of lengths; give "
            "one of each, or tuples of the same length."
        )
    if not kv:
        raise ValueError("There are no rows to attend to: give at least one array of rows and its indices.")
    return kv, indices, lengths


def check_v_width(v_width, width) -> int:
    """`v_width`, or `width` for None. Raises ValueError unless 1 <= v_width <= width."""
    v_width = width if v_width is None else v_width
    if not isinstance(v_width, int) or not 1 <= v_width <= width:
        raise ValueError(f"v_width is {v_width!r}; values are the first v_width of {width} key values.")
    return v_width


def _count(value):
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else "one array"
