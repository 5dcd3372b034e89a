"""Products with stored weights on Blackwell: tcgen05 products with the weight's rows as rows, accumulators in TMEM.

A thread block has 128 rows of a weight and a tile of input rows. Four warpgroups: one loads stored bytes and inputs by TMA,
one issues the products, two make bf16 values of the bytes, times their scales, as Hopper's kernel makes its operands, and
store them in shared memory, from where tensor cores take a left operand. The two also write the sums, transposed.

No Blackwell GPU was at hand: the kernel is compiled for one and interpreted, and its speed is not known.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_gemm import lanes, tmem
from pallas_kernels.grouped_gemm.lanes import BYTES, ROWS, Stored
from pallas_kernels.grouped_gemm.reference import one_by_one

STEP = 64  # columns of an operand, between two products
MOST_ROWS, LEAST_ROWS = 128, 16  # of inputs in a product
STAGES, SLOTS = 4, 4  # tiles of stored bytes, and operands with their inputs, in shared memory
_LOADER, _MULTIPLIER, _UNPACKERS = 0, 1, 2  # warpgroups; the last is the first of two
_PART = 64  # columns of sums that are written at a time
_TILE = (plgpu.TilingTransform((8, STEP)), plgpu.SwizzleTransform(128))


def unproven(function, args):
    """Why this kernel is not chosen by itself for a call that it carries."""
    return "the sm100 kernel was compiled and interpreted, but never run on a GPU; name it to run it."


@one_by_one
def grouped_gemm(x, weight, scale, group, *, block=None, out_dtype):
    """See `pallas_kernels.grouped_gemm.grouped_gemm`. bf16 inputs."""
    stored = lanes.stored_as(x, weight, block, "sm100")
    tiles, rows, width = x.shape
    tile = min(MOST_ROWS, max(LEAST_ROWS, 1 << (rows - 1).bit_length()))
    parts = -(-rows // tile)
    x = jnp.pad(x, ((0, 0), (0, parts * tile - rows), (0, 0))).reshape(tiles * parts, tile, width)
    out = _multiply(x, weight, scale, jnp.repeat(group, parts), stored, jnp.dtype(out_dtype))
    return out.reshape(tiles, parts * tile, -1)[:, :rows]


@one_by_one
def quantized_matmul(x, weight, scale, *, block=None, out_dtype):
    """See `pallas_kernels.grouped_gemm.quantized_matmul`. bf16 inputs."""
    rows = x.reshape(1, -1, x.shape[-1])
    group = jnp.zeros(1, jnp.int32)
    out = grouped_gemm(rows, weight[None], scale[None], group, block=block, out_dtype=out_dtype)
    return out.reshape(*x.shape[:-1], -1)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _multiply(x, weight, scale, group, stored: Stored, out_dtype):
    """x [tiles, R, K] bf16, weight [E, N, stored], scale [E, ..], group [tiles] -> [tiles, R, N]."""
    tiles, tile, width = x.shape
    experts, rows, bytes_of_row = weight.shape
    turns, products = width // stored.values, stored.pieces  # tiles of stored bytes, and products with one

    def body(x_ref, weight_ref, scale_ref, group_ref, out_ref, *refs):
        raw_s, a_s, x_s, acc, raw_full, raw_empty, a_full, x_full, done = refs
        wg, number = lax.axis_index("wg"), lax.axis_index("tile")
        first = lax.axis_index("block") * tmem.ROWS
        expert = group_ref[number]
        valid = (expert >= 0) & (expert < experts)
        expert, count = jnp.where(valid, expert, 0), jnp.where(valid, turns, 0)

        def own_row(half):
            """Where 64 of the rows begin in a weight: the last that it has where these are beyond them."""
            return expert * rows + jnp.minimum(first + half * ROWS, rows - ROWS)

        def wait_for_slot(n):
            @pl.when(n >= SLOTS)
            def _():
                plgpu.barrier_wait(done.at[lax.rem(n, SLOTS)])

        def see_done():
            """Waits for the products that `wait_for_slot` has not waited for."""
            total = count * products
            lax.fori_loop(
                jnp.maximum(total - SLOTS, 0), total, lambda n, _: plgpu.barrier_wait(done.at[lax.rem(n, SLOTS)]), None
            )

        def load():
            def load_stored(turn):
                slot = lax.rem(turn, STAGES)

                @pl.when(turn >= STAGES)
                def _():
                    plgpu.barrier_wait(raw_empty.at[slot])

                for half in range(2):
                    source = weight_ref.at[pl.ds(own_row(half), ROWS), pl.ds(turn * BYTES, BYTES)]
                    plgpu.copy_gmem_to_smem(source, raw_s.at[slot, half], raw_full.at[slot])

            def step(turn, _):
                pl.when(turn + STAGES - 1 < count)(lambda: load_stored(turn + STAGES - 1))

                def load_inputs(i, _):
                    n = turn * products + i
                    wait_for_slot(n)
                    slot = lax.rem(n, SLOTS)
                    source = x_ref.at[pl.ds(number * tile, tile), pl.ds(n * STEP, STEP)]
                    plgpu.copy_gmem_to_smem(source, x_s.at[slot], x_full.at[slot])

                lax.fori_loop(0, products, load_inputs, None)

            lax.fori_loop(0, jnp.minimum(count, STAGES - 1), lambda turn, _: load_stored(turn), None)
            lax.fori_loop(0, count, step, None)
            see_done()
            lax.fori_loop(
                jnp.maximum(count - STAGES, 0),
                count,
                lambda turn, _: plgpu.barrier_wait(raw_empty.at[lax.rem(turn, STAGES)]),
                None,
            )

        def multiply():
            def step(n, _):
                slot = lax.rem(n, SLOTS)
                plgpu.barrier_wait(x_full.at[slot])
                plgpu.barrier_wait(a_full.at[slot])
                plgpu.tcgen05_mma(acc, a_s.at[slot], x_s.at[slot].T, done.at[slot], accumulate=n > 0)

            lax.fori_loop(0, count * products, step, None)

        def unpack():
            half = wg - _UNPACKERS

            def scales(turn):
                column = jnp.minimum(turn, turns - 1) * stored.values
                return lanes.load_scales([scale_ref], 0, own_row(half), column, stored, rows)

            def step(turn, found):
                following = scales(turn + 1)
                stage = lax.rem(turn, STAGES)
                plgpu.barrier_wait(raw_full.at[stage])
                scaling = lanes.factors(found, stored)
                for part in range(lanes.PARTS):
                    words = lanes.load_words(raw_s.at[stage, half], part)
                    for piece in range(part * products // lanes.PARTS, (part + 1) * products // lanes.PARTS):
                        values = lanes.operand([words], scaling, [piece], stored)
                        wait_for_slot(turn * products + piece)
                        slot = lax.rem(turn * products + piece, SLOTS)
                        a_s[slot, pl.ds(half * ROWS, ROWS)] = values
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(a_full.at[slot])
                plgpu.barrier_arrive(raw_empty.at[stage])
                return following

            lax.fori_loop(0, count, step, scales(0))
            see_done()
            for start in range(0, tile, _PART):

                @pl.when(half == start // _PART % 2)
                def _(start=start):
                    sums = plgpu.async_load_tmem(acc.at[:, pl.ds(start, min(_PART, tile))], layout=tmem.LAYOUT)
                    plgpu.wait_load_tmem()
                    sums = jnp.where(valid, sums * 2.0**stored.down, 0.0)
                    tmem.store(out_ref, sums, number * tile + start, first)

        lax.cond(wg == _LOADER, load, lambda: lax.cond(wg == _MULTIPLIER, multiply, unpack))

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tiles * tile, rows), out_dtype),
        grid=(-(-rows // tmem.ROWS), tiles),  # tiles of one weight next to each other find its bytes in L2
        grid_names=("block", "tile"),
        num_threads=_UNPACKERS + 2,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((STAGES, 2, ROWS, BYTES), jnp.uint8, transforms=lanes.TILE),
            plgpu.SMEM((SLOTS, tmem.ROWS, STEP), jnp.bfloat16, transforms=_TILE),
            plgpu.SMEM((SLOTS, tile, STEP), jnp.bfloat16, transforms=_TILE),
            plgpu.TMEM((tmem.ROWS, tile), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_barriers=SLOTS, orders_tensor_core=True),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(
        lanes.in_column_order(x, stored).reshape(tiles * tile, width),
        lax.bitcast_convert_type(weight, jnp.uint8).reshape(experts * rows, bytes_of_row),
        scale.reshape(-1, scale.shape[-1]), group,
    )  # fmt: skip
    return out.reshape(tiles, tile, rows)
