"""Sparse decode on Blackwell: one part of a row's lists per thread block, tcgen05 products with accumulators in TMEM.

A thread block takes 64 heads of one segment of the schedule. Three warpgroups: one gathers stored rows by cp.async and
unpacks them to bf16 in shared memory, keys and values in one; one makes probabilities of scores; one issues the
products, rescales the accumulator when a maximum has grown, and writes the output. While a block is multiplied, the
stored rows of the next are under way. Rows come by cp.async and not by TMA's gather of four: that wants rows at one
stride, which pages with a stride of their own, and records whose scales lie apart, do not have.

No Blackwell GPU was at hand: the kernel is compiled for one and interpreted, and its speed is not known.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.copies import CopyBarriers, copy_barriers
from pallas_kernels.sparse_attention import gather
from pallas_kernels.sparse_attention.online_softmax import START
from pallas_kernels.sparse_decode import merge, operands, planning, rows, scaling, sm90
from pallas_kernels.sparse_decode.lanes import VALUES

BLOCK = planning.BLOCK
HEADS = 64  # rows of a product
CHUNK = 128  # values of one accumulator
_CHUNKS = VALUES // CHUNK
_LOG2E = math.log2(math.e)
_LAYOUT = plgpu.Layout.WGMMA
_PER_HEAD, _PER_TOKEN = _LAYOUT.reduce(1), _LAYOUT.reduce(0)
_UNPACK, _SOFTMAX, _WARPGROUPS = 0, 1, 3
_FEW, _MANY = (
    136,
    232,
)  # registers of a thread of the first two warpgroups, and of the one that multiplies: 504 together


def unproven(function, args):
    """Why this kernel is not chosen by itself for a call that it carries."""
    return "the sm100 kernel was compiled and interpreted, but never run on a GPU; name it to run it."


def sparse_decode(
    q, caches, lists, *, topk_lengths, sink, scale, v_width, num_splits=None, split_size=None, schedule=None,
    p_dtype=jnp.bfloat16, out_dtype=jnp.bfloat16,
):  # fmt: skip
    """See `pallas_kernels.sparse_decode.sparse_decode`. bf16 queries, values of 512, float32 sums.

    8 to 64 heads, or 128.
    """
    sm90.require(q, caches, lists, scale, v_width, p_dtype, out_dtype, "sm100")
    heads = q.shape[2]
    if heads > HEADS and heads % HEADS:
        raise NotImplementedError(f"the sm100 kernel takes up to {HEADS} heads or a multiple of it, not {heads}.")
    return sm90.decode(
        _attend, q, caches, lists, topk_lengths=topk_lengths, sink=sink, scale=scale, num_splits=num_splits,
        split_size=split_size, schedule=schedule, out_dtype=out_dtype,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("scale", "heads", "out_dtype"))
def _attend(q, caches, lists, lengths, sink, schedule, *, scale, heads, out_dtype):
    """As `sm90.attend`."""
    total, width = q.shape[0] // heads, q.shape[1]
    groups, used = -(-heads // HEADS), min(heads, HEADS)
    aligned = groups * HEADS
    many, parts = len(caches), max(schedule.parts, 1)
    layouts = tuple(rows.staged(cache.format) for cache in caches)
    widths, limits = [each.shape[1] for each in lists], [cache.num_slots for cache in caches]
    tail = width - VALUES
    interpreted = mosaic.is_interpreted()
    tensor = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    bf16, f32 = jnp.bfloat16, jnp.float32
    scratch = dict(
        q_s=plgpu.SMEM((HEADS, width), bf16, transforms=operands.HALF_TILE),
        k_s=plgpu.SMEM((_CHUNKS, BLOCK, CHUNK), bf16, transforms=operands.HALF_TILE),
        p_s=plgpu.SMEM((HEADS, BLOCK), bf16, transforms=operands.HALF_TILE),
        raw_s=plgpu.SMEM((16 if interpreted else BLOCK * max(layout.stride for layout in layouts),), jnp.uint8),
        scale_s=plgpu.SMEM((BLOCK * max(1, *[layout.groups for layout in layouts]),), bf16),
        odd_s=plgpu.SMEM((4,), jnp.int32),
        bias_s=plgpu.SMEM((2, BLOCK), f32),
        factor_s=plgpu.SMEM((HEADS,), f32),
        scores=plgpu.TMEM((HEADS, BLOCK), f32),
        acc=[plgpu.TMEM((HEADS, CHUNK), f32) for _ in range(_CHUNKS)],
        copied=copy_barriers(2),
        started=plgpu.Barrier(num_arrivals=_WARPGROUPS),
        q_full=plgpu.Barrier(),
        k_full=plgpu.Barrier(),
        k_empty=tensor(),
        scored=tensor(),
        factor_ready=plgpu.Barrier(),
        ready=plgpu.Barrier(
            num_arrivals=2, orders_tensor_core=True
        ),  # probabilities are stored, the accumulator is scaled
        added=tensor(),
    )
    if tail:
        scratch |= dict(tail_s=plgpu.SMEM((BLOCK, tail), bf16, transforms=operands.HALF_TILE))
    if interpreted:
        scratch |= dict(decoded_s=plgpu.SMEM((BLOCK, width), bf16))

    arguments = sm90.Arguments(
        [cache.pages for cache in caches], [each.reshape(-1) for each in lists], lengths,
        None if sink is None else jnp.pad(sink, (0, aligned - heads)), schedule.segments,
    )  # fmt: skip

    def body(q_ref, *refs, **scratch_refs):
        (page_refs, list_refs, length_refs, sink_ref, segment_ref), refs = arguments.split(refs)
        out_ref, lse_ref, part_ref, part_lse_ref = refs
        s = _Scratch(**scratch_refs)
        copied = CopyBarriers(s.copied, 2)
        wg = lax.axis_index("wg")
        segment, group = lax.axis_index("segment"), lax.axis_index("group")
        there = segment_ref[segment, 0] < total
        row, part = jnp.minimum(segment_ref[segment, 0], total - 1), segment_ref[segment, 3]
        seen = [k if ref is None else jnp.clip(ref[row], 0, k) for ref, k in zip(length_refs, widths)]
        tiles = [(n + BLOCK - 1) // BLOCK for n in seen]
        begin = segment_ref[segment, 1]
        stop = jnp.minimum(segment_ref[segment, 2], sum(tiles))
        steps = jnp.maximum(stop - begin, 1)  # an empty part is one block of nothing
        first_block = begin

        def list_of(block):
            return jnp.int32(0) if many == 1 else jnp.where(block < tiles[0], 0, 1)

        def unpack():
            plgpu.set_max_registers(_FEW, action="decrease")

            def start(i):
                """Starts copying the stored rows of block i."""
                block = first_block + i
                which = list_of(block)
                if many == 1:
                    at, k, count = block * BLOCK, widths[0], seen[0]
                else:
                    second = which == 1
                    at = (block - jnp.where(second, tiles[0], 0)) * BLOCK
                    k, count = jnp.where(second, widths[1], widths[0]), jnp.where(second, seen[1], seen[0])
                count = jnp.where(block < stop, count - at, 0)
                places = gather.look_up(list_refs, limits, which + 1, row * k + at, count)
                decoded = s.decoded_s if interpreted else None
                for number in range(many):

                    @pl.when(which == number)
                    def _():
                        rows.copy(
                            s.raw_s, s.bias_s.at[lax.rem(i, 2)], page_refs[number], places, copied, lax.rem(i, 2),
                            layouts[number], caches[number].page_size, decoded,
                        )  # fmt: skip

                copied.arrive(lax.rem(i, 2))

            source = q_ref.at[pl.ds(row * heads + group * HEADS, used)]
            plgpu.copy_gmem_to_smem(source, s.q_s.at[pl.ds(0, used)], s.q_full)
            start(jnp.int32(0))

            def step(i, _):
                which = list_of(first_block + i)
                decoded = s.decoded_s if interpreted else None
                stored = (s.raw_s, s.scale_s, s.odd_s)
                copied.wait(lax.rem(i, 2), i // 2)
                scaling.prepare(*stored, which, layouts)

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(s.k_empty)

                plgpu.commit_smem()
                for c in range(_CHUNKS):
                    operands.unpack(*stored, which, s.k_s.at[c], CHUNK * c, layouts, decoded)
                if tail:
                    operands.unpack(*stored, which, s.tail_s, VALUES, layouts, decoded)
                plgpu.commit_smem()
                plgpu.barrier_arrive(s.k_full)
                pl.when(i + 1 < steps)(functools.partial(start, i + 1))

            lax.fori_loop(0, steps, step, None)
            plgpu.barrier_wait(s.k_empty)

        def up(which):
            ups = [2.0**layout.down for layout in layouts]
            return ups[0] if len(set(ups)) == 1 else jnp.where(which == 0, ups[0], ups[1])

        def softmax():
            plgpu.set_max_registers(_FEW, action="decrease")

            def spread(vector):
                return lax.broadcast_in_dim(vector, (HEADS, BLOCK), (0,))

            def step(i, carry):
                high, total = carry
                lift = up(list_of(first_block + i))
                plgpu.barrier_wait(s.scored)
                scores = plgpu.async_load_tmem(s.scores, layout=_LAYOUT)
                plgpu.wait_load_tmem()
                bias = plgpu.load(s.bias_s.at[lax.rem(i, 2)], layout=_PER_TOKEN)
                scores = scores * (scale * _LOG2E * lift) + lax.broadcast_in_dim(bias, scores.shape, (1,))
                new = jnp.maximum(high, jnp.max(scores, axis=1))
                shrink = jnp.exp2(high - new)
                s.factor_s[...] = shrink
                plgpu.barrier_arrive(s.factor_ready)
                p = jnp.exp2(scores - spread(new))

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(s.added)  # the product that read the probabilities before these

                s.p_s[...] = (p * lift).astype(bf16)
                plgpu.commit_smem()
                plgpu.barrier_arrive(s.ready)
                return new, total * shrink + jnp.sum(p, axis=1)

            start = plgpu.layout_cast(jnp.full((HEADS,), START, f32), _PER_HEAD)
            zero = plgpu.layout_cast(jnp.zeros((HEADS,), f32), _PER_HEAD)
            high, sums = lax.fori_loop(0, steps, step, (start, zero))
            weight = sums
            if sink_ref is not None:
                sinks = plgpu.load(sink_ref.at[pl.ds(group * HEADS, HEADS)], layout=_PER_HEAD, optimized=False)
                weight = sums + jnp.exp2(jnp.where(part < 0, sinks * _LOG2E, -jnp.inf) - high)
            nothing = sums == 0
            plgpu.barrier_wait(s.added)  # the last factor has been used
            s.factor_s[...] = jnp.where(nothing, 0.0, 1.0 / weight)
            plgpu.barrier_arrive(s.factor_ready)
            lse = jnp.where(nothing, -jnp.inf, high / _LOG2E + jnp.log(jnp.where(nothing, 1.0, sums)))
            head = pl.ds(group * HEADS, HEADS)

            @pl.when(there & (part < 0))
            def _():
                lse_ref[row, head] = lse

            @pl.when(part >= 0)
            def _():
                part_lse_ref[part, head] = lse

        def multiply():
            plgpu.set_max_registers(_MANY, action="increase")

            def score():
                plgpu.barrier_wait(s.k_full)
                for c in range(_CHUNKS):
                    left = s.q_s.at[:, pl.ds(c * CHUNK, CHUNK)]
                    plgpu.tcgen05_mma(s.scores, left, s.k_s.at[c].T, accumulate=c > 0)
                if tail:
                    plgpu.tcgen05_mma(s.scores, s.q_s.at[:, pl.ds(VALUES, tail)], s.tail_s.T)
                plgpu.tcgen05_commit_arrive(s.scored)

            def add(i):
                for c in range(_CHUNKS):
                    plgpu.tcgen05_mma(s.acc[c], s.p_s, s.k_s.at[c], accumulate=i > 0)
                plgpu.tcgen05_commit_arrive(s.k_empty)
                plgpu.tcgen05_commit_arrive(s.added)

            def factor():
                plgpu.barrier_wait(s.factor_ready)
                return lax.broadcast_in_dim(plgpu.load(s.factor_s, layout=_PER_HEAD), (HEADS, CHUNK), (0,))

            def step(i, _):
                score()
                shrink = factor()

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(s.added)
                    for acc in s.acc:
                        values = plgpu.async_load_tmem(acc, layout=_LAYOUT)
                        plgpu.wait_load_tmem()
                        plgpu.async_store_tmem(acc, values * shrink)
                    plgpu.commit_tmem()

                plgpu.barrier_arrive(s.ready)
                plgpu.barrier_wait(s.ready)
                add(i)

            plgpu.barrier_wait(s.q_full)
            lax.fori_loop(0, steps, step, None)
            inverse = factor()
            plgpu.barrier_wait(s.added)
            head = pl.ds(group * HEADS, HEADS)
            for c, acc in enumerate(s.acc):
                values = plgpu.async_load_tmem(acc, layout=_LAYOUT)
                plgpu.wait_load_tmem()
                values = values * inverse
                column = pl.ds(c * CHUNK, CHUNK)

                @pl.when(there & (part < 0))
                def _(c=c, values=values, column=column):
                    if out_dtype == f32:
                        out_ref[row, head, column] = values
                        return
                    s.k_s[c] = values.astype(bf16)  # no rows are needed any more
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(s.k_s.at[c], out_ref.at[row, head, column])

                @pl.when(part >= 0)
                def _(values=values, column=column):
                    part_ref[part, head, column] = values

            plgpu.wait_smem_to_gmem(0)

        pl.when(wg == _UNPACK)(copied.initialise)
        plgpu.barrier_arrive(s.started)
        plgpu.barrier_wait(s.started)
        lax.cond(wg == _UNPACK, unpack, lambda: lax.cond(wg == _SOFTMAX, softmax, multiply))

    out, lse, outs, lses = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((total, aligned, VALUES), out_dtype),
            jax.ShapeDtypeStruct((total, aligned), f32),
            jax.ShapeDtypeStruct((parts, aligned, VALUES), f32),
            jax.ShapeDtypeStruct((parts, aligned), f32),
        ),
        grid=(schedule.segments.shape[0], groups),
        grid_names=("segment", "group"),
        num_threads=_WARPGROUPS,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )(q, *arguments.given)
    out, lse = out[:, :heads].reshape(total * heads, VALUES), lse[:, :heads].reshape(-1)
    if schedule.parts:
        outs, lses = outs[:, :heads].reshape(-1, VALUES), lses[:, :heads].reshape(-1)
        out, lse = merge.combine(out, lse, outs, lses, sink, schedule)
    return out, lse


class _Scratch:
    def __init__(self, **refs):
        self.__dict__ |= refs
