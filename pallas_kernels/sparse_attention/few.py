"""Sparse attention on Hopper for 8 to 32 heads: keys and values are the rows of the wgmmas, heads their columns.

With few heads the gathering is what takes the time, and no part of a wgmma is filled up with nothing. A thread block
takes a query row at a time: one warpgroup gathers, the other multiplies 64 gathered keys with the queries, weighs them,
and adds the transposed values times the transposed probabilities to an accumulator of 512 rows.
"""

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
from pallas_kernels.sparse_attention.ring import (
    BLOCK_BYTES, BLOCKS, KEYS, TILES, VALUES, Launch, scratch, start, tile,
)  # fmt: skip

HEADS = (8, 16, 24, 32)
_PER_KEY = plgpu.Layout.WGMMA.reduce(1)
_PER_HEAD = plgpu.Layout.WGMMA.reduce(0)
_LOG2E = math.log2(math.e)
_MEMORY = 232448 - 4096  # bytes of shared memory of a thread block, less what barriers and small arrays take


def ring_blocks(heads: int, width: int) -> int:
    """Blocks of the ring that fit besides queries and probabilities."""
    tail = TILES * 2 * KEYS * (width - VALUES)
    taken = tail + 2 * heads * width + 2 * heads * KEYS
    return min(TILES * BLOCKS, (_MEMORY - taken) // BLOCK_BYTES)


@functools.partial(jax.jit, static_argnames=("scale",))
def attend(q, kvs, lists, lengths, sink, *, scale):
    """q [T, H, D], kvs [S, D], lists [T, K] and lengths [T] (one or two of each), sink [H] -> out, lse."""
    tokens, heads, width = q.shape
    threads = min(mosaic.CORES, tokens)
    tailed = width > VALUES
    launch = Launch(kvs, lists, lengths, sink)
    arrays = launch.arrays
    refs = {
        "q": tile((heads, width)),
        "p": tile((heads, KEYS)),
        "asked": plgpu.Barrier(),
        "started": plgpu.Barrier(num_arrivals=2),
    }
    if tailed:
        refs["tail"] = tile((TILES, KEYS, KEYS))
    refs |= scratch(ring_blocks(heads, width), small=0, users=1, halves=False)

    def body(q_ref, *all_refs):
        *array_refs, out_ref, lse_ref = all_refs[: len(arrays) + 2]
        at = dict(zip(refs, all_refs[len(arrays) + 2 :]))
        ring, sink_ref = launch.ring(at, tailed, q_ref, array_refs)
        thread = lax.axis_index("thread")
        count = (tokens - thread + threads - 1) // threads

        def gather():
            ring.gather(count, lambda i: (thread + i * threads, 0), queries=0)

        def attend():

            def ask(i):
                """Starts copying the queries of item i."""
                plgpu.copy_gmem_to_smem(q_ref.at[pl.ds((thread + i * threads) * heads, heads)], at["q"], at["asked"])

            ask(0)

            def item(i, position):
                token = thread + i * threads
                last = ring.count(token) - 1
                plgpu.barrier_wait(at["asked"])

                def step(j, state):
                    accs, high, total, position = state
                    ring.wait_early(position)

                    def scores(acc):
                        for n in (*ring.early, *ring.late):
                            if n in ring.late[:1]:
                                ring.wait_late(position)
                            columns = pl.ds(n * rows.BLOCK, rows.BLOCK)
                            plgpu.wgmma(acc, ring.block(position, n), at["q"].at[:, columns].T)
                        if tailed:
                            plgpu.wgmma(acc, ring.tail(position), at["q"].at[:, pl.ds(VALUES, KEYS)].T)
                        return acc[...]

                    s = pl.run_scoped(scores, plgpu.ACC((KEYS, heads), jnp.float32))

                    @pl.when((j == last) & (i + 1 < count))
                    def _():
                        ask(i + 1)

                    bias = plgpu.load(ring.bias(position), layout=_PER_KEY)
                    s = s + lax.broadcast_in_dim(bias, s.shape, [0])
                    new = jnp.maximum(high, jnp.max(s, axis=0) * (scale * _LOG2E))
                    shrink = jnp.exp2(high - new)
                    p = jnp.exp2(s * (scale * _LOG2E) - lax.broadcast_in_dim(new, s.shape, [1]))
                    total = total * lax.broadcast_in_dim(shrink, s.shape, [1]) + p
                    # Code written lane by lane waits for nobody; the maximum over all warps above did, so that no
                    # warp still reads the probabilities before. Below, the sum over all warps stands for it.
                    rows.store_transposed(at["p"], p)
                    plgpu.commit_smem()
                    shrink = lax.broadcast_in_dim(shrink, accs[0].shape, [1])
                    accs = [acc * shrink for acc in accs]

                    def products(*accs):
                        for n, acc in enumerate(accs):
                            plgpu.wgmma(acc, ring.block(position, n).T, at["p"].T)

                    accs = mosaic.accumulate(products, accs)

                    @pl.when(j < last)
                    def _():
                        ring.release(position)

                    return accs, new, total, position + 1

                zero = plgpu.layout_cast(jnp.zeros((rows.BLOCK, heads), jnp.float32), plgpu.Layout.WGMMA)
                high = plgpu.layout_cast(jnp.full((heads,), START, jnp.float32), _PER_HEAD)
                # Every thread sums what it sees; the sums meet once, at the end.
                total = plgpu.layout_cast(jnp.zeros((KEYS, heads), jnp.float32), plgpu.Layout.WGMMA)
                accs, high, total, position = lax.fori_loop(
                    0, last + 1, step, ([zero] * BLOCKS, high, total, position)
                )
                total = jnp.sum(total, axis=0)
                nothing = total == 0
                sinks = plgpu.load(sink_ref, layout=_PER_HEAD, optimized=False)
                factor = jnp.where(nothing, 0.0, 1 / (total + jnp.exp2(sinks * _LOG2E - high)))
                lse = jnp.where(nothing, -jnp.inf, high / _LOG2E + jnp.log(jnp.where(nothing, 1.0, total)))
                # The last tile is not needed any more, and there is no other place for the output.
                small = ring.bias(position - 1).at[pl.ds(0, heads)]
                small[...] = lse
                factor = lax.broadcast_in_dim(factor, accs[0].shape, [1])
                for n, acc in enumerate(accs):
                    rows.store_transposed(ring.block(position - 1, n), acc * factor)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(small, lse_ref.at[pl.ds(token * heads, heads)])
                for n in range(BLOCKS):
                    to = out_ref.at[pl.ds(token * heads, heads), pl.ds(n * rows.BLOCK, rows.BLOCK)]
                    plgpu.copy_smem_to_gmem(ring.block(position - 1, n).at[pl.ds(0, heads)], to)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                ring.release(position - 1)
                return position

            lax.fori_loop(0, count, item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        start(gather, attend, ring, at["started"], warpgroup=1)

    out, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((tokens * heads, VALUES), jnp.bfloat16),
            jax.ShapeDtypeStruct((tokens * heads,), jnp.float32),
        ),
        grid=(threads,),
        grid_names=("thread",),
        num_threads=2,
        thread_name="wg",
        scratch_types=list(refs.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(q.reshape(tokens * heads, width), *arrays)
    return out.reshape(tokens, heads, VALUES), lse.reshape(tokens, heads)
