"""Indexer scores of candidate blocks on Hopper: as the dense kernel, on keys gathered by cp.async.

Every query row has blocks of its own, so a thread block scores one row at a time; runs of columns of all rows, laid
end to end, are dealt out evenly. The producer warpgroup gathers eight or four blocks into a tile of 64 keys and keeps
several tiles under way; what follows is `indexer_logits.sm90`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import indexing, mosaic
from pallas_kernels.indexer_logits import lanes
from pallas_kernels.indexer_logits import sm90 as dense

BLOCK_SIZES = (8, 16)
CONFIG = dense.TuningConfig(columns=64, groups=1, math=3, stages=12, runs=1, unroll=1)
_AHEAD = 8  # tiles that the producer keeps under way
_LISTED = 256  # blocks whose places are in shared memory at a time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CandidateSchedule:
    """What all layers that score the same candidates share; made once per step.

    runs: `indexer_logits.sm90.Schedule` of the visible columns. visible: int32 [R], columns of a row that hold a
    visible position. places: int32 [R * tiles * blocks a tile], the row of 128 bytes where a block's keys start.
    """

    runs: Any
    visible: Any
    places: Any


def candidate_logits(
    q, keys, weights, candidates, *, context_lens, block_table, rounding=None, schedule=None, config=CONFIG
):
    """See `pallas_kernels.candidate_logits.candidate_logits`. FP8 queries, IndexFP8 keys of width 128.

    schedule: of `make_schedule` for the same candidates, lengths, table and cache; None makes it here.
    """
    batch, rows, heads, width = q.shape
    _require(candidates)
    dense.require(heads, width, q.dtype)
    kind = dense.fp8_pages(keys)
    blocks, size = candidates.blocks.shape[-1], candidates.block_size
    if 0 in (batch, rows, blocks):
        return jnp.full((batch, rows, blocks * size), -jnp.inf, jnp.float32)
    if schedule is None:
        schedule = make_schedule(
            candidates, keys, context_lens=context_lens, block_table=block_table, heads=heads, config=config
        )
    stride, page_size = keys.pages.shape[1], keys.page_size
    layout = (stride // dense.WIDTH, stride // 4, page_size * dense.WIDTH // 4)
    values, scales = kind.views(keys.pages)
    scores = _score(
        q.reshape(batch * rows, heads, width), values, scales.reshape(-1), weights.reshape(batch * rows, heads),
        schedule, blocks, size, layout, rounding is not None, config,
    )  # fmt: skip
    return scores.reshape(batch, rows, -1)


def ragged_candidate_logits(
    q, k, weights, candidates, *, row_start, row_end, k_scale=None, rounding=None, schedule=None, config=CONFIG
):
    """See `pallas_kernels.candidate_logits.ragged_candidate_logits`. FP8 queries and keys of width 128.

    schedule: of `make_ragged_schedule` for the same candidates and rows; None makes it here.
    """
    rows, heads, width = q.shape
    _require(candidates)
    dense.require(heads, width, q.dtype)
    if k.dtype != dense.FP8:
        raise NotImplementedError(f"the sm90 kernel takes float8_e4m3fn keys, not {k.dtype}.")
    blocks, size = candidates.blocks.shape[-1], candidates.block_size
    if 0 in (rows, blocks, k.shape[0]):
        return jnp.full((rows, blocks * size), -jnp.inf, jnp.float32)
    if schedule is None:
        schedule = make_ragged_schedule(candidates, row_start=row_start, row_end=row_end, heads=heads, config=config)
    whole = (2**31 - 1, 0, 0)  # one page: a row's scale has the row's own number
    return _score(q, k, k_scale, weights, schedule, blocks, size, whole, rounding is not None, config)


def make_schedule(candidates, keys, *, context_lens, block_table, heads: int, config=CONFIG) -> CandidateSchedule:
    """The schedule of paged candidates [B, N, C]: where their blocks lie in pages of `keys`, and who scores them."""
    position = candidates.blocks * candidates.block_size
    request = jnp.arange(position.shape[0], dtype=jnp.int32)[:, None, None]
    entry = jnp.where(position < 0, -1, request * block_table.shape[1] + position // keys.page_size)
    page = jnp.clip(indexing.gather_rows(block_table.reshape(-1), entry), 0, keys.pages.shape[0] - 1)
    places = page * (keys.pages.shape[1] // dense.WIDTH) + jnp.maximum(position, 0) % keys.page_size
    return _schedule(candidates, context_lens, places, heads, config)


def make_ragged_schedule(candidates, *, row_start, row_end, heads: int, config=CONFIG) -> CandidateSchedule:
    """The schedule of ragged candidates [T, C], whose blocks count from ``row_start``."""
    places = row_start[:, None] + jnp.maximum(candidates.blocks, 0) * candidates.block_size
    return _schedule(candidates, jnp.maximum(row_end - row_start, 0), places, heads, config)


def _schedule(candidates, lengths, places, heads, config):
    visible = _visible(candidates, lengths).reshape(-1)
    # Whole tiles of places, so that the last one of a row can be gathered like the others.
    places = places.reshape(visible.shape[0], -1)
    per_tile = lanes.KEYS // candidates.block_size
    places = jnp.pad(places, ((0, 0), (0, -places.shape[1] % per_tile))).reshape(-1)
    return CandidateSchedule(dense.make_schedule(visible[:, None], heads, config), visible, places)


def _visible(candidates, lengths):
    """Columns of every row that hold a visible position: blocks ascend, so that only the last can be cut off."""
    last = jnp.take_along_axis(candidates.blocks, jnp.maximum(candidates.count[..., None] - 1, 0), axis=-1)[..., 0]
    size = candidates.block_size
    within = jnp.clip(lengths - last * size, 0, size)
    return jnp.where(candidates.count > 0, (candidates.count - 1) * size + within, 0).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8, 9))
def _score(q, keys, scales, weights, schedule, blocks, size, layout, rounding, config):
    """q [R, H, D], keys [rows, D], scales [n] or None, weights [R, H] -> [R, blocks * size]."""
    rows, heads, width = q.shape
    total = blocks * size
    queries = dense.queries_per_block(1, heads, config)  # more than one only to fill a wgmma; one row counts
    columns = queries * heads
    threads = schedule.runs.first.shape[0] - 1
    scaled = scales is not None
    per_tile = lanes.KEYS // size
    tiles = -(-total // lanes.KEYS)
    listed_tiles = _LISTED // per_tile
    stored = tiles * lanes.KEYS if mosaic.is_interpreted() else total

    def body(q_ref, k_ref, w_ref, visible_ref, places_ref, segment_ref, first_ref, *refs):
        scales_ref = refs[0] if scaled else None
        out_ref, q_s, w_s, k_s, scale_s, full, empty, ready, used, places_s, listed = refs[scaled:]
        k_s, k_rows_s = mosaic.row_tile_views(k_s)
        wg, thread = lax.axis_index("wg"), lax.axis_index("thread")
        begin, stop = first_ref[thread], first_ref[thread + 1]

        def place(i):
            """Row, first and last tile, and slot for the query of segment i."""
            return segment_ref[i, 0], segment_ref[i, 1], segment_ref[i, 2], lax.rem(i - begin, 2)

        def arrive(tile):
            plgpu.barrier_arrive(full.at[lax.rem(tile, config.stages)])

        def produce():
            plgpu.set_max_registers(config.registers[0], action="decrease")

            def segment(i, loaded):
                row, low, high, at = place(i)

                @pl.when(i - begin >= 2)
                def _():
                    plgpu.barrier_wait(used.at[at])

                plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(row * heads, columns)], q_s.at[at], ready.at[at])
                plgpu.copy_gmem_to_smem(w_ref.at[pl.ds(row * heads, columns)], w_s.at[at], ready.at[at])

                # Places come through shared memory, a list for some tiles at a time and one list ahead: a load from
                # device memory in front of every tile would leave the memory idle.
                lists = (high - low + listed_tiles - 1) // listed_tiles

                def fetch(part):
                    begin = (row * tiles + low) * per_tile + part * _LISTED
                    slot = lax.rem(part, 2)
                    mosaic.fence_proxies()  # waits for the copies under way: once a list, and not once a tile
                    plgpu.copy_gmem_to_smem(places_ref.at[pl.ds(begin, _LISTED)], places_s.at[slot], listed.at[slot])

                fetch(0)

                def gather_list(part, loaded):
                    @pl.when(part + 1 < lists)
                    def _():
                        fetch(part + 1)

                    slot = lax.rem(part, 2)
                    plgpu.barrier_wait(listed.at[slot])
                    start = low + part * listed_tiles

                    def load(tile, to):
                        mosaic.gather_tile(
                            k_rows_s.at[to], scale_s.at[to] if scaled else None, k_ref, scales_ref, places_s.at[slot],
                            (tile - start) * per_tile, size=size, scale_layout=layout,
                        )  # fmt: skip

                    def gathered(loaded):
                        @pl.when(loaded > _AHEAD)
                        def _():
                            mosaic.wait_copies(_AHEAD)
                            arrive(loaded - 1 - _AHEAD)

                    stop = jnp.minimum(start + listed_tiles, high)
                    return dense.load_tiles(load, start, stop, loaded, empty, config, gathered)

                return lax.fori_loop(0, lists, gather_list, loaded)

            loaded = lax.fori_loop(begin, stop, segment, jnp.int32(0))
            mosaic.wait_copies(0)
            lax.fori_loop(jnp.maximum(loaded - _AHEAD, 0), loaded, lambda tile, _: arrive(tile), None)
            dense.drain(loaded, empty, config)

            def see_used(i, _):
                plgpu.barrier_wait(used.at[lax.rem(i - begin, 2)])

            lax.fori_loop(jnp.maximum(begin, stop - 2), stop, see_used, None)

        def math():
            plgpu.set_max_registers(config.registers[1], action="increase")
            dense.fill_unseen(out_ref, visible_ref, 1, 1, thread * config.math + wg, threads * config.math)

            def segment(i, scored):
                row, low, high, at = place(i)
                bounds = lanes.load_bounds(None, visible_ref, row, row + 1, queries=queries)
                plgpu.barrier_wait(ready.at[at])
                w = plgpu.load(w_s.at[at], layout=lanes.PER_COLUMN)
                mosaic.fence_proxies()

                def finish(_, dots, scale, tile):
                    lanes.store_scores(
                        out_ref, dots, w, scale, bounds, row, row + 1, tile * lanes.KEYS,
                        queries=queries, heads=heads, rounding=rounding,
                    )  # fmt: skip

                ring = dense.Ring(
                    full, empty, lambda slot: k_s.at[slot],
                    lambda slot: plgpu.load(scale_s.at[slot], layout=lanes.PER_KEY) if scaled else None,
                    copied=True,
                )  # fmt: skip
                dense.score_tiles(finish, q_s.at[pl.ds(at, 1)], ring, wg, low, high, scored, config)
                plgpu.barrier_arrive(used.at[at])
                return scored + high - low

            lax.fori_loop(begin, stop, segment, jnp.int32(0))

        lax.cond(wg == config.math, produce, math)

    scores = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, stored), jnp.float32),
        grid=(threads,),
        grid_names=("thread",),
        num_threads=config.math + 1,
        thread_name="wg",
        scratch_types=[
            *dense.paged_scratch(columns, dense.FP8_TILES, 1, config),
            plgpu.SMEM((2, _LISTED), jnp.int32),
            plgpu.Barrier(num_barriers=2),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(
        q.reshape(rows * heads, width), keys, weights.astype(jnp.float32).reshape(-1), schedule.visible,
        schedule.places, schedule.runs.segments, schedule.runs.first, *([scales] if scaled else []),
    )  # fmt: skip
    return scores[:, :total]


def _require(candidates):
    if candidates.block_size not in BLOCK_SIZES:
        raise NotImplementedError(f"the sm90 kernel takes blocks of 8 or 16 positions, not {candidates.block_size}.")


def unproven(function, args):
    """Why this kernel is not chosen by itself for a call that it carries, or None."""
    return "the sm90 kernel was rewritten after its last run on a GPU, and is compiled and interpreted only; name it to run it."
