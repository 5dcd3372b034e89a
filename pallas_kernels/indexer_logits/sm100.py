"""Indexer scores on Blackwell: FP8 tcgen05 products into TMEM, TMA loads.

Four warpgroups to a thread block: one loads tiles of 128 keys by TMA, one issues the products (keys are the rows,
(query, head) pairs the columns), two take turns in reducing an accumulator from TMEM to scores. A thread block scores
the query rows of one block against one of a few equal runs of their visible keys.

No Blackwell GPU was at hand: the kernel is compiled for one and interpreted, and its speed is not known.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.indexer_logits import sm90
from pallas_kernels.records import IndexFP8

WIDTH = sm90.WIDTH
KEYS = 128  # keys of a tile: rows of a tcgen05.mma
COLUMNS = 128  # (query, head) pairs of a block
STAGES = 4
_PART = 64  # columns that are reduced at a time
_FP8_TILE = (plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(128))
_TILE = plgpu.Layout.TCGEN05
_PER_KEY = _TILE.reduce(1)
_PER_COLUMN = _TILE.reduce(0)
_LOADER, _MULTIPLIER, _FIRST_REDUCER, _REDUCERS = 0, 1, 2, 2


def indexer_logits(q, k, weights, *, row_start, row_end, k_scale=None, rounding=None):
    """See `pallas_kernels.indexer_logits.indexer_logits`. FP8 queries and keys of width 128; float32 accumulation."""
    rows, heads, width = q.shape
    _require(heads, width, q.dtype)
    if k.dtype != sm90.FP8:
        raise NotImplementedError(f"the sm100 kernel takes float8_e4m3fn keys, not {k.dtype}.")
    if 0 in (rows, k.shape[0]):
        return jnp.full((rows, k.shape[0]), -jnp.inf, jnp.float32)
    scale = jnp.ones(k.shape[0], jnp.float32) if k_scale is None else k_scale
    return _ragged(q, k, weights, row_start, row_end, scale, rounding is not None)


def paged_indexer_logits(q, keys, weights, *, context_lens, block_table, rounding=None):
    """See `pallas_kernels.indexer_logits.paged_indexer_logits`. FP8 queries, IndexFP8 keys of width 128."""
    batch, rows, heads, width = q.shape
    if not isinstance(keys.format, IndexFP8):
        raise NotImplementedError(f"the sm100 kernel reads IndexFP8 keys, not {keys.format}.")
    _require(heads, width, q.dtype)
    if keys.page_size not in sm90.PAGE_SIZES or keys.pages.shape[1] % WIDTH:
        raise NotImplementedError(
            f"the sm100 kernel reads pages of {', '.join(map(str, sm90.PAGE_SIZES))} rows whose stride is a multiple "
            f"of {WIDTH} bytes, not of {keys.page_size} rows with stride {keys.pages.shape[1]}."
        )
    if 0 in (batch, rows, block_table.shape[1]):
        return jnp.full((batch, rows, block_table.shape[1] * keys.page_size), -jnp.inf, jnp.float32)
    return _paged(q, keys, weights, context_lens, block_table, rounding is not None)


@functools.partial(jax.jit, static_argnums=6)
def _ragged(q, k, weights, row_start, row_end, scale, rounding):
    total = k.shape[0]

    def load(refs, request, tile, rows_s, scale_s, barrier):
        k_ref, scale_ref = refs
        keys = pl.ds(tile * KEYS, KEYS)
        plgpu.copy_gmem_to_smem(k_ref.at[keys], rows_s, barrier)
        plgpu.copy_gmem_to_smem(scale_ref.at[keys], scale_s, barrier)

    scores = _score(
        q[None], weights[None], row_start[None], row_end[None], (k, scale), load, 2, total=total, rounding=rounding
    )
    return scores[0]


@functools.partial(jax.jit, static_argnums=5)
def _paged(q, keys, weights, context_lens, block_table, rounding):
    page_size, (pages, stride) = keys.page_size, keys.pages.shape
    table_width = block_table.shape[1]
    piece = min(page_size, KEYS)

    def load(refs, request, tile, rows_s, scale_s, barrier):
        values_ref, scales_ref, table_ref = refs
        for start in range(0, KEYS, piece):
            position = tile * KEYS + start
            entry = jnp.minimum(position // page_size, table_width - 1)
            page = jnp.clip(table_ref[request, entry], 0, pages - 1)
            to = pl.ds(start, piece)
            plgpu.copy_gmem_to_smem(values_ref.at[pl.ds(page * (stride // WIDTH), piece)], rows_s.at[to], barrier)
            plgpu.copy_gmem_to_smem(scales_ref.at[page, pl.ds(page_size * WIDTH // 4, piece)], scale_s.at[to], barrier)

    values = lax.bitcast_convert_type(keys.pages, sm90.FP8).reshape(-1, WIDTH)
    scales = lax.bitcast_convert_type(keys.pages.reshape(pages, -1, 4), jnp.float32)
    return _score(
        q, weights, jnp.zeros_like(context_lens), context_lens, (values, scales, block_table), load, 2 * KEYS // piece,
        total=table_width * page_size, rounding=rounding,
    )  # fmt: skip


def _score(q, weights, row_start, row_end, key_arrays, load, copies, *, total, rounding):
    """q [B, N, H, D], weights [B, N, H], visible ranges int32 [B, N] -> float32 [B, N, total].

    load(refs, request, tile, rows, scales, barrier) copies tile `tile` of a request's keys, in `copies` copies.
    """
    batch, rows, heads, _ = q.shape
    queries = max(min(COLUMNS // heads, 1 << (rows - 1).bit_length()), 64 // heads)
    columns = queries * heads
    per_request = -(-rows // queries)
    tiles = -(-total // KEYS)
    blocks = batch * per_request
    splits = max(1, min(tiles, mosaic.CORES // blocks))

    def body(q_ref, w_ref, start_ref, end_ref, *refs):
        key_refs, scratch = refs[: len(key_arrays)], refs[len(key_arrays) :]
        out_ref, q_s, w_s, k_s, scale_s, acc, ready, full, empty, done, free = scratch
        k_s, k_rows_s = mosaic.row_tile_views(k_s)
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

        @pl.when(wg == _LOADER)
        def _():
            column = pl.ds(first * heads, columns)
            plgpu.copy_gmem_to_smem(q_ref.at[request, column], q_s, ready)
            plgpu.copy_gmem_to_smem(w_ref.at[request, column], w_s, ready)

            def step(i, _):
                slot = lax.rem(i, STAGES)

                @pl.when(i >= STAGES)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                load(key_refs, request, begin + i, k_rows_s.at[slot], scale_s.at[slot], full.at[slot])

            lax.fori_loop(0, mine, step, None)

            def drain(i, _):
                plgpu.barrier_wait(empty.at[lax.rem(i, STAGES)])

            lax.fori_loop(jnp.maximum(mine - STAGES, 0), mine, drain, None)

        @pl.when(wg == _MULTIPLIER)
        def _():
            plgpu.barrier_wait(ready)

            def step(i, _):
                slot, half = lax.rem(i, STAGES), lax.rem(i, _REDUCERS)

                @pl.when(i >= _REDUCERS)
                def _():
                    plgpu.barrier_wait(free.at[half])

                plgpu.barrier_wait(full.at[slot])
                into = acc.at[:, pl.ds(half * columns, columns)]
                plgpu.tcgen05_mma(into, k_s.at[slot], q_s.T, done.at[half], accumulate=False)

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
                # The tile's scales are in the slot until it is given back, which this warpgroup does.
                scale = plgpu.load(scale_s.at[slot], layout=_PER_KEY)
                mosaic.fence_proxies()
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
                        score = (_round(score) if rounding else score) * scale
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
            lax.fori_loop(0, (tiles - share + shares - 1) // shares, lambda i, _: fill(share + i * shares, None), None)

    scores = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch * rows, tiles * KEYS), jnp.float32),
        grid=(splits, blocks),
        grid_names=("split", "block"),
        num_threads=_FIRST_REDUCER + _REDUCERS,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((columns, WIDTH), sm90.FP8, transforms=_FP8_TILE),
            plgpu.SMEM((columns,), jnp.float32),
            mosaic.row_tile((STAGES, KEYS, WIDTH), sm90.FP8),
            plgpu.SMEM((STAGES, KEYS), jnp.float32),
            plgpu.TMEM((KEYS, _REDUCERS * columns), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_barriers=_REDUCERS, orders_tensor_core=True),
            plgpu.Barrier(num_barriers=_REDUCERS, orders_tensor_core=True),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(
        q.reshape(batch, rows * heads, WIDTH), weights.astype(jnp.float32).reshape(batch, rows * heads),
        row_start.reshape(-1), row_end.reshape(-1), *key_arrays,
    )  # fmt: skip
    return scores[:, :total].reshape(batch, rows, total)


def _round(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _require(heads, width, dtype):
    if heads not in sm90.HEADS or width != WIDTH:
        raise NotImplementedError(
            f"the sm100 kernel takes {', '.join(map(str, sm90.HEADS))} heads of width {WIDTH}, and q has {heads} of "
            f"{width}."
        )
    if dtype != sm90.FP8:
        raise NotImplementedError(f"the sm100 kernel takes float8_e4m3fn queries, not {dtype}.")
