"""Indexer scores on Hopper: FP8 or bf16 wgmma, TMA loads, scores finished in registers.

A thread block scores a few query rows against a run of keys. A producer warpgroup loads tiles of 64 keys by TMA into
a ring; each math warpgroup takes every n-th tile, multiplies its keys with all (query, head) columns at once (keys are
the rows of the wgmma, so that the sum over the heads runs along an accumulator's registers), and reduces and stores
while the tensor cores work for the other warpgroups. A thread block takes one segment of work after the other and
loads the next while the last is scored. What was tried and measured is in docs/performance.md.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from pallas_kernels import indexing, mosaic
from pallas_kernels.indexer_logits import keys as index_keys
from pallas_kernels.indexer_logits import lanes, ring
from pallas_kernels.indexer_logits.ring import Segment, TuningConfig

RAGGED = TuningConfig(columns=128, math=4, stages=8)
RAGGED_MXFP4 = TuningConfig(columns=128, math=3, stages=9)
PAGED = TuningConfig(columns=64, math=2, stages=10)
PAGED_MXFP4 = TuningConfig(columns=64, math=4, stages=12)
PAGED_MXFP4_MANY = TuningConfig(columns=128, math=3, stages=9)  # a fourth warpgroup would leave too few registers
PAGED_MANY = TuningConfig(columns=128, math=4, stages=12)  # two queries of 64 heads, or more
_FILLED = 8192  # columns of -inf that a warpgroup writes at a time
_LONG = 64  # tiles of a segment that make up for changing queries


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which thread block scores which run of keys for which queries. Made once per step, shared by all layers.

    segments: int32 [G, 3], a block of query rows and its tiles [begin, end) of 64 keys. first: int32 [blocks + 1], the
    first segment of every thread block. queries: query rows of a block.
    """

    segments: Any
    first: Any
    queries: int = dataclasses.field(metadata={"static": True})


def indexer_logits(
    q, k, weights, compressed=None, dtype=jnp.float32, *, row_start, row_end, k_scale=None, q_scale=None, rounding=None,
    config=None,
):  # fmt: skip
    """See `pallas_kernels.indexer_logits.indexer_logits`. Width 128; float32 accumulation; FP8 queries with FP8 keys,
    bf16 or packed queries with packed keys."""
    q = index_keys.unpacked_queries(q, q_scale)
    rows, heads, width = q.shape
    kind, views = index_keys.packed_keys(k, k_scale)
    index_keys.require_queries(heads, width, q.dtype, kind.query_dtype)
    total = k.shape[0] if compressed is None else compressed
    if 0 in (rows, k.shape[0], total):
        return jnp.full((rows, total), -jnp.inf, dtype)
    if config is None:
        config = RAGGED_MXFP4 if kind.in_registers else RAGGED
    form = (compressed, jnp.dtype(dtype))
    return _ragged(q, views, weights, row_start, row_end, kind, rounding is not None, form, config)


def paged_indexer_logits(
    q, keys, weights, *, context_lens, block_table, q_scale=None, rounding=None, schedule=None, config=None
):
    """See `pallas_kernels.indexer_logits.paged_indexer_logits`. As `indexer_logits`."""
    q = index_keys.unpacked_queries(q, q_scale)
    batch, rows, heads, width = q.shape
    kind, where, views = index_keys.paged_keys(keys)
    index_keys.require_queries(heads, width, q.dtype, kind.query_dtype)
    if 0 in (batch, rows, block_table.shape[1]):
        return jnp.full((batch, rows, block_table.shape[1] * keys.page_size), -jnp.inf, jnp.float32)
    if schedule is None:
        schedule = make_schedule(context_lens, heads)
    check_schedule(schedule, context_lens, heads)
    if config is None:
        few = schedule.queries * heads <= PAGED.columns
        one, many = (PAGED_MXFP4, PAGED_MXFP4_MANY) if kind.in_registers else (PAGED, PAGED_MANY)
        config = one if few else many
    return _paged(q, views, weights, context_lens, block_table, schedule, kind, where, rounding is not None, config)


