"""Sparse decode on Hopper: parts of the lists on persistent thread blocks, and their combination.

A warpgroup gathers the stored rows of a part, 64 at a time, each row copied in one piece, and hands a block on with its
scales brought to the form that the others read. Two warpgroups attend to 128 rows at a time, with the tokens as rows of
the products: scores are K q^T, [64 tokens, heads] for each warpgroup's own block, and sums are V^T p^T, [256 values,
heads] for each warpgroup's half of the values and both blocks. The left operands, K and V^T, are made in registers from
the stored bytes (see `operands`), so that nothing converted goes through shared memory, and a call of 8 heads pays for
8. The bytes of the next operand are loaded before this one is converted, and the ways of reading a block part in front
of its products, not between them: two warps a scheduler hide little, and a branch ends what the assembler may move.
Where a row of the schedule has one part, it is finished here; the others leave normalised parts in float32 and their
log-sum-exps, which a second kernel combines.
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
from pallas_kernels.copies import CopyBarriers, copy_barriers
from pallas_kernels.sparse_attention import gather
from pallas_kernels.sparse_decode import lanes, merge, operands, planning, rows, scaling
from pallas_kernels.lane_ops import fresh_zero, opaque
from pallas_kernels.sparse_decode.lanes import PER_HEAD, VALUES

BLOCK = planning.BLOCK
WARPGROUPS = 2  # of arithmetic
_LOG2E = math.log2(math.e)
_SHARED = 221 * 1024  # bytes of shared memory of a thread block, less what barriers and alignment take


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """Registers of the threads of arithmetic and of those that gather, and the most blocks in the ring."""

    math: int = 232
    gather: int = 40
    stages: int = 8

    def __post_init__(self):
        if any(n % 8 or not 24 <= n <= 240 for n in (self.math, self.gather)):
            raise ValueError(f"{self}: registers come in multiples of 8, from 24 to 240.")
        # What a thread block starts with, 64k registers dealt out in eights: more would be waited for, for ever.
        if 2 * self.math + self.gather > 504:
            raise ValueError(f"{self}: a thread of each of two warpgroups and one that gathers have 504 registers.")
        if self.stages < WARPGROUPS:
            raise ValueError(f"{self}: two blocks are attended to at once; stages must be at least that.")


CONFIG = TuningConfig()


def arrangement(heads: int, width: int, layouts) -> int:
    """Thread blocks among which the heads of a row are divided.

    As few as `planning.head_groups`, unless rows are so long (bf16 of 576) that 64 heads' queries leave no room for two
    blocks of them.
    """
    groups = planning.head_groups(heads)
    while stages_of(heads // groups, width, layouts) < WARPGROUPS:
        groups += 1
        while heads // 8 % groups:
            groups += 1
    return groups


def sparse_decode(
    q, caches, lists, *, topk_lengths, sink, scale, v_width, num_splits=None, split_size=None, schedule=None,
    p_dtype=jnp.bfloat16, out_dtype=jnp.bfloat16,
):  # fmt: skip
    """See `pallas_kernels.sparse_decode.sparse_decode`. bf16 queries, values of 512, float32 sums; 8 to 128 heads."""
    require(q, caches, lists, scale, v_width, p_dtype, out_dtype)
    return decode(
        attend, q, caches, lists, topk_lengths=topk_lengths, sink=sink, scale=scale,
        num_splits=num_splits, split_size=split_size, schedule=schedule, out_dtype=out_dtype,
    )  # fmt: skip


def decode(attend, q, caches, lists, *, topk_lengths, sink, scale, num_splits, split_size, schedule, out_dtype):
    """What a kernel's `attend` is called with, and results in the shapes of the operation."""
    batch, per_request, heads, width = q.shape
    total = batch * per_request
    flat = [None if length is None else length.reshape(total) for length in topk_lengths]
    full = [i for i, each in enumerate(lists) if each.shape[2] and caches[i].pages.shape[0]]
    if 0 in (total, len(full)):
        nothing = jnp.full((batch, per_request, heads), -jnp.inf, jnp.float32)
        return jnp.zeros((batch, per_request, heads, VALUES), out_dtype), nothing
    if schedule is None:
        widths = tuple(each.shape[2] for each in lists)
        schedule = planning.make_schedule(widths, flat, total, heads, split_size, num_splits)
    out, lse = attend(
        q.reshape(total * heads, width), caches, tuple(each.reshape(total, -1) for each in lists), tuple(flat),
        None if sink is None else sink.astype(jnp.float32), schedule, scale=float(scale), heads=heads,
        out_dtype=jnp.dtype(out_dtype),
    )  # fmt: skip
    return out.reshape(batch, per_request, heads, VALUES), lse.reshape(batch, per_request, heads)


