"""Indexer scores on Blackwell: tcgen05 products into TMEM, TMA loads.

Four warpgroups to a thread block: one loads tiles of 128 keys by TMA, one issues the products (keys are the rows,
(query, head) pairs the columns), two take turns in reducing an accumulator from TMEM to scores. A thread block scores
the query rows of one block against one of a few equal runs of their visible keys.

FP8 keys are multiplied as they are. MXFP4 keys are multiplied as they are too where the queries are packed MXFP4, with
the scales of both in TMEM; for bf16 queries they are unpacked to bf16 on the way. Products take one CTA: what bounds
the kernel is the reduction of every product by ordinary cores, which a pair of CTAs does no faster, and the keys that
a pair would share come from L2 at a fraction of its rate.

No Blackwell GPU was at hand: the kernel is compiled for one and interpreted (all but the block-scaled product, which
the interpreter does not know), and its speed is not known.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import blocks, mosaic
from pallas_kernels.copies import CopyBarriers, copy_barriers
from pallas_kernels.indexer_logits import keys as index_keys
from pallas_kernels.indexer_logits import lanes
from pallas_kernels.indexer_logits.keys import FP8, WIDTH

KEYS = 128  # keys of a tile: rows of a tcgen05.mma
COLUMNS = 128  # (query, head) pairs of a block
STAGES = 4
_PART = 64  # columns that are reduced at a time
_TILE = plgpu.Layout.TCGEN05
_PER_KEY = _TILE.reduce(1)
_PER_COLUMN = _TILE.reduce(0)
_LOADER, _MULTIPLIER, _FIRST_REDUCER, _REDUCERS = 0, 1, 2, 2
_FP8_TILE = (plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(128))
_BF16_TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_E2M1, _E8M0 = jnp.float4_e2m1fn, jnp.float8_e8m0fnu


@dataclasses.dataclass(frozen=True)
class _Fp8:
    """FP8 keys and queries; a key's scale multiplies the finished score."""

    query_dtype = FP8
    swizzle = WIDTH  # of the tile as copies write it
    least_columns = 64
    scaled = True
    copied_on = False  # whether the products read a copy of the tile, so that its slot is free before they are done

    def scratch(self, columns):
        return [mosaic.row_tile((STAGES, KEYS, WIDTH), FP8), plgpu.SMEM((STAGES, KEYS), jnp.float32)]

    def rows(self, tiles, slot):
        return mosaic.row_tile_views(tiles[0])[1].at[slot]

    def query_scratch(self, columns):
        return plgpu.SMEM((columns, WIDTH), FP8, transforms=_FP8_TILE)

    def query_rows(self, q_s):
        """The queries' scratch as a copy fills it."""
        return q_s

    def prepare_queries(self, tiles, scales_ref, block):
        """What is done once in front of the first product."""

    def multiply(self, into, tiles, q_s, slot, half, done):
        """Product `done`: the keys of a slot times all queries, with scratch of its own for either half."""
        keys = mosaic.row_tile_views(tiles[0])[0].at[slot]
        plgpu.tcgen05_mma(into, keys, q_s.T, done, accumulate=False)


