"""The rest of the Hopper decode kernel that is written lane by lane: queries, the softmax over tokens, the output.

Scores come as [64 tokens, heads] in the layout of a wgmma accumulator: lane `l` of warp `w` has tokens
``16 w + l // 4`` and eight further down, and of every eight heads the two at ``2 * (l % 4)``. A head's maximum and sum
therefore run over two registers, eight lanes, four warps and two warpgroups. Maxima meet in shared memory, atomically,
as integers of the same order; sums stay apart until the very end and are added in a fixed order. Each piece has a twin
in plain Pallas.
"""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels import mosaic
from pallas_kernels.sparse_attention.online_softmax import START
from pallas_kernels.lane_ops import SCALAR, WGMMA, asm, fragment, i32, i32_type, own_thread, permute
from pallas_kernels.sparse_decode.operands import HALF_TILE, key_order, value_order_back

PER_HEAD = WGMMA.reduce(0)
PER_TOKEN = WGMMA.reduce(1)
LANE_SUMS = plgpu.Layout.WG_STRIDED((256,), vec_size=2)
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
VALUES = 512
_LAG = 8.0  # powers of two
_LANE_BITS = (16, 8, 4)  # of lanes that have the same heads


def load_queries(q_ref, q_s, first, wg, warpgroups: int):
    """Rows first .. of q_ref (bf16 [rows, width], device memory) to q_s [heads, width] (TILE), columns in `key_order`.

    By `warpgroups` warpgroups, each a part; a barrier has to follow.
    """
    heads, width = q_s.shape

    def twin(q_ref, q_s, first, wg):
        @pl.when(wg == 0)
        def _():
            q_s[...] = key_order(q_ref[pl.ds(first, heads)])

    @mosaic.lane_code(arg_types=(plgpu.RefType(), plgpu.RefType(TILE), SCALAR, SCALAR), twin=twin)
    def load(_, q_ref, q_s, first, wg):
        i64, i8 = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(8)
        four = ir.VectorType.get((4,), i32_type())
        thread = arith.addi(arith.muli(mosaic.scalar(wg), i32(128)), arith.remui(own_thread(), i32(128)))
        start = arith.muli(arith.extui(i64, mosaic.scalar(first)), utils.c(2 * width, i64))
        source = utils.getelementptr(mosaic.global_pointer(q_ref), [start], i8)
        to = utils.memref_ptr(q_s)
        pieces = width // 16
        threads = 128 * warpgroups
        count = -(-heads * pieces // threads)

        def fetch(k):
            piece = arith.addi(thread, i32(threads * k))
            if (k + 1) * threads > heads * pieces:
                piece = arith.minsi(piece, i32(heads * pieces - 1))  # some pieces are written twice
            words = []
            for part in range(2):
                at = arith.addi(arith.muli(piece, i32(32)), i32(16 * part))
                loaded = llvm.load(four, utils.getelementptr(source, [at], i8), alignment=16)
                words += [vector.extract(loaded, [], ir.DenseI64ArrayAttr.get([i])) for i in range(4)]
            return piece, words

        fetched = [fetch(k) for k in range(count)]  # all before the first is needed: one trip to memory
        for piece, words in fetched:
            row, column = arith.divui(piece, i32(pieces)), arith.remui(piece, i32(pieces))
            within = arith.remui(row, i32(8))
            at = arith.addi(arith.muli(arith.divui(row, i32(8)), i32(width // 64 * 1024)), arith.muli(within, i32(128)))
            at = arith.addi(at, arith.muli(arith.divui(column, i32(4)), i32(1024)))
            for part, selector in enumerate((0x5410, 0x7632)):
                pairs = [permute(words[2 * i], words[2 * i + 1], selector) for i in range(4)]
                chunk = arith.addi(arith.muli(arith.remui(column, i32(4)), i32(2)), i32(part))
                place = arith.addi(at, arith.muli(arith.xori(chunk, within), i32(16)))
                llvm.store(vector.from_elements(four, pairs), utils.getelementptr(to, [place], i8), alignment=16)

    load(q_ref, q_s, first, wg)


def copy_heads(ref, to, first):
    """Starts copying elements first .. of ref (float32, flat, device memory) to `to`, float32 [128], by a warpgroup.

    Behind ref's end the last one is repeated. By cp.async: they are there with the rows that the same threads copy next.
    """
    size = ref.shape[0]

    def twin(ref, to, first):
        to[...] = lax.dynamic_slice(jnp.pad(ref[...], (0, 127), mode="edge"), (first,), (128,))

    @mosaic.lane_code(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR), twin=twin)
    def copy(_, ref, to, first):
        f32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(64)
        own = arith.remui(own_thread(), i32(128))
        at = arith.minsi(arith.addi(mosaic.scalar(first), own), i32(size - 1))
        source = utils.getelementptr(mosaic.global_pointer(ref), [at], f32)
        to = utils.getelementptr(utils.memref_ptr(to), [own], f32)
        addresses = [llvm.ptrtoint(i32_type(), to), llvm.ptrtoint(i64, source)]
        asm("cp.async.ca.shared.global [$0], [$1], 4;", "r,l,~{memory}", addresses)

    copy(ref, to, first)


def scores(products, factor, bias_ref):
    """products [64 tokens, heads] times `factor` (float32 scalar) plus bias_ref (float32 [64])."""

    def twin(products, factor, bias_ref):
        bias = plgpu.load(bias_ref, layout=PER_TOKEN)
        return products * factor + lax.broadcast_in_dim(bias, products.shape, [0])

    @mosaic.lane_code(
        arg_types=(WGMMA, SCALAR, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(products.shape, jnp.float32, layout=WGMMA),
        twin=twin,
    )
    def multiply_add(_, products, factor, bias_ref):
        f32, factor = ir.F32Type.get(), mosaic.scalar(factor)
        lane = arith.remui(own_thread(), i32(32))
        warp = arith.divui(arith.remui(own_thread(), i32(128)), i32(32))
        token = arith.addi(arith.muli(warp, i32(16)), arith.divui(lane, i32(4)))
        biases, tokens = utils.memref_ptr(bias_ref), [token, arith.addi(token, i32(8))]
        bias = [llvm.load(f32, utils.getelementptr(biases, [at], f32)) for at in tokens]
        registers = np.empty(products.registers.size, dtype=object)
        for i, register in enumerate(products.registers.flat):  # of eight heads, first the upper tokens, then the lower
            found = [llvm.intr_fma(x, factor, bias[i % 2]) for x in _elements(register)]
            registers[i] = vector.from_elements(ir.VectorType.get((2,), f32), found)
        return fragment(registers, products.shape)

    return multiply_add(products, factor, bias_ref)


class Maxima:
    """What the scores of every head are taken against: their running maximum, or a little less.

    It only follows the maximum once that is more than `_LAG` above: probabilities stay under 2^_LAG, and sums are
    rarely to be brought to another maximum. A turn: `offer` by every warpgroup, a barrier, `moved`, `read` by every one
    and `pass_on` by one, another barrier. In shared memory, in three copies which take turns, the maxima offered (which
    start at what held before) and what held before a turn. In turn t copies t % 3 count, and t + 1's are made ready.
    """

    def __init__(self, ref):
        self.ref, self.heads = ref, ref.shape[1]

    @staticmethod
    def scratch(heads: int, warpgroups: int):
        if mosaic.is_interpreted():  # what held before a turn in three copies, and what each warpgroup offers
            return plgpu.SMEM((3 + warpgroups, heads), jnp.float32)
        return plgpu.SMEM((6, heads), jnp.int32)

    def reset(self, turn):
        """Forgets all maxima before `turn`, which must not be the one after another; by one warpgroup."""

        def twin(ref, turn):
            ref[lax.rem(turn, 3)] = jnp.full((self.heads,), START, jnp.float32)

        @mosaic.lane_code(arg_types=(plgpu.RefType(), SCALAR), twin=twin)
        def reset(_, ref, turn):
            head = arith.remui(own_thread(), i32(self.heads))
            start = utils.c(START, ir.F32Type.get())
            at = arith.addi(head, self._copy(turn, 0))
            self._set(ref, at, start)

        reset(self.ref, turn)

    def offer(self, scores, turn, wg):
        """Takes in the scores [64, heads] of a warpgroup."""

        def twin(ref, scores, _, wg):
            ref[3 + wg] = jnp.max(scores, axis=0)

        @mosaic.lane_code(arg_types=(plgpu.RefType(), WGMMA, SCALAR, SCALAR), twin=twin)
        def offer(_, ref, scores, turn, wg):
            held, head = _across_lanes(scores, arith.maximumf, float("-inf"))
            at = arith.addi(head, self._copy(turn, 0))
            at = llvm.ptrtoint(i32_type(), utils.getelementptr(utils.memref_ptr(ref), [at], i32_type()))
            text = (
                f"{{ .reg .pred p; setp.lt.u32 p, $3, {self.heads};\n"
                "@p red.shared.max.s32 [$0], $1; @p red.shared.max.s32 [$0+4], $2; }"
            )
            asm(text, "r,r,r,r,~{memory}", [at, *[_key(x) for x in held], head])

        offer(self.ref, scores, turn, wg)

    def moved(self, turn):
        """Whether what holds changes in this turn for one of the heads: 0 or 1, the same for all threads."""

        def twin(ref, turn):
            before, now = self._twin(ref, turn)
            return jnp.any(before != now).astype(jnp.int32)

        @mosaic.lane_code(
            arg_types=(plgpu.RefType(), SCALAR),
            return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR),
            twin=twin,
        )
        def moved(_, ref, turn):
            lane = arith.remui(own_thread(), i32(32))
            head = arith.remui(arith.muli(lane, i32(2)), i32(self.heads))
            before, now = self._before_and_now(ref, turn, head)
            pairs = [[llvm.bitcast(i32_type(), x) for x in two] for two in zip(before, now)]
            changed = arith.ori(*[arith.cmpi(arith.CmpIPredicate.ne, *two) for two in pairs])
            changed = arith.extui(i32_type(), changed)
            text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
            found = asm(text, "=r,r", [changed], i32_type())
            found = arith.extui(i32_type(), arith.cmpi(arith.CmpIPredicate.ne, found, i32(0)))
            register = np.array(found, dtype=object)
            return mgpu.FragmentedArray(_registers=register, _layout=SCALAR.to_mgpu(), _is_signed=True)

        return moved(self.ref, turn)

    def before(self, turn):
        """What held for every head [heads] before this turn."""

        @mosaic.lane_code(
            arg_types=(plgpu.RefType(), SCALAR),
            return_type=plgpu.ShapeDtypeStruct((self.heads,), jnp.float32, layout=PER_HEAD),
            twin=lambda ref, turn: ref[lax.rem(turn, 3)],
        )
        def before(_, ref, turn):
            return self._heads(lambda head: self._held(ref, turn, head))

        return before(self.ref, turn)

    def read(self, turn):
        """What holds for every head [heads] in this turn."""

        @mosaic.lane_code(
            arg_types=(plgpu.RefType(), SCALAR),
            return_type=plgpu.ShapeDtypeStruct((self.heads,), jnp.float32, layout=PER_HEAD),
            twin=lambda ref, turn: self._twin(ref, turn)[1],
        )
        def read(_, ref, turn):
            return self._heads(lambda head: self._before_and_now(ref, turn, head)[1])

        return read(self.ref, turn)

    def pass_on(self, turn):
        """Makes the next turn's copies ready; by one warpgroup."""

        def twin(ref, turn):
            ref[lax.rem(turn + 1, 3)] = self._twin(ref, turn)[1]

        @mosaic.lane_code(arg_types=(plgpu.RefType(), SCALAR), twin=twin)
        def pass_on(_, ref, turn):
            pairs = self.heads // 2
            head = arith.muli(arith.remui(own_thread(), i32(pairs)), i32(2))
            now = self._before_and_now(ref, turn, head)[1]
            at = arith.addi(head, self._copy(turn, 1))
            for i, x in enumerate(now):
                self._set(ref, arith.addi(at, i32(i)), x)

        pass_on(self.ref, turn)

    def add(self, sums, p, turn):
        """`sums` of earlier turns, brought to this turn's maximum, and those of p [64, heads] over tokens.

        sums: float32 [256], of which every lane has those of two heads for its own warp; `offer_sums` tells them.
        """

        def twin(ref, sums, p, turn):
            before, now = self._twin(ref, turn)
            own = sums[: self.heads] * jnp.exp2(before - now) + jnp.sum(p, axis=0)
            return jnp.pad(own, (0, 256 - self.heads))

        @mosaic.lane_code(
            arg_types=(plgpu.RefType(), LANE_SUMS, WGMMA, SCALAR),
            return_type=plgpu.ShapeDtypeStruct((256,), jnp.float32, layout=LANE_SUMS),
            twin=twin,
        )
        def add(_, ref, sums, p, turn):
            held, head = _across_lanes(p, arith.addf, 0.0)
            head = arith.minsi(head, i32(self.heads - 2))  # a lane without heads of its own
            before, now = self._before_and_now(ref, turn, head)
            found = []
            for own, more, b, n in zip(_elements(sums.registers.flat[0]), held, before, now):
                f32 = ir.F32Type.get()
                shrink = llvm.inline_asm(f32, [arith.subf(b, n)], "ex2.approx.ftz.f32 $0, $1;", "=f,f")
                found.append(llvm.intr_fma(own, shrink, more))
            register = vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), found)
            return _lane_sums(register)

        return add(self.ref, sums, p, turn)

    def _copy(self, turn, ahead):
        """First element of a copy, counted from this turn's."""
        number = arith.remui(arith.addi(mosaic.scalar(turn), i32(ahead)), i32(3))
        return arith.muli(number, i32(self.heads))

    def _set(self, ref, at, x):
        """Both copies of an element."""
        llvm.store(_key(x), utils.getelementptr(utils.memref_ptr(ref), [at], i32_type()))
        at = arith.addi(at, i32(3 * self.heads))
        llvm.store(llvm.bitcast(i32_type(), x), utils.getelementptr(utils.memref_ptr(ref), [at], i32_type()))

    def _held(self, ref, turn, head):
        """What held before, of two heads."""
        at = arith.addi(arith.addi(head, self._copy(turn, 0)), i32(3 * self.heads))
        return [llvm.bitcast(ir.F32Type.get(), bits) for bits in _two_words(ref, at)]

    def _before_and_now(self, ref, turn, head):
        """What held before and what holds now, of two heads."""
        before = self._held(ref, turn, head)
        offered = [_from_key(key) for key in _two_words(ref, arith.addi(head, self._copy(turn, 0)))]
        lag = utils.c(_LAG, ir.F32Type.get())
        now = []
        for b, o in zip(before, offered):
            above = arith.cmpf(arith.CmpFPredicate.OGT, o, arith.addf(b, lag))
            now.append(arith.select(above, o, b))
        return before, now

    def _heads(self, of):
        """An array [heads] of what of(head) tells of two heads."""
        quad = arith.muli(_quad(), i32(2))
        registers = [of(arith.addi(quad, i32(8 * i))) for i in range(self.heads // 8)]
        registers = [vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), r) for r in registers]
        return _per_head(registers, (self.heads,))

    def _twin(self, ref, turn):
        before = ref[lax.rem(turn, 3)]
        offered = functools.reduce(jnp.maximum, [ref[i] for i in range(3, ref.shape[0])])
        return before, jnp.where(offered > before + _LAG, offered, before)


def offer_sums(sums, sums_s, wg):
    """Writes the sums that `Maxima.add` gathered to sums_s (float32 [4 * warpgroups, heads]); then `read_sums`."""
    heads = sums_s.shape[1]

    def twin(sums_s, sums, wg):
        sums_s[wg] = sums[:heads]

    @mosaic.lane_code(arg_types=(plgpu.RefType(), LANE_SUMS, SCALAR), twin=twin)
    def offer(_, sums_s, sums, wg):
        warp = arith.divui(arith.remui(own_thread(), i32(128)), i32(32))
        row = arith.addi(arith.muli(mosaic.scalar(wg), i32(4)), warp)
        head = _first_head(heads)
        at = arith.addi(arith.muli(row, i32(heads)), head)
        at = llvm.ptrtoint(i32_type(), utils.getelementptr(utils.memref_ptr(sums_s), [at], i32_type()))
        text = f"{{ .reg .pred p; setp.lt.u32 p, $3, {heads};\n@p st.shared.v2.f32 [$0], {{$1, $2}}; }}"
        asm(text, "r,f,f,r,~{memory}", [at, *_elements(sums.registers.flat[0]), head])

    offer(sums_s, sums, wg)


def read_sums(sums_s):
    """The sums [heads] of all that was offered, added in a fixed order."""
    warps = sums_s.shape[0] // 4 if mosaic.is_interpreted() else sums_s.shape[0]
    total = plgpu.load(sums_s.at[0], layout=PER_HEAD)
    for i in range(1, warps):
        total = total + plgpu.load(sums_s.at[i], layout=PER_HEAD)
    return total


def write_probabilities(p_s, p):
    """p [64 tokens, heads] as bf16 [2, heads, 32] (HALF_TILE), tokens last, in two halves; by a warpgroup."""

    def twin(p_s, p):
        for half in range(2):
            p_s[half] = p[32 * half : 32 * half + 32].astype(jnp.bfloat16).T

    @mosaic.lane_code(arg_types=(plgpu.RefType(HALF_TILE), WGMMA), twin=twin)
    def write(_, p_s, p):
        heads = p.shape[1]
        lane = arith.remui(own_thread(), i32(32))
        warp = arith.divui(arith.remui(own_thread(), i32(128)), i32(32))
        matrix, row = arith.remui(arith.divui(lane, i32(8)), i32(2)), arith.remui(lane, i32(8))
        chunk = arith.addi(arith.muli(arith.remui(warp, i32(2)), i32(2)), matrix)
        chunk = arith.xori(chunk, arith.divui(row, i32(2)))  # the 64-byte swizzle
        at = arith.addi(arith.muli(arith.divui(warp, i32(2)), i32(64 * heads)), arith.muli(row, i32(64)))
        at = arith.addi(at, arith.muli(chunk, i32(16)))
        to = arith.addi(llvm.ptrtoint(i32_type(), utils.memref_ptr(p_s)), at)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        registers = p.registers.reshape(heads // 8, 2)
        for i in range(heads // 8):
            halves = [llvm.bitcast(i32_type(), arith.truncf(pair, r)) for r in registers[i]]
            asm(
                f"stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [$0+{512 * i}], {{$1, $2}};",
                "r,r,r,~{memory}",
                [to, *halves],
            )

    write(p_s, p)


def store_output(out_ref, accs, row, wg):
    """Stores sums of values, for every head of a thread block, to rows row .. of out_ref [rows, 512], device memory.

    accs: float32 [128, heads] each, in `value_order`, of values ``128 * len(accs) * wg`` .. and on.
    """
    heads = accs[0].shape[1]
    parts = len(accs)

    def twin(out_ref, row, wg, *accs):
        for i, acc in enumerate(accs):
            block = value_order_back(acc).T.astype(out_ref.dtype)
            out_ref[pl.ds(row, heads), pl.ds((wg * parts + i) * 128, 128)] = block

    @mosaic.lane_code(arg_types=(plgpu.RefType(), SCALAR, SCALAR, *[WGMMA] * parts), twin=twin)
    def store(_, out_ref, row, wg, *accs):
        i64 = ir.IntegerType.get_signless(64)
        f32 = ir.F32Type.get()
        wide = jnp.dtype(out_ref_dtype) == jnp.float32
        size = 4 if wide else 2
        lane = arith.remui(own_thread(), i32(32))
        warp = arith.divui(arith.remui(own_thread(), i32(128)), i32(32))
        first = arith.addi(mosaic.scalar(row), arith.muli(_quad(), i32(2)))
        column = arith.addi(arith.muli(warp, i32(32)), arith.muli(arith.divui(lane, i32(4)), i32(4)))
        column = arith.addi(column, arith.muli(mosaic.scalar(wg), i32(128 * parts)))
        start = arith.addi(
            arith.muli(arith.extui(i64, first), utils.c(VALUES * size, i64)),
            arith.extui(i64, arith.muli(column, i32(size))),
        )
        pointer = utils.getelementptr(mosaic.global_pointer(out_ref), [start], ir.IntegerType.get_signless(8))
        for part, acc in enumerate(accs):
            registers = acc.registers.reshape(2, heads // 8, 2)
            for i in range(heads // 8):
                values = [_elements(registers[mt, i, half]) for mt in range(2) for half in range(2)]
                for e in range(2):
                    four = vector.from_elements(ir.VectorType.get((4,), f32), [v[e] for v in values])
                    if not wide:
                        four = arith.truncf(ir.VectorType.get((4,), ir.BF16Type.get()), four)
                    offset = ((8 * i + e) * VALUES + 128 * part) * size
                    at = utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))
                    llvm.store(four, at, alignment=4 * size)

    out_ref_dtype = out_ref.dtype
    store(out_ref, row, wg, *accs)


def store_heads(ref, values, at):
    """Stores float32 values [heads], PER_HEAD, to elements at .. of ref (float32, flat, device memory)."""
    heads = values.shape[0]

    def twin(ref, values, at):
        ref[pl.ds(at, heads)] = values

    @mosaic.lane_code(arg_types=(plgpu.RefType(), PER_HEAD, SCALAR), twin=twin)
    def store(_, ref, values, at):
        i64 = ir.IntegerType.get_signless(64)
        thread = arith.remui(own_thread(), i32(128))
        first = arith.addi(mosaic.scalar(at), arith.muli(_quad(), i32(2)))
        pointer = utils.getelementptr(mosaic.global_pointer(ref), [arith.extui(i64, first)], ir.F32Type.get())
        to = llvm.ptrtoint(i64, pointer)
        for i, register in enumerate(values.registers.flat):
            text = f"{{ .reg .pred p; setp.lt.u32 p, $3, 4;\n@p st.global.v2.f32 [$0+{32 * i}], {{$1, $2}}; }}"
            asm(text, "l,f,f,r,~{memory}", [to, *_elements(register), thread])

    store(ref, values, at)


def _row_pairs(array):
    """The two tokens of every head of a lane, head after head."""
    heads = array.shape[1]
    registers = array.registers.reshape(heads // 8, 2)
    return [pair for i in range(heads // 8) for pair in zip(_elements(registers[i, 0]), _elements(registers[i, 1]))]


def _per_head(registers, shape):
    layout = PER_HEAD.to_mgpu()
    return mgpu.FragmentedArray(
        _registers=np.array(registers, dtype=object).reshape(layout.registers_shape(shape)),
        _layout=layout,
        _is_signed=None,
    )


def _first_head(heads):
    """The first of the two heads that a lane has after `_across_lanes`; at least `heads` for a lane that has none."""
    lane = arith.remui(own_thread(), i32(32))
    head, held = arith.muli(_quad(), i32(2)), _power_of_two(heads // 8)
    for bit in _LANE_BITS:
        if held > 1:
            held //= 2
            upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, i32(bit)), i32(0))
            head = arith.addi(head, arith.select(upper, i32(8 * held), i32(0)))
    return head


def _across_lanes(array, combine, neutral):
    """What `combine` makes of a warp's tokens of [64, heads]: two heads for every lane, and which is the first.

    Lanes that hold the same heads halve them among each other, as long as there are two pairs of them.
    """
    heads = array.shape[1]
    lane = arith.remui(own_thread(), i32(32))
    columns = [combine(*pair) for pair in _row_pairs(array)]
    held = list(zip(columns[::2], columns[1::2]))
    nothing = utils.c(neutral, ir.F32Type.get())
    held += [(nothing, nothing)] * (_power_of_two(len(held)) - len(held))
    for bit in _LANE_BITS:
        if len(held) == 1:
            held = [tuple(combine(x, _shuffle(x, bit)) for x in held[0])]
            continue
        upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, i32(bit)), i32(0))
        half, kept = len(held) // 2, []
        for low, high in zip(held[:half], held[half:]):
            mine = [arith.select(upper, h, x) for x, h in zip(low, high)]
            other = [arith.select(upper, x, h) for x, h in zip(low, high)]
            kept.append(tuple(combine(m, _shuffle(o, bit)) for m, o in zip(mine, other)))
        held = kept
    return held[0], _first_head(heads)


def _power_of_two(n):
    return 1 << (n - 1).bit_length()


def _two_words(ref, at):
    words = llvm.load(
        ir.VectorType.get((2,), i32_type()), utils.getelementptr(utils.memref_ptr(ref), [at], i32_type()), alignment=8
    )
    return _elements(words)


def _lane_sums(register):
    return mgpu.FragmentedArray(
        _registers=np.array([register], dtype=object).reshape(LANE_SUMS.to_mgpu().registers_shape((256,))),
        _layout=LANE_SUMS.to_mgpu(),
        _is_signed=None,
    )


def _shuffle(x, bit):
    """The value of the lane that differs in `bit`."""
    f32 = ir.F32Type.get()
    bits = llvm.bitcast(i32_type(), x)
    return llvm.bitcast(f32, nvvm.shfl_sync(i32(-1), bits, i32(bit), i32(31), nvvm.ShflKind.bfly))


def _key(x):
    """A float32 as an int32 of the same order."""
    bits = llvm.bitcast(i32_type(), x)
    return arith.xori(bits, arith.andi(arith.shrsi(bits, i32(31)), i32(0x7FFFFFFF)))


def _from_key(key):
    bits = arith.xori(key, arith.andi(arith.shrsi(key, i32(31)), i32(0x7FFFFFFF)))
    return llvm.bitcast(ir.F32Type.get(), bits)


def _elements(register):
    count = ir.VectorType(register.type).shape[0]
    return [vector.extract(register, [], ir.DenseI64ArrayAttr.get([i])) for i in range(count)]


def _quad():
    return arith.remui(own_thread(), i32(4))
