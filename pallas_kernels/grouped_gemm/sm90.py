"""Products with stored weights on Hopper: TMA brings stored bytes, which become operands of a wgmma in registers.

A thread block takes one item after the other: some rows of a weight, 64 for a wgmma, and a tile of input rows. A producer
warpgroup loads stored bytes and inputs into a ring, which does not stop between items. Items of several weights with the
same inputs are taken as those of one. Four warpgroups read the bytes,
make bf16 values of them, times their scales, and multiply: rows of the weight are rows of the products, so that a tile of
8 input rows pays for 8, and nothing that is dequantised goes through memory of any kind. The four divide an item's rows
among them, or its columns (`ways`), whose sums they add in shared memory; `splits` divides columns among items, and XLA
adds. How columns are divided follows from the weight and the rows of a tile alone, so a row's bits depend on nothing else.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.grouped_gemm import lanes, reference
from pallas_kernels.grouped_gemm.lanes import BYTES, ROWS, Stored

WARPGROUPS = 4  # of arithmetic
MOST_ROWS = 128  # of a tile
FEW_ROWS = 32  # of a tile whose products take no longer than its weights' bytes
FAST_ROW_BYTES = 8 << 20  # one row times so small a weight is faster by XLA, which dequantises it on the way
_DENSE_TILE = 64
_SHARED = 216 * 1024
_INPUTS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How an item is divided: its columns among `ways` of the four warpgroups and `splits` items, and tiles in the ring.

    math, load: registers of the threads of arithmetic and of those that load.
    """

    ways: int
    splits: int
    stages: int
    math: int = 112
    load: int = 32

    def __post_init__(self):
        if self.ways not in (1, 2, 4):
            raise ValueError(f"ways={self.ways}; four warpgroups divide columns in 1, 2 or 4.")
        if self.stages < 2 or self.stages % self.ways:
            raise ValueError(f"stages={self.stages}; the ring needs a multiple of ways={self.ways}, and at least 2.")
        # What a thread block starts with, 64k registers dealt out in eights: more would be waited for, for ever.
        if WARPGROUPS * self.math + self.load > 480:
            raise ValueError(f"{self}: a thread of each of four warpgroups and one that loads have 480 registers.")

    @property
    def row_groups(self) -> int:
        """Wgmmas that an item's rows make."""
        return WARPGROUPS // self.ways


