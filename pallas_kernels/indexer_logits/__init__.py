"""Indexer scores of every query against every key: ragged (packed keys) and paged."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt8

from pallas_kernels import checks, dispatch
from pallas_kernels.records import IndexMXFP4, PagedRows

GROUP = 32  # values of an MXFP4 row under one exponent


def indexer_logits(
    q: Shaped[Array, "T H stored"],
    k: Shaped[Array, "S stored2"],
    weights: Shaped[Array, "T H"],
    *,
    row_start: Int32[Array, " T"],
    row_end: Int32[Array, " T"],
    k_scale: Shaped[Array, "S *groups"] | None = None,
    q_scale: UInt8[Array, "T H G"] | None = None,
    rounding: Any = None,
    compressed: int | None = None,
    dtype: Any = jnp.float32,
    implementation: str | None = None,
) -> Float[Array, "T columns"]:
    """Packed keys: k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s]); -inf outside [row_start, row_end).

    q and k: float32, bf16 or FP8 values [..., D] (a query's FP8 scale belongs into its weights), with k_scale float32
    [S] or None. Or MXFP4 keys, k uint8 [S, D / 2] and k_scale uint8 [S, D / 32] as quantize_mxfp4 gives them; then
    queries may be MXFP4 as well, q uint8 [T, H, D / 2] and q_scale uint8 [T, H, D / 32]. relu comes before the
    weights, which may be negative. Products and sums in float32. ``rounding=jnp.bfloat16`` rounds as the released
    models do: the dot product, its product with the weight, and the sum over the heads (summed in float32); the
    weights and inputs are expected in that precision already. Returns [T, S], column s for key s; or, with
    ``compressed=W``, [T, W], column c of row t for key row_start[t] + c, and keys beyond the W-th left out. dtype of
    the scores: float32 or bfloat16. Source: DeepSeek-V3.2 paper, equation 1; DeepGEMM's mqa_logits for the ranges.
    """
    if compressed is not None:
        checks.positive("compressed", compressed)
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"dtype={jnp.dtype(dtype)}; scores are float32 or bfloat16.")
    check_packed(q, k, weights, row_start, row_end, k_scale, q_scale, rounding, {})
    return dispatch.call(
        __name__, "indexer_logits", implementation, q, k, weights, compressed, dtype, row_start=row_start,
        row_end=row_end, k_scale=k_scale, q_scale=q_scale, rounding=rounding,
    )  # fmt: skip


def paged_indexer_logits(
    q: Shaped[Array, "B N H stored"],
    keys: PagedRows,
    weights: Shaped[Array, "B N H"],
    *,
    context_lens: Int32[Array, "B N"],
    block_table: Int32[Array, "B M"],
    q_scale: UInt8[Array, "B N H G"] | None = None,
    rounding: Any = None,
    schedule: Any = None,
    implementation: str | None = None,
) -> Float32[Array, "B N L"]:
    """Scores of every request's own keys in a paged cache, [B, N, M * page_size]: column j is request-local position j.

    Row j of request b is slot ``block_table[b, j // page_size] * page_size + j % page_size`` of `keys`. -inf from
    ``context_lens[b, n]`` on; entries of the block table that only such columns use may be anything. Arithmetic and
    packed queries as in indexer_logits, on decoded keys. schedule: of `make_indexer_schedule` for the same
    context_lens, made once per step; None makes it here.
    """
    check_paged(q, keys, weights, context_lens, block_table, rounding, {}, q_scale)
    return dispatch.call(
        __name__, "paged_indexer_logits", implementation, q, keys, weights, context_lens=context_lens,
        block_table=block_table, q_scale=q_scale, rounding=rounding, schedule=schedule,
    )  # fmt: skip


def make_indexer_schedule(context_lens: Int32[Array, "B N"], heads: int, *, implementation: str | None = None) -> Any:
    """How the kernel at hand shares out the keys of a step among thread blocks: for all layers of `heads` heads.

    A pytree for `paged_indexer_logits`, or None where the implementation needs none.
    """
    checks.shape("context_lens", context_lens, "B N", {})
    checks.integer("context_lens", context_lens)
    checks.positive("heads", heads)
    return dispatch.call(__name__, "make_schedule", implementation, context_lens, heads)


def check_packed(q, k, weights, row_start, row_end, k_scale, q_scale, rounding, sizes) -> None:
    """Checks what all score functions of packed keys take."""
    packed = k.dtype == jnp.uint8
    checks.shape("q", q, "T H D", sizes)
    if packed or q.dtype == jnp.uint8:
        sizes.pop("D")  # two values a byte: `_check_queries` compares the widths
    checks.shape("k", k, "S D", sizes)
    checks.shape("weights", weights, "T H", sizes)
    width = k.shape[-1] * (1 + packed)
    if packed:
        _check_scale("k", k, k_scale)
    else:
        checks.floating("k", k)
        if k_scale is not None:
            checks.shape("k_scale", k_scale, "S", sizes)
            checks.floating("k_scale", k_scale)
    _check_queries(q, q_scale, width, packed, f"k has shape {tuple(k.shape)} and dtype {k.dtype}")
    checks.floating("weights", weights)
    for name, array in (("row_start", row_start), ("row_end", row_end)):
        checks.shape(name, array, "T", sizes)
        checks.integer(name, array)
    check_rounding(rounding)


def check_paged(q, keys, weights, context_lens, block_table, rounding, sizes, q_scale=None) -> None:
    """Checks what all paged score functions take."""
    checks.shape("q", q, "B N H D", sizes)
    checks.shape("weights", weights, "B N H", sizes)
    checks.shape("context_lens", context_lens, "B N", sizes)
    checks.shape("block_table", block_table, "B M", sizes)
    _check_queries(
        q, q_scale, keys.format.width, isinstance(keys.format, IndexMXFP4),
        f"the keys are {keys.format} of width {keys.format.width}",
    )  # fmt: skip
    checks.floating("weights", weights)
    checks.integer("context_lens", context_lens)
    checks.integer("block_table", block_table)
    check_rounding(rounding)


def _check_queries(q, q_scale, width, packed_keys, keys):
    """Checks queries against keys of `width` values; `keys` says in words what those are."""
    if q.dtype == jnp.uint8:
        _check_scale("q", q, q_scale)
        if not packed_keys:
            raise ValueError(f"q is packed MXFP4 (uint8), but {keys}. Packed queries need MXFP4 keys.")
    else:
        checks.floating("q", q)
        if q_scale is not None:
            raise ValueError(f"q_scale is given, but q is {q.dtype}; only packed MXFP4 queries (uint8) have one.")
    found = q.shape[-1] * (1 + (q.dtype == jnp.uint8))
    if found != width:
        raise ValueError(f"q has D={found}, but {keys}. Queries and keys must have the same width.")


def _check_scale(name, packed, scale):
    wanted = (*packed.shape[:-1], 2 * packed.shape[-1] // GROUP)
    if scale is None or scale.dtype != jnp.uint8 or tuple(scale.shape) != wanted:
        given = "None" if scale is None else f"{scale.dtype} of shape {tuple(scale.shape)}"
        raise ValueError(
            f"{name} is packed MXFP4 of shape {tuple(packed.shape)} and {name}_scale is {given}; it must be uint8 of "
            f"shape {wanted}, an exponent for every {GROUP} values, as quantize_mxfp4 gives it."
        )


def check_rounding(rounding) -> None:
    """Raises ValueError unless `rounding` is None or bfloat16."""
    if rounding is not None and jnp.dtype(rounding) != jnp.dtype(jnp.bfloat16):
        raise ValueError(f"rounding={rounding!r}; it must be None (float32 throughout) or jnp.bfloat16.")
