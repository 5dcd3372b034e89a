"""Queries against keys to chosen positions, within a budget of bytes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import blocks, checks
from pallas_kernels.candidate_logits import Candidates, candidate_logits, candidate_positions
from pallas_kernels.indexer_logits import check_paged, paged_indexer_logits
from pallas_kernels.records import PagedRows
from pallas_kernels.top_k import top_k, top_k_and_candidate_blocks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """What an indexer chose: topk_indices int32 [B, N, k] (ascending positions, then -1), counts int32 [B, N], and
    candidate_blocks int32 [B, N, C] (ascending ids, then -1) or None."""

    topk_indices: Any
    counts: Any
    candidate_blocks: Any


def select(
    q: Float[Array, "B N H D"],
    keys: PagedRows,
    weights: Float[Array, "B N H"],
    k: int,
    *,
    context_lens: Int32[Array, "B N"],
    block_table: Int32[Array, "B M"],
    candidates: Candidates | None = None,
    candidate_topk_blocks: int | None = None,
    candidate_block_size: int | None = None,
    rounding: Any = None,
    byte_budget: int = blocks.BUDGET,
    implementation: str | None = None,
) -> Selection:
    """The k best positions of every query row: indexer scores, then top_k, on as many rows as the budget allows.

    With `candidates` only their blocks are scored. With `candidate_topk_blocks` and `candidate_block_size` the row's
    own candidate blocks are chosen from the same scores as well. `byte_budget` bounds the score arrays (at least one
    row is scored at a time); the result does not depend on it. Ties and masks as in top_k, scores as in
    indexer_logits; `implementation` names that of the two operations inside.
    """
    sizes = {}
    check_paged(q, keys, weights, context_lens, block_table, rounding, sizes)
    checks.positive("k", k)
    checks.positive("byte_budget", byte_budget)
    if (candidate_topk_blocks is None) != (candidate_block_size is None):
        raise ValueError(
            f"candidate_topk_blocks={candidate_topk_blocks} and candidate_block_size={candidate_block_size}: give "
            "both, to choose candidate blocks, or neither."
        )
    if candidates is not None and candidate_topk_blocks is not None:
        raise ValueError("candidates and candidate_topk_blocks: rows bound to candidates do not choose them.")
    if candidates is not None:
        checks.shape("candidates.blocks", candidates.blocks, "B N C", sizes)

    def score_and_choose(arrays):
        q, weights, lengths, table, candidates = arrays
        if candidates is not None:
            scores = candidate_logits(
                q, keys, weights, candidates, context_lens=lengths, block_table=table, rounding=rounding,
                implementation=implementation,
            )  # fmt: skip
            columns, counts = top_k(scores, k, implementation=implementation)
            return Selection(candidate_positions(columns, candidates, candidates.block_size), counts, None)
        scores = paged_indexer_logits(
            q, keys, weights, context_lens=lengths, block_table=table, rounding=rounding, implementation=implementation
        )
        if candidate_topk_blocks is None:
            return Selection(*top_k(scores, k, lengths=lengths, implementation=implementation), None)
        return Selection(
            *top_k_and_candidate_blocks(
                scores, k, lengths, candidate_topk_blocks, candidate_block_size, implementation=implementation
            )
        )

    if candidates is None:
        width = sizes["M"] * keys.page_size
    else:
        width = sizes["C"] * candidates.block_size
    rows = max(1, byte_budget // (COPIES * 4 * max(1, width)))
    if rows >= sizes["B"]:  # every request at once, some of their rows at a time
        return _over_rows(score_and_choose, rows // sizes["B"], (q, weights, context_lens, block_table, candidates))

    def request(arrays):
        one = jax.tree.map(lambda array: array[None], arrays)
        return jax.tree.map(lambda array: array[0], _over_rows(score_and_choose, rows, one))

    return lax.map(request, (q, weights, context_lens, block_table, candidates))


COPIES = 3  # scores, the keys that top_k makes of them, and what is being written while they are read


def _over_rows(function, rows, arrays):
    """`function` on blocks of `rows` query rows (axis 1); the block table goes to every block whole."""
    q, weights, lengths, table, candidates = arrays

    def block(arrays):
        q, weights, lengths, candidates = jax.tree.map(lambda array: jnp.moveaxis(array, 0, 1), arrays)
        chosen = function((q, weights, lengths, table, candidates))
        return jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), chosen)

    turned = jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), (q, weights, lengths, candidates))
    return jax.tree.map(lambda array: jnp.moveaxis(array, 0, 1), blocks.map_rows(block, rows, turned))
