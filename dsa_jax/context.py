"""Caches divided by context: what each of the devices along the mesh axis cp holds, and how they select and attend together.

A page of a divided cache holds as many rows of every device as a page of one device has, device after device: with
pages of `rows` rows on each of `ways` devices, position p lies on device (p // rows) mod ways. So the block table, which
says where a request's pages are, is the same on every device, and rows of one device keep their order.

Where nothing is divided every function here does what the operation of its name does.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from dsa_jax import ops, ranks

CONTEXT = "context"
_LAST = jnp.iinfo(jnp.int32).max


def own(positions: Int32[Array, "*any"], rows: int) -> Int32[Array, "*any"]:
    """Positions (or blocks of them, with `rows` blocks of a page here) as this device counts its own; -1 for the others."""
    ways = ranks.parts(CONTEXT)
    if ways == 1:
        return positions
    turn = positions // rows
    here = (positions >= 0) & (turn % ways == ranks.place(CONTEXT))
    return jnp.where(here, turn // ways * rows + positions % rows, -1)


def of_all(positions: Int32[Array, "*any"], rows: int) -> Int32[Array, "*any"]:
    """This device's own positions as all devices count them; -1 stays -1."""
    ways = ranks.parts(CONTEXT)
    if ways == 1:
        return positions
    place = (positions // rows * ways + ranks.place(CONTEXT)) * rows + positions % rows
    return jnp.where(positions < 0, -1, place)


def own_count(count: Int32[Array, "*any"], rows: int) -> Int32[Array, "*any"]:
    """How many of the first `count` positions are this device's."""
    ways = ranks.parts(CONTEXT)
    if ways == 1:
        return count
    rest = count % (rows * ways) - ranks.place(CONTEXT) * rows
    return count // (rows * ways) * rows + jnp.clip(rest, 0, rows)


def own_most(count: int, rows: int) -> int:
    """How many of the first `count` positions may be this device's at most."""
    ways = ranks.parts(CONTEXT)
    return count if ways == 1 else -(-count // (rows * ways)) * rows


def held(block_table: Int32[Array, "B M"], rows: int) -> int:
    """Positions that the pages of a request hold, on all devices."""
    return block_table.shape[1] * rows * ranks.parts(CONTEXT)


def slots(positions: Int32[Array, "B N K"], block_table: Int32[Array, "B M"], rows: int) -> Int32[Array, "B N K"]:
    """Slots of positions in this device's pages, in their places; -1 where another device has the position."""
    return ops.positions_to_slots(own(positions, rows), block_table, rows)[0]


def listed(
    positions: Int32[Array, "B N K"],
    block_table: Int32[Array, "B M"],
    rows: int,
    lengths: Int32[Array, "B N"] | None = None,
) -> Int32[Array, "B N K"]:
    """Slots of those of ascending positions below `lengths` that this device has: ascending, then -1."""
    if ranks.parts(CONTEXT) > 1:
        lengths = None if lengths is None else own_count(lengths, rows)
        positions = _packed(own(positions, rows))
    return ops.positions_to_slots(positions, block_table, rows, lengths)[0]


def every_listed(
    block_table: Int32[Array, "B M"], rows: int, lengths: Int32[Array, "B N"]
) -> Int32[Array, "B N K"]:
    """Slots of all positions below `lengths` that this device has, K = all that its pages hold: ascending, then -1."""
    every = jnp.arange(block_table.shape[1] * rows, dtype=jnp.int32)
    every = jnp.broadcast_to(every, (*lengths.shape, len(every)))
    return ops.positions_to_slots(every, block_table, rows, own_count(lengths, rows))[0]


def candidates(
    blocks: Int32[Array, "*rows C"], context_lens: Int32[Array, "*rows"], block_size: int, rows: int
) -> ops.Candidates:
    """Candidate blocks as this device scores them: its own ones of `blocks`, counted as it counts positions."""
    return ops.expand_candidates(
        own(blocks, rows // block_size), own_count(context_lens, rows), block_size
    )


def candidate_blocks(candidates: ops.Candidates, rows: int) -> Int32[Array, "*rows C"]:
    """The blocks that `candidates` was made of, ascending, then -1: those of all devices."""
    blocks = candidates.blocks
    if ranks.parts(CONTEXT) == 1:
        return blocks
    every = of_all(blocks, rows // candidates.block_size)
    return _packed(ranks.joined(every, CONTEXT, -1))[..., : blocks.shape[-1]]


def select(
    q: Float[Array, "B N H D"],
    keys: ops.PagedRows,
    weights: Float[Array, "B N H"],
    k: int,
    *,
    context_lens: Int32[Array, "B N"],
    block_table: Int32[Array, "B M"],
    candidates: ops.Candidates | None = None,
    candidate_topk_blocks: int | None = None,
    candidate_block_size: int | None = None,
    rounding=None,
    schedule=None,
) -> ops.Selection:
    """`ops.select` over the keys of all devices: each scores its own and chooses among them, and the choices are merged.

    Exact: what all devices together choose is among what each chooses alone. Lengths and results count all positions;
    candidates and schedule are this device's.
    """
    blocks = {"candidate_topk_blocks": candidate_topk_blocks, "candidate_block_size": candidate_block_size}
    options = dict(block_table=block_table, candidates=candidates, rounding=rounding, schedule=schedule, **blocks)
    axes = ranks.axes_of(CONTEXT)
    if not axes:
        return ops.select(q, keys, weights, k, context_lens=context_lens, **options)
    rows = keys.page_size
    found = ops.select(
        q, keys, weights, k, context_lens=own_count(context_lens, rows), return_scores=True, **options
    )
    positions, counts = ops.merge_top_k(found.scores, of_all(found.topk_indices, rows), k, axis_name=axes)
    if found.candidate_blocks is None:
        return ops.Selection(positions, counts, None)
    # The newest block of all devices is chosen whatever its score; that of each device is among the blocks it names.
    newest = jnp.where(context_lens > 0, (context_lens - 1) // candidate_block_size, -1)[..., None]
    ids = of_all(found.candidate_blocks, rows // candidate_block_size)
    ids = jnp.where(ids == newest, -1, ids)
    width = min(candidate_topk_blocks, held(block_table, rows) // candidate_block_size)
    if width > 1:
        others, _ = ops.merge_top_k(found.block_scores, ids, width - 1, axis_name=axes)
        newest = _packed(jnp.concatenate([others, newest], axis=-1))
    return ops.Selection(positions, counts, newest)


def scores(
    q: Float[Array, "B N H D"],
    keys: ops.PagedRows,
    weights: Float[Array, "B N H"],
    *,
    context_lens: Int32[Array, "B N"],
    block_table: Int32[Array, "B M"],
    rounding=None,
) -> Float32[Array, "B N L"]:
    """`ops.paged_indexer_logits` over the keys of all devices, in the order of positions."""
    found = ops.paged_indexer_logits(
        q, keys, weights,
        context_lens=own_count(context_lens, keys.page_size), block_table=block_table, rounding=rounding,
    )  # fmt: skip
    pages = found.reshape(*found.shape[:-1], block_table.shape[1], keys.page_size)
    return ranks.joined(pages, CONTEXT, -1).reshape(*found.shape[:-1], -1)


def attend(
    q: Float[Array, "B S H D"],
    caches: tuple[ops.PagedRows, ...],
    slots: tuple[Int32[Array, "B S _"], ...],
    *,
    whole: int,
    block_table: Int32[Array, "B M"],
    sink: Float[Array, " H"] | None = None,
    scale: float,
    v_width: int | None = None,
    p_dtype=None,
) -> tuple[Float[Array, "B S H V"], Float32[Array, "B S H"]]:
    """`ops.attend` over the rows of all devices, the sink once. The first `whole` caches are on every device.

    Each device attends to its share of the slots in whole caches and to its own slots in divided ones (as `listed` gives
    them, or a prefix of its rows); the parts are merged. Slots of divided caches come from the block table.
    """
    options = dict(
        scale=scale, v_width=v_width, p_dtype=p_dtype,
        block_tables=(*(None,) * whole, *(block_table,) * (len(caches) - whole)),
    )  # fmt: skip
    if not ranks.axes_of(CONTEXT):
        return ops.attend(q, caches, slots, sink=sink, **options)
    slots = (*(_dealt(each) for each in slots[:whole]), *slots[whole:])
    lengths = (*(None,) * whole, *(jnp.sum(each >= 0, axis=-1, dtype=jnp.int32) for each in slots[whole:]))
    part, lse = ops.attend(q, caches, slots, topk_lengths=lengths, out_dtype=jnp.float32, **options)
    out, lse = merged(part, lse, sink)
    return out.astype(q.dtype), lse


def merged(
    out: Float[Array, "*rows H V"], lse: Float32[Array, "*rows H"], sink: Float[Array, " H"] | None = None
) -> tuple[Float[Array, "*rows H V"], Float32[Array, "*rows H"]]:
    """Each device's attention over rows of its own, without a sink, as attention over the rows of all: out and lse.

    lse is the natural log, -inf where a device had nothing to attend to; the result's is without the sink, too.
    """
    axes = ranks.axes_of(CONTEXT)
    if not axes:
        return out, lse
    high = jnp.maximum(lax.pmax(lse, axes), -1e30)  # finite, where no device has anything
    weight = jnp.exp(lse - high)
    total = lax.psum(weight, axes)
    out = lax.psum(jnp.where(weight[..., None] > 0, out * weight[..., None], 0), axes)
    below = total if sink is None else total + jnp.exp(sink - high)
    out = jnp.where(total[..., None] > 0, out / jnp.where(total > 0, below, 1)[..., None], 0)
    return out, high + jnp.log(total)


def _dealt(slots: Int32[Array, "B S K"]) -> Int32[Array, "B S _"]:
    """This device's share of slots that every device could attend to."""
    ways = ranks.parts(CONTEXT)
    width = -(-slots.shape[-1] // ways)
    padded = jnp.pad(slots, ((0, 0), (0, 0), (0, width * ways - slots.shape[-1])), constant_values=-1)
    return lax.dynamic_slice_in_dim(padded, ranks.place(CONTEXT) * width, width, axis=-1)


def _packed(positions: Int32[Array, "*rows K"]) -> Int32[Array, "*rows K"]:
    """Positions ascending, then -1."""
    ascending = jnp.sort(jnp.where(positions < 0, _LAST, positions), axis=-1)
    return jnp.where(ascending == _LAST, -1, ascending)