@dataclasses.dataclass(frozen=True)
class _Unpacked:
    """MXFP4 keys for bf16 queries: the multiplying warpgroup unpacks a tile to bf16, exactly, and then multiplies."""

    query_dtype = jnp.bfloat16
    swizzle = 0
    least_columns = 64
    scaled = False
    copied_on = True

    def scratch(self, columns):
        return [
            plgpu.SMEM((STAGES, KEYS, WIDTH // 2), jnp.uint8),
            plgpu.SMEM((STAGES, KEYS), jnp.int32),
            plgpu.SMEM((_REDUCERS, KEYS, WIDTH), jnp.bfloat16, transforms=_BF16_TILE),
        ]

    def rows(self, tiles, slot):
        return tiles[0].at[slot]

    def query_scratch(self, columns):
        return plgpu.SMEM((columns, WIDTH), jnp.bfloat16, transforms=_BF16_TILE)

    def query_rows(self, q_s):
        return q_s

    def prepare_queries(self, tiles, scales_ref, block):
        pass

    def multiply(self, into, tiles, q_s, slot, half, done):
        values, words, unpacked = tiles
        for start in range(0, KEYS, lanes.KEYS):
            keys = pl.ds(start, lanes.KEYS)
            unpacked[half, keys] = lanes.unpack_mxfp4(values.at[slot, keys], words.at[slot, keys])
        plgpu.commit_smem()
        plgpu.tcgen05_mma(into, unpacked.at[half], q_s.T, done, accumulate=False)


@dataclasses.dataclass(frozen=True)
class _Packed:
    """MXFP4 keys for packed MXFP4 queries: a block-scaled product, the scales of both in TMEM."""

    query_dtype = jnp.uint8
    swizzle = WIDTH // 2
    least_columns = COLUMNS
    scaled = False
    copied_on = False

    def scratch(self, columns):
        scales = plgpu.TMEM((COLUMNS, WIDTH // 32), _E8M0, layout=plgpu.TMEMLayout.SCALES_LAYOUT)
        turned = plgpu.SMEM((_REDUCERS, 1, 1, 32, 16), _E8M0)
        return [
            _both(STAGES, KEYS), plgpu.SMEM((STAGES, KEYS), jnp.int32),
            plgpu.RefUnion(turned, plgpu.SMEM((_REDUCERS, KEYS), jnp.int32)), [scales] * _REDUCERS,
            plgpu.SMEM((1, 1, 32, 16), _E8M0), scales, plgpu.Barrier(),
        ]  # fmt: skip

    def rows(self, tiles, slot):
        return tiles[0][0].at[slot]

    def query_scratch(self, columns):
        return _both(columns)

    def query_rows(self, q_s):
        return q_s[0]

    def prepare_queries(self, tiles, scales_ref, block):
        *_, scales, in_tmem, barrier = tiles
        plgpu.copy_gmem_to_smem(scales_ref.at[block], scales, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.async_copy_scales_to_tmem(scales, in_tmem)

    def multiply(self, into, tiles, q_s, slot, half, done):
        values, words, (scales, scale_words), in_tmem, _, q_scale, _ = tiles
        lanes.turn_words(words.at[slot], scale_words.at[half])
        plgpu.commit_smem()
        for which in range(_REDUCERS):

            @pl.when(half == which)
            def _():
                plgpu.async_copy_scales_to_tmem(scales.at[which], in_tmem[which])
                plgpu.tcgen05_mma(
                    into, values[1].at[slot], q_s[1].T, done, a_scale=in_tmem[which], b_scale=q_scale, accumulate=False
                )


def _both(*shape):
    """Scratch of packed rows [*shape, 64 bytes] that TMA fills as bytes and tensor cores read as E2M1 values."""
    return plgpu.RefUnion(
        plgpu.SMEM((*shape, WIDTH // 2), jnp.uint8, transforms=(plgpu.SwizzleTransform(64),)),
        plgpu.SMEM((*shape, WIDTH), _E2M1, transforms=(plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(64))),
    )


def indexer_logits(
    q, k, weights, compressed=None, dtype=jnp.float32, *, row_start, row_end, k_scale=None, q_scale=None, rounding=None
):
    """See `pallas_kernels.indexer_logits.indexer_logits`. Width 128; float32 accumulation; FP8 queries with FP8 keys,
    bf16 or packed queries with packed keys."""
    if compressed is not None:
        raise NotImplementedError("the sm100 kernel writes a column for every key; it has no compressed rows.")
    if 0 in (q.shape[0], k.shape[0]):
        return jnp.full((q.shape[0], k.shape[0]), -jnp.inf, dtype)
    keys, views = index_keys.packed_keys(k, k_scale)
    if not keys.scaled:
        views = (*views, jnp.ones(k.shape[0], jnp.float32))
    q, q_scale, kind = queries_of_kind(q, q_scale, keys)
    scores = _ragged(q, q_scale, views, weights, row_start, row_end, kind, rounding is not None)
    return blocks.cast(scores, dtype)


def paged_indexer_logits(
    q, keys, weights, *, context_lens, block_table, q_scale=None, rounding=None, schedule=None
):
    """See `pallas_kernels.indexer_logits.paged_indexer_logits`. As `indexer_logits`; a schedule is not needed."""
    batch, rows = q.shape[:2]
    kind, where, views = index_keys.paged_keys(keys)
    if 0 in (batch, rows, block_table.shape[1]):
        return jnp.full((batch, rows, block_table.shape[1] * keys.page_size), -jnp.inf, jnp.float32)
    q, q_scale, kind = queries_of_kind(q, q_scale, kind)
    return _paged(q, q_scale, views, weights, context_lens, block_table, kind, where, rounding is not None)


def make_schedule(context_lens, heads):
    """None: these kernels cut the work by themselves."""
    return None


def queries_of_kind(q, q_scale, keys):
    """Queries and scales as the kernel of their kind takes them, and the kind."""
    if q_scale is not None and mosaic.is_interpreted():  # which knows no block-scaled product
        q, q_scale = index_keys.unpacked_queries(q, q_scale), None
    kind = _Fp8() if isinstance(keys, index_keys.Fp8Keys) else _Unpacked() if q_scale is None else _Packed()
    heads, width = q.shape[-2:]
    index_keys.require_queries(heads, width * (1 + (q_scale is not None)), q.dtype, kind.query_dtype)
    return lanes.unpacked_columns(q) if isinstance(kind, _Unpacked) else q, q_scale, kind


@functools.partial(jax.jit, static_argnums=(6, 7))
def _ragged(q, q_scale, views, weights, row_start, row_end, kind, rounding):
    def load(refs, request, tile, values_s, words_s, barrier):
        rows = pl.ds(tile * KEYS, KEYS)
        plgpu.copy_gmem_to_smem(refs[0].at[rows], values_s, barrier)
        plgpu.copy_gmem_to_smem(refs[1].at[rows], words_s, barrier)

    scores = score(
        q[None], None if q_scale is None else q_scale[None], weights[None], row_start[None], row_end[None], kind, views,
        load, 2, total=views[0].shape[0], rounding=rounding,
    )  # fmt: skip
    return scores[0]


@functools.partial(jax.jit, static_argnums=(6, 7, 8))
def _paged(q, q_scale, views, weights, context_lens, block_table, kind, where, rounding):
    page_size, pages = where.page_size, views[1].shape[0]
    table_width = block_table.shape[1]
    piece = min(page_size, KEYS)

    def load(refs, request, tile, values_s, words_s, barrier):
        values_ref, words_ref, table_ref = refs
        for start in range(0, KEYS, piece):
            entry = jnp.minimum((tile * KEYS + start) // page_size, table_width - 1)
            page = jnp.clip(table_ref[request, entry], 0, pages - 1)
            to = pl.ds(start, piece)
            plgpu.copy_gmem_to_smem(values_ref.at[pl.ds(page * where.page_rows, piece)], values_s.at[to], barrier)
            plgpu.copy_gmem_to_smem(words_ref.at[page, pl.ds(where.first_word, piece)], words_s.at[to], barrier)

    return score(
        q, q_scale, weights, jnp.zeros_like(context_lens), context_lens, kind, (*views, block_table), load,
        2 * KEYS // piece, total=table_width * page_size, rounding=rounding,
    )  # fmt: skip


def score(q, q_scale, weights, row_start, row_end, kind, key_arrays, load, copies, *, total, rounding):
    """q [B, N, H, D], weights [B, N, H], visible ranges int32 [B, N] -> float32 [B, N, total].

    q_scale: uint8 [B, N, H, D / 32] for packed queries. load(refs, request, tile, values, words, barrier) copies tile
    `tile` of a request's keys: in `copies` copies by TMA, or, where that is None, by cp.async.
    """
    batch, rows, heads, stored_width = q.shape
    queries = max(min(COLUMNS // heads, 1 << (rows - 1).bit_length()), kind.least_columns // heads)
    columns = queries * heads
    per_request = -(-rows // queries)
    tiles_wide = -(-total // KEYS)
    blocks = batch * per_request
    splits = max(1, min(tiles_wide, mosaic.CORES // blocks))
    scales = () if q_scale is None else (_turned(q_scale, per_request),)
    gathered = copies is None

    def body(q_ref, w_ref, start_ref, end_ref, *refs):
        key_refs, refs = refs[: len(key_arrays)], refs[len(key_arrays) :]
        scales_ref = refs[0] if scales else None
        out_ref, q_s, w_s, tiles, acc, ready, full, empty, done, free, *started = refs[len(scales) :]
        wg, split, block = lax.axis_index("wg"), lax.axis_index("split"), lax.axis_index("block")
        request, first = block // per_request, lax.rem(block, per_request) * queries
        bounds = []
        low, high = jnp.int32(total), jnp.int32(0)
        for j in range(queries):
            row = request * rows + jnp.minimum(first + j, rows - 1)
            start, end = jnp.maximum(start_ref[row], 0), jnp.minimum(end_ref[row], total)
            bounds.append((start, end))
            low = jnp.where(start < end, jnp.minimum(low, start), low)
            high = jnp.where(start < end, jnp.maximum(high, end), high)
        low, high = low // KEYS, (high + KEYS - 1) // KEYS
        count = jnp.maximum(high - low, 0)
        low = jnp.where(count > 0, low, 0)
        begin = low + split * count // splits
        mine = low + (split + 1) * count // splits - begin

        if gathered:
            full = CopyBarriers(full, STAGES)
            pl.when(wg == _LOADER)(full.initialise)
            plgpu.barrier_arrive(started[0])
            plgpu.barrier_wait(started[0])

        @pl.when(wg == _LOADER)
        def _():
            column = pl.ds(first * heads, columns)
            plgpu.copy_gmem_to_smem(q_ref.at[request, column], kind.query_rows(q_s), ready)
            plgpu.copy_gmem_to_smem(w_ref.at[request, column], w_s, ready)

            def step(i, _):
                slot = lax.rem(i, STAGES)

                @pl.when(i >= STAGES)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                barrier = None if gathered else full.at[slot]
                load(key_refs, request, begin + i, kind.rows(tiles, slot), tiles[1].at[slot], barrier)
                if gathered:
                    full.arrive(slot)

            lax.fori_loop(0, mine, step, None)

            def drain(i, _):
                plgpu.barrier_wait(empty.at[lax.rem(i, STAGES)])

            lax.fori_loop(jnp.maximum(mine - STAGES, 0), mine, drain, None)

        @pl.when(wg == _MULTIPLIER)
        def _():
            plgpu.barrier_wait(ready)
            kind.prepare_queries(tiles, scales_ref, block)

            def step(i, _):
                slot, half = lax.rem(i, STAGES), lax.rem(i, _REDUCERS)

                @pl.when(i >= _REDUCERS)
                def _():
                    plgpu.barrier_wait(free.at[half])

                if gathered:
                    full.wait(slot, i // STAGES)
                    mosaic.fence_proxies()
                else:
                    plgpu.barrier_wait(full.at[slot])
                into = acc.at[:, pl.ds(half * columns, columns)]
                kind.multiply(into, tiles, q_s, slot, half, done.at[half])
                if kind.copied_on:
                    plgpu.barrier_arrive(empty.at[slot])

            lax.fori_loop(0, mine, step, None)

            def drain(i, _):
                plgpu.barrier_wait(free.at[lax.rem(i, _REDUCERS)])

            lax.fori_loop(jnp.maximum(mine - _REDUCERS, 0), mine, drain, None)

        @pl.when(wg >= _FIRST_REDUCER)
        def _():
            half = wg - _FIRST_REDUCER
            plgpu.barrier_wait(ready)
            lane = plgpu.broadcasted_iota(jnp.int32, (KEYS,), 0, layout=_PER_KEY)

            def put(j, tile, score):
                @pl.when(first + j < rows)
                def _():
                    out_ref[request * rows + first + j, pl.ds(tile * KEYS, KEYS)] = score

            def step(i, _):
                at = i * _REDUCERS + half
                slot, tile = lax.rem(at, STAGES), begin + at
                plgpu.barrier_wait(done.at[half])
                scale = None
                if kind.scaled:  # in the slot until it is given back, which this warpgroup does
                    scale = plgpu.load(tiles[1].at[slot], layout=_PER_KEY)
                    mosaic.fence_proxies()
                if not kind.copied_on:
                    plgpu.barrier_arrive(empty.at[slot])
                position = lane + tile * KEYS
                for part in range(0, columns, _PART):  # all columns at once would not fit the registers
                    dots = plgpu.async_load_tmem(acc.at[:, pl.ds(half * columns + part, _PART)], layout=_TILE)
                    plgpu.wait_load_tmem()
                    if part + _PART == columns:
                        plgpu.barrier_arrive(free.at[half])
                    w = plgpu.load(w_s.at[pl.ds(part, _PART)], layout=_PER_COLUMN)
                    w = plgpu.layout_cast(lax.broadcast_in_dim(w, (KEYS, _PART), (1,)), _TILE)
                    products = jnp.maximum(_round(dots) if rounding else dots, 0.0) * w
                    products = _round(products) if rounding else products
                    for at_column in range(0, _PART, heads):
                        j = (part + at_column) // heads
                        start, end = bounds[j]
                        score = jnp.sum(products[:, at_column : at_column + heads], axis=1)
                        score = _round(score) if rounding else score
                        score = score if scale is None else score * scale
                        visible = (position >= start) & (position < end)
                        put(j, tile, jnp.where(visible, score, -jnp.inf))

            lax.fori_loop(0, (mine - half + _REDUCERS - 1) // _REDUCERS, step, None)
            # What no tile covers, by tiles: the thread blocks of a query block share them.
            nothing = jnp.where(lane < 0, 0.0, -jnp.inf)

            def fill(i, _):
                @pl.when((i < low) | (i >= low + count))
                def _():
                    for j in range(queries):
                        put(j, i, nothing)

            share, shares = split * _REDUCERS + half, splits * _REDUCERS
            pieces = (tiles_wide - share + shares - 1) // shares
            lax.fori_loop(0, pieces, lambda i, _: fill(share + i * shares, None), None)

    scores = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch * rows, tiles_wide * KEYS), jnp.float32),
        grid=(splits, blocks),
        grid_names=("split", "block"),
        num_threads=_FIRST_REDUCER + _REDUCERS,
        thread_name="wg",
        scratch_types=[
            kind.query_scratch(columns),
            plgpu.SMEM((columns,), jnp.float32),
            kind.scratch(columns),
            plgpu.TMEM((KEYS, _REDUCERS * columns), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            copy_barriers(STAGES) if gathered else plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_barriers=_REDUCERS, orders_tensor_core=True),
            plgpu.Barrier(num_barriers=_REDUCERS, orders_tensor_core=True),
            *[plgpu.Barrier(num_arrivals=_FIRST_REDUCER + _REDUCERS)] * gathered,
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(
        q.reshape(batch, rows * heads, stored_width), weights.astype(jnp.float32).reshape(batch, rows * heads),
        row_start.reshape(-1), row_end.reshape(-1), *key_arrays, *scales,
    )  # fmt: skip
    return scores[:, :total].reshape(batch, rows, total)


def _turned(q_scale, per_request):
    """Scales uint8 [B, N, H, 4] of packed queries as tensor cores read them: [blocks, 1, 1, 32, 16] E8M0."""
    batch = q_scale.shape[0]
    rows = q_scale.reshape(batch, -1, WIDTH // 32)
    rows = jnp.pad(rows, ((0, 0), (0, per_request * COLUMNS - rows.shape[1]), (0, 0)))
    turned = rows.reshape(batch * per_request, 1, 1, 4, 32, WIDTH // 32).swapaxes(3, 4)
    return lax.bitcast_convert_type(turned.reshape(batch * per_request, 1, 1, 32, 16), _E8M0)


def _round(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def unproven(function, args):
    """Why this kernel is not chosen by itself for a call that it carries."""
    return "the sm100 kernels were compiled and interpreted, but never run on a GPU; name them to run them."
