"""Indexer scores of candidate blocks on Hopper: as the dense kernel, on keys gathered by cp.async.

Every query row has blocks of its own, so a thread block scores one row at a time; runs of columns of all rows, laid end
to end, are dealt out evenly. The producer warpgroup gathers eight or four blocks into a tile of 64 keys and keeps several
tiles under way; what follows is `indexer_logits.sm90`.
"""

import functools

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


def candidate_logits(
    q, keys, weights, candidates, *, context_lens, block_table, rounding=None, schedule=None, config=CONFIG
):
    """See `pallas_kernels.candidate_logits.candidate_logits`. FP8 queries, IndexFP8 keys of width 128.

    schedule: of `make_schedule` for the same candidates and lengths; None makes it here.
    """
    batch, rows, heads, width = q.shape
    _require(candidates)
    dense.require(heads, width, q.dtype)
    dense.require_pages(keys)
    blocks, size = candidates.blocks.shape[-1], candidates.block_size
    if 0 in (batch, rows, blocks):
        return jnp.full((batch, rows, blocks * size), -jnp.inf, jnp.float32)
    if schedule is None:
        schedule = make_schedule(candidates, context_lens, heads, config)
    stride, page_size = keys.pages.shape[1], keys.page_size
    # Row of 128 bytes where a block starts; the pages' scales lie behind their values.
    position = candidates.blocks * size
    request = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    entry = jnp.where(position < 0, -1, request * block_table.shape[1] + position // page_size)
    page = jnp.clip(indexing.gather_rows(block_table.reshape(-1), entry), 0, keys.pages.shape[0] - 1)
    places = page * (stride // dense.WIDTH) + jnp.maximum(position, 0) % page_size

    layout = (stride // dense.WIDTH, stride // 4, page_size * dense.WIDTH // 4)
    values, scales = dense.page_views(keys)
    scores = _score(
        q.reshape(batch * rows, heads, width), values, scales.reshape(-1), weights.reshape(batch * rows, heads),
        _visible(candidates, context_lens).reshape(-1), places.reshape(-1), schedule, size, layout,
        rounding is not None, config,
    )  # fmt: skip
    return scores.reshape(batch, rows, -1)


def ragged_candidate_logits(
    q, k, weights, candidates, *, row_start, row_end, k_scale=None, rounding=None, schedule=None, config=CONFIG
):
    """See `pallas_kernels.candidate_logits.ragged_candidate_logits`. FP8 queries and keys of width 128.

    schedule: of `make_schedule` for the same candidates and lengths ``row_end - row_start``; None makes it here.
    """
    rows, heads, width = q.shape
    _require(candidates)
    dense.require(heads, width, q.dtype)
    if k.dtype != dense.FP8:
        raise NotImplementedError(f"the sm90 kernel takes float8_e4m3fn keys, not {k.dtype}.")
    blocks, size = candidates.blocks.shape[-1], candidates.block_size
    if 0 in (rows, blocks, k.shape[0]):
        return jnp.full((rows, blocks * size), -jnp.inf, jnp.float32)
    lengths = jnp.maximum(row_end - row_start, 0)
    if schedule is None:
        schedule = make_schedule(candidates, lengths, heads, config)
    places = row_start[:, None] + jnp.maximum(candidates.blocks, 0) * size
    return _score(
        q, k, k_scale, weights, _visible(candidates, lengths), places.reshape(-1), schedule, size, (2**31 - 1, 0, 0),
        rounding is not None, config,
    )  # fmt: skip


def make_schedule(candidates, context_lens, heads: int, config=CONFIG) -> dense.Schedule:
    """Cuts the visible columns of all rows, laid end to end, into equal runs. Made once per step.

    candidates: of `expand_candidates` with rows [*rows]; context_lens: int32 [*rows], visible lengths.
    """
    return dense.make_schedule(_visible(candidates, context_lens).reshape(-1, 1), heads, config)


def _visible(candidates, lengths):
    """Columns of every row that hold a visible position: blocks ascend, so that only the last can be cut off."""
    last = jnp.take_along_axis(candidates.blocks, jnp.maximum(candidates.count[..., None] - 1, 0), axis=-1)[..., 0]
    size = candidates.block_size
    within = jnp.clip(lengths - last * size, 0, size)
    return jnp.where(candidates.count > 0, (candidates.count - 1) * size + within, 0).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(7, 8, 9, 10))
def _score(q, keys, scales, weights, visible, places, schedule, size, layout, rounding, config):
    """q [R, H, D], keys [rows, D], scales [n] or None, weights [R, H], visible columns [R], places [R * C] -> [R, C * size]."""
    rows, heads, width = q.shape
    blocks = places.shape[0] // rows
    total = blocks * size
    queries = dense.queries_per_block(1, heads, config)  # more than one only to fill a wgmma; one row counts
    columns = queries * heads
    threads = schedule.first.shape[0] - 1
    scaled = scales is not None
    per_tile = lanes.KEYS // size
    tiles = -(-total // lanes.KEYS)
    # Whole tiles of places, so that the last one of a row can be gathered like the others.
    places = jnp.pad(places.reshape(rows, blocks), ((0, 0), (0, tiles * per_tile - blocks))).reshape(-1)
    stored = tiles * lanes.KEYS if mosaic.is_interpreted() else total

    def body(q_ref, k_ref, w_ref, visible_ref, places_ref, segment_ref, first_ref, *refs):
        scales_ref = refs[0] if scaled else None
        out_ref, q_s, w_s, k_s, scale_s, full, empty, ready, used = refs[scaled:]
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

                def load(tile, slot):
                    mosaic.gather_tile(
                        k_rows_s.at[slot], scale_s.at[slot] if scaled else None, k_ref, scales_ref, places_ref,
                        (row * tiles + tile) * per_tile, size=size, scale_layout=layout,
                    )  # fmt: skip

                def gathered(loaded):
                    @pl.when(loaded > _AHEAD)
                    def _():
                        mosaic.wait_copies(_AHEAD)
                        arrive(loaded - 1 - _AHEAD)

                return dense.load_tiles(load, low, high, loaded, empty, config, gathered)

            loaded = lax.fori_loop(begin, stop, segment, jnp.int32(0))
            mosaic.wait_copies(0)
            lax.fori_loop(jnp.maximum(loaded - _AHEAD, 0), loaded, lambda tile, _: arrive(tile), None)
            dense.drain(loaded, empty, config)
            lax.fori_loop(
                jnp.maximum(begin, stop - 2), stop, lambda i, _: plgpu.barrier_wait(used.at[lax.rem(i - begin, 2)]), None
            )

        def math():
            plgpu.set_max_registers(config.registers[1], action="increase")
            dense.fill_unseen(out_ref, visible_ref, 1, 1, thread * config.math + wg, threads * config.math)

            def segment(i, scored):
                row, low, high, at = place(i)
                bounds = lanes.load_bounds(None, visible_ref, row, row + 1, queries=queries)
                plgpu.barrier_wait(ready.at[at])
                w = plgpu.load(w_s.at[at], layout=lanes.PER_COLUMN)
                mosaic.release_reads()

                def finish(_, dots, scale, tile):
                    lanes.store_scores(
                        out_ref, dots, w, scale, bounds, row, row + 1, tile * lanes.KEYS,
                        queries=queries, heads=heads, rounding=rounding,
                    )  # fmt: skip

                ring = (k_s, scale_s if scaled else None, full, empty)
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
        scratch_types=dense.paged_scratch(columns, 1, config),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(
        q.reshape(rows * heads, width), keys, weights.astype(jnp.float32).reshape(-1), visible, places,
        schedule.segments, schedule.first, *([scales] if scaled else []),
    )  # fmt: skip
    return scores[:, :total]


def _require(candidates):
    if candidates.block_size not in BLOCK_SIZES:
        raise NotImplementedError(f"the sm90 kernel takes blocks of 8 or 16 positions, not {candidates.block_size}.")
