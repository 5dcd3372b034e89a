"""From logical positions to physical slots of a paged cache."""

from jaxtyping import Array, Int32

from pallas_kernels import checks
from pallas_kernels.slots import reference


def positions_to_slots(
    topk_indices: Int32[Array, "B N K"],
    block_table: Int32[Array, "B M"],
    page_size: int,
    lengths: Int32[Array, "B N"] | None = None,
) -> tuple[Int32[Array, "B N K"], Int32[Array, "B N"]]:
    """Slots ``block_table[b, i // page_size] * page_size + i % page_size`` of request-local positions i.

    -1 stays -1; so does a position at or beyond ``lengths``, one beyond the block table, and one whose page is
    negative. Order is kept. Also returns how many slots of every row are valid. Slots are int32: a cache may have
    2^31 rows. Kernels split a slot into (page, row) again and never form a flat number of bytes.
    """
    sizes = {}
    checks.shape("topk_indices", topk_indices, "B N K", sizes)
    checks.shape("block_table", block_table, "B M", sizes)
    checks.integer("topk_indices", topk_indices)
    checks.integer("block_table", block_table)
    checks.positive("page_size", page_size)
    if lengths is not None:
        checks.shape("lengths", lengths, "B N", sizes)
        checks.integer("lengths", lengths)
    return reference.positions_to_slots(topk_indices, block_table, page_size, lengths)
