"""Indexer scores of chosen candidate blocks only, and the way back from their columns to positions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, Shaped, UInt8

from pallas_kernels import checks, dispatch
from pallas_kernels.indexer_logits import check_packed, check_paged
from pallas_kernels.records import PagedRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Candidates:
    """Candidate blocks of every row, ready for scoring; made once per step and shared by all its consumers.

    blocks: int32 [*rows, C], ids of reachable blocks ascending, then -1. count: int32 [*rows], how many there are.
    Column c of the scores is position ``blocks[c // block_size] * block_size + c % block_size``.
    """

    blocks: Any
    count: Any
    block_size: int = dataclasses.field(metadata={"static": True})


def expand_candidates(
    candidate_blocks: Int32[Array, "*rows C"], context_lens: Int32[Array, "*rows"], block_size: int
) -> Candidates:
    """Candidate block ids as Candidates: sorted, without those below 0 or at and beyond the visible length.

    Ids of a row must differ from one another. `context_lens` are visible lengths, `block_size` positions a block.
    """
    checks.integer("candidate_blocks", candidate_blocks)
    checks.integer("context_lens", context_lens)
    checks.positive("block_size", block_size)
    if candidate_blocks.shape[:-1] != context_lens.shape:
        raise ValueError(
            f"candidate_blocks have shape {tuple(candidate_blocks.shape)} and context_lens "
            f"{tuple(context_lens.shape)}; context_lens must have the shape of candidate_blocks without their last axis."
        )
    last = jnp.iinfo(jnp.int32).max
    reachable = (candidate_blocks >= 0) & (candidate_blocks < -(-context_lens[..., None] // block_size))
    ids = jnp.sort(jnp.where(reachable, candidate_blocks, last), axis=-1)
    count = jnp.sum(reachable, axis=-1, dtype=jnp.int32)
    return Candidates(jnp.where(ids == last, -1, ids), count, block_size)


def candidate_positions(
    columns: Int32[Array, "*rows K"], candidates: Candidates, block_size: int
) -> Int32[Array, "*rows K"]:
    """Request-local positions of columns of candidate scores; -1 for a column outside the width or of no block."""
    checks.integer("columns", columns)
    if block_size != candidates.block_size:
        raise ValueError(f"block_size is {block_size}, but the candidates were expanded for {candidates.block_size}.")
    if columns.shape[:-1] != candidates.count.shape:
        raise ValueError(
            f"columns have shape {tuple(columns.shape)} for candidates of rows {tuple(candidates.count.shape)}; all "
            "axes but the last must be the same."
        )
    slot = columns // block_size
    inside = (columns >= 0) & (slot < candidates.count[..., None])
    block = jnp.take_along_axis(candidates.blocks, jnp.where(inside, slot, 0), axis=-1)
    return jnp.where(inside, block * block_size + columns % block_size, -1)


def candidate_logits(
    q: Shaped[Array, "B N H stored"],
    keys: PagedRows,
    weights: Shaped[Array, "B N H"],
    candidates: Candidates,
    *,
    context_lens: Int32[Array, "B N"],
    block_table: Int32[Array, "B M"],
    q_scale: UInt8[Array, "B N H G"] | None = None,
    rounding: Any = None,
    schedule: Any = None,
    implementation: str | None = None,
) -> Float32[Array, "B N W"]:
    """Indexer scores of the candidate blocks, [B, N, C * block_size]; -inf where nothing is visible.

    Queries, keys, lengths, table, arithmetic and rounding as in indexer_logits.paged_indexer_logits; columns as
    `Candidates` says. A column's score equals the dense score of its position up to the order of the sums. schedule: of
    `make_candidate_schedule` for the same candidates, lengths and table, made once per step; None makes it here.
    """
    sizes = {}
    check_paged(q, keys, weights, context_lens, block_table, rounding, sizes, q_scale)
    checks.shape("candidates.blocks", candidates.blocks, "B N C", sizes)
    return dispatch.call(
        __name__, "candidate_logits", implementation, q, keys, weights, candidates, context_lens=context_lens,
        block_table=block_table, q_scale=q_scale, rounding=rounding, schedule=schedule,
    )  # fmt: skip


def ragged_candidate_logits(
    q: Shaped[Array, "T H stored"],
    k: Shaped[Array, "S stored2"],
    weights: Shaped[Array, "T H"],
    candidates: Candidates,
    *,
    row_start: Int32[Array, " T"],
    row_end: Int32[Array, " T"],
    k_scale: Shaped[Array, "S *groups"] | None = None,
    q_scale: UInt8[Array, "T H G"] | None = None,
    rounding: Any = None,
    schedule: Any = None,
    implementation: str | None = None,
) -> Float32[Array, "T W"]:
    """Indexer scores of the candidate blocks of packed keys, [T, C * block_size]; -inf where nothing is visible.

    Block ids count from ``row_start[t]``: column c is the key ``row_start[t] + position``, visible below
    ``row_end[t]``. Queries, keys, arithmetic and rounding as in indexer_logits.indexer_logits. schedule: of
    `make_ragged_candidate_schedule` for the same candidates and rows, made once per step; None makes it here.
    """
    sizes = {}
    check_packed(q, k, weights, row_start, row_end, k_scale, q_scale, rounding, sizes)
    checks.shape("candidates.blocks", candidates.blocks, "T C", sizes)
    return dispatch.call(
        __name__, "ragged_candidate_logits", implementation, q, k, weights, candidates, row_start=row_start,
        row_end=row_end, k_scale=k_scale, q_scale=q_scale, rounding=rounding, schedule=schedule,
    )  # fmt: skip


def make_candidate_schedule(
    candidates: Candidates,
    keys: PagedRows,
    *,
    context_lens: Int32[Array, "B N"],
    block_table: Int32[Array, "B M"],
    heads: int,
    implementation: str | None = None,
) -> Any:
    """What all layers of `heads` heads that score the same paged candidates share: where their blocks lie in pages like
    those of `keys`, and which thread block scores them. A pytree for `candidate_logits`, or None where the
    implementation needs none.
    """
    sizes = {}
    checks.shape("candidates.blocks", candidates.blocks, "B N C", sizes)
    checks.shape("context_lens", context_lens, "B N", sizes)
    checks.shape("block_table", block_table, "B M", sizes)
    checks.positive("heads", heads)
    return dispatch.call(
        __name__, "make_schedule", implementation, candidates, keys, context_lens=context_lens,
        block_table=block_table, heads=heads,
    )  # fmt: skip


def make_ragged_candidate_schedule(
    candidates: Candidates,
    *,
    row_start: Int32[Array, " T"],
    row_end: Int32[Array, " T"],
    heads: int,
    implementation: str | None = None,
) -> Any:
    """As `make_candidate_schedule`, for `ragged_candidate_logits`."""
    sizes = {}
    checks.shape("candidates.blocks", candidates.blocks, "T C", sizes)
    checks.shape("row_start", row_start, "T", sizes)
    checks.shape("row_end", row_end, "T", sizes)
    checks.positive("heads", heads)
    return dispatch.call(
        __name__, "make_ragged_schedule", implementation, candidates, row_start=row_start, row_end=row_end, heads=heads
    )
