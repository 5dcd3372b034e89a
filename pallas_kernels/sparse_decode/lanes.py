"""The rest of the Hopper decode kernel that is written lane by lane: queries, the softmax over tokens, the output.

Scores come as [64 tokens, heads] in the layout of a wgmma accumulator: lane `l` of warp `w` has tokens
``16 w + l // 4`` and eight further down, and of every eight heads the two at ``2 * (l % 4)``. A head's maximum and sum
therefore run over two registers, eight lanes, four warps and two warpgroups. Maxima meet in shared memory, atomically,
as integers of the same order; sums stay apart until the very end and are added in a fixed order. Each piece has a twin
in plain Pallas.
"""

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
from pallas_kernels.sparse_decode import rows
from pallas_kernels.sparse_decode.rows import HALF_TILE, SCALAR, WGMMA, asm, i32, i32_type, permute

PER_HEAD = WGMMA.reduce(0)
PER_TOKEN = WGMMA.reduce(1)
LANE_SUMS = plgpu.Layout.WG_STRIDED((256,), vec_size=2)
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
MATH = 2  # warpgroups that do arithmetic
VALUES = 512
_LANE_BITS = (16, 8, 4)  # of lanes that have the same heads


def load_queries(q_ref, q_s, first, wg):
    """Rows first .. of q_ref (bf16 [rows, width], device memory) to q_s [heads, width] (TILE), columns in `key_order`.

    By both math warpgroups, each a part; a barrier has to follow.
    """
    heads, width = q_s.shape

    def twin(q_ref, q_s, first, wg):
        @pl.when(wg == 0)
        def _():
            q_s[...] = rows.key_order(q_ref[pl.ds(first, heads)])

    @mosaic.lane_code(arg_types=(plgpu.RefType(), plgpu.RefType(TILE), SCALAR, SCALAR), twin=twin)
    def load(_, q_ref, q_s, first, wg):
        i64, i8 = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(8)
        four = ir.VectorType.get((4,), i32_type())
        thread = arith.addi(arith.muli(mosaic.scalar(wg), i32(128)), arith.remui(rows.own_thread(), i32(128)))
        start = arith.muli(arith.extui(i64, mosaic.scalar(first)), utils.c(2 * width, i64))
        source = utils.getelementptr(mosaic.global_pointer(q_ref), [start], i8)
        to = utils.memref_ptr(q_s)
        pieces = width // 16
        for k in range(-(-heads * pieces // (128 * MATH))):
            piece = arith.addi(thread, i32(128 * MATH * k))
            if (k + 1) * 128 * MATH > heads * pieces:
                piece = arith.minsi(piece, i32(heads * pieces - 1))  # some pieces are written twice
            words = []
            for part in range(2):
                at = arith.addi(arith.muli(piece, i32(32)), i32(16 * part))
                loaded = llvm.load(four, utils.getelementptr(source, [at], i8), alignment=16)
                words += [vector.extract(loaded, [], ir.DenseI64ArrayAttr.get([i])) for i in range(4)]
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


class Maxima:
    """The running maximum of every head in shared memory, in three copies, which take turns.

    A turn: `offer` by both warpgroups, a barrier, `read` by both and `pass_on` by one, another barrier. In turn t copy
    t % 3 becomes this turn's maximum, the one before is the last turn's, and the one after is made ready.
    """

    def __init__(self, ref):
        self.ref, self.heads = ref, ref.shape[1]

    @staticmethod
    def scratch(heads: int):
        if mosaic.is_interpreted():  # maxima before a turn in three copies, and what both warpgroups offer
            return plgpu.SMEM((3 + MATH, heads), jnp.float32)
        return plgpu.SMEM((3, heads), jnp.int32)

    def reset(self, turn):
        """Forgets all maxima before `turn`, which must not be the one after another; by one warpgroup."""

        def twin(ref, turn):
            ref[lax.rem(turn, 3)] = jnp.full((self.heads,), START, jnp.float32)

        @mosaic.lane_code(arg_types=(plgpu.RefType(), SCALAR), twin=twin)
        def reset(_, ref, turn):
            head = arith.remui(rows.own_thread(), i32(self.heads))
            start = _key(utils.c(START, ir.F32Type.get()))
            for copy in (0, 2):
                at = arith.addi(head, self._copy(turn, copy))
                llvm.store(start, utils.getelementptr(utils.memref_ptr(ref), [at], i32_type()))

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

    def read(self, turn):
        """The maxima of every head [heads] before this turn and with it."""

        def twin(ref, turn):
            before = ref[lax.rem(turn, 3)]
            return before, jnp.maximum(before, jnp.maximum(ref[3], ref[4]))

        @mosaic.lane_code(
            arg_types=(plgpu.RefType(), SCALAR),
            return_type=(plgpu.ShapeDtypeStruct((self.heads,), jnp.float32, layout=PER_HEAD),) * 2,
            twin=twin,
        )
        def read(_, ref, turn):
            found = []
            for copy in (2, 0):
                start = arith.addi(arith.muli(_quad(), i32(2)), self._copy(turn, copy))
                registers = [_two_keys(ref, arith.addi(start, i32(8 * i))) for i in range(self.heads // 8)]
                registers = [vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), r) for r in registers]
                found.append(_per_head(registers, (self.heads,)))
            return tuple(found)

        return read(self.ref, turn)

    def pass_on(self, turn):
        """Makes the next turn's copy ready; by one warpgroup."""

        def twin(ref, turn):
            before = ref[lax.rem(turn, 3)]
            ref[lax.rem(turn + 1, 3)] = jnp.maximum(before, jnp.maximum(ref[3], ref[4]))

        @mosaic.lane_code(arg_types=(plgpu.RefType(), SCALAR), twin=twin)
        def pass_on(_, ref, turn):
            head = arith.remui(rows.own_thread(), i32(self.heads))
            here, there = (
                utils.getelementptr(utils.memref_ptr(ref), [arith.addi(head, self._copy(turn, copy))], i32_type())
                for copy in range(2)
            )
            llvm.store(llvm.load(i32_type(), here), there)

        pass_on(self.ref, turn)

    def add(self, sums, p, turn):
        """`sums` of earlier turns, brought to this turn's maximum, and those of p [64, heads] over tokens.

        sums: float32 [256], of which every lane has those of two heads for its own warp; `offer_sums` tells them.
        """

        def twin(ref, sums, p, turn):
            before, now = ref[lax.rem(turn, 3)], jnp.maximum(ref[lax.rem(turn, 3)], jnp.maximum(ref[3], ref[4]))
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
            before, now = (_two_keys(ref, arith.addi(head, self._copy(turn, copy))) for copy in (2, 0))
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


def offer_sums(sums, sums_s, wg):
    """Writes the sums that `Maxima.add` gathered to sums_s (float32 [8, heads]); after a barrier, `read_sums`."""
    heads = sums_s.shape[1]

    def twin(sums_s, sums, wg):
        sums_s[wg] = sums[:heads]

    @mosaic.lane_code(arg_types=(plgpu.RefType(), LANE_SUMS, SCALAR), twin=twin)
    def offer(_, sums_s, sums, wg):
        warp = arith.divui(arith.remui(rows.own_thread(), i32(128)), i32(32))
        row = arith.addi(arith.muli(mosaic.scalar(wg), i32(4)), warp)
        head = _first_head(heads)
        at = arith.addi(arith.muli(row, i32(heads)), head)
        at = llvm.ptrtoint(i32_type(), utils.getelementptr(utils.memref_ptr(sums_s), [at], i32_type()))
        text = f"{{ .reg .pred p; setp.lt.u32 p, $3, {heads};\n@p st.shared.v2.f32 [$0], {{$1, $2}}; }}"
        asm(text, "r,f,f,r,~{memory}", [at, *_elements(sums.registers.flat[0]), head])

    offer(sums_s, sums, wg)


def read_sums(sums_s):
    """The sums [heads] of all that was offered, added in a fixed order."""
    warps = 2 if mosaic.is_interpreted() else 8
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
        lane = arith.remui(rows.own_thread(), i32(32))
        warp = arith.divui(arith.remui(rows.own_thread(), i32(128)), i32(32))
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

    accs: float32 [128, heads] in `value_order`, of values ``256 * wg`` .. and of the 128 after those.
    """
    heads = accs[0].shape[1]
    parts = len(accs)

    def twin(out_ref, row, wg, *accs):
        for i, acc in enumerate(accs):
            block = rows.value_order_back(acc).T.astype(out_ref.dtype)
            out_ref[pl.ds(row, heads), pl.ds((wg * parts + i) * 128, 128)] = block

    @mosaic.lane_code(arg_types=(plgpu.RefType(), SCALAR, SCALAR, *[WGMMA] * parts), twin=twin)
    def store(_, out_ref, row, wg, *accs):
        i64 = ir.IntegerType.get_signless(64)
        f32 = ir.F32Type.get()
        wide = jnp.dtype(out_ref_dtype) == jnp.float32
        size = 4 if wide else 2
        lane = arith.remui(rows.own_thread(), i32(32))
        warp = arith.divui(arith.remui(rows.own_thread(), i32(128)), i32(32))
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
        thread = arith.remui(rows.own_thread(), i32(128))
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
    lane = arith.remui(rows.own_thread(), i32(32))
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
    lane = arith.remui(rows.own_thread(), i32(32))
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


def _two_keys(ref, at):
    """Two float32 from element `at` of integers of the same order."""
    keys = llvm.load(
        ir.VectorType.get((2,), i32_type()), utils.getelementptr(utils.memref_ptr(ref), [at], i32_type()), alignment=8
    )
    return [_from_key(key) for key in _elements(keys)]


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
    return arith.remui(rows.own_thread(), i32(4))