def grouped_gemm(x, weight, scale, group, *, block=None, out_dtype):
    """See `pallas_kernels.grouped_gemm.grouped_gemm`. bf16 inputs, tiles of at most 128 rows."""
    weights, scales = _several(weight, scale)
    stored = lanes.stored_as(x, weights[0], block, "sm90")
    tiles, rows, _ = x.shape
    if rows > MOST_ROWS:
        raise NotImplementedError(f"the sm90 kernel takes tiles of at most {MOST_ROWS} rows, not {rows}.")
    tile = _tile_rows(rows, MOST_ROWS)
    every_row = len(weights) * weights[0].shape[0] * weights[0].shape[1]
    ways = _grouped_ways(every_row, x.shape[2] // stored.values) if tile <= FEW_ROWS else 1
    config = _config(stored, tile, ways, 1)
    out = _multiply(_padded(x, tile), weights, scales, group, stored, config, jnp.dtype(out_dtype))
    return _as_given(weight, [each[:, :rows] for each in out])


def quantized_matmul(x, weight, scale, *, block=None, out_dtype):
    """See `pallas_kernels.grouped_gemm.quantized_matmul`. bf16 inputs; what XLA multiplies faster is left to it."""
    weights, scales = _several(weight, scale)
    stored = lanes.stored_as(x, weights[0], block, "sm90")
    lead, width = x.shape[:-1], x.shape[-1]
    rows, size = x.size // width, len(weights) * weights[0].size
    if rows > reference.MOST_DENSE_ROWS or (rows == 1 and size <= FAST_ROW_BYTES):
        return reference.quantized_matmul(x, weight, scale, block=block, out_dtype=out_dtype)
    x = x.reshape(-1, width)
    tile = _tile_rows(rows, _DENSE_TILE)
    tiles = -(-rows // tile)
    config = _config(stored, tile, *_division(len(weights) * weights[0].shape[0], width // stored.values))
    x = jnp.pad(x, ((0, tiles * tile - rows), (0, 0))).reshape(tiles, tile, width)
    weights, scales = (tuple(each[None] for each in several) for several in (weights, scales))
    out = _multiply(x, weights, scales, jnp.zeros((tiles,), jnp.int32), stored, config, jnp.dtype(out_dtype))
    return _as_given(weight, [each.reshape(tiles * tile, -1)[:rows].reshape(*lead, -1) for each in out])


def _several(weight, scale):
    return (weight, scale) if isinstance(weight, tuple) else ((weight,), (scale,))


def _as_given(weight, products):
    return tuple(products) if isinstance(weight, tuple) else products[0]


def _tile_rows(rows: int, most: int) -> int:
    return min(most, max(8, 1 << (rows - 1).bit_length()))


def _padded(x, tile: int):
    return jnp.pad(x, ((0, 0), (0, tile - x.shape[1]), (0, 0)))


def _grouped_ways(rows: int, columns: int) -> int:
    """Ways for few input rows, of weights with so many rows together: items of 128 rows, or of 64 where those would be fewer
    than multiprocessors."""
    most = 2 if rows // (2 * ROWS) >= mosaic.CORES else 4
    return next(ways for ways in (4, 2, 1) if ways <= most and columns % ways == 0)


def _division(rows: int, turns: int) -> tuple[int, int]:
    """(ways, splits) for one weight of so many rows and tiles of stored bytes a row, by estimated microseconds.

    64 rows of a tile take 0.25 in a multiprocessor, an item 1.5 more, and adding sums of several items 2 and what they are.
    """

    def estimate(ways, splits):
        items = splits * -(-rows * ways // (ROWS * WARPGROUPS))
        item = 0.25 * -(-turns // splits) * WARPGROUPS / ways + 1.5
        return -(-items // mosaic.CORES) * item + (splits > 1) * (2 + 0.2 * splits), ways, splits

    found = [
        estimate(ways, splits)
        for ways in (1, 2, 4)
        for splits in range(1, min(8, turns) + 1)
        if ways == 1 or turns % (ways * splits) == 0
    ]
    return min(found)[1:]


def _config(stored: Stored, tile: int, ways: int, splits: int) -> TuningConfig:
    groups = WARPGROUPS // ways
    each = groups * ROWS * BYTES + 2 * tile * stored.values + 16
    partial = (ways - 1) * groups * ROWS * tile * 4
    stages = (_SHARED - partial) // each // ways * ways
    return TuningConfig(ways, splits, min(stages, 16))


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _multiply(x, weights, scales, group, stored: Stored, config: TuningConfig, out_dtype):
    """x [tiles, R, K] bf16, weights [E, N, stored] each, scales [E, ..], group [tiles] -> [tiles, R, N] for each weight."""
    tiles, tile, width = x.shape
    experts, rows, bytes_of_row = weights[0].shape
    ways, splits, stages, groups = config.ways, config.splits, config.stages, config.row_groups
    item_rows = ROWS * groups
    blocks_of_one = -(-rows // item_rows)
    blocks = len(weights) * blocks_of_one
    columns = width // stored.values  # tiles of stored bytes
    interpreted = mosaic.is_interpreted()
    # Few sums leave registers for longer operands and for those of one tile while the next one's are made, 128 rows' sums for
    # one operand at a time: with more, the assembler serialises all products (C7512, C7513).
    few = tile <= FEW_ROWS
    at_once = 2 if stored.fp4 and few else 1
    in_flight = 0 if interpreted or tile > 64 else 1
    calls = [tuple(range(i, i + at_once)) for i in range(0, stored.pieces, at_once)]
    items, threads = tiles * splits * blocks, min(mosaic.CORES, tiles * splits * blocks)
    sum_dtype = out_dtype if splits == 1 else jnp.dtype(jnp.float32)
    scratch = {
        "raw": plgpu.SMEM((stages, groups, ROWS, BYTES), jnp.uint8, transforms=lanes.TILE),
        "x": plgpu.SMEM((stages, tile, stored.values), jnp.bfloat16, transforms=_INPUTS),
        "full": plgpu.Barrier(num_arrivals=groups + 1, num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    }
    if ways > 1:
        scratch["partial"] = plgpu.SMEM((ways - 1, groups, ROWS * tile), jnp.float32)
        scratch["summed"] = plgpu.Barrier(num_arrivals=ways - 1, num_barriers=groups)
        scratch["read"] = plgpu.Barrier(num_barriers=groups)
    if interpreted:  # whose wgmma takes no operand in registers
        scratch["left"] = plgpu.SMEM((WARPGROUPS, ROWS, 64 * at_once), jnp.bfloat16, transforms=_INPUTS)

    def body(x_ref, group_ref, *refs):
        weight_refs, scale_refs = refs[: len(weights)], refs[len(weights) : 2 * len(weights)]
        out_ref, *refs = refs[2 * len(weights) :]
        at = dict(zip(scratch, refs))
        wg, thread = lax.axis_index("wg"), lax.axis_index("thread")
        count = (items - thread + threads - 1) // threads

        def walk(step, carry):
            """step(tile, split, which, block, expert, turns, carry) -> carry over all items; the next expert is looked up
            meanwhile.

            which: the number of the weight. turns: the first tile of stored bytes and how many, which is 0 for a tile of rows
            without an expert.
            """

            def item(i):
                return jnp.minimum(thread + i * threads, items - 1)

            def look_up(i):
                return group_ref[item(i) // (splits * blocks)]

            def one(i, state):
                carry, found = state
                following = look_up(i + 1)
                number, rest = item(i) // (splits * blocks), lax.rem(item(i), splits * blocks)
                split, block = rest // blocks, lax.rem(rest, blocks)
                first, end = (columns * n // splits for n in (split, split + 1))
                there = (found >= 0) & (found < experts)
                turns = first, jnp.where(there, end - first, 0)
                which, block = block // blocks_of_one, lax.rem(block, blocks_of_one)
                return step(number, split, which, block, jnp.where(there, found, 0), turns, carry), following

            return lax.fori_loop(0, count, one, (carry, look_up(0)))[0]

        def produce():
            plgpu.set_max_registers(config.load, action="decrease")

            def step(number, split, which, block, expert, turns, loaded):
                first_turn, count = turns
                first = expert * rows + block * item_rows

                def load(turn, loaded):
                    slot = lax.rem(loaded, stages)

                    @pl.when(loaded >= stages)
                    def _():
                        plgpu.barrier_wait(at["empty"].at[slot])

                    full = at["full"].at[slot]
                    turn = first_turn + turn
                    for i in range(groups):
                        row = jnp.minimum(first + i * ROWS, experts * rows - ROWS)  # beyond the weight: read, not used
                        place = (pl.ds(row, ROWS), pl.ds(turn * BYTES, BYTES))
                        for w, ref in enumerate(weight_refs):
                            copy = functools.partial(plgpu.copy_gmem_to_smem, ref.at[place], at["raw"].at[slot, i], full)
                            if len(weights) == 1:
                                copy()
                            else:
                                pl.when(which == w)(copy)
                    source = x_ref.at[pl.ds(number * tile, tile), pl.ds(turn * stored.values, stored.values)]
                    plgpu.copy_gmem_to_smem(source, at["x"].at[slot], full)
                    return loaded + 1

                return lax.fori_loop(0, count, load, loaded)

            loaded = walk(step, jnp.int32(0))

            def see_used(i, _):
                plgpu.barrier_wait(at["empty"].at[lax.rem(i, stages)])

            lax.fori_loop(jnp.maximum(loaded - stages, 0), loaded, see_used, None)

        def multiply():
            plgpu.set_max_registers(config.math, action="increase")
            own, way = lax.rem(wg, groups), wg // groups

            def product(acc, left, slot, pieces):
                if interpreted:
                    at["left"][wg] = left
                    plgpu.commit_smem()
                    left = at["left"].at[wg]
                plgpu.wgmma(acc, left, at["x"].at[slot, :, pl.ds(64 * pieces[0], 64 * len(pieces))].T)
                plgpu.wgmma_wait(in_flight)  # the operand before this one may be overwritten

            def step(number, split, which, block, expert, turns, used):
                first, count = turns
                row = block * item_rows + own * ROWS

                def scales(turn):
                    turn = jnp.minimum(first + turn * ways + way, columns - 1)
                    at_row = jnp.minimum(expert * rows + row, experts * rows - ROWS)
                    return lanes.load_scales(scale_refs, which, at_row, turn * stored.values, stored, rows)

                def sums(acc):
                    def slot_of(turn):
                        return lax.rem(used + turn * ways + way, stages)

                    def take(turn, found):
                        following = scales(turn + 1)
                        slot = slot_of(turn)
                        plgpu.barrier_wait(at["full"].at[slot])
                        scaling = lanes.factors(found, stored)
                        raw = at["raw"].at[slot, own]

                        def load(pieces):
                            parts = sorted({piece * lanes.PARTS // stored.pieces for piece in pieces})
                            return [lanes.load_words(raw, part) for part in parts]

                        words = load(calls[0])
                        for pieces, after in zip(calls, [*calls[1:], ()]):
                            loaded, words = words, load(after)
                            product(acc, lanes.operand(loaded, scaling, pieces, stored), slot, pieces)
                            if few and pieces is calls[0]:  # what was multiplied before is done, the tile before with it

                                @pl.when(turn > 0)
                                def _():
                                    plgpu.barrier_arrive(at["empty"].at[slot_of(turn - 1)])

                        if not few:
                            plgpu.wgmma_wait(0)
                            plgpu.barrier_arrive(at["empty"].at[slot])
                        return following

                    last = count // ways - 1
                    lax.fori_loop(0, last + 1, take, scales(0))
                    plgpu.wgmma_wait(0)
                    if few:
                        pl.when(last >= 0)(lambda: plgpu.barrier_arrive(at["empty"].at[slot_of(last)]))
                    return acc[...]

                found = pl.run_scoped(sums, plgpu.ACC((ROWS, tile), jnp.float32))

                def write(found):
                    @pl.when(row < rows)
                    def _():
                        first_row = (split * tiles + number) * tile
                        lanes.store(out_ref, found * 2.0**stored.down, first_row, which * rows + row)

                if ways == 1:
                    write(found)
                else:

                    @pl.when(way > 0)
                    def _():
                        lanes.set_aside(at["partial"].at[way - 1, own], found)
                        plgpu.barrier_arrive(at["summed"].at[own])
                        plgpu.barrier_wait(at["read"].at[own])

                    @pl.when(way == 0)
                    def _():
                        plgpu.barrier_wait(at["summed"].at[own])
                        total = found
                        for i in range(ways - 1):
                            total = lanes.add_aside(total, at["partial"].at[i, own])
                        plgpu.barrier_arrive(at["read"].at[own])
                        write(total)

                return used + count

            walk(step, jnp.int32(0))

        lax.cond(wg == WARPGROUPS, produce, multiply)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits * tiles * tile, len(weights) * rows), sum_dtype),
        grid=(threads,),
        grid_names=("thread",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(
        lanes.in_column_order(x, stored).reshape(tiles * tile, width), group,
        *[lax.bitcast_convert_type(each, jnp.uint8).reshape(experts * rows, bytes_of_row) for each in weights],
        *[each.reshape(-1, each.shape[-1]) for each in scales],
    )  # fmt: skip
    out = out.reshape(splits, tiles, tile, -1)
    out = out[0] if splits == 1 else functools.reduce(jnp.add, out).astype(out_dtype)
    return jnp.split(out, len(weights), axis=-1)