def queries_per_block(rows: int, heads: int, columns: int) -> int:
    """Query rows that a thread block scores at once: a power of two that makes 32 to `columns` columns, at most 8."""
    most = max(1, min(columns // heads, 8))
    return max(min(most, 1 << (rows - 1).bit_length()), 32 // heads)


def make_schedule(context_lens: Int32[Array, "B N"], heads: int) -> Schedule:
    """Cuts the visible keys of all requests, laid end to end, into equal runs, one per thread block."""
    index_keys.require_heads(heads)
    batch, rows = context_lens.shape
    queries = queries_per_block(rows, heads, PAGED_MANY.columns)
    blocks = -(-rows // queries)
    padded = jnp.pad(context_lens, ((0, 0), (0, blocks * queries - rows)))
    return cut(jnp.max(padded.reshape(batch * blocks, queries), axis=1), queries)


def check_schedule(schedule: Schedule, context_lens, heads: int) -> None:
    """Raises ValueError for a schedule that was made for other rows or heads."""
    batch, rows = context_lens.shape
    queries = queries_per_block(rows, heads, PAGED_MANY.columns)
    found = schedule.segments.shape[0] - (schedule.first.shape[0] - 1)
    if (schedule.queries, found) != (queries, batch * -(-rows // queries)):
        raise ValueError(
            f"schedule holds {found} blocks of {schedule.queries} query rows, but {batch} requests of {rows} rows with "
            f"{heads} heads make {batch * -(-rows // queries)} of {queries}. Make it with make_indexer_schedule for "
            "these."
        )


def cut(visible: Int32[Array, " blocks"], queries: int) -> Schedule:
    """The schedule of blocks of `queries` query rows that see so many columns each."""
    blocks = visible.shape[0]
    tiles = jnp.maximum(visible + lanes.KEYS - 1, 0) // lanes.KEYS
    ends = jnp.cumsum(tiles)
    total, starts = ends[-1], ends - tiles
    threads = mosaic.CORES
    cuts = jnp.arange(threads + 1, dtype=jnp.int32)
    # i * total / threads without passing 2^31
    cuts = cuts * (total // threads) + cuts * (total % threads) // threads
    # Of both kinds of borders each value counts once, in ascending order. Compared with one another, not sorted: few enough,
    # and as many launches less.
    border = jnp.concatenate([cuts[:-1], starts])
    place = jnp.arange(border.size, dtype=jnp.int32)
    row = border[:, None]
    again = jnp.any((border == row) & (place < place[:, None]), axis=1)
    following = jnp.min(jnp.where(border > row, border, total), axis=1)
    block = jnp.searchsorted(ends, border, side="right", method="compare_all")
    base = jnp.max(jnp.where(starts <= row, starts, 0), axis=1)
    counts = ~again & (border < total)
    rank = jnp.sum(counts & (border < row), axis=1, dtype=jnp.int32)
    segments = jnp.stack([block, border - base, following - base], axis=1).astype(jnp.int32)
    segments = indexing.scatter_rows(jnp.zeros_like(segments), jnp.where(counts, rank, -1), segments)
    first = jnp.sum(counts & (border < cuts[:, None]), axis=1, dtype=jnp.int32)
    return Schedule(segments, first, queries)


def scheduled(segment_ref, first_ref, thread, describe) -> ring.Segments:
    """A thread block's segments of a Schedule; describe(block, low, high) makes a Segment."""
    begin, stop = first_ref[thread], first_ref[thread + 1]
    last = segment_ref.shape[0] - 1

    def fetch(i):
        at = jnp.minimum(begin + i, last)
        return segment_ref[at, 0], segment_ref[at, 1], segment_ref[at, 2]

    return ring.Segments(stop - begin, fetch, lambda i, fetched: describe(*fetched))


def _splits(blocks: int, tiles: int) -> int:
    """Pieces that the keys of a block of queries are cut into, so that every multiprocessor gets the same share."""
    least = max(1, min(tiles, -(-mosaic.CORES // blocks)))
    options = [least, *[s for s in range(least + 1, 9) if tiles // s >= _LONG]]
    idle = lambda s: -(-blocks * s // mosaic.CORES) * mosaic.CORES / (blocks * s)  # noqa: E731
    return min(options, key=lambda s: (round(idle(s), 2), s))


@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8))
def _ragged(q, views, weights, row_start, row_end, kind, rounding, form, config):
    rows, heads, _ = q.shape
    compressed, dtype = form
    total = views[0].shape[0]
    queries = queries_per_block(rows, heads, config.columns)
    columns = queries * heads
    blocks = -(-rows // queries)
    tiles = -(-total // lanes.KEYS)
    splits = _splits(blocks, tiles)
    items = splits * blocks
    threads = min(mosaic.CORES, items)
    # The interpreter knows no predicated stores: its tiles must lie within the output.
    stored = tiles * lanes.KEYS if mosaic.is_interpreted() else total
    stored = stored if compressed is None else compressed

    def body(q_ref, w_ref, start_ref, end_ref, *refs):
        view_refs, (out_ref, *scratch) = refs[: len(views)], refs[len(views) :]
        scratch = ring.Scratch(*scratch)
        wg, thread = lax.axis_index("wg"), lax.axis_index("thread")

        def item(i):
            """Piece of a query block. The longest rows of a causal call come first, and rounds go to and fro."""
            turn = jnp.where(lax.rem(i, 2) == 0, thread, threads - 1 - thread)
            n = jnp.minimum(i * threads + turn, items - 1)
            return lax.rem(n, splits), (blocks - 1 - n // splits) * queries

        def fetch(i):
            at = [jnp.minimum(item(i)[1] + j, rows - 1) for j in range(queries)]
            return [(start_ref[row], end_ref[row]) for row in at]

        def resolve(i, fetched):
            split, first = item(i)
            low, high = jnp.int32(total), jnp.int32(0)
            for start, end in fetched:
                start, end = jnp.maximum(start, 0), jnp.minimum(end, total)
                low = jnp.where(start < end, jnp.minimum(low, start), low)
                high = jnp.where(start < end, jnp.maximum(high, end), high)
            low, high = low // lanes.KEYS, (high + lanes.KEYS - 1) // lanes.KEYS
            count = jnp.maximum(high - low, 0)
            low = jnp.where(count > 0, low, 0)
            begin, stop = low + split * count // splits, low + (split + 1) * count // splits
            return Segment(first, rows, begin, stop, (split, low, low + count))

        rest = items - items // threads * threads
        late = jnp.where(items // threads % 2 == 0, thread, threads - 1 - thread) < rest
        segments = ring.Segments(items // threads + late.astype(jnp.int32), fetch, resolve)

        def load_queries(segment, q_s, w_s, barrier):
            column = pl.ds(segment.first * heads, columns)
            plgpu.copy_gmem_to_smem(q_ref.at[column], q_s, barrier)
            plgpu.copy_gmem_to_smem(w_ref.at[column], w_s, barrier)

        def load_segment(segment, loaded):
            def load(tile, slot):
                index_keys.load_packed(kind, view_refs, scratch.tiles, tile, slot, scratch.full.at[slot])

            return ring.load_tiles(load, segment.low, segment.high, loaded, scratch, config)

        def fill_rest(segment):
            split, low, high = segment.extra
            share, shares = split * config.math + wg, splits * config.math
            for j in range(queries):
                row = segment.first + j
                if compressed is not None:
                    at = jnp.minimum(row, rows - 1)
                    start, end = start_ref[at], jnp.minimum(end_ref[at], total)
                    left = jnp.clip(-start, 0, compressed)
                    _fill_share(out_ref, row, 0, left, share, shares)
                    _fill_share(out_ref, row, jnp.maximum(end - start, left), compressed, share, shares)
                    continue
                _fill_share(out_ref, row, 0, low * lanes.KEYS, share, shares)
                _fill_share(out_ref, row, high * lanes.KEYS, total, share, shares)

        def math():
            ring.consume(
                segments, scratch, config, wg, kind, out_ref, start_ref, end_ref, queries=queries, heads=heads,
                rounding=rounding, weight_dtype=weights.dtype, compressed=compressed is not None, after=fill_rest,
            )  # fmt: skip

        lax.cond(
            wg == config.math, lambda: ring.produce(segments, scratch, config, load_queries, load_segment), math
        )

    scores = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, stored), dtype),
        grid=(threads,),
        grid_names=("thread",),
        num_threads=config.math + 1,
        thread_name="wg",
        scratch_types=ring.scratch_types(columns, kind, 1 + kind.scaled, config),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(
        kind.queries(q).reshape(rows * heads, index_keys.WIDTH), weights.astype(jnp.float32).reshape(rows * heads),
        row_start, row_end, *views,
    )  # fmt: skip
    return scores[:, :total] if compressed is None else scores


@functools.partial(jax.jit, static_argnums=(6, 7, 8, 9))
def _paged(q, views, weights, context_lens, block_table, schedule, kind, where, rounding, config):
    batch, rows, heads, _ = q.shape
    page_size, pages = where.page_size, views[1].shape[0]
    total = block_table.shape[1] * page_size
    queries = schedule.queries
    columns = queries * heads
    blocks = -(-rows // queries)
    threads = schedule.first.shape[0] - 1
    pieces = max(1, lanes.KEYS // page_size)  # pages of a tile, or 1 where a page has several tiles
    piece = lanes.KEYS // pieces
    stored = -(-total // lanes.KEYS) * lanes.KEYS if mosaic.is_interpreted() else total

    def body(q_ref, w_ref, length_ref, table_ref, segment_ref, first_ref, *refs):
        view_refs, (out_ref, *scratch) = refs[: len(views)], refs[len(views) :]
        scratch = ring.Scratch(*scratch)
        wg, thread = lax.axis_index("wg"), lax.axis_index("thread")

        def describe(block, low, high):
            request, part = block // blocks, lax.rem(block, blocks)
            return Segment(request * rows + part * queries, (request + 1) * rows, low, high, (request, part))

        segments = scheduled(segment_ref, first_ref, thread, describe)

        def load_queries(segment, q_s, w_s, barrier):
            request, part = segment.extra
            column = pl.ds(part * columns, columns)
            plgpu.copy_gmem_to_smem(q_ref.at[request, column], q_s, barrier)
            plgpu.copy_gmem_to_smem(w_ref.at[request, column], w_s, barrier)

        def load_segment(segment, loaded):
            def load(tile, slot):
                for i in range(pieces):
                    position = tile * lanes.KEYS + i * piece
                    entry = jnp.minimum(position // page_size, block_table.shape[1] - 1)
                    page = jnp.clip(table_ref[segment.extra[0], entry], 0, pages - 1)
                    row = lax.rem(position, page_size)
                    index_keys.load_paged(
                        kind, where, view_refs, scratch.tiles, page, row, slot, i * piece, piece, scratch.full.at[slot]
                    )

            return ring.load_tiles(load, segment.low, segment.high, loaded, scratch, config)

        def math():
            fill_unseen(out_ref, length_ref, rows, queries, thread * config.math + wg, threads * config.math)
            ring.consume(
                segments, scratch, config, wg, kind, out_ref, None, length_ref, queries=queries, heads=heads,
                rounding=rounding, weight_dtype=weights.dtype,
            )  # fmt: skip

        lax.cond(
            wg == config.math, lambda: ring.produce(segments, scratch, config, load_queries, load_segment), math
        )

    scores = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch * rows, stored), jnp.float32),
        grid=(threads,),
        grid_names=("thread",),
        num_threads=config.math + 1,
        thread_name="wg",
        scratch_types=ring.scratch_types(columns, kind, 2 * pieces, config),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(
        kind.queries(q).reshape(batch, rows * heads, index_keys.WIDTH),
        weights.astype(jnp.float32).reshape(batch, rows * heads),
        context_lens.reshape(-1), block_table, schedule.segments, schedule.first, *views,
    )  # fmt: skip
    return scores[:, :total].reshape(batch, rows, total)


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
