"""Attention of query rows over listed rows of unpaged arrays (prefill)."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import checks, dispatch
from pallas_kernels.sparse_attention import backward, dense

Ints = Int32[Array, " T"] | tuple[Int32[Array, " T"] | None, ...] | None  # one for the one list, or one a list


def sparse_attention(
    q: Float[Array, "T H D"],
    kv: Float[Array, "S D"] | tuple[Float[Array, "_ D"], ...],
    topk_indices: Int32[Array, "T K"] | tuple[Int32[Array, "T _"], ...],
    *,
    topk_length: Ints = None,
    row_start: Ints = None,
    row_end: Ints = None,
    sink: Float[Array, " H"] | None = None,
    scale: float,
    v_width: int | None = None,
    p_dtype: Any = None,
    lse_prefix: int | None = None,
    dense_below: int | None = None,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Softmax attention of every query row over its listed rows; all heads share one key, whose first v_width values
    (default: 512, or all of a narrower key) are the value.

    kv, topk_indices and what goes with the lists are one array each, or tuples of equal length (several caches under
    one softmax, in this order, none of them copied). An index below 0 or at least S is none; one listed twice counts
    twice. Only the first topk_length entries of a list are looked at. A batch is packed along T and S: index i of query
    row t is kv row ``row_start[t] + i`` (default 0), and none from ``row_end[t]`` (default S) on.

    Returns out [T, H, v_width] in q.dtype and lse [T, H]: the natural log of the sum of exp(scale * q.k), without the
    sink; with `lse_prefix` also the same over the first lse_prefix entries of the lists, one behind the other. Row t of
    head h is sum exp(s) v / (sum exp(s) + exp(sink[h])): the sink is not scaled and enters once. Nothing to attend: out
    0, lse -inf, whatever the sink; a sink of +inf gives 0, one of -inf is none. Sums are float32, blocks of 64 indices
    with a running maximum; the probabilities are rounded to p_dtype (default q.dtype) for the numerator only.

    Differentiable in q, kv and sink, from every result, by reverse mode, whatever runs forward (see `backward`). Where
    all of kv has at most `dense_below` rows, dense products with a mask run instead, which give the same results; None
    takes `dense.rows_below` (0 where an implementation is named), 0 is never. Source: the sparse_attn kernel of
    DeepSeek-V4.1's released code.
    """
    sizes = {}
    checks.shape("q", q, "T H D", sizes)
    checks.floating("q", q)
    kvs, lists, lengths = as_tuples(kv, topk_indices, topk_length)
    _, _, starts = as_tuples(kv, topk_indices, row_start)
    _, _, ends = as_tuples(kv, topk_indices, row_end)
    for i, (rows, indices) in enumerate(zip(kvs, lists)):
        checks.shape(f"kv[{i}]", rows, f"S{i} D", sizes)
        checks.floating(f"kv[{i}]", rows)
        checks.shape(f"topk_indices[{i}]", indices, f"T K{i}", sizes)
        checks.integer(f"topk_indices[{i}]", indices)
        for name, per_list in (("topk_length", lengths), ("row_start", starts), ("row_end", ends)):
            if per_list[i] is not None:
                checks.shape(f"{name}[{i}]", per_list[i], "T", sizes)
                checks.integer(f"{name}[{i}]", per_list[i])
    if sink is not None:
        checks.shape("sink", sink, "H", sizes)
        checks.floating("sink", sink)
    width = sum(indices.shape[1] for indices in lists)
    if lse_prefix is not None and not (isinstance(lse_prefix, int) and 1 <= lse_prefix <= width):
        raise ValueError(f"lse_prefix is {lse_prefix!r}; it counts leading entries of lists of {width} together, from 1 on.")
    if dense_below is not None and not (isinstance(dense_below, int) and dense_below >= 0):
        raise ValueError(f"dense_below is {dense_below!r}; it must be a number of rows of kv, 0 for never, or None.")
    implementation = dispatch.named(implementation)
    rows = sum(len(kv) for kv in kvs)
    limit = dense.rows_below(implementation, width) if dense_below is None else dense_below
    options = backward.Options(
        package=__name__,
        implementation="dense" if rows <= limit else implementation,
        scale=float(scale),
        v_width=check_v_width(v_width, sizes["D"]),
        p_dtype=jnp.dtype(q.dtype if p_dtype is None else p_dtype),
        lse_prefix=lse_prefix,
    )
    lists = tuple(_absolute(*each) for each in zip(kvs, lists, starts, ends))
    return backward.attend(options, q, kvs, lists, lengths, sink)


def _absolute(kv, indices, start, end):
    """Indices relative to `start` and below `end` as rows of kv; -1 for none."""
    if start is None and end is None:
        return indices
    indices_from = 0 if start is None else start[:, None]
    inside = (indices >= 0) & (indices < (len(kv) if end is None else end[:, None]) - indices_from)
    return jnp.where(inside, indices + indices_from, -1)


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
    """`v_width`; for None 512, or `width` if that is less. Raises ValueError unless 1 <= v_width <= width."""
    v_width = min(512, width) if v_width is None else v_width
    if not isinstance(v_width, int) or not 1 <= v_width <= width:
        raise ValueError(f"v_width is {v_width!r}; values are the first v_width of {width} key values.")
    return v_width


def _count(value):
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else "one array"
