"""Sparse attention on Hopper for 40 heads and more: a warpgroup scores, two others sum values, a fourth gathers rows.

A thread block takes 64 heads of a query row at a time. The scoring warpgroup holds the queries in registers, which
leaves shared memory for three tiles of 64 gathered rows, keys and values in one; it keeps the running maximum, writes
the probabilities behind the values of their tile (over the keys' last 64 columns where those are not values) and hands
the shrinking of older sums to the two summing warpgroups, each of which has half of the values' columns. The tensor
cores alternate: the sums of tile j wait until tile j + 1 is scored, and hide its softmax. Queries come through the ring
of tiles like rows, so that one thread block's items follow each other without a gap.
"""

import dataclasses
import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.sparse_attention import gather as rows
from pallas_kernels.sparse_attention.online_softmax import START

BLOCK = rows.ROWS
HEADS = 64  # of a thread block: rows of a wgmma
VALUES = 512
_QUARTER = VALUES // 4
_PER_HEAD = plgpu.Layout.WGMMA.reduce(1)
_PER_ROW = plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How shared memory and registers are shared out. Checks itself.

    slots: tiles of rows. held: columns of the queries in registers. score, apply, gather: registers of a thread of the
    scoring, the summing and the gathering warpgroup.
    """

    slots: int
    held: int
    score: int = 168
    apply: int = 160
    gather: int = 24

    def __post_init__(self):
        if any(n % 8 or not 24 <= n <= 232 for n in (self.score, self.apply, self.gather)):
            raise ValueError(f"{self}: registers come in multiples of 8, from 24 to 232.")
        if self.score + 2 * self.apply + self.gather > 512:
            raise ValueError(f"{self}: one scoring, two summing and one gathering thread have 512 registers together.")


CONFIGS = {512: TuningConfig(slots=3, held=384), 576: TuningConfig(slots=2, held=320)}


@functools.partial(jax.jit, static_argnames=("scale", "config"))
def attend(q, kvs, lists, lengths, sink, *, scale, config=None):
    """q [T, H, D], kvs [S, D], lists [T, K] and lengths [T] (one or two of each), sink [H] -> out, lse."""
    tokens, heads, width = q.shape
    config = CONFIGS[width] if config is None else config
    groups = -(-heads // HEADS)
    items = tokens * groups
    used = min(heads, HEADS)
    many = len(lists)
    widths = [each.shape[1] for each in lists]
    limits = [kv.shape[0] for kv in kvs]
    threads = min(mosaic.CORES, items)
    padded = -(-heads // HEADS) * HEADS if heads < HEADS else heads
    held = config.held
    slots = config.slots
    apart = width == VALUES  # whether probabilities have buffers of their own, and not their tile's columns behind the values
    stay = [c for c in range(held, width, BLOCK)]  # where the columns of the queries begin that stay in shared memory
    interpreted = mosaic.is_interpreted()
    log2e = math.log2(math.e)
    scratch = {"kv": plgpu.SMEM((slots, BLOCK, width), jnp.bfloat16, transforms=rows.TILE)}
    if apart:
        scratch["p"] = plgpu.SMEM((2, HEADS, BLOCK), jnp.bfloat16, transforms=rows.TILE)
    if stay:
        scratch["stay"] = plgpu.SMEM((HEADS, BLOCK * len(stay)), jnp.bfloat16, transforms=rows.TILE)
    if interpreted:
        scratch["full"] = plgpu.Barrier(num_barriers=slots)
    if interpreted and held:  # whose wgmma takes no operand in registers
        scratch["q"] = plgpu.SMEM((HEADS, held), jnp.bfloat16, transforms=rows.TILE)
    scratch |= {
        # Of every slot's keys their bias, and of heads what older sums shrink by; then the barriers of the copies. In one
        # piece, as every piece is rounded up and nothing is left.
        "small": plgpu.SMEM((2 * slots + 1, BLOCK), jnp.float32),
        "empty": plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        "scored": plgpu.Barrier(num_barriers=slots),
        "weighed": plgpu.Barrier(num_barriers=slots),
        "final": plgpu.Barrier(),
        "started": plgpu.Barrier(num_arrivals=4),
    }

    def body(q_ref, *refs):
        kv_refs, list_refs, length_refs = refs[:many], refs[many : 2 * many], refs[2 * many : 3 * many]
        sink_ref, out_ref, lse_ref, *scratch_refs = refs[3 * many :]
        at = dict(zip(scratch, scratch_refs))
        full = rows.CopyBarriers(at["full"] if interpreted else at["small"].at[2 * slots], slots)
        bias_s, shrink_s = at["small"].at[pl.ds(0, slots)], at["small"].at[pl.ds(slots, slots)]
        wg, thread = lax.axis_index("wg"), lax.axis_index("thread")

        def place(i):
            """Query row, first head, and tiles of either list, of this thread block's item number i."""
            item = thread + i * threads
            token, group = item // groups, lax.rem(item, groups)
            head = jnp.minimum(group * HEADS, max(heads - HEADS, 0))
            seen = [jnp.clip(ref[token], 0, k) for ref, k in zip(length_refs, widths)]
            return token, head, seen, [(n + BLOCK - 1) // BLOCK for n in seen]

        def probabilities(position):
            if apart:
                return at["p"].at[lax.rem(position, 2)]
            return at["kv"].at[lax.rem(position, slots), :, pl.ds(VALUES, BLOCK)]

        def every_item(step, state):
            return lax.fori_loop(0, (items - thread + threads - 1) // threads, step, state)

        def count(tiles):
            return jnp.maximum(sum(tiles), 1)  # an empty list is one tile of nothing

        def gather():
            plgpu.set_max_registers(config.gather, action="decrease")

            def fill(which, places, position):
                slot = lax.rem(position, slots)

                @pl.when(position >= slots)
                def _():
                    plgpu.barrier_wait(at["empty"].at[slot])

                rows.gather(at["kv"].at[slot], bias_s.at[slot], (q_ref, *kv_refs), which, places, width=width)
                full.arrive(slot)
                return position + 1

            def item(i, position):
                token, head, seen, tiles = place(i)

                def look_up(tile):
                    if many == 1:
                        source = (jnp.int32(1), token * widths[0] + tile * BLOCK, seen[0] - tile * BLOCK)
                    else:
                        first = tile < tiles[0]
                        tile = jnp.where(first, tile, tile - tiles[0]) * BLOCK
                        base = token * jnp.where(first, widths[0], widths[1]) + tile
                        source = (jnp.where(first, 1, 2), base, jnp.where(first, seen[0], seen[1]) - tile)
                    return rows.look_up(list_refs, limits, *source), source[0]

                places, which = look_up(jnp.int32(0))
                own = rows.look_up(list_refs, limits, jnp.int32(0), token * heads + head, jnp.int32(used))
                position = fill(jnp.int32(0), own, position)

                def tile(j, state):
                    places, which, position = state
                    following = look_up(j + 1)
                    return *following, fill(which, places, position)

                return lax.fori_loop(0, count(tiles), tile, (places, which, position))[2]

            position = every_item(item, jnp.int32(0))

            def see_used(i, _):
                plgpu.barrier_wait(at["empty"].at[lax.rem(i, slots)])

            lax.fori_loop(jnp.maximum(position - slots, 0), position, see_used, None)

        def score():
            plgpu.set_max_registers(config.score, action="increase")

            def see_used(position):
                """Waits until the probabilities of two tiles ago were used; queries count as a tile."""
                if apart:

                    @pl.when(position >= 2)
                    def _():
                        plgpu.barrier_wait(at["empty"].at[lax.rem(position - 2, slots)])

            def item(i, position):
                token, head, _, tiles = place(i)
                slot = lax.rem(position, slots)
                full.wait(slot, position // slots)
                see_used(position)
                if held:
                    q = plgpu.load(at["kv"].at[slot, :, pl.ds(0, held)], layout=plgpu.Layout.WGMMA)
                    if interpreted:
                        at["q"][...] = q
                        q = at["q"]
                for n, column in enumerate(stay):
                    part = plgpu.load(at["kv"].at[slot, :, pl.ds(column, BLOCK)], layout=plgpu.Layout.WGMMA)
                    at["stay"][:, pl.ds(n * BLOCK, BLOCK)] = part
                plgpu.commit_smem()
                for _ in range(2):  # in place of the summing warpgroups, which do not see queries
                    plgpu.barrier_arrive(at["empty"].at[slot])

                def tile(j, state):
                    high, total, position = state
                    slot = lax.rem(position, slots)
                    keys = at["kv"].at[slot]
                    full.wait(slot, position // slots)
                    mosaic.fence_proxies()

                    def products(acc):
                        if held:
                            plgpu.wgmma(acc, q, keys.at[:, pl.ds(0, held)].T)
                        if stay:
                            plgpu.wgmma(acc, at["stay"], keys.at[:, pl.ds(held, width - held)].T)
                        return acc[...]

                    s = pl.run_scoped(products, plgpu.ACC((HEADS, BLOCK), jnp.float32))

                    @pl.when(j > 0)
                    def _():
                        plgpu.barrier_arrive(at["scored"].at[slot])

                    bias = plgpu.load(bias_s.at[slot], layout=_PER_ROW)
                    s = s + lax.broadcast_in_dim(bias, s.shape, [1])
                    new = jnp.maximum(high, jnp.max(s, axis=1) * (scale * log2e))
                    shrink = jnp.exp2(high - new)
                    p = jnp.exp2(s * (scale * log2e) - lax.broadcast_in_dim(new, s.shape, [0]))
                    shrink_s[slot] = shrink
                    see_used(position)
                    probabilities(position)[...] = p.astype(jnp.bfloat16)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(at["weighed"].at[slot])
                    return new, total * shrink + jnp.sum(p, axis=1), position + 1

                high = plgpu.layout_cast(jnp.full((HEADS,), START, jnp.float32), _PER_HEAD)
                total = plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), _PER_HEAD)
                high, total, position = lax.fori_loop(0, count(tiles), tile, (high, total, position + 1))
                sinks = plgpu.load(sink_ref.at[pl.ds(head, HEADS)], layout=_PER_HEAD)
                nothing = total == 0
                factor = jnp.where(nothing, 0.0, 1 / (total + jnp.exp2(sinks * log2e - high)))
                bias_s[lax.rem(position - 1, slots)] = factor  # the bias of the last tile is not needed any more
                plgpu.barrier_arrive(at["final"])
                lse = jnp.where(nothing, -jnp.inf, high / log2e + jnp.log(jnp.where(nothing, 1.0, total)))
                lse_ref[pl.ds(token * padded + head, HEADS)] = lse
                return position

            every_item(item, jnp.int32(0))

        def apply():
            plgpu.set_max_registers(config.apply, action="increase")
            # In two pieces, as one wgmma of 256 columns has more registers than a thread starts with.
            quarters = [pl.ds(wg * 2 * _QUARTER + n * _QUARTER, _QUARTER) for n in range(2)]
            half = pl.ds(wg * 2 * _QUARTER, 2 * _QUARTER)

            def item(i, position):
                token, head, _, tiles = place(i)
                last = count(tiles) - 1

                def tile(j, state):
                    accs, position = state
                    slot = lax.rem(position, slots)
                    kv = at["kv"].at[slot]
                    plgpu.barrier_wait(at["weighed"].at[slot])
                    shrink = plgpu.load(shrink_s.at[slot], layout=_PER_HEAD)
                    mosaic.fence_proxies()
                    shrink = lax.broadcast_in_dim(shrink, accs[0].shape, [0])
                    accs = [acc * shrink for acc in accs]

                    @pl.when(j < last)
                    def _():
                        plgpu.barrier_wait(at["scored"].at[lax.rem(position + 1, slots)])

                    def products(*accs):
                        for acc, quarter in zip(accs, quarters):
                            plgpu.wgmma(acc, probabilities(position), kv.at[:, quarter])

                    accs = mosaic.accumulate(products, accs)

                    @pl.when(j < last)
                    def _():
                        plgpu.barrier_arrive(at["empty"].at[slot])

                    return accs, position + 1

                zeros = [
                    plgpu.layout_cast(jnp.zeros((HEADS, _QUARTER), jnp.float32), plgpu.Layout.WGMMA) for _ in range(2)
                ]
                accs, position = lax.fori_loop(0, last + 1, tile, (zeros, position + 1))
                plgpu.barrier_wait(at["final"])
                # The last tile's values of this half are not needed any more, and there is no other place for the output.
                slot = lax.rem(position - 1, slots)
                factor = plgpu.load(bias_s.at[slot], layout=_PER_HEAD)
                factor = lax.broadcast_in_dim(factor, accs[0].shape, [0])
                for acc, quarter in zip(accs, quarters):
                    at["kv"][slot, :, quarter] = (acc * factor).astype(jnp.bfloat16)
                plgpu.commit_smem()
                for row in range(0, used, 8):  # what TMA copies has to lie together
                    to = out_ref.at[pl.ds(token * heads + head + row, 8), half]
                    plgpu.copy_smem_to_gmem(at["kv"].at[slot, pl.ds(row, 8), half], to)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(at["empty"].at[slot])
                return position

            every_item(item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == 3)
        def _():
            full.initialise()

        plgpu.barrier_arrive(at["started"])
        plgpu.barrier_wait(at["started"])
        lax.cond(wg == 3, gather, lambda: lax.cond(wg == 2, score, apply))

    out, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((tokens * heads, VALUES), jnp.bfloat16),
            jax.ShapeDtypeStruct((tokens * padded,), jnp.float32),
        ),
        grid=(threads,),
        grid_names=("thread",),
        num_threads=4,
        thread_name="wg",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )(
        q.reshape(tokens * heads, width), *kvs, *[each.reshape(-1) for each in lists], *lengths,
        jnp.pad(sink, (0, padded - heads)),
    )  # fmt: skip
    return out.reshape(tokens, heads, VALUES), lse.reshape(tokens, padded)[:, :heads]