def require(q, caches, lists, scale, v_width, p_dtype, out_dtype, family="sm90"):
    """Raises NotImplementedError unless the kernels of this operation carry the call."""
    _, _, heads, width = q.shape
    for name, dtype in (("q", q.dtype), ("probabilities", p_dtype)):
        if dtype != jnp.bfloat16:
            raise NotImplementedError(f"the {family} kernel takes bfloat16, and {name} have {jnp.dtype(dtype)}.")
    if jnp.dtype(out_dtype) not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"the {family} kernel writes bfloat16 or float32, not {jnp.dtype(out_dtype)}.")
    if v_width != VALUES:
        raise NotImplementedError(f"the {family} kernel takes values of {VALUES}, not of {v_width}.")
    if heads % 8 or not 8 <= heads <= 128:
        raise NotImplementedError(f"the {family} kernel takes multiples of 8 heads from 8 to 128, not {heads}.")
    if len(lists) > 2:
        raise NotImplementedError(f"the {family} kernel takes one or two lists, not {len(lists)}.")
    if not scale > 0:
        raise NotImplementedError(f"the {family} kernel takes a scale above 0, not {scale}.")
    for cache in caches:
        layout = rows.staged(cache.format)
        if layout.quantised and cache.pages.shape[1] % 16:
            raise NotImplementedError(
                f"the {family} kernel reads 16 bytes at a time, and pages have {cache.pages.shape[1]} bytes; make the "
                "page stride a multiple of 16."
            )
        if cache.pages[0].size * cache.pages.dtype.itemsize >= 2**31:
            raise NotImplementedError(f"the {family} kernel counts the bytes of a page in 31 bits.")
        if cache.num_slots >= 2**31 or any(each.size >= 2**31 for each in lists):
            raise NotImplementedError(f"the {family} kernel counts slots and list entries in 31 bits.")


