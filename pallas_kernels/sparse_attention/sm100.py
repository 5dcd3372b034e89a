"""Attention over listed rows on Blackwell: TMA gather4, tcgen05 products with the accumulators in TMEM.

A thread block takes 64 heads of one query row (where there are fewer, the rows of the products that are left over are
computed and dropped). Three warpgroups: one gathers blocks of listed rows; one makes probabilities of scores; one issues
the products, rescales the accumulator when a maximum has grown, and writes the output. (With a fourth, products and
accumulator apart, no warpgroup has the registers that rescaling takes.) Keys and values are the same bytes in shared
memory.

With a multiple of 128 heads two thread blocks form a pair, whose products are 2-CTA MMAs: each holds 64 heads, the keys
of its half of a block, and its half of the values of the whole block. The interpreter knows no 2-CTA MMA and gets the
same body as two blocks on their own.

No Blackwell GPU was at hand: the kernel is compiled for one and interpreted, and its speed is not known.
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
from pallas_kernels.sparse_attention.online_softmax import START

HEADS = 64  # of a thread block: rows of its part of a tcgen05.mma
KEYS = 64  # rows that a thread block gathers at a time as keys
VALUES = 512
WIDTHS = (512, 576)
CHUNK = 128  # values of one accumulator: as many columns of it as a warpgroup holds in registers with ease
_CHUNKS = VALUES // CHUNK
_LOG2_E = math.log2(math.e)
_LOADER, _SOFTMAX, _MULTIPLIER, _WARPGROUPS = 0, 1, 2, 3


def unproven(function, args):
    """Why this kernel is not chosen by itself for a call that it carries."""
    return "the sm100 kernel was compiled and interpreted, but never run on a GPU; name it to run it."


def sparse_attention(q, kvs, lists, *, topk_length, sink, scale, v_width, p_dtype, lse_prefix=None):
    """See `pallas_kernels.sparse_attention.sparse_attention`. bf16, width 512 or 576, values of 512, one or two lists."""
    _require(q, kvs, v_width, p_dtype)
    lengths = (None,) * len(lists) if topk_length is None else topk_length
    used = [i for i, kv in enumerate(kvs) if 0 not in kv.shape and lists[i].shape[1]]
    if not used or 0 in q.shape:
        out, lse = jnp.zeros((*q.shape[:2], v_width), q.dtype), jnp.full(q.shape[:2], -jnp.inf, jnp.float32)
        return (out, lse) if lse_prefix is None else (out, lse, lse)
    columns = [indices.shape[1] for indices in lists]
    if lse_prefix is not None:
        if used != list(range(len(lists))) or not (lse_prefix == sum(columns) or lse_prefix <= columns[0]):
            raise NotImplementedError("the sm100 kernel sums a prefix that ends within the first list, or everything.")
        if lse_prefix not in (columns[0], sum(columns)) and lse_prefix % (2 * KEYS):
            raise NotImplementedError(f"the sm100 kernel sums a prefix of {lse_prefix} entries only in multiples of {2 * KEYS}.")
    sink = jnp.full(q.shape[1], -jnp.inf, jnp.float32) if sink is None else sink.astype(jnp.float32)
    out, lse, prefix = _attend(
        q, *(tuple(part[i] for i in used) for part in (kvs, lists, lengths)), sink, float(scale),
        _Form(
            heads=q.shape[1],
            width=q.shape[2],
            # A pair's rows of 576 values would need 108 bytes of shared memory more than there are.
            paired=q.shape[1] % (2 * HEADS) == 0 and q.shape[2] == VALUES and not mosaic.is_interpreted(),
            prefix=None if lse_prefix is None else min(lse_prefix, columns[0]),
        ),
    )
    if lse_prefix is None:
        return out, lse
    return out, lse, lse if lse_prefix == sum(columns) else prefix


@dataclasses.dataclass(frozen=True)
class _Form:
    """What a kernel is made for."""

    heads: int
    width: int
    paired: bool
    prefix: int | None  # entries of the first list whose sum is wanted on its own

    @property
    def block(self):  # keys of one step
        return KEYS * (1 + self.paired)

    @property
    def stages(self):
        return 1 if self.paired else 2

    @property
    def list_slots(self):  # the lists of the blocks whose rows are held, and of the next
        return self.stages + 1

    @property
    def tail(self):  # columns of a key that are no values
        return self.width - VALUES

    @property
    def transforms(self):
        """Of all operands. Alone, a block's 64 x 64 scores are two groups of 32 columns: 128-byte rows would not fit."""
        columns = 64 if self.paired else 32
        return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))


