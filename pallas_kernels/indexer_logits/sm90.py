"""Indexer scores on Hopper: FP8 wgmma, TMA loads, scores finished in registers.

A thread block scores a few query rows against a run of keys. A producer warpgroup loads tiles of 64 keys by TMA into
a ring; each math warpgroup takes every n-th tile, multiplies its keys with all (query, head) columns at once (keys are
the rows of the wgmma, so that the sum over the heads runs along an accumulator's registers), and reduces and stores
while the tensor cores work for the other warpgroups. What was tried and measured is in docs/performance.md.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from pallas_kernels import mosaic
from pallas_kernels.indexer_logits import lanes
from pallas_kernels.records import IndexFP8, IndexMXFP4

WIDTH = 128
HEADS = (8, 16, 32, 64)
PAGE_SIZES = (32, 64, 128)
FP8 = jnp.float8_e4m3fn
_FP8_TILE = (plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(128))
_FILLED = 8192  # columns of -inf that a warpgroup writes at a time


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How the work is cut. Checks itself.

    columns: (query, head) pairs of one wgmma at most. groups: groups of so many columns that a tile of keys is
    multiplied with while it is there (ragged only). math: math warpgroups. stages: tiles of 64 keys in the ring. runs:
    thread blocks per multiprocessor that the keys are cut for. unroll: wgmmas of a warpgroup in one straight piece, in
    which the tensor cores work on the next while the last is reduced; 1 waits for each.
    """

    columns: int
    groups: int
    math: int
    stages: int
    runs: int
    unroll: int

    def __post_init__(self):
        if self.columns not in (64, 128, 256):
            raise ValueError(f"columns={self.columns}; the kernel takes 64, 128 or 256.")
        if self.math not in (2, 3, 4):
            raise ValueError(f"math={self.math}; a thread block has 2, 3 or 4 math warpgroups.")
        if self.stages < 2 or self.stages % self.math:
            raise ValueError(f"stages={self.stages}; the ring needs a multiple of math={self.math}, and at least 2.")
        if min(self.runs, self.groups, self.unroll) < 1:
            raise ValueError(f"runs={self.runs}, groups={self.groups}, unroll={self.unroll}; each must be at least 1.")

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer's and of a math warpgroup's threads: the producer leaves the others what it can."""
        entry = 65536 // (128 * (self.math + 1)) // 8 * 8
        producer = 24 if self.math > 2 else 40
        return producer, min((entry * (self.math + 1) - producer) // self.math // 8 * 8, 232)


RAGGED = TuningConfig(columns=128, groups=1, math=4, stages=8, runs=4, unroll=1)
PAGED = TuningConfig(columns=128, groups=1, math=2, stages=10, runs=1, unroll=1)
PAGED_MANY = TuningConfig(columns=128, groups=1, math=4, stages=12, runs=1, unroll=1)  # more rows than one block holds


@dataclasses.dataclass(frozen=True)
class _Fp8Pages:
    """Pages of IndexFP8: tiles of FP8 values with a scale a key, by TMA to where the tensor cores read them."""

    page_size: int
    stride: int
    query_dtype = FP8
    query_tile = _FP8_TILE
    copies = 2
    in_registers = False

    def queries(self, q):
        return q

    def views(self, pages):
        """FP8 rows of 128 bytes (the rows of scales among them), and float32 [pages, stride / 4]."""
        values = lax.bitcast_convert_type(pages, FP8).reshape(-1, WIDTH)
        return values, lax.bitcast_convert_type(pages.reshape(pages.shape[0], -1, 4), jnp.float32)

    def tiles(self, stages):
        return [mosaic.row_tile((stages, lanes.KEYS, WIDTH), FP8), plgpu.SMEM((stages, lanes.KEYS), jnp.float32)]

    def load(self, views, tiles, page, row, slot, start, count, barrier):
        """Keys row .. row + count - 1 of a page to rows start .. of a tile."""
        values, scales = views
        to = pl.ds(start, count)
        rows = mosaic.row_tile_views(tiles[0])[1]
        from_row = page * (self.stride // WIDTH) + row
        plgpu.copy_gmem_to_smem(values.at[pl.ds(from_row, count)], rows.at[slot, to], barrier)
        from_scale = pl.ds(self.page_size * WIDTH // 4 + row, count)
        plgpu.copy_gmem_to_smem(scales.at[page, from_scale], tiles[1].at[slot, to], barrier)

    def operand(self, tiles, slot):
        return mosaic.row_tile_views(tiles[0])[0].at[slot]

    def scale(self, tiles, slot):
        return plgpu.load(tiles[1].at[slot], layout=lanes.PER_KEY)


@dataclasses.dataclass(frozen=True)
class _MxFp4Pages:
    """Pages of IndexMXFP4: packed tiles by TMA, unpacked in registers to bf16, exactly, for a bf16 wgmma.

    A thread unpacks groups of 32 values under one exponent. It holds them where a wgmma expects other columns, so the
    queries' columns are moved to match: the order of a dot product's terms is free.
    """

    page_size: int
    stride: int
    query_dtype = jnp.bfloat16
    query_tile = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    copies = 2
    in_registers = True

    def queries(self, q):
        return q.reshape(*q.shape[:-1], 4, 16, 2).swapaxes(-3, -2).reshape(q.shape)

    def views(self, pages):
        """Rows of 64 bytes: a page's values, then its exponents, sixteen keys a row."""
        return (pages.reshape(-1, WIDTH // 2),)

    def tiles(self, stages):
        packed = [plgpu.SMEM((stages, lanes.KEYS, WIDTH // 2), jnp.uint8), plgpu.SMEM((stages, 4, 64), jnp.uint8)]
        if not mosaic.is_interpreted():
            return packed
        # The interpreter's wgmma takes no operand in registers: it gets one in memory.
        return [*packed, plgpu.SMEM((stages, lanes.KEYS, WIDTH), jnp.bfloat16, transforms=self.query_tile)]

    def load(self, views, tiles, page, row, slot, start, count, barrier):
        (rows,) = views
        from_row = page * (self.stride // (WIDTH // 2))
        plgpu.copy_gmem_to_smem(rows.at[pl.ds(from_row + row, count)], tiles[0].at[slot, pl.ds(start, count)], barrier)
        exponents = pl.ds(from_row + self.page_size + row // 16, count // 16)
        plgpu.copy_gmem_to_smem(rows.at[exponents], tiles[1].at[slot, pl.ds(start // 16, count // 16)], barrier)

    def operand(self, tiles, slot):
        unpacked = lanes.unpack_mxfp4(tiles[0].at[slot], tiles[1].at[slot])
        if not mosaic.is_interpreted():
            return unpacked
        tiles[2][slot] = unpacked
        return tiles[2].at[slot]

    def scale(self, tiles, slot):
        return None


FP8_TILES = _Fp8Pages(64, 64 * 132)  # for scratch that does not depend on the pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which thread block scores which run of keys for which queries. Made once per step, shared by all layers.

    segments: int32 [G, 3], a block of query rows and its tiles [begin, end) of 64 keys. first: int32 [blocks + 1], the
    first segment of every thread block.
    """

    segments: Any
    first: Any


def indexer_logits(q, k, weights, *, row_start, row_end, k_scale=None, rounding=None, config=RAGGED):
    """See `pallas_kernels.indexer_logits.indexer_logits`. FP8 queries and keys of width 128; float32 accumulation."""
    rows, heads, width = q.shape
    require(heads, width, q.dtype)
    if k.dtype != FP8:
        raise NotImplementedError(f"the sm90 kernel takes float8_e4m3fn keys, not {k.dtype}.")
    if 0 in (rows, k.shape[0]):
        return jnp.full((rows, k.shape[0]), -jnp.inf, jnp.float32)
    return _ragged(q, k, weights, row_start, row_end, k_scale, rounding is not None, config)


def paged_indexer_logits(
    q, keys, weights, *, context_lens, block_table, rounding=None, schedule=None, config=None
):
    """See `pallas_kernels.indexer_logits.paged_indexer_logits`. Width 128; float32 accumulation.

    FP8 queries with IndexFP8 keys, or bf16 queries with IndexMXFP4 keys. schedule: of `make_schedule` for the same
    context_lens; None makes it here. config: None picks PAGED or PAGED_MANY, which take the same schedule.
    """
    batch, rows, heads, width = q.shape
    kind = _pages(keys)
    require(heads, width, q.dtype, kind.query_dtype)
    if config is None:
        config = PAGED if rows * heads <= PAGED.columns else PAGED_MANY
    if 0 in (batch, rows, block_table.shape[1]):
        return jnp.full((batch, rows, block_table.shape[1] * keys.page_size), -jnp.inf, jnp.float32)
    if schedule is None:
        schedule = make_schedule(context_lens, heads, config)
    return _paged(q, keys, weights, context_lens, block_table, schedule, rounding is not None, config)


def queries_per_block(rows: int, heads: int, config: TuningConfig = PAGED) -> int:
    """Query rows of a request that a thread block scores at once: a power of two that makes 32 columns or more."""
    most = max(1, config.columns // heads)
    return max(min(most, 1 << (rows - 1).bit_length()), 32 // heads)


def make_schedule(context_lens: Int32[Array, "B N"], heads: int, config: TuningConfig = PAGED) -> Schedule:
    """Cuts the visible keys of all requests, laid end to end, into equal runs, one per thread block."""
    batch, rows = context_lens.shape
    queries = queries_per_block(rows, heads, config)
    blocks = -(-rows // queries)
    padded = jnp.pad(context_lens, ((0, 0), (0, blocks * queries - rows)))
    visible = jnp.max(padded.reshape(batch * blocks, queries), axis=1)
    tiles = jnp.maximum(visible + lanes.KEYS - 1, 0) // lanes.KEYS
    ends = jnp.cumsum(tiles)
    total, starts = ends[-1], ends - tiles
    threads = mosaic.CORES * config.runs
    cuts = jnp.arange(threads + 1, dtype=jnp.int32)
    # i * total / threads without passing 2^31
    cuts = cuts * (total // threads) + cuts * (total % threads) // threads
    borders = jnp.sort(jnp.concatenate([cuts[:-1], starts]))
    following = jnp.append(borders[1:], total)
    block = jnp.searchsorted(ends, borders, side="right", method="compare_all").astype(jnp.int32)
    filled = following > borders
    order = jnp.argsort(~filled, stable=True)
    base = starts[jnp.minimum(block, batch * blocks - 1)]
    segments = jnp.stack([block, borders - base, following - base], axis=1)[order]
    first = jnp.sum(filled & (borders < cuts[:, None]), axis=1, dtype=jnp.int32)
    return Schedule(segments.astype(jnp.int32), first)


@functools.partial(jax.jit, static_argnums=(6, 7))
def _ragged(q, k, weights, row_start, row_end, k_scale, rounding, config):
    rows, heads, _ = q.shape
    total = k.shape[0]
    queries = min(config.columns // heads, 8)  # more would not fit the registers
    columns, scored = queries * heads, queries * config.groups
    blocks = -(-rows // scored)
    tiles = -(-total // lanes.KEYS)
    splits = max(1, min(tiles, mosaic.CORES * config.runs // blocks))
    # The interpreter knows no predicated stores: its tiles must lie within the output.
    stored = (rows, tiles * lanes.KEYS) if mosaic.is_interpreted() else (rows, total)
    scaled = k_scale is not None

    def body(q_ref, k_ref, w_ref, start_ref, end_ref, *refs):
        scale_ref = refs[0] if scaled else None
        out_ref, q_s, w_s, k_s, scale_s, full, empty, ready = refs[scaled:]
        k_s, k_rows_s = mosaic.row_tile_views(k_s)
        wg = lax.axis_index("wg")
        split = lax.axis_index("split")
        first = (blocks - 1 - lax.axis_index("block")) * scored  # the longest rows of a causal call first
        low, high = jnp.int32(total), jnp.int32(0)
        for j in range(scored):
            row = jnp.minimum(first + j, rows - 1)
            start, end = jnp.maximum(start_ref[row], 0), jnp.minimum(end_ref[row], total)
            low = jnp.where(start < end, jnp.minimum(low, start), low)
            high = jnp.where(start < end, jnp.maximum(high, end), high)
        low, high = low // lanes.KEYS, (high + lanes.KEYS - 1) // lanes.KEYS
        count = jnp.maximum(high - low, 0)
        low = jnp.where(count > 0, low, 0)
        begin, stop = low + split * count // splits, low + (split + 1) * count // splits

        def load(tile, slot):
            keys = pl.ds(tile * lanes.KEYS, lanes.KEYS)
            plgpu.copy_gmem_to_smem(k_ref.at[keys], k_rows_s.at[slot], full.at[slot])
            if scaled:
                plgpu.copy_gmem_to_smem(scale_ref.at[keys], scale_s.at[slot], full.at[slot])

        def produce():
            plgpu.set_max_registers(config.registers[0], action="decrease")
            for g in range(config.groups):
                column = pl.ds((first + g * queries) * heads, columns)
                plgpu.copy_gmem_to_smem(q_ref.at[column], q_s.at[g], ready)
                plgpu.copy_gmem_to_smem(w_ref.at[column], w_s.at[g], ready)
            loaded = load_tiles(load, begin, stop, 0, empty, config)
            drain(loaded, empty, config)

        def math():
            plgpu.set_max_registers(config.registers[1], action="increase")
            limit = jnp.int32(rows)
            firsts = [first + g * queries for g in range(config.groups)]
            bounds = [lanes.load_bounds(start_ref, end_ref, at, limit, queries=queries) for at in firsts]
            plgpu.barrier_wait(ready)
            w = [plgpu.load(w_s.at[g], layout=lanes.PER_COLUMN) for g in range(config.groups)]

            def finish(g, dots, scale, tile):
                lanes.store_scores(
                    out_ref, dots, w[g], scale, bounds[g], firsts[g], limit, tile * lanes.KEYS,
                    queries=queries, heads=heads, rounding=rounding,
                )  # fmt: skip

            ring = Ring(
                full, empty, lambda slot: k_s.at[slot],
                lambda slot: plgpu.load(scale_s.at[slot], layout=lanes.PER_KEY) if scaled else None,
            )  # fmt: skip
            score_tiles(finish, q_s, ring, wg, begin, stop, 0, config)
            share, shares = split * config.math + wg, splits * config.math
            for j in range(scored):
                _fill_share(out_ref, first + j, 0, low * lanes.KEYS, share, shares)
                _fill_share(out_ref, first + j, (low + count) * lanes.KEYS, total, share, shares)

        lax.cond(wg == config.math, produce, math)

    scores = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(stored, jnp.float32),
        grid=(splits, blocks),
        grid_names=("split", "block"),
        num_threads=config.math + 1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((config.groups, columns, WIDTH), FP8, transforms=_FP8_TILE),
            plgpu.SMEM((config.groups, columns), jnp.float32),
            mosaic.row_tile((config.stages, lanes.KEYS, WIDTH), FP8),
            plgpu.SMEM((config.stages, lanes.KEYS), jnp.float32),
            *_ring_barriers(1 + scaled, config),
            plgpu.Barrier(num_arrivals=2 * config.groups),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(
        q.reshape(rows * heads, WIDTH), k, weights.astype(jnp.float32).reshape(rows * heads), row_start, row_end,
        *([k_scale] if scaled else []),
    )  # fmt: skip
    return scores[:rows, :total]


@functools.partial(jax.jit, static_argnums=(6, 7))
def _paged(q, keys, weights, context_lens, block_table, schedule, rounding, config):
    batch, rows, heads, _ = q.shape
    page_size, pages = keys.page_size, keys.pages.shape[0]
    total = block_table.shape[1] * page_size
    queries = queries_per_block(rows, heads, config)
    columns = queries * heads
    blocks = -(-rows // queries)
    threads = schedule.first.shape[0] - 1
    pieces = max(1, lanes.KEYS // page_size)  # pages of a tile, or 1 where a page has several tiles
    piece = lanes.KEYS // pieces
    kind = _pages(keys)
    views = kind.views(keys.pages)
    stored = -(-total // lanes.KEYS) * lanes.KEYS if mosaic.is_interpreted() else total

    def body(q_ref, w_ref, length_ref, table_ref, segment_ref, first_ref, *refs):
        view_refs, (out_ref, q_s, w_s, *tiles, full, empty, ready, used) = refs[: len(views)], refs[len(views) :]
        wg, thread = lax.axis_index("wg"), lax.axis_index("thread")
        begin, stop = first_ref[thread], first_ref[thread + 1]

        def place(i):
            """Request, query block within it, first and last tile, and slot for the queries of segment i."""
            block = segment_ref[i, 0]
            return block // blocks, lax.rem(block, blocks), segment_ref[i, 1], segment_ref[i, 2], lax.rem(i - begin, 2)

        def load(request, tile, slot):
            for i in range(pieces):
                position = tile * lanes.KEYS + i * piece
                entry = jnp.minimum(position // page_size, block_table.shape[1] - 1)
                page = jnp.clip(table_ref[request, entry], 0, pages - 1)
                row = lax.rem(position, page_size)
                kind.load(view_refs, tiles, page, row, slot, i * piece, piece, full.at[slot])

        def produce():
            plgpu.set_max_registers(config.registers[0], action="decrease")

            def segment(i, loaded):
                request, block, low, high, at = place(i)

                @pl.when(i - begin >= 2)
                def _():
                    plgpu.barrier_wait(used.at[at])

                column = pl.ds(block * columns, columns)
                plgpu.copy_gmem_to_smem(q_ref.at[request, column], q_s.at[at], ready.at[at])
                plgpu.copy_gmem_to_smem(w_ref.at[request, column], w_s.at[at], ready.at[at])
                return load_tiles(functools.partial(load, request), low, high, loaded, empty, config)

            loaded = lax.fori_loop(begin, stop, segment, jnp.int32(0))
            drain(loaded, empty, config)

            def see_used(i, _):
                plgpu.barrier_wait(used.at[lax.rem(i - begin, 2)])

            lax.fori_loop(jnp.maximum(begin, stop - 2), stop, see_used, None)

        def math():
            plgpu.set_max_registers(config.registers[1], action="increase")
            fill_unseen(out_ref, length_ref, rows, queries, thread * config.math + wg, threads * config.math)

            def segment(i, scored):
                request, block, low, high, at = place(i)
                first = request * rows + block * queries
                limit = (request + 1) * rows
                bounds = lanes.load_bounds(None, length_ref, first, limit, queries=queries)
                plgpu.barrier_wait(ready.at[at])
                w = plgpu.load(w_s.at[at], layout=lanes.PER_COLUMN)
                mosaic.fence_proxies()

                def finish(_, dots, scale, tile):
                    lanes.store_scores(
                        out_ref, dots, w, scale, bounds, first, limit, tile * lanes.KEYS,
                        queries=queries, heads=heads, rounding=rounding,
                    )  # fmt: skip

                ring = Ring(
                    full, empty, functools.partial(kind.operand, tiles), functools.partial(kind.scale, tiles),
                    in_registers=kind.in_registers,
                )  # fmt: skip
                score_tiles(finish, q_s.at[pl.ds(at, 1)], ring, wg, low, high, scored, config)
                plgpu.barrier_arrive(used.at[at])
                return scored + high - low

            lax.fori_loop(begin, stop, segment, jnp.int32(0))

        lax.cond(wg == config.math, produce, math)

    scores = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch * rows, stored), jnp.float32),
        grid=(threads,),
        grid_names=("thread",),
        num_threads=config.math + 1,
        thread_name="wg",
        scratch_types=paged_scratch(columns, kind, kind.copies * pieces, config),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(
        kind.queries(q).reshape(batch, rows * heads, WIDTH),
        weights.astype(jnp.float32).reshape(batch, rows * heads),
        context_lens.reshape(-1), block_table, schedule.segments, schedule.first, *views,
    )  # fmt: skip
    return scores[:, :total].reshape(batch, rows, total)


def paged_scratch(columns, kind, copies, config):
    """Queries and weights of two segments, the ring, and barriers that say a segment's queries are ready or used."""
    return [
        plgpu.SMEM((2, columns, WIDTH), kind.query_dtype, transforms=kind.query_tile),
        plgpu.SMEM((2, columns), jnp.float32),
        *kind.tiles(config.stages),
        *_ring_barriers(copies, config),
        plgpu.Barrier(num_arrivals=2, num_barriers=2),
        plgpu.Barrier(num_arrivals=config.math, num_barriers=2),
    ]


def _ring_barriers(copies, config):
    """Barriers that say a tile is full or empty."""
    return [
        plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
        plgpu.Barrier(num_barriers=config.stages),
    ]


@dataclasses.dataclass(frozen=True)
class Ring:
    """How a math warpgroup gets at tiles: barriers, the wgmma's left operand and the keys' scales (or None) of a slot.

    in_registers: the operand is an array, and the slot is free once it is made. copied: tiles come by cp.async.
    """

    full: Any
    empty: Any
    operand: Callable
    scale: Callable
    in_registers: bool = False
    copied: bool = False


def load_tiles(load, begin, stop, loaded, empty, config, after=lambda loaded: None):
    """Loads the tiles [begin, stop) into the ring, after `loaded` others; `after` hears how many were. Returns that."""

    def step(tile, loaded):
        slot = lax.rem(loaded, config.stages)

        @pl.when(loaded >= config.stages)
        def _():
            plgpu.barrier_wait(empty.at[slot])

        load(tile, slot)
        after(loaded + 1)
        return loaded + 1

    return lax.fori_loop(begin, stop, step, jnp.int32(loaded))


def drain(loaded, empty, config):
    """Waits until the last tiles were used, so that no arrival is left unseen."""

    def step(i, _):
        plgpu.barrier_wait(empty.at[lax.rem(i, config.stages)])

    lax.fori_loop(jnp.maximum(loaded - config.stages, 0), loaded, step, None)


def score_tiles(finish, q_s, ring, wg, begin, stop, scored, config):
    """Warpgroup `wg`'s tiles of [begin, stop), `scored` tiles having gone before: keys x columns, then `finish`."""
    groups, columns = q_s.shape[:2]
    skipped = lax.rem(wg + config.math - lax.rem(jnp.int32(scored), config.math), config.math)
    count = (stop - begin - skipped + config.math - 1) // config.math
    ahead = max(1, config.unroll // groups)

    def piece(first, tiles):
        """`tiles` tiles of this warpgroup, from its `first` one on."""
        steps = [(u, g) for u in range(tiles) for g in range(groups)]
        at = [begin + skipped + (first + u) * config.math for u in range(tiles)]
        slot = [lax.rem(scored + tile - begin, config.stages) for tile in at]
        operands, scales = {}, {}

        def reduce(n, acc, following):
            u, g = steps[n]
            dots = plgpu.wgmma_accumulator_load(acc, wait_n=following)
            if g == 0 and not ring.in_registers:
                scales[u] = ring.scale(slot[u])
                if scales[u] is not None:
                    mosaic.fence_proxies()
            if g == groups - 1 and not ring.in_registers:
                plgpu.barrier_arrive(ring.empty.at[slot[u]])
            finish(g, dots, scales.get(u), at[u])

        def run(n, before):
            u, g = steps[n]
            if g == 0:
                plgpu.barrier_wait(ring.full.at[slot[u]])
                if ring.copied:
                    mosaic.fence_proxies()
                operands[u] = ring.operand(slot[u])
                if ring.in_registers:
                    mosaic.fence_proxies()
                    plgpu.barrier_arrive(ring.empty.at[slot[u]])

            # The accumulator is made here, right in front of its wgmma: earlier it would cost registers, and anything
            # in between would cost the instructions that set it to zero.
            def scope(acc):
                plgpu.wgmma(acc, operands[u], q_s.at[g].T)
                if before is not None:
                    reduce(n - 1, before, 1)
                if n + 1 < len(steps) and config.unroll > 1:
                    run(n + 1, acc)
                else:
                    reduce(n, acc, 0)
                    if n + 1 < len(steps):
                        run(n + 1, None)

            pl.run_scoped(scope, plgpu.ACC((lanes.KEYS, columns), jnp.float32))

        run(0, None)

    whole = count // ahead
    lax.fori_loop(0, whole, lambda i, _: piece(i * ahead, ahead), None)
    if ahead > 1:
        lax.fori_loop(whole * ahead, count, lambda i, _: piece(i, 1), None)


def _fill_share(out_ref, row, begin, end, share, shares):
    """-inf to one of `shares` equal runs of the columns [begin, end) of a row."""
    width = (jnp.maximum(end - begin, 0) + shares - 1) // shares
    start = begin + share * width
    lanes.fill(out_ref, row, start, jnp.minimum(start + width, end))


def fill_unseen(out_ref, length_ref, rows, queries, share, shares):
    """-inf to the columns that no tile of a row's query block covers; pieces go round among `shares`."""
    total = out_ref.shape[1]
    pieces = -(-total // _FILLED)

    def step(i, _):
        item = share + i * shares
        row, piece = item // pieces, lax.rem(item, pieces)
        request, block = row // rows, lax.rem(row, rows) // queries
        longest = jnp.int32(0)
        for j in range(queries):
            other = jnp.minimum(block * queries + j, rows - 1)
            longest = jnp.maximum(longest, length_ref[request * rows + other])
        seen = (longest + lanes.KEYS - 1) // lanes.KEYS * lanes.KEYS
        lanes.fill(out_ref, row, jnp.maximum(piece * _FILLED, seen), jnp.minimum((piece + 1) * _FILLED, total))

    count = out_ref.shape[0] * pieces
    lax.fori_loop(0, (count - share + shares - 1) // shares, step, None)


def require(heads, width, dtype, wanted=FP8):
    """Raises NotImplementedError unless queries of this kind are carried."""
    if heads not in HEADS or width != WIDTH:
        raise NotImplementedError(
            f"the sm90 kernel takes {', '.join(map(str, HEADS))} heads of width {WIDTH}, and q has {heads} of {width}."
        )
    if dtype != wanted:
        raise NotImplementedError(f"the sm90 kernel takes {jnp.dtype(wanted)} queries here, not {dtype}.")


def fp8_pages(keys) -> _Fp8Pages:
    """What the kernels need to know of IndexFP8 pages. Raises NotImplementedError for pages that they do not read."""
    if not isinstance(keys.format, IndexFP8):
        raise NotImplementedError(f"the sm90 kernel reads IndexFP8 keys here, not {keys.format}.")
    return _checked(_Fp8Pages(keys.page_size, keys.pages.shape[1]), 128)


def _pages(keys):
    if isinstance(keys.format, IndexMXFP4):
        return _checked(_MxFp4Pages(keys.page_size, keys.pages.shape[1]), 64)
    return fp8_pages(keys)


def _checked(kind, unit):
    if kind.page_size not in PAGE_SIZES or kind.stride % unit:
        raise NotImplementedError(
            f"the sm90 kernel reads pages of {', '.join(map(str, PAGE_SIZES))} rows whose stride is a multiple of "
            f"{unit} bytes, not of {kind.page_size} rows with stride {kind.stride}."
        )
    return kind


def unproven(function, args):
    """Why this kernel is not chosen by itself for a call that it carries, or None."""
    if function == "paged_indexer_logits" and isinstance(args[1].format, IndexMXFP4):
        return "the sm90 kernel for MXFP4 keys was compiled and interpreted, but never run on a GPU; name it to run it."
    return None