def stages_of(heads, width, layouts):
    row_bytes = max(layout.stride for layout in layouts)
    groups = max(layout.groups for layout in layouts)
    each = BLOCK * (row_bytes + 2 * groups + 4) + 16
    fixed = heads * (2 * width + WARPGROUPS * (2 * BLOCK + 16) + 24) + 512
    return min(CONFIG.stages, (_SHARED - fixed) // each)


class Arguments:
    """Trees of arguments of which some leaves may be None: the `given` ones, and references in their place."""

    def __init__(self, *trees):
        self.given, self._tree = jax.tree.flatten(trees)

    def split(self, refs):
        """The trees with the first references in place of the arguments, and the other references."""
        count = len(self.given)
        return jax.tree.unflatten(self._tree, refs[:count]), refs[count:]


@functools.partial(jax.jit, static_argnames=("scale", "heads", "out_dtype"))
def attend(q, caches, lists, lengths, sink, schedule, *, scale, heads, out_dtype):
    """q [T * H, D], lists [T, K] and lengths [T] of each cache, sink [H] -> out [T * H, 512], lse [T * H].

    Any of the lengths and the sink may be None, and is then nothing that is read: an array that only says so would
    take a kernel of its own to make, in front of every call.
    """
    total, width = q.shape[0] // heads, q.shape[1]
    threads = schedule.first.shape[0] - 1
    many = len(caches)
    layouts = tuple(rows.staged(cache.format) for cache in caches)
    groups = arrangement(heads, width, layouts)
    used = heads // groups
    widths, limits = [each.shape[1] for each in lists], [cache.num_slots for cache in caches]
    stages = stages_of(used, width, layouts)
    parts_of_values = VALUES // 128 // WARPGROUPS
    chunks = width // 64
    interpreted = mosaic.is_interpreted()
    parts = max(schedule.parts, 1)
    scratch = {
        "q": plgpu.SMEM((1, used, width), jnp.bfloat16, transforms=lanes.TILE),
        "raw": plgpu.SMEM((stages, BLOCK * max(layout.stride for layout in layouts)), jnp.uint8),
        "scale": plgpu.SMEM((stages, BLOCK * max(1, *[layout.groups for layout in layouts])), jnp.bfloat16),
        "odd": plgpu.SMEM((stages, 4), jnp.int32),
        "bias": plgpu.SMEM((stages, BLOCK), jnp.float32),
        "p": plgpu.SMEM((WARPGROUPS, 2, used, 32), jnp.bfloat16, transforms=lanes.HALF_TILE),
        "high": lanes.Maxima.scratch(used, WARPGROUPS),
        "sums": plgpu.SMEM((4 * WARPGROUPS, used), jnp.float32),
        "sink": plgpu.SMEM((128,), jnp.float32),
        "full": copy_barriers(stages),
        "prepared": plgpu.Barrier(num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        "scored": plgpu.Barrier(num_arrivals=WARPGROUPS),
        "weighed": plgpu.Barrier(num_arrivals=WARPGROUPS),
        "ready": plgpu.Barrier(num_arrivals=WARPGROUPS),
        "started": plgpu.Barrier(num_arrivals=WARPGROUPS + 1),
    }
    if interpreted:  # whose wgmma takes no operand in registers
        scratch["raw"] = plgpu.SMEM((stages, 16), jnp.uint8)
        scratch["decoded"] = plgpu.SMEM((stages, BLOCK, width), jnp.bfloat16)
        scratch["k"] = plgpu.SMEM((WARPGROUPS, BLOCK, 64), jnp.bfloat16, transforms=lanes.TILE)
        scratch["v"] = plgpu.SMEM((WARPGROUPS, 128, 32), jnp.bfloat16, transforms=lanes.HALF_TILE)

    even = schedule.even
    arguments = Arguments(
        [cache.pages for cache in caches], [each.reshape(-1) for each in lists], lengths, sink,
        *((None, None) if even else (schedule.segments, schedule.starts)),
    )  # fmt: skip

    def body(q_ref, *refs):
        (page_refs, list_refs, length_refs, sink_ref, segment_ref, start_ref), refs = arguments.split(refs)
        out_ref, lse_ref, part_ref, part_lse_ref, *scratch_refs = refs
        at = dict(zip(scratch, scratch_refs))
        full = CopyBarriers(at["full"], stages)
        wg, thread = lax.axis_index("wg"), lax.axis_index("thread")
        head = lax.axis_index("group") * used

        def every_segment(step, state):
            """step(segment, state) for all of this thread block; the next one is looked up during a step."""
            if even:
                first, last = even.share(thread, threads), even.share(thread + 1, threads)

                def look_up(i):  # as what is read is: numbers of which the compiler makes no more than that
                    return [opaque(x) for x in (*even.segment(i), jnp.int32(-1) if even.parts == 1 else i)]

                own = look_up(first)
            else:
                first, last, *own = [start_ref[thread, k] for k in range(6)]
                final = segment_ref.shape[0] - 1

                def look_up(i):
                    return [segment_ref[jnp.minimum(i, final), k] for k in range(4)]

            def advance(i, state):
                own, state = state
                following = look_up(i + 1)
                return following, step(own, state)

            return lax.fori_loop(first, last, advance, (own, state))[1]

        def place(segment):
            """Row, number of the part, entries and blocks of the lists that count, and the blocks begin .. end - 1, of
            which those from stop on are none: an empty part is one block of nothing."""
            row, begin, end, part = segment
            seen = [k if ref is None else jnp.clip(ref[row], 0, k) for ref, k in zip(length_refs, widths)]
            tiles = [(n + BLOCK - 1) // BLOCK for n in seen]
            stop = jnp.minimum(end, sum(tiles))
            return row, part, seen, tiles, begin, stop, jnp.maximum(stop, begin + 1)

        def list_of(block, tiles):
            return jnp.int32(0) if many == 1 else jnp.where(block < tiles[0], 0, 1)

        def stored(slot):
            return at["raw"].at[slot], at["scale"].at[slot], at["odd"].at[slot]

        def by_list(which, function):
            if many == 1:
                function(0)
            else:
                for number in range(many):
                    pl.when(which == number)(functools.partial(function, number))

        def produce():
            plgpu.set_max_registers(CONFIG.gather, action="decrease")

            def prepare(position, which):
                """Of a block that was begun: waits until it is there, and hands it on."""
                slot = lax.rem(position, stages)
                full.wait(slot, position // stages)
                scaling.prepare(*stored(slot), which, layouts)
                plgpu.barrier_arrive(at["prepared"].at[slot])

            def segment(own, state):
                row, _, seen, tiles, begin, stop, end = place(own)
                if sink_ref is not None:  # with the first rows, so that no output has to wait for it
                    pl.when(state[0] == 0)(lambda: lanes.copy_heads(sink_ref, at["sink"], head))

                def look_up(block):
                    which = list_of(block, tiles)
                    if many == 1:
                        start, k, count = block * BLOCK, widths[0], seen[0]
                    else:
                        second = which == 1
                        start = (block - jnp.where(second, tiles[0], 0)) * BLOCK
                        k, count = jnp.where(second, widths[1], widths[0]), jnp.where(second, seen[1], seen[0])
                    count = jnp.where(block < stop, count - start, 0)
                    return gather.look_up(list_refs, limits, which + 1, row * k + start, count), which

                def fill(j, state):
                    places, which, position, last = state
                    following = look_up(j + 1)
                    slot = lax.rem(position, stages)
                    again = position >= stages

                    @pl.when(again)  # the block before this one first: who frees the slot may need it
                    def _():
                        prepare(position - 1, last)
                        plgpu.barrier_wait(at["empty"].at[slot])

                    def copy(number):
                        decoded = at["decoded"].at[slot] if interpreted else None
                        rows.copy(
                            at["raw"].at[slot], at["bias"].at[slot], page_refs[number], places, full, slot,
                            layouts[number], caches[number].page_size, decoded,
                        )  # fmt: skip

                    by_list(which, copy)
                    full.arrive(slot)
                    pl.when((position > 0) & ~again)(lambda: prepare(position - 1, last))
                    return *following, position + 1, which

                return lax.fori_loop(begin, end, fill, (*look_up(begin), *state))[2:]

            position, last = every_segment(segment, (jnp.int32(0), jnp.int32(0)))
            pl.when(position > 0)(lambda: prepare(position - 1, last))

            def see_used(i, _):
                plgpu.barrier_wait(at["empty"].at[lax.rem(i, stages)])

            lax.fori_loop(jnp.maximum(position - stages, 0), position, see_used, None)

        def multiply(acc, left, right, stand_in):
            if interpreted:
                at[stand_in][wg] = left
                plgpu.commit_smem()
                left = at[stand_in].at[wg]
            plgpu.wgmma(acc, left, right)
            plgpu.wgmma_wait(0 if interpreted else 1)  # the operand before this one may be overwritten

        def attend_to():
            plgpu.set_max_registers(CONFIG.math, action="increase")
            maxima = lanes.Maxima(at["high"])

            def both(barrier):
                plgpu.barrier_arrive(at[barrier])
                plgpu.barrier_wait(at[barrier])

            ways = scaling.readings(layouts)[: 1 if interpreted else None]

            def way_of(slot, which):
                """Number of the way in which the rows of a block are read."""
                return jnp.int32(0) if interpreted else scaling.reading_of(at["odd"].at[slot], which, layouts)

            def score(position, which):
                slot = lax.rem(position, stages)
                raw, scales, _ = stored(slot)
                decoded = at["decoded"].at[slot] if interpreted else None
                plgpu.barrier_wait(at["prepared"].at[slot])

                def products(way):
                    def of(acc):
                        following = operands.load_keys(raw, scales, 0, way, decoded)
                        for chunk in range(chunks):
                            words = following
                            if chunk + 1 < chunks:
                                following = operands.load_keys(raw, scales, chunk + 1, way, decoded)
                            left = operands.key_fragment(words, chunk, way)
                            multiply(acc, left, at["q"].at[fresh_zero(), :, pl.ds(64 * chunk, 64)].T, "k")
                        return acc[...]

                    return pl.run_scoped(of, plgpu.ACC((BLOCK, used), jnp.float32))

                found = lax.switch(way_of(slot, which), [functools.partial(products, way) for way in ways])
                factor = jnp.float32(scale * _LOG2E * up(which))
                return lanes.scores(found, factor, at["bias"].at[slot])

            def up(which):
                ups = [2.0**layout.down for layout in layouts]
                return ups[0] if len(set(ups)) == 1 else jnp.where(which == 0, ups[0], ups[1])

            def add_values(position, which, number, accs):
                slot = lax.rem(position, stages)
                raw, scales, _ = stored(slot)
                decoded = at["decoded"].at[slot] if interpreted else None

                @pl.when(number != wg)
                def _():
                    plgpu.barrier_wait(at["prepared"].at[slot])

                def products(way, accs):
                    pieces = [(half, i) for half in range(2) for i in range(parts_of_values)]

                    def load(half, i):
                        part, last = parts_of_values * wg + i, i + 1 == parts_of_values
                        return operands.load_values(raw, scales, part, half, way, decoded, may_be_tail=last)

                    def of(*accs):
                        following = load(*pieces[0])
                        for n, (half, i) in enumerate(pieces):
                            words = following
                            if n + 1 < len(pieces):
                                following = load(*pieces[n + 1])
                            else:  # the last of the block has been read
                                plgpu.barrier_arrive(at["empty"].at[slot])
                            part, last = parts_of_values * wg + i, i + 1 == parts_of_values
                            left = operands.value_fragment(words, part, half, way, may_be_tail=last)
                            multiply(accs[i], left, at["p"].at[number, half].T, "v")

                    return mosaic.accumulate(of, accs)

                # Loops of one turn or none: with a switch the assembler finds too few registers for MODEL1's values and
                # 64 heads, and serialises the products (C7512).
                chosen = way_of(slot, which)
                for i, way in enumerate(ways):
                    once = (chosen == i).astype(jnp.int32)
                    accs = lax.fori_loop(0, once, lambda _, accs, way=way: products(way, accs), accs)
                return accs

            def segment(own, state):
                position, turn = state
                row, part, _, tiles, begin, _, end = place(own)
                lanes.load_queries(q_ref, at["q"].at[0], row * heads + head, wg, WARPGROUPS)
                pl.when(wg == 0)(functools.partial(maxima.reset, turn))
                mosaic.fence_proxies()
                both("ready")

                def take_turn(j, state):
                    accs, sums, turn = state
                    own = WARPGROUPS * j + wg
                    which = list_of(begin + own, tiles)
                    nothing = plgpu.layout_cast(jnp.full((BLOCK, used), -jnp.inf, jnp.float32), lanes.WGMMA)
                    there = (begin + own < end).astype(jnp.int32)
                    s = lax.fori_loop(0, there, lambda _, s: score(position + own, which), nothing)
                    maxima.offer(s, turn, wg)
                    both("scored")
                    pl.when(wg == 0)(functools.partial(maxima.pass_on, turn))

                    def shrunk():
                        high = maxima.read(turn)
                        shrink = jnp.exp2(maxima.before(turn) - high)
                        return [acc * lax.broadcast_in_dim(shrink, acc.shape, [1]) for acc in accs], high

                    accs, high = lax.cond(maxima.moved(turn) != 0, shrunk, lambda: (accs, maxima.before(turn)))
                    p = jnp.exp2(s - lax.broadcast_in_dim(high, s.shape, [1]))
                    sums = maxima.add(sums, p, turn)
                    lanes.write_probabilities(at["p"].at[wg], p * up(which))
                    mosaic.fence_proxies()
                    both("weighed")

                    def values(number, accs):
                        block = WARPGROUPS * j + number
                        return add_values(position + block, list_of(begin + block, tiles), number, accs)

                    accs = lax.fori_loop(0, jnp.minimum(WARPGROUPS, end - begin - WARPGROUPS * j), values, accs)
                    return accs, sums, turn + 1

                zeros = plgpu.layout_cast(jnp.zeros((128, used), jnp.float32), lanes.WGMMA)
                accs = [zeros] * parts_of_values
                sums = plgpu.layout_cast(jnp.zeros((256,), jnp.float32), lanes.LANE_SUMS)
                turns = (end - begin + WARPGROUPS - 1) // WARPGROUPS
                accs, sums, turn = lax.fori_loop(0, turns, take_turn, (accs, sums, turn))
                lanes.offer_sums(sums, at["sums"], wg)
                both("ready")
                high = maxima.before(turn)
                finish(row, part, accs, high, lanes.read_sums(at["sums"]))
                return position + end - begin, turn + 1  # the other warpgroup may still read this turn's maxima

            def finish(row, part, accs, high, total):
                whole = part < 0
                nothing, weight = total == 0, total
                if sink_ref is not None:
                    sinks = plgpu.load(at["sink"].at[pl.ds(0, used)], layout=PER_HEAD)
                    weight = total + jnp.exp2(jnp.where(whole, sinks * _LOG2E, -jnp.inf) - high)
                factor = jnp.where(nothing, 0.0, 1 / weight)
                lse = jnp.where(nothing, -jnp.inf, high / _LOG2E + jnp.log(jnp.where(nothing, 1.0, total)))
                accs = [acc * lax.broadcast_in_dim(factor, acc.shape, [1]) for acc in accs]

                @pl.when(whole)
                def _():
                    lanes.store_output(out_ref, accs, row * heads + head, wg)

                @pl.when(part >= 0)
                def _():
                    lanes.store_output(part_ref, accs, part * heads + head, wg)

                @pl.when((wg == 0) & whole)
                def _():
                    lanes.store_heads(lse_ref, lse, row * heads + head)

                @pl.when((wg == 0) & (part >= 0))
                def _():
                    lanes.store_heads(part_lse_ref, lse, part * heads + head)

            every_segment(segment, (jnp.int32(0), jnp.int32(0)))

        pl.when(wg == WARPGROUPS)(full.initialise)
        plgpu.barrier_arrive(at["started"])
        plgpu.barrier_wait(at["started"])
        lax.cond(wg == WARPGROUPS, produce, attend_to)

    out, lse, outs, lses = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((total * heads, VALUES), out_dtype),
            jax.ShapeDtypeStruct((total * heads,), jnp.float32),
            jax.ShapeDtypeStruct((parts * heads, VALUES), jnp.float32),
            jax.ShapeDtypeStruct((parts * heads,), jnp.float32),
        ),
        grid=(threads, groups),
        grid_names=("thread", "group"),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(q, *arguments.given)
    if schedule.parts:
        out, lse = merge.combine(out, lse, outs, lses, sink, schedule)
    return out, lse
