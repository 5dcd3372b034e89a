"""Exact top-k of rows, of blocks of a row, and of results of several shards."""

from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import checks, dispatch

ORDERS = ("position", "score")


def top_k(
    scores: Float[Array, "*rows L"],
    k: int,
    *,
    lengths: Int32[Array, "*rows"] | None = None,
    row_start: Int32[Array, "*rows"] | None = None,
    row_end: Int32[Array, "*rows"] | None = None,
    order: str = "position",
    return_scores: bool = False,
    implementation: str | None = None,
) -> tuple:
    """Positions of the k highest scores of every row: int32 [..., k], and how many there are: int32 [...].

    Only columns below ``lengths`` (default L) take part or, of scores of packed keys, those from ``row_start`` to below
    ``row_end``, and then positions count from ``row_start``, as they do in `ragged_candidate_logits`. Bounds outside
    the row are taken as 0 and L. NaN and -inf are never chosen, +inf may be. Ties go to the
    lower position; -0 and +0 tie. Positions ascend (order="position") or go from the best score down
    (order="score"), then -1 up to width k, whatever L is. With `return_scores` the scores come third, float32, -inf
    where the position is -1. Exact, and equal from run to run.
    """
    checks.floating("scores", scores)
    checks.positive("k", k)
    _order(order)
    if scores.ndim < 1:
        raise ValueError(f"scores have shape {tuple(scores.shape)}; they need at least the axis to choose from.")
    bounds = {"lengths": lengths, "row_start": row_start, "row_end": row_end}
    bounds = {name: array for name, array in bounds.items() if array is not None}
    if [*bounds] not in ([], ["lengths"], ["row_start", "row_end"]):
        raise ValueError(f"{' and '.join(bounds)} given; give lengths, or both row_start and row_end, or none of them.")
    for name, array in bounds.items():
        _per_row(name, scores, array)
    return dispatch.call(
        __name__, "top_k", implementation, scores, k, order=order, return_scores=return_scores, **bounds
    )


def candidate_blocks(
    scores: Float[Array, "*rows L"],
    lengths: Int32[Array, "*rows"],
    topk_blocks: int,
    block_size: int,
    *,
    implementation: str | None = None,
) -> Int32[Array, "*rows C"]:
    """Ids of every row's best blocks of `block_size` positions, int32 [..., min(topk_blocks, ceil(L / block_size))].

    A block's score is the highest of its visible positions (those below ``lengths``). The newest block, even a
    partial one, is always chosen and counts as one of the topk_blocks; a block with a NaN comes next, with +inf. Ties
    go to the lower id. Blocks of which nothing is visible or all is -inf are dropped. Ids ascend, then -1. A row of
    length 0 has none. Source: the candidate selection of DeepSeek-V4.1's released code.
    """
    _blocks(scores, lengths, topk_blocks, block_size)
    return dispatch.call(__name__, "candidate_blocks", implementation, scores, lengths, topk_blocks, block_size)


def top_k_and_candidate_blocks(
    scores: Float[Array, "*rows L"],
    k: int,
    lengths: Int32[Array, "*rows"],
    topk_blocks: int,
    block_size: int,
    *,
    implementation: str | None = None,
) -> tuple[Int32[Array, "*rows k"], Int32[Array, "*rows"], Int32[Array, "*rows C"]]:
    """Positions and counts of `top_k` and ids of `candidate_blocks` of the same rows; a kernel reads them once.

    What a layer needs that chooses its own positions and the blocks of the layers behind it.
    """
    checks.positive("k", k)
    _blocks(scores, lengths, topk_blocks, block_size)
    return dispatch.call(
        __name__, "top_k_and_candidate_blocks", implementation, scores, k, lengths, topk_blocks, block_size
    )


def merge_top_k(
    scores: Float32[Array, "*parts k"],
    ids: Int32[Array, "*parts k"],
    k: int,
    *,
    order: str = "position",
    axis_name: str | None = None,
    implementation: str | None = None,
) -> tuple[Int32[Array, "*rows K"], Int32[Array, "*rows"]]:
    """The k best of several shards' results, by score descending, then id ascending: ids [..., k] and their count.

    scores and ids: [shards, ..., k] of all shards or, under `shard_map` over the mesh axis `axis_name`, [..., k] of
    this shard, which are gathered over that axis; every shard then has the same result.
    `ids` are global positions, different in every shard, -1 for none (its score does not matter); all 31 bits count.
    An entry of score NaN or -inf is none. Output ids ascend or go from the best down, as `order` says, then -1.
    With every shard's own top k given, the result is the top k of all shards together.
    """
    checks.positive("k", k)
    _order(order)
    if axis_name is not None:
        scores, ids = lax.all_gather((scores, ids), axis_name)
    if scores.shape != ids.shape or scores.ndim < 2:
        raise ValueError(
            f"scores have shape {tuple(scores.shape)} and ids {tuple(ids.shape)}; both must be [shards, ..., k]."
        )
    checks.floating("scores", scores)
    checks.integer("ids", ids)
    return dispatch.call(__name__, "merge_top_k", implementation, scores, ids, k, order=order)


def _order(order):
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is not known. Allowed: {', '.join(ORDERS)}.")


def _blocks(scores, lengths, topk_blocks, block_size):
    checks.floating("scores", scores)
    checks.positive("topk_blocks", topk_blocks)
    checks.positive("block_size", block_size)
    if scores.ndim < 1 or scores.shape[-1] < 1:
        raise ValueError(f"scores have shape {tuple(scores.shape)}; the last axis must hold at least one position.")
    _per_row("lengths", scores, lengths)


def _per_row(name, scores, array):
    checks.integer(name, array)
    if array.shape != scores.shape[:-1]:
        raise ValueError(
            f"{name} has shape {tuple(array.shape)} and scores {tuple(scores.shape)}; {name} must have the shape "
            f"of the scores without their last axis, {tuple(scores.shape[:-1])}."
        )
