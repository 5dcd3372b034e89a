"""Sparse attention on Hopper for 40 heads and more: a warpgroup scores, two others sum values, a fourth gathers rows.

A thread block takes 64 heads of a query row at a time. The scoring warpgroup holds the queries in registers, which
leaves shared memory for three tiles of 64 gathered rows, keys and values in one; it keeps the running maximum, writes
the probabilities behind the values of their tile (over the keys' last 64 columns where those are not values) and hands
the shrinking of older sums to the two summing warpgroups, each of which has half of the values' columns. The tensor
cores alternate: the sums of tile j wait until tile j + 1 is scored, and hide its softmax. A summing warpgroup frees the
first of its two blocks of a tile while the second is summed, so that the next rows are on their way earlier. Queries come
through the ring of tiles like rows, so that one thread block's items follow each other without a gap.
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
from pallas_kernels.sparse_attention.ring import BLOCKS, KEYS, TILES, VALUES, Launch, scratch, start, tile

HEADS = 64  # of a thread block: rows of a wgmma
_HELD = 3  # blocks of the queries in registers
_SUMS = 8  # columns of sums: what the fewest columns of a wgmma are, each thread has two
_PER_HEAD = plgpu.Layout.WGMMA.reduce(1)
_PER_KEY = plgpu.Layout.WGMMA.reduce(0)
_LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How shared memory and registers are shared out. Checks itself.

    ring: blocks of the ring. score, apply, gather: registers of a thread of the scoring, the summing and the gathering
    warpgroup.
    """

    ring: int
    score: int
    apply: int
    gather: int

    def __post_init__(self):
        if self.ring not in (11, 12):
            raise ValueError(f"ring={self.ring}; three tiles of 4 blocks, the last of which may lack one, are 11 or 12.")
        if any(n % 8 or not 24 <= n <= 232 for n in (self.score, self.apply, self.gather)):
            raise ValueError(f"{self}: registers come in multiples of 8, from 24 to 232.")
        if self.score + 2 * self.apply + self.gather > 512:
            raise ValueError(f"{self}: one scoring, two summing and one gathering thread have 512 registers together.")


CONFIGS = {
    512: TuningConfig(ring=12, score=160, apply=160, gather=32),
    576: TuningConfig(ring=11, score=168, apply=160, gather=24),
}