@functools.partial(jax.jit, static_argnums=(5, 6))
def _attend(q, kvs, lists, lengths, sink, scale, form):
    """(out, lse, lse of the prefix); the last is garbage without a prefix."""
    tokens = q.shape[0]
    starts, blocks = [], []
    lists = list(lists)
    for i, (indices, length) in enumerate(zip(lists, lengths)):
        width = indices.shape[1]
        if length is None:
            blocks.append(jnp.full((tokens,), -(-width // form.block), jnp.int32))
        else:
            length = jnp.clip(length, 0, width)
            indices = jnp.where(jnp.arange(width) < length[:, None], indices, -1)
            blocks.append(-(-length // form.block))
        # An index below 0 is a large unsigned one: TMA fills rows from the last on with zeros.
        fill = ((0, 0), (0, -width % form.block))
        lists[i] = lax.bitcast_convert_type(jnp.pad(indices, fill, constant_values=-1), jnp.uint32)
        starts.append(kvs[i].shape[0])
    groups = -(-form.heads // HEADS)
    grid = (tokens * (groups // 2 if form.paired else groups),)
    body = functools.partial(_body, form=form, rows=tuple(starts), scale=scale * _LOG2_E)
    aligned = groups * HEADS
    out, lse, prefix = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((tokens, form.heads, VALUES), jnp.bfloat16),
            jax.ShapeDtypeStruct((tokens, aligned), jnp.float32),
            jax.ShapeDtypeStruct((tokens, aligned if form.prefix is not None else 1), jnp.float32),
        ),
        grid=grid,
        grid_names=("work",),
        num_threads=_WARPGROUPS,
        thread_name="wg",
        scratch_types=_scratch(form),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=512 if form.paired else 0,  # rows of scores lie in two warps, or in one
        ),
        **(dict(cluster=(2,), cluster_names=("pair",)) if form.paired else {}),
    )(q, jnp.pad(sink, (0, aligned - form.heads)), *kvs, *lists, *blocks)
    return out, lse[:, : form.heads], prefix[:, : form.heads]


def _scratch(form):
    bf16, f32 = jnp.bfloat16, jnp.float32
    tensor = functools.partial(plgpu.Barrier, orders_tensor_core=True)

    def ready(**kwargs):
        """A barrier on which the products wait: for both thread blocks of a pair."""
        if not form.paired:
            return plgpu.Barrier(**kwargs)
        return plgpu.ClusterBarrier(collective_axes=("pair",), **kwargs)

    scratch = dict(
        q_s=plgpu.SMEM((HEADS, form.width), bf16, transforms=form.transforms),
        k_s=plgpu.SMEM((form.stages, _CHUNKS, KEYS, CHUNK), bf16, transforms=form.transforms),
        p_s=plgpu.SMEM((HEADS, form.block), bf16, transforms=form.transforms),
        list_s=plgpu.SMEM((form.list_slots, form.block), jnp.uint32),
        factor_s=plgpu.SMEM((HEADS,), f32),
        scores=plgpu.TMEM((HEADS, form.block), f32, collective=form.paired),
        acc=[plgpu.TMEM((HEADS, CHUNK), f32, collective=form.paired) for _ in range(_CHUNKS)],
        listed=plgpu.Barrier(num_barriers=form.list_slots),
        q_full=plgpu.Barrier(),
        k_full=plgpu.Barrier(num_arrivals=_CHUNKS + (form.tail > 0), num_barriers=form.stages),
        k_empty=tensor(num_barriers=form.stages),
        scored=tensor(),
        factor_ready=plgpu.Barrier(),
        ready=ready(num_arrivals=2, orders_tensor_core=True),  # probabilities are stored, the accumulator is scaled
        added=tensor(),
    )
    if form.tail:
        scratch |= dict(tail_s=plgpu.SMEM((form.stages, KEYS, form.tail), bf16, transforms=form.transforms))
    if form.paired:
        scratch |= dict(
            v_s=plgpu.SMEM((_CHUNKS, form.block, CHUNK // 2), bf16, transforms=form.transforms),
            v_full=plgpu.Barrier(num_arrivals=_CHUNKS),
            v_empty=tensor(),
            k_ready=ready(),
            v_ready=ready(),
        )
    return scratch


def _body(q_ref, sink_ref, *refs, form, rows, scale, **scratch):
    count = len(rows)
    kv_refs, list_refs, block_refs = (refs[i * count : (i + 1) * count] for i in range(3))
    out_ref, lse_ref, prefix_ref = refs[3 * count :]
    s = _Scratch(**scratch)
    wg, work = lax.axis_index("wg"), lax.axis_index("work")
    groups = -(-form.heads // HEADS)
    if form.paired:
        rank = lax.axis_index("pair")
        token, group = work // (groups // 2), lax.rem(work, groups // 2) * 2 + rank
    else:
        rank = 0
        token, group = work // groups, lax.rem(work, groups)
    counts = [ref[token] for ref in block_refs]
    first = counts[0]
    # At least one block, of nothing if need be, so that accumulator and sums are defined.
    steps = jnp.maximum(sum(counts), 1)
    call = _Call(form, rows, scale, token, group, rank, first, steps)

    @pl.when(wg == _LOADER)
    def _():
        _load(call, q_ref, kv_refs, list_refs, s)

    @pl.when(wg == _SOFTMAX)
    def _():
        _softmax(call, sink_ref, lse_ref, prefix_ref, s)

    @pl.when(wg == _MULTIPLIER)
    def _():
        _multiply(call, out_ref, s)


@dataclasses.dataclass(frozen=True)
class _Call:
    """One thread block's work: `first` blocks of the first list, `steps` in all."""

    form: _Form
    rows: tuple[int, ...]
    scale: float
    token: jax.Array
    group: jax.Array
    rank: jax.Array | int
    first: jax.Array
    steps: jax.Array

    @property
    def heads(self):  # of a thread block, without the unused rows
        return min(self.form.heads, HEADS)

    def per_list(self, step, function):
        """Runs ``function(number of the list, its block)`` for the list that block `step` belongs to."""
        if len(self.rows) == 1:
            function(0, step)
            return

        @pl.when(step < self.first)
        def _():
            function(0, step)

        @pl.when(step >= self.first)
        def _():
            function(1, step - self.first)


class _Scratch:
    def __init__(self, **refs):
        self.__dict__ |= refs


def _load(call, q_ref, kv_refs, list_refs, s):
    """Gathers every block's rows as soon as the products that read what lay in their place are done."""
    form, steps = call.form, call.steps

    def fetch(step):
        """Starts copying the list of a block, if there is one more."""

        @pl.when(step < steps)
        def _():
            slot = lax.rem(step, form.list_slots)

            def copy(number, block):
                # A call of no block at all has the first of the last list, of which every entry is none.
                source = list_refs[number].at[call.token, pl.ds(block * form.block, form.block)]
                plgpu.copy_gmem_to_smem(source, s.list_s.at[slot], s.listed.at[slot])

            call.per_list(step, copy)

    heads = pl.ds(call.group * HEADS, call.heads)
    plgpu.copy_gmem_to_smem(q_ref.at[call.token, heads], s.q_s.at[pl.ds(0, call.heads)], s.q_full)
    fetch(jnp.int32(0))

    def step(i, _):
        slot, place = lax.rem(i, form.stages), lax.rem(i, form.list_slots)

        @pl.when(i >= form.stages)
        def _():
            plgpu.barrier_wait(s.k_empty.at[slot])

        # Of the list that lies there the probabilities are made, or its rows' place would not be free.
        if not form.paired:
            fetch(i + 1)
        plgpu.barrier_wait(s.listed.at[place])

        def gather_keys(number, _):
            own = s.list_s.at[place, pl.ds(call.rank * KEYS, KEYS)]

            def chunk(c, _):  # a loop: the instructions of all chunks at once take too many registers
                _gather(s.k_s.at[slot, c], kv_refs[number], own, s.k_full.at[slot], pl.multiple_of(c * CHUNK, CHUNK))

            lax.fori_loop(0, _CHUNKS, chunk, None)
            if form.tail:
                _gather(s.tail_s.at[slot], kv_refs[number], own, s.k_full.at[slot], VALUES)

        call.per_list(i, gather_keys)
        if not form.paired:
            return

        @pl.when(i > 0)
        def _():
            plgpu.barrier_wait(s.v_empty)

        fetch(i + 1)

        def gather_values(number, _):
            def chunk(c, _):
                first = pl.multiple_of(c * CHUNK + call.rank * (CHUNK // 2), CHUNK // 2)
                _gather(s.v_s.at[c], kv_refs[number], s.list_s.at[place], s.v_full, first)

            lax.fori_loop(0, _CHUNKS, chunk, None)

        call.per_list(i, gather_values)

    lax.fori_loop(0, steps, step, None)

    def drain(i, _):
        plgpu.barrier_wait(s.k_empty.at[lax.rem(i, form.stages)])

    lax.fori_loop(jnp.maximum(steps - form.stages, 0), steps, drain, None)
    if form.paired:
        plgpu.barrier_wait(s.v_empty)


def _gather(tile_ref, kv_ref, list_ref, barrier, column):
    """Copies columns from `column` on of the listed rows (uint32 [n] in shared memory; zeros from the last row on) into
    a tile [n, columns] by TMA gather4: one arrival."""
    columns = pl.ds(column, tile_ref.shape[-1])
    if not mosaic.is_interpreted():
        places = plgpu.load(list_ref, layout=plgpu.Layout.TMA_INDICES)
        plgpu.copy_gmem_to_smem(kv_ref.at[places, columns], tile_ref, barrier)
        return
    places, rows = list_ref[...], kv_ref.shape[0]
    values = kv_ref[:, columns][jnp.minimum(places, rows - 1).astype(jnp.int32)]
    tile_ref[...] = jnp.where((places < rows)[:, None], values, jnp.zeros_like(values))
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)


def _layout(form, columns):
    """Registers of an accumulator of 64 rows."""
    return plgpu.Layout.TCGEN05_M64_COLLECTIVE(columns) if form.paired else plgpu.Layout.WGMMA


def _softmax(call, sink_ref, lse_ref, prefix_ref, s):
    form, steps = call.form, call.steps
    layout = _layout(form, form.block)
    per_head, per_key = layout.reduce(1), layout.reduce(0)
    head = pl.ds(call.group * HEADS, HEADS)

    def spread(vector):
        return lax.broadcast_in_dim(vector, (HEADS, form.block), (0,))

    def step(i, carry):
        high, total, prefix_high, prefix_total = carry
        plgpu.barrier_wait(s.scored)
        scores = plgpu.async_load_tmem(s.scores, layout=layout)
        plgpu.wait_load_tmem()
        places = plgpu.load(s.list_s.at[lax.rem(i, form.list_slots)], layout=per_key)
        rows = jnp.where(i < call.first, call.rows[0], call.rows[-1]).astype(jnp.uint32)
        listed = lax.broadcast_in_dim(places < rows, (HEADS, form.block), (1,))
        scores = jnp.where(listed, scores * call.scale, -jnp.inf)
        new = jnp.maximum(high, jnp.max(scores, axis=1))
        shrink = jnp.exp2(high - new)
        s.factor_s[...] = shrink
        plgpu.barrier_arrive(s.factor_ready)
        p = jnp.exp2(scores - spread(new))
        total = total * shrink + jnp.sum(p, axis=1)

        @pl.when(i > 0)
        def _():
            plgpu.barrier_wait(s.added)  # the product that read the probabilities before these

        s.p_s[...] = p.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.barrier_arrive(s.ready)
        if form.prefix is not None:
            within = (i < call.first) & (i * form.block < form.prefix)
            prefix_high = jnp.where(within, new, prefix_high)
            prefix_total = jnp.where(within, total, prefix_total)
        return new, total, prefix_high, prefix_total

    start = plgpu.layout_cast(jnp.full((HEADS,), START, jnp.float32), per_head)
    zero = plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), per_head)
    high, total, prefix_high, prefix_total = lax.fori_loop(0, steps, step, (start, zero, start, zero))

    sink = plgpu.load(sink_ref.at[head], layout=per_head, optimized=False)
    denominator = total + jnp.exp2(sink * _LOG2_E - high)
    empty = denominator == 0
    plgpu.barrier_wait(s.added)  # the last factor has been used
    s.factor_s[...] = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, denominator))
    plgpu.barrier_arrive(s.factor_ready)
    lse_ref[call.token, head] = _natural_log(total, high)
    if form.prefix is not None:
        prefix_ref[call.token, head] = _natural_log(prefix_total, prefix_high)


def _natural_log(total, high):
    """log(total * 2^high), -inf where total is 0, NaN where it is."""
    log = (high + jnp.log2(jnp.where(total > 0, total, 1.0))) * (1 / _LOG2_E)
    return jnp.where(total > 0, log, jnp.where(total == 0, -jnp.inf, total))


def _multiply(call, out_ref, s):
    """Issues the products, and keeps the accumulator: scales its rows before a block is added, and writes it out."""
    form, steps = call.form, call.steps
    axis = dict(collective_axis="pair") if form.paired else {}
    layout = _layout(form, CHUNK)

    def wait_for_both(full, ready):
        """Waits for copies, and in a pair for those of both thread blocks."""
        plgpu.barrier_wait(full)
        if form.paired:
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(ready)

    def score(i):
        slot = lax.rem(i, form.stages)
        wait_for_both(s.k_full.at[slot], s.k_ready if form.paired else None)
        for c in range(_CHUNKS):
            part = s.q_s.at[:, pl.ds(c * CHUNK, CHUNK)]
            plgpu.tcgen05_mma(s.scores, part, s.k_s.at[slot, c].T, accumulate=c > 0, **axis)
        if form.tail:
            plgpu.tcgen05_mma(s.scores, s.q_s.at[:, pl.ds(VALUES, form.tail)], s.tail_s.at[slot].T, **axis)
        if form.paired:
            plgpu.tcgen05_commit_arrive(s.k_empty.at[slot], **axis)
        plgpu.tcgen05_commit_arrive(s.scored, **axis)

    def add(i):
        slot = lax.rem(i, form.stages)
        for c in range(_CHUNKS):
            values = s.v_s.at[c] if form.paired else s.k_s.at[slot, c]
            plgpu.tcgen05_mma(s.acc[c], s.p_s, values, accumulate=i > 0, **axis)
        plgpu.tcgen05_commit_arrive(s.v_empty if form.paired else s.k_empty.at[slot], **axis)
        plgpu.tcgen05_commit_arrive(s.added, **axis)

    def factor():
        plgpu.barrier_wait(s.factor_ready)
        return lax.broadcast_in_dim(plgpu.load(s.factor_s, layout=layout.reduce(1)), (HEADS, CHUNK), (0,))

    def scale(i):
        shrink = factor()

        @pl.when(i > 0)
        def _():
            plgpu.barrier_wait(s.added)
            for acc in s.acc:
                values = plgpu.async_load_tmem(acc, layout=layout)
                plgpu.wait_load_tmem()
                plgpu.async_store_tmem(acc, values * shrink)
            plgpu.commit_tmem()

        plgpu.barrier_arrive(s.ready)

    plgpu.barrier_wait(s.q_full)

    def step(i, _):
        @pl.when(i > 0)
        def _():
            scale(i - 1)
            if form.paired:
                wait_for_both(s.v_full, s.v_ready)
            plgpu.barrier_wait(s.ready)
            add(i - 1)

        @pl.when(i < steps)
        def _():
            score(i)

    lax.fori_loop(0, steps + 1, step, None)
    inverse = factor()
    plgpu.barrier_wait(s.added)
    heads = pl.ds(call.group * HEADS, call.heads)
    for c, acc in enumerate(s.acc):  # no rows are needed any more: the output goes out from the place of the first
        values = plgpu.async_load_tmem(acc, layout=layout)
        plgpu.wait_load_tmem()
        s.k_s[0, c] = (values * inverse).astype(jnp.bfloat16)
        plgpu.commit_smem()
        to = out_ref.at[call.token, heads, pl.ds(c * CHUNK, CHUNK)]
        plgpu.copy_smem_to_gmem(s.k_s.at[0, c, pl.ds(0, call.heads)], to)
    plgpu.wait_smem_to_gmem(0)


def _require(q, kvs, v_width, p_dtype):
    heads, width = q.shape[1:]
    if heads % 8 or (heads > HEADS and heads % HEADS):
        raise NotImplementedError(
            f"the sm100 kernel takes heads in multiples of 8 up to {HEADS} and of {HEADS} above, not {heads}."
        )
    if width not in WIDTHS or v_width != VALUES:
        raise NotImplementedError(
            f"the sm100 kernel takes keys of width {' or '.join(map(str, WIDTHS))} and values of {VALUES}, not {width} and "
            f"{v_width}."
        )
    if len(kvs) > 2:
        raise NotImplementedError(f"the sm100 kernel takes one or two lists, not {len(kvs)}.")
    for dtype in (q.dtype, p_dtype, *(kv.dtype for kv in kvs)):
        if dtype != jnp.bfloat16:
            raise NotImplementedError(f"the sm100 kernel takes bfloat16 queries, rows and probabilities, not {dtype}.")
