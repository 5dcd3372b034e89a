"""Indexer scores of candidate blocks on Hopper: as the dense kernel, on keys gathered by cp.async.

Every query row has blocks of its own, so a thread block scores one row at a time; runs of columns of all rows, laid
end to end, are dealt out evenly. The producer warpgroup gathers eight or four blocks into a tile of 64 keys and keeps
several tiles under way; what follows is `indexer_logits.ring`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import copies, indexing, mosaic
from pallas_kernels.indexer_logits import keys as index_keys
from pallas_kernels.indexer_logits import lanes, ring
from pallas_kernels.indexer_logits import sm90 as dense
from pallas_kernels.indexer_logits.ring import Segment, TuningConfig

BLOCK_SIZES = (8, 16)
CONFIG = TuningConfig(columns=64, math=2, stages=10)
MXFP4 = TuningConfig(columns=64, math=4, stages=12)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CandidateSchedule:
    """What all layers that score the same candidates share; made once per step.

    runs: `indexer_logits.sm90.Schedule` of the visible columns. visible: int32 [R], columns of a row that hold a
    visible position. places: int32 [R * C and some], the row of values where a block's keys start, a
    row's in whole lists.
    """

    runs: Any
    visible: Any
    places: Any


def candidate_logits(
    q, keys, weights, candidates, *, context_lens, block_table, q_scale=None, rounding=None, schedule=None, config=None
):
    """See `pallas_kernels.candidate_logits.candidate_logits`. Width 128; FP8 queries with FP8 keys, bf16 or packed
    queries with MXFP4 keys."""
    q = index_keys.unpacked_queries(q, q_scale)
    batch, rows, heads, width = q.shape
    kind, where, (values, words) = index_keys.paged_keys(keys)
    index_keys.require_queries(heads, width, q.dtype, kind.query_dtype)
    blocks, size = block_sizes(candidates)
    if 0 in (batch, rows, blocks):
        return jnp.full((batch, rows, blocks * size), -jnp.inf, jnp.float32)
    if schedule is None:
        schedule = make_schedule(candidates, keys, context_lens=context_lens, block_table=block_table, heads=heads)
    layout = (where.page_rows, where.page_words, where.first_word)
    scores = _score(
        q.reshape(batch * rows, heads, width), values, words.reshape(-1), weights.reshape(batch * rows, heads),
        schedule, kind, blocks, size, layout, rounding is not None, config,
    )  # fmt: skip
    return scores.reshape(batch, rows, -1)


def ragged_candidate_logits(
    q, k, weights, candidates, *, row_start, row_end, k_scale=None, q_scale=None, rounding=None, schedule=None,
    config=None,
):  # fmt: skip
    """See `pallas_kernels.candidate_logits.ragged_candidate_logits`. As `candidate_logits`."""
    q = index_keys.unpacked_queries(q, q_scale)
    rows, heads, width = q.shape
    kind, views = index_keys.packed_keys(k, k_scale)
    index_keys.require_queries(heads, width, q.dtype, kind.query_dtype)
    blocks, size = block_sizes(candidates)
    if 0 in (rows, blocks, k.shape[0]):
        return jnp.full((rows, blocks * size), -jnp.inf, jnp.float32)
    if schedule is None:
        schedule = make_ragged_schedule(candidates, row_start=row_start, row_end=row_end, heads=heads)
    words = views[1] if kind.scaled else None
    whole = (2**31 - 1, 0, 0)  # one page: a row's word has the row's own number
    return _score(q, views[0], words, weights, schedule, kind, blocks, size, whole, rounding is not None, config)


def make_schedule(candidates, keys, *, context_lens, block_table, heads: int) -> CandidateSchedule:
    """The schedule of paged candidates [B, N, C]: where their blocks lie in pages of `keys`, and who scores them."""
    _, where, _ = index_keys.paged_keys(keys)
    position = candidates.blocks * candidates.block_size
    request = jnp.arange(position.shape[0], dtype=jnp.int32)[:, None, None]
    entry = jnp.where(position < 0, -1, request * block_table.shape[1] + position // keys.page_size)
    page = jnp.clip(indexing.gather_rows(block_table.reshape(-1), entry), 0, keys.pages.shape[0] - 1)
    places = page * where.page_rows + jnp.maximum(position, 0) % keys.page_size
    return _schedule(candidates, context_lens, places, heads)


def make_ragged_schedule(candidates, *, row_start, row_end, heads: int) -> CandidateSchedule:
    """The schedule of ragged candidates [T, C], whose blocks count from ``row_start``."""
    places = row_start[:, None] + jnp.maximum(candidates.blocks, 0) * candidates.block_size
    return _schedule(candidates, jnp.maximum(row_end - row_start, 0), places, heads)


def _schedule(candidates, lengths, places, heads):
    index_keys.require_heads(heads)
    block_sizes(candidates)
    visible = _visible_columns(candidates, lengths).reshape(-1)
    # Whole lists of places, so that the last tiles of a row can be gathered like the others.
    places = places.reshape(visible.shape[0], -1)
    places = jnp.pad(places, ((0, 0), (0, -places.shape[1] % copies.PLACES))).reshape(-1)
    places = jnp.pad(places, (0, copies.PLACES))
    # More than one query only to fill a wgmma: one row counts.
    return CandidateSchedule(dense.cut(visible, dense.queries_per_block(1, heads, CONFIG.columns)), visible, places)


def _visible_columns(candidates, lengths):
    """Columns of every row that hold a visible position: blocks ascend, so that only the last can be cut off."""
    last = jnp.take_along_axis(candidates.blocks, jnp.maximum(candidates.count[..., None] - 1, 0), axis=-1)[..., 0]
    size = candidates.block_size
    within = jnp.clip(lengths - last * size, 0, size)
    return jnp.where(candidates.count > 0, (candidates.count - 1) * size + within, 0).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8, 9, 10))
def _score(q, values, words, weights, schedule, kind, blocks, size, layout, rounding, config):
    """q [R, H, D], values [rows, row bytes], words [n] or None, weights [R, H] -> [R, blocks * size]."""
    rows, heads, width = q.shape
    total = blocks * size
    if config is None:
        config = MXFP4 if kind.in_registers else CONFIG
    check_schedule(schedule, rows, heads, blocks, size)
    queries = schedule.runs.queries
    columns = queries * heads
    threads = schedule.runs.first.shape[0] - 1
    per_tile = lanes.KEYS // size
    tiles = -(-total // lanes.KEYS)
    listed = copies.PLACES // per_tile  # tiles
    last = schedule.places.shape[0] - copies.PLACES
    stored = tiles * lanes.KEYS if mosaic.is_interpreted() else total

    def body(q_ref, w_ref, visible_ref, places_ref, segment_ref, first_ref, values_ref, *refs):
        words_ref = refs[0] if kind.scaled else None
        out_ref, *scratch, started = refs[kind.scaled :]
        scratch = ring.Scratch(*scratch)
        full = copies.CopyBarriers(scratch.full, config.stages)
        scratch = scratch._replace(full=full)
        wg, thread = lax.axis_index("wg"), lax.axis_index("thread")
        segments = dense.scheduled(
            segment_ref, first_ref, thread, lambda row, low, high: Segment(row, row + 1, low, high)
        )

        def load_queries(segment, q_s, w_s, barrier):
            column = pl.ds(segment.first * heads, columns)
            plgpu.copy_gmem_to_smem(q_ref.at[column], q_s, barrier)
            plgpu.copy_gmem_to_smem(w_ref.at[column], w_s, barrier)

        def load_segment(segment, loaded):
            # Places are in registers, some tiles' at a time and so many ahead: a load from device memory in front of
            # every tile would leave the memory idle.
            begin = segment.first * row_places(blocks) + segment.low * per_tile
            count = segment.high - segment.low
            lists = (count + listed - 1) // listed

            def fetch(part):
                return copies.load_places(places_ref, jnp.minimum(begin + part * copies.PLACES, last))

            def gather_list(part, carry):
                loaded, places = carry
                following = fetch(part + 1)

                def load(tile, to):
                    copies.gather_tile(
                        kind.rows(scratch.tiles, to), scratch.tiles[1].at[to] if kind.scaled else None, values_ref,
                        words_ref, places, (tile - part * listed) * per_tile, size=size, word_layout=layout,
                        swizzle=kind.swizzle,
                    )  # fmt: skip
                    full.arrive(to)

                stop = jnp.minimum((part + 1) * listed, count)
                return ring.load_tiles(load, part * listed, stop, loaded, scratch, config), following

            return lax.fori_loop(0, lists, gather_list, (loaded, fetch(0)))[0]

        def math():
            dense.fill_unseen(out_ref, visible_ref, 1, 1, thread * config.math + wg, threads * config.math)
            ring.consume(
                segments, scratch, config, wg, kind, out_ref, None, visible_ref, queries=queries, heads=heads,
                rounding=rounding, weight_dtype=weights.dtype,
            )  # fmt: skip

        pl.when(wg == config.math)(full.initialise)
        plgpu.barrier_arrive(started)
        plgpu.barrier_wait(started)
        lax.cond(
            wg == config.math, lambda: ring.produce(segments, scratch, config, load_queries, load_segment), math
        )

    scores = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, stored), jnp.float32),
        grid=(threads,),
        grid_names=("thread",),
        num_threads=config.math + 1,
        thread_name="wg",
        scratch_types=[
            *ring.scratch_types(columns, kind, None, config), plgpu.Barrier(num_arrivals=config.math + 1)
        ],  # fmt: skip
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(
        kind.queries(q).reshape(rows * heads, width), weights.astype(jnp.float32).reshape(-1), schedule.visible,
        schedule.places, schedule.runs.segments, schedule.runs.first, values, *([words] if kind.scaled else []),
    )  # fmt: skip
    return scores[:, :total]


def row_places(blocks: int) -> int:
    """Places that a CandidateSchedule holds for a row of so many blocks."""
    return -(-blocks // copies.PLACES) * copies.PLACES


def check_schedule(schedule, rows, heads, blocks, size):
    """Raises ValueError for a schedule that was made for other rows, candidates or heads."""
    places = rows * row_places(blocks) + copies.PLACES
    queries = dense.queries_per_block(1, heads, CONFIG.columns)
    found = (schedule.visible.shape[0], schedule.places.shape[0], schedule.runs.queries)
    if found != (rows, places, queries):
        raise ValueError(
            f"schedule holds {found[0]} rows, {found[1]} places and {found[2]} queries a block, but {rows} rows of "
            f"{blocks} blocks of {size} with {heads} heads need {places} places and {queries}. Make it for these "
            "candidates with make_candidate_schedule or make_ragged_candidate_schedule."
        )


def block_sizes(candidates) -> tuple[int, int]:
    """Blocks of a row and positions of a block. Raises NotImplementedError for blocks that are not carried."""
    if candidates.block_size not in BLOCK_SIZES:
        raise NotImplementedError(f"the kernel takes blocks of 8 or 16 positions, not {candidates.block_size}.")
    return candidates.blocks.shape[-1], candidates.block_size