@functools.partial(jax.jit, static_argnames=("scale", "config"))
def attend(q, kvs, lists, lengths, sink, *, scale, config=None):
    """q [T, H, D], kvs [S, D], lists [T, K] and lengths [T] (one or two of each), sink [H] -> out, lse.

    At most 64 heads, or a multiple of it.
    """
    tokens, heads, width = q.shape
    config = CONFIGS[width] if config is None else config
    groups = -(-heads // HEADS)
    items = tokens * groups
    used = min(heads, HEADS)
    threads = min(mosaic.CORES, items)
    padded = max(heads, HEADS)
    tailed = width > VALUES
    interpreted = mosaic.is_interpreted()
    launch = Launch(kvs, lists, lengths, jnp.pad(sink, (0, padded - heads)))
    arrays = launch.arrays
    refs = {
        # Keys' last columns, and when a tile is scored its probabilities; without such columns, probabilities alone.
        "tail": tile((TILES if tailed else 2, KEYS, KEYS)),
        "rest": tile((HEADS, width - _HELD * rows.BLOCK)),  # of the queries
        "scored": plgpu.Barrier(num_barriers=TILES),
        "weighed": plgpu.Barrier(num_barriers=TILES),
        "final": plgpu.Barrier(),
        "started": plgpu.Barrier(num_arrivals=4),
    }
    refs |= scratch(config.ring, small=TILES, users=2, halves=True)
    if interpreted:  # whose wgmma takes no operand in registers
        refs["q"] = tile((_HELD, HEADS, rows.BLOCK))

    def body(q_ref, *all_refs):
        *array_refs, out_ref, lse_ref = all_refs[: len(arrays) + 2]
        at = dict(zip(refs, all_refs[len(arrays) + 2 :]))
        ring, sink_ref = launch.ring(at, tailed, q_ref, array_refs)
        def place(i):
            """Query row and first head of this thread block's item number i."""
            item = lax.axis_index("thread") + i * threads
            return item // groups, lax.rem(item, groups) * HEADS

        def count():
            return (items - lax.axis_index("thread") + threads - 1) // threads

        def probabilities(position):
            return at["tail"].at[lax.rem(position, at["tail"].shape[0])]

        def shrink_s(position):
            """What the sums of older tiles are multiplied with, of every head."""
            return at["small"].at[TILES + lax.rem(position, TILES)]

        def gather():
            plgpu.set_max_registers(config.gather, action="decrease")

            def row(i):
                token, head = place(i)
                return token, token * heads + head

            ring.gather(count(), row, queries=used)

        def score():
            plgpu.set_max_registers(config.score, action="increase")

            def see_used(position):
                """Waits until the probabilities of two tiles ago were used; queries count as a tile."""
                if not tailed:
                    ring.wait_used(position - 2)

            def load_queries(position):
                """The first blocks of the queries in registers; the others go to where they stay."""
                ring.wait_early(position)
                ring.wait_late(position)
                see_used(position)
                q = [plgpu.load(ring.block(position, n), layout=plgpu.Layout.WGMMA) for n in range(_HELD)]
                if interpreted:
                    for n in range(_HELD):
                        at["q"][n] = q[n]
                    q = [at["q"].at[n] for n in range(_HELD)]
                for n in range(_HELD, BLOCKS):
                    part = plgpu.load(ring.block(position, n), layout=plgpu.Layout.WGMMA)
                    at["rest"][:, pl.ds((n - _HELD) * rows.BLOCK, rows.BLOCK)] = part
                if tailed:
                    part = plgpu.load(ring.tail(position), layout=plgpu.Layout.WGMMA)
                    at["rest"][:, pl.ds((BLOCKS - _HELD) * rows.BLOCK, KEYS)] = part
                plgpu.commit_smem()
                for _ in range(2):  # in place of the summing warpgroups, which do not see queries
                    ring.release_half(position)
                    ring.release(position)
                return q

            def item(i, position):
                token, head = place(i)
                q = load_queries(position)

                def step(j, state):
                    high, total, position = state
                    ring.wait_early(position)

                    def products(acc):
                        for n in (*ring.early, *ring.late):
                            if n in ring.late[:1]:
                                if tailed:
                                    rest = at["rest"].at[:, pl.ds((BLOCKS - _HELD) * rows.BLOCK, KEYS)]
                                    plgpu.wgmma(acc, rest, ring.tail(position).T)
                                ring.wait_late(position)
                            rest = at["rest"].at[:, pl.ds((n - _HELD) * rows.BLOCK, rows.BLOCK)]
                            plgpu.wgmma(acc, q[n] if n < _HELD else rest, ring.block(position, n).T)
                        return acc[...]

                    s = pl.run_scoped(products, plgpu.ACC((HEADS, KEYS), jnp.float32))

                    @pl.when(j > 0)
                    def _():
                        plgpu.barrier_arrive(at["scored"].at[lax.rem(position, TILES)])

                    bias = plgpu.load(ring.bias(position), layout=_PER_KEY)
                    s = s + lax.broadcast_in_dim(bias, s.shape, [1])
                    new = jnp.maximum(high, jnp.max(s, axis=1) * (scale * _LOG2E))
                    shrink = jnp.exp2(high - new)
                    p = jnp.exp2(s * (scale * _LOG2E) - lax.broadcast_in_dim(new, s.shape, [0]))
                    shrink_s(position)[...] = shrink
                    if tailed:
                        mosaic.synchronize()  # all have multiplied with the keys that the probabilities replace
                    see_used(position)
                    probabilities(position)[...] = p.astype(jnp.bfloat16)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(at["weighed"].at[lax.rem(position, TILES)])
                    total = total * lax.broadcast_in_dim(shrink, total.shape, [0])
                    for column in range(0, KEYS, _SUMS):
                        total = total + p[:, column : column + _SUMS]
                    return new, total, position + 1

                high = plgpu.layout_cast(jnp.full((HEADS,), START, jnp.float32), _PER_HEAD)
                # Every thread sums what it sees; the sums meet once, at the end.
                total = plgpu.layout_cast(jnp.zeros((HEADS, _SUMS), jnp.float32), plgpu.Layout.WGMMA)
                high, total, position = lax.fori_loop(0, ring.count(token), step, (high, total, position + 1))
                total = jnp.sum(total, axis=1)
                sinks = plgpu.load(sink_ref.at[pl.ds(head, HEADS)], layout=_PER_HEAD, optimized=False)
                nothing = total == 0
                factor = jnp.where(nothing, 0.0, 1 / (total + jnp.exp2(sinks * _LOG2E - high)))
                ring.bias(position - 1)[...] = factor  # the bias of the last tile is not needed any more
                plgpu.barrier_arrive(at["final"])
                lse = jnp.where(nothing, -jnp.inf, high / _LOG2E + jnp.log(jnp.where(nothing, 1.0, total)))
                lse_ref[pl.ds(token * padded + head, HEADS)] = lse
                return position

            lax.fori_loop(0, count(), item, jnp.int32(0))

        def apply():
            plgpu.set_max_registers(config.apply, action="increase")
            # In two pieces, as one wgmma of 256 columns has more registers than a thread starts with.
            own = [lax.axis_index("wg") * (BLOCKS // 2) + n for n in range(BLOCKS // 2)]

            def item(i, position):
                token, head = place(i)
                last = ring.count(token) - 1

                def step(j, state):
                    accs, position = state
                    plgpu.barrier_wait(at["weighed"].at[lax.rem(position, TILES)])
                    shrink = plgpu.load(shrink_s(position), layout=_PER_HEAD)
                    mosaic.fence_proxies()
                    shrink = lax.broadcast_in_dim(shrink, accs[0].shape, [0])
                    accs = [acc * shrink for acc in accs]

                    @pl.when(j < last)
                    def _():
                        plgpu.barrier_wait(at["scored"].at[lax.rem(position + 1, TILES)])

                    def products(*accs):
                        for acc, n in zip(accs, own):
                            plgpu.wgmma(acc, probabilities(position), ring.block(position, n))
                        plgpu.wgmma_wait(1)  # the first is done

                        @pl.when(j < last)
                        def _():
                            ring.release_half(position)

                    accs = mosaic.accumulate(products, accs)

                    @pl.when(j < last)
                    def _():
                        ring.release(position)

                    return accs, position + 1

                zero = plgpu.layout_cast(jnp.zeros((HEADS, rows.BLOCK), jnp.float32), plgpu.Layout.WGMMA)
                accs, position = lax.fori_loop(0, last + 1, step, ([zero] * len(own), position + 1))
                plgpu.barrier_wait(at["final"])
                # The last tile's values of this half are not needed any more, and there is no other place for what
                # is to be stored.
                final = position - 1
                factor = plgpu.load(ring.bias(final), layout=_PER_HEAD)
                factor = lax.broadcast_in_dim(factor, accs[0].shape, [0])
                mosaic.synchronize()
                for acc, n in zip(accs, own):
                    ring.block(final, n)[...] = (acc * factor).astype(jnp.bfloat16)
                plgpu.commit_smem()
                for n in own:
                    to = out_ref.at[pl.ds(token * heads + head, used), pl.ds(n * rows.BLOCK, rows.BLOCK)]
                    plgpu.copy_smem_to_gmem(ring.block(final, n).at[pl.ds(0, used)], to)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                ring.release_half(final)
                ring.release(final)
                return position

            lax.fori_loop(0, count(), item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        start(gather, lambda: lax.cond(lax.axis_index("wg") == 2, score, apply), ring, at["started"], warpgroup=3)

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
        scratch_types=list(refs.values()),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0,
            unsafe_no_auto_barriers=True,
        ),
    )(q.reshape(tokens * heads, width), *arrays)
    return out.reshape(tokens, heads, VALUES), lse.reshape(tokens, padded)[:, :heads]
