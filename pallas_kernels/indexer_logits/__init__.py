"""Indexer scores of every query against every key: ragged (packed keys) and paged."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import checks, dispatch
from pallas_kernels.records import PagedRows


def indexer_logits(
    q: Float[Array, "T H D"],
    k: Float[Array, "S D"],
    weights: Float[Array, "T H"],
    *,
    row_start: Int32[Array, " T"],
    row_end: Int32[Array, " T"],
    k_scale: Float32[Array, " S"] | None = None,
    rounding: Any = None,
    implementation: str | None = None,
) -> Float32[Array, "T S"]:
    """Packed keys: k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s]); -inf outside [row_start, row_end).

    q and k: float32, bf16 or FP8 values (a query's FP8 scale belongs into its weights). relu comes before the
    weights, which may be negative. Products and sums in float32. ``rounding=jnp.bfloat16`` rounds as the released
    models do: the dot product, its product with the weight, and the sum over the heads (summed in float32); the
    weights and inputs are expected in that precision already. Source: DeepSeek-V3.2 paper, equation 1; DeepGEMM's
    mqa_logits for the ranges.
    """
    sizes = {}
    checks.shape("q", q, "T H D", sizes)
    checks.shape("k", k, "S D", sizes)
    checks.shape("weights", weights, "T H", sizes)
    for name, array in (("q", q), ("k", k), ("weights", weights)):
        checks.floating(name, array)
    for name, array in (("row_start", row_start), ("row_end", row_end)):
        checks.shape(name, array, "T", sizes)
        checks.integer(name, array)
    if k_scale is not None:
        checks.shape("k_scale", k_scale, "S", sizes)
    check_rounding(rounding)
    return dispatch.call(
        __name__, "indexer_logits", implementation, q, k, weights, row_start=row_start, row_end=row_end,
        k_scale=k_scale, rounding=rounding,
    )  # fmt: skip


def paged_indexer_logits(
    q: Float[Array, "B N H D"],
    keys: PagedRows,
    weights: Float[Array, "B N H"],
    *,
    context_lens: Int32[Array, "B N"],
    block_table: Int32[Array, "B M"],
    rounding: Any = None,
    implementation: str | None = None,
) -> Float32[Array, "B N L"]:
    """Scores of every request's own keys in a paged cache, [B, N, M * page_size]: column j is request-local position j.

    Row j of request b is slot ``block_table[b, j // page_size] * page_size + j % page_size`` of `keys`. -inf from
    ``context_lens[b, n]`` on; entries of the block table that only such columns use may be anything. Arithmetic as in
    indexer_logits, on decoded keys.
    """
    sizes = {}
    check_paged(q, keys, weights, context_lens, block_table, rounding, sizes)
    return dispatch.call(
        __name__, "paged_indexer_logits", implementation, q, keys, weights, context_lens=context_lens,
        block_table=block_table, rounding=rounding,
    )  # fmt: skip


def check_paged(q, keys, weights, context_lens, block_table, rounding, sizes) -> None:
    """Checks what all paged score functions take."""
    checks.shape("q", q, "B N H D", sizes)
    checks.shape("weights", weights, "B N H", sizes)
    checks.shape("context_lens", context_lens, "B N", sizes)
    checks.shape("block_table", block_table, "B M", sizes)
    checks.floating("q", q)
    checks.floating("weights", weights)
    checks.integer("context_lens", context_lens)
    checks.integer("block_table", block_table)
    if keys.format.width != sizes["D"]:
        raise ValueError(f"q has D={sizes['D']}, but the keys are {keys.format} of width {keys.format.width}.")
    check_rounding(rounding)


def check_rounding(rounding) -> None:
    """Raises ValueError unless `rounding` is None or bfloat16."""
    if rounding is not None and jnp.dtype(rounding) != jnp.dtype(jnp.bfloat16):
        raise ValueError(f"rounding={rounding!r}; it must be None (float32 throughout) or jnp.bfloat16.")
