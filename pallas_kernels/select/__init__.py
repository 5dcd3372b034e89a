"""Queries against keys to chosen positions, within a budget of bytes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import blocks, checks, platform
from pallas_kernels.candidate_logits import Candidates, candidate_logits, candidate_positions, make_candidate_schedule
from pallas_kernels.indexer_logits import check_paged, make_indexer_schedule, paged_indexer_logits
from pallas_kernels.records import PagedRows
from pallas_kernels.top_k import top_k, top_k_and_candidate_blocks
from pallas_kernels.top_k.reference import block_scores


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """What an indexer chose: topk_indices int32 [B, N, k] (ascending positions, then -1), counts int32 [B, N], and
    candidate_blocks int32 [B, N, C] (ascending ids, then -1) or None.

    scores, block_scores: float32, of the chosen positions and blocks, -inf where there is none; None if not asked for.
    """

    topk_indices: Any
    counts: Any
    candidate_blocks: Any
    scores: Any = None
    block_scores: Any = None


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
    return_scores: bool = False,
    byte_budget: int | None = None,
    schedule: Any = None,
    implementation: str | None = None,
) -> Selection:
    """The k best positions of every query row: indexer scores, then top_k, on as many rows as the budget allows.

    With `candidates` only their blocks are scored. With `candidate_topk_blocks` and `candidate_block_size` the row's
    own candidate blocks are chosen from the same scores as well. `byte_budget` bounds the score arrays (at least one
    row is scored at a time; default 64 MiB, 512 MiB on a GPU with kernels); the result does not depend on it. schedule:
    of `make_select_schedule` for the same lengths, table, candidates and budget, made once per step; None makes it here.
    Ties and masks as in top_k, scores as in indexer_logits; `implementation` names that of the two operations inside.
    `return_scores` adds what `merge_top_k` takes where `keys` are one of several shards: scores, and of blocks the
    highest of their visible positions.
    """
    sizes = {}
    check_paged(q, keys, weights, context_lens, block_table, rounding, sizes)
    checks.positive("k", k)
    byte_budget = _budget() if byte_budget is None else byte_budget
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

    def score_and_choose(table, rows, schedule):
        q, weights, lengths, candidates = rows
        if candidates is not None:
            scores = candidate_logits(
                q, keys, weights, candidates, context_lens=lengths, block_table=table, rounding=rounding,
                schedule=schedule, implementation=implementation,
            )  # fmt: skip
            columns, counts = top_k(scores, k, implementation=implementation)
            positions = candidate_positions(columns, candidates, candidates.block_size)
            return Selection(positions, counts, None, _taken(scores, columns) if return_scores else None)
        scores = paged_indexer_logits(
            q, keys, weights, context_lens=lengths, block_table=table, rounding=rounding, schedule=schedule,
            implementation=implementation,
        )  # fmt: skip
        if candidate_topk_blocks is None:
            positions, counts = top_k(scores, k, lengths=lengths, implementation=implementation)
            return Selection(positions, counts, None, _taken(scores, positions) if return_scores else None)
        positions, counts, ids = top_k_and_candidate_blocks(
            scores, k, lengths, candidate_topk_blocks, candidate_block_size, implementation=implementation
        )
        if not return_scores:
            return Selection(positions, counts, ids)
        best = block_scores(scores, lengths, candidate_block_size)
        return Selection(positions, counts, ids, _taken(scores, positions), _taken(best, ids))

    blocking = _Blocking.of(context_lens, block_table, keys, candidates, byte_budget)
    tables, rows = blocking.split_tables(block_table), blocking.split((q, weights, context_lens, candidates))

    def group(operands):
        table, rows, schedules = operands
        return _each(lambda block: score_and_choose(table, *block), (rows, schedules))

    return blocking.join(_each(group, (tables, rows, schedule)))


def make_select_schedule(
    context_lens: Int32[Array, "B N"],
    block_table: Int32[Array, "B M"],
    keys: PagedRows,
    heads: int,
    *,
    candidates: Candidates | None = None,
    byte_budget: int | None = None,
    implementation: str | None = None,
) -> Any:
    """The schedules of all kernels that one `select` runs, for all layers of a step that call it with the same lengths,
    table, candidates and budget, `heads` heads, and keys of the format and page size of `keys`. A pytree, or None where
    the implementation needs none.
    """
    sizes = {}
    checks.shape("context_lens", context_lens, "B N", sizes)
    checks.shape("block_table", block_table, "B M", sizes)
    checks.positive("heads", heads)
    byte_budget = _budget() if byte_budget is None else byte_budget
    checks.positive("byte_budget", byte_budget)

    def make(table, rows):
        lengths, candidates = rows
        if candidates is None:
            return make_indexer_schedule(lengths, heads, implementation=implementation)
        return make_candidate_schedule(
            candidates, keys, context_lens=lengths, block_table=table, heads=heads, implementation=implementation
        )

    blocking = _Blocking.of(context_lens, block_table, keys, candidates, byte_budget)
    tables, rows = blocking.split_tables(block_table), blocking.split((context_lens, candidates))
    return _each(lambda group: _each(lambda block: make(group[0], block), group[1]), (tables, rows))


def _budget() -> int:
    """Bytes of scores at once. Kernels take more rows for less: fewer calls, and top-k with enough rows for all
    multiprocessors."""
    return blocks.BUDGET if platform.kernel_name() is None else 8 * blocks.BUDGET


COPIES = 3  # scores, the keys that top_k makes of them, and what is being written while they are read


@dataclasses.dataclass(frozen=True)
class _Blocking:
    """How a call is cut for its budget: into equal `groups` of as many requests as it allows, and the rows of each into
    `blocks` of `rows`."""

    groups: int
    blocks: int
    rows: int
    total: int

    @classmethod
    def of(cls, context_lens, block_table, keys, candidates, byte_budget) -> "_Blocking":
        batch, total = context_lens.shape
        if candidates is None:
            width = block_table.shape[1] * keys.page_size
        else:
            width = candidates.blocks.shape[-1] * candidates.block_size
        rows = max(1, byte_budget // (COPIES * 4 * max(1, width)))
        together = max((n for n in range(1, min(batch, rows) + 1) if batch % n == 0), default=1)
        rows = max(1, min(rows // together, total))
        return cls(max(1, batch // together), max(1, -(-total // rows)), rows, total)

    def split_tables(self, table):
        """[B, M] -> [groups, B / groups, M]"""
        return table.reshape(self.groups, -1, table.shape[1])

    def split(self, tree):
        """[B, N, ..] -> [groups, blocks, B / groups, rows, ..], the last block filled up with zeros."""

        def one(array):
            padding = [(0, 0), (0, self.blocks * self.rows - self.total)] + [(0, 0)] * (array.ndim - 2)
            cut = jnp.pad(array, padding).reshape(self.groups, -1, self.blocks, self.rows, *array.shape[2:])
            return jnp.swapaxes(cut, 1, 2)

        return jax.tree.map(one, tree)

    def join(self, tree):
        """The inverse of `split`."""

        def one(array):
            cut = jnp.swapaxes(array, 1, 2)
            return cut.reshape(-1, self.blocks * self.rows, *array.shape[4:])[:, : self.total]

        return jax.tree.map(one, tree)


def _taken(scores, ids):
    """Scores [.., L] at ids [.., K]; -inf where an id is negative."""
    return jnp.where(ids < 0, -jnp.inf, jnp.take_along_axis(scores, jnp.maximum(ids, 0), axis=-1))


def _each(function, trees):
    """`function` on every entry of axis 0, one after the other, results stacked; without a loop where there is one."""
    if jax.tree.leaves(trees)[0].shape[0] > 1:
        return lax.map(function, trees)
    return jax.tree.map(lambda array: array[None], function(jax.tree.map(lambda array: array[0], trees)))
