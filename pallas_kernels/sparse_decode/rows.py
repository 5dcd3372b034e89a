"""How rows of a cache lie in shared memory, and how the Hopper kernel reads them as operands of a wgmma.

A row is staged as its stored bytes, one field behind the other. Rows begin at odd multiples of 16 bytes from each
other, so that eight rows never meet in a bank. Nothing is ever written back as bf16: a thread reads the bytes that its
registers of an operand stand for and converts them there, once as keys (tokens are rows of the operand) and once as
values (tokens are columns). A dot product's terms and an output's rows may come in any order, so both take the order
in which four neighbouring bytes are nearest to hand: see `key_order` and `value_order`.

Quantised rows are multiplied by 2^-48 on the way (`up` undoes it, on scores and probabilities). That leaves room to
fold 2^120, which makes an FP8 number's bits a bf16 number, into the scale: one product a pair of values. It is exact
for scales from 2^-54 to 2^55; above, values become infinite, and below, they may lose bits where they are under 2^-78.
"""

import dataclasses
import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

from pallas_kernels import mosaic
from pallas_kernels.records import V32, Model1, Plain, RecordFormat, V41MXFP8, V41NVFP4

BLOCK = 64  # rows that are staged together
DOWN = 48  # quantised rows are read 2^-48 times their value
WGMMA = plgpu.Layout.WGMMA
SCALAR = plgpu.Layout.WG_SPLAT(())
HALF_TILE = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))
_TO_BF16 = 120  # an E4M3 number's bits, three places from the top of a bf16 number's, are 2^-120 times its value


@dataclasses.dataclass(frozen=True)
class Staged:
    """A format's row in shared memory: `quantised` values with scales for every `group`, then bf16 values from `tail`.

    kind: "fp8", "fp4" or "bf16". scale: byte of a row where its scales start. fields: bytes that lie together in a
    page.
    """

    format: RecordFormat
    kind: str
    quantised: int
    group: int
    scale: int
    tail: int
    fields: tuple[int, ...]

    @property
    def stride(self) -> int:
        """Bytes from a row to the next."""
        chunks = -(-sum(self.fields) // 16)
        return 16 * (chunks + 1 - chunks % 2)

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.quantised // self.group if self.quantised else 0

    @property
    def down(self) -> int:
        """Values are read as 2^-down times what they are."""
        return DOWN if self.quantised else 0


def staged(format: RecordFormat) -> Staged:
    """The layout of `format` in shared memory. NotImplementedError for a format that the kernel does not read."""
    if isinstance(format, V32) and format == V32():
        return Staged(format, "fp8", 512, 128, 512, 528, (656,))
    if isinstance(format, Model1) and format == Model1():
        return Staged(format, "fp8", 448, 64, 576, 448, (576, 8))
    if isinstance(format, V41MXFP8) and format.width == 512:
        return Staged(format, "fp8", 512, 32, 512, 0, (528,))
    if isinstance(format, V41NVFP4) and format.width == 512:
        return Staged(format, "fp4", 512, 16, 256, 0, (288,))
    if isinstance(format, Plain) and format.dtype == jnp.bfloat16 and format.width in (512, 576):
        return Staged(format, "bf16", 0, 0, 0, 0, (2 * format.width,))
    raise NotImplementedError(
        "the decode kernels read V32(512, 64), Model1(512, 64), V41MXFP8 and V41NVFP4 of width 512, and plain bf16 "
        f"rows of 512 or 576 values, not {format}."
    )


def key_order(x):
    """Values [.., n] (n a multiple of 16) in the order in which a wgmma takes them."""
    return x.reshape(*x.shape[:-1], -1, 4, 2, 2).swapaxes(-1, -2).swapaxes(-2, -3).reshape(x.shape)


def value_order(x):
    """Values [128, ..] in the order of the rows of two wgmmas of 64."""
    return x.reshape(4, 8, 2, 2, -1).transpose(2, 0, 3, 1, 4).reshape(128, -1)


def value_order_back(x):
    """The inverse of `value_order`."""
    return x.reshape(2, 4, 2, 8, -1).transpose(1, 3, 0, 2, 4).reshape(128, -1)


def copy(raw_ref, bias_ref, pages_ref, places, layout: Staged, page_size: int, decoded_ref=None):
    """Starts copying the rows at `places` (of `sparse_attention.gather.look_up`) to shared memory, by a warpgroup.

    raw_ref: uint8 [>= 64 * stride]. pages_ref: the cache's pages in device memory. bias_ref: float32 [64], gets 0 where
    there is a row, and -inf where there is none; such a row is filled with zeros. decoded_ref: bf16 [64, width], which
    stands for raw_ref where the kernel is interpreted.
    """
    page_bytes = int(np.prod(pages_ref.shape[1:])) * jnp.dtype(pages_ref.dtype).itemsize
    format = layout.format

    def twin(_, bias_ref, pages_ref, places):
        places = places.reshape(4, 32)[:, : BLOCK // 4].reshape(BLOCK)

        def add(row, found):
            place = jnp.maximum(lax.dynamic_index_in_dim(places, row, keepdims=False), 0)
            page, at = place // page_size, place % page_size
            if isinstance(format, Plain):
                read = pages_ref[page, at]
            else:
                fields = format.fields(page_size)
                read = jnp.concatenate([pages_ref[page, pl.ds(f.offset + at * f.stride, f.size)] for f in fields])
            return lax.dynamic_update_index_in_dim(found, read, row, 0)

        stored = format.width if isinstance(format, Plain) else format.row_bytes
        found = lax.fori_loop(0, BLOCK, add, jnp.zeros((BLOCK, stored), pages_ref.dtype))
        found = format.decode(found, jnp.bfloat16) * jnp.bfloat16(2.0**-layout.down)
        decoded_ref[...] = jnp.where(places[:, None] >= 0, found, jnp.bfloat16(0))
        bias_ref[...] = jnp.where(places >= 0, 0.0, -jnp.inf)

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_STRIDED((128,), vec_size=1)),
        twin=twin,
    )
    def start(_, raw_ref, bias_ref, pages_ref, places):
        i64, f32 = ir.IntegerType.get_signless(64), ir.F32Type.get()
        place = vector.extract(places.registers.flat[0], [], ir.DenseI64ArrayAttr.get([0]))
        lane = arith.remui(utils.thread_idx(), i32(32))
        first = arith.muli(_warp(utils.thread_idx()), i32(16))
        nothing = arith.cmpi(arith.CmpIPredicate.slt, place, i32(0))
        bias = arith.select(nothing, utils.c(float("-inf"), f32), utils.c(0.0, f32))
        at = arith.addi(first, arith.remui(lane, i32(16)))
        llvm.store(bias, utils.getelementptr(utils.memref_ptr(bias_ref), [at], f32))
        source = llvm.ptrtoint(i64, mosaic.global_pointer(pages_ref))
        part, group = arith.remui(lane, i32(8)), arith.divui(lane, i32(8))
        to = llvm.ptrtoint(i32_type(), utils.memref_ptr(raw_ref))
        part_bytes = arith.muli(part, i32(16))
        fields = [(f.offset, f.stride) for f in format.fields(page_size)]
        for i in range(4):
            row = arith.addi(group, i32(4 * i))  # within the warp's 16
            found = nvvm.shfl_sync(i32(-1), place, row, i32(31), nvvm.ShflKind.idx)
            there = arith.cmpi(arith.CmpIPredicate.sge, found, i32(0))
            found = arith.maxsi(found, i32(0))
            page, within = arith.divui(found, i32(page_size)), arith.remui(found, i32(page_size))
            page = arith.addi(source, arith.muli(arith.extui(i64, page), utils.c(page_bytes, i64)))
            row_to = arith.addi(to, arith.muli(arith.addi(first, row), i32(layout.stride)))
            staged_at = 0
            for (offset, stride), size in zip(fields, layout.fields):
                start_at = arith.addi(i32(offset), arith.muli(within, i32(stride)))
                begin = arith.addi(page, arith.extui(i64, start_at))
                if size % 16 == 0:
                    begin = arith.addi(begin, arith.extui(i64, part_bytes))
                    row_begin = arith.addi(row_to, part_bytes)
                    _copy_chunks(row_begin, begin, part, there, staged_at, size // 16)
                else:
                    _copy_eight(row_to, begin, part, there, staged_at)
                staged_at += size

    start(raw_ref, bias_ref, pages_ref, places)


def _copy_chunks(to, source, part, there, offset, chunks):
    """16 bytes for each of eight threads, over and over, until there are `chunks`."""
    size = arith.select(there, i32(16), i32(0))
    lines = "".join(
        f"cp.async.cg.shared.global [$0+{offset + 128 * k}], [$1+{128 * k}], 16, $2;\n" for k in range(chunks // 8)
    )
    if chunks % 8:
        k = chunks // 8
        lines += (
            f"{{ .reg .pred p; setp.lt.u32 p, $3, {chunks % 8};\n"
            f"@p cp.async.cg.shared.global [$0+{offset + 128 * k}], [$1+{128 * k}], 16, $2; }}"
        )
    asm(lines, "r,l,r,r,~{memory}", [to, source, size, part])


def _copy_eight(to, source, part, there, offset):
    size = arith.select(there, i32(8), i32(0))
    line = f"{{ .reg .pred p; setp.eq.u32 p, $3, 0;\n@p cp.async.ca.shared.global [$0+{offset}], [$1], 8, $2; }}"
    asm(line, "r,l,r,r,~{memory}", [to, source, size, part])


def prepare(raw_ref, scale_ref, odd_ref, which, layouts: tuple[Staged, ...]):
    """Writes the scales of a block of staged rows as the fragments want them, by a warpgroup.

    scale_ref: bf16 [>= groups * 64], a group's scales for all rows together. odd_ref: int32 [4], of which one is not 0
    where a float32 scale is no power of two that fits; fragments then take the scales from the rows. which: number of
    the layout among `layouts`.
    """

    @mosaic.lane_code(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), SCALAR), twin=lambda *_: None)
    def write(_, raw_ref, scale_ref, odd_ref, which):
        thread = arith.remui(own_thread(), i32(128))
        token, part = arith.remui(thread, i32(BLOCK)), arith.divui(thread, i32(BLOCK))
        raw, to = utils.memref_ptr(raw_ref), utils.memref_ptr(scale_ref)

        def of(layout):
            odd = i32(0)
            share = -(-layout.groups // 2)
            for j in range(share):
                group = arith.addi(arith.muli(part, i32(share)), i32(j))
                group = arith.minsi(group, i32(layout.groups - 1)) if layout.groups % 2 else group
                at = arith.muli(token, i32(layout.stride))
                if layout.format == V32():
                    at = arith.addi(at, arith.addi(i32(layout.scale), arith.muli(group, i32(4))))
                    bits, strange = _scale_of_float(_load(raw, at, 32))
                    odd = arith.ori(odd, strange)
                else:
                    at = arith.addi(at, arith.addi(i32(layout.scale), group))
                    byte = arith.extui(i32_type(), _load(raw, at, 8))
                    bits = _scale_of_e4m3(byte) if layout.kind == "fp4" else _scale_of_e8m0(byte)
                at = arith.addi(arith.muli(group, i32(2 * BLOCK)), arith.muli(token, i32(2)))
                i16 = ir.IntegerType.get_signless(16)
                llvm.store(arith.trunci(i16, bits), utils.getelementptr(to, [at], _i8()))
            return [odd]

        (odd,) = _by_layout(which, layouts, of, [i32_type()]) if any(x.quantised for x in layouts) else [i32(0)]
        if any(layout.format == V32() for layout in layouts):
            text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
            any_odd = asm(text, "=r,r", [odd], i32_type())
            llvm.store(
                any_odd, utils.getelementptr(utils.memref_ptr(odd_ref), [arith.divui(thread, i32(32))], i32_type())
            )

    write(raw_ref, scale_ref, odd_ref, which)


def _scale_of_float(bits):
    """bf16 bits of a float32 scale times 2^(120 - DOWN), and whether it is no power of two or does not fit."""
    field = arith.shrui(bits, i32(23))  # with the sign, which makes it large
    fits = arith.andi(
        arith.cmpi(arith.CmpIPredicate.ule, arith.subi(field, i32(1)), i32(254 - (_TO_BF16 - DOWN) - 1)),
        arith.cmpi(arith.CmpIPredicate.eq, arith.andi(bits, i32(0x7FFFFF)), i32(0)),
    )
    scale = arith.shli(arith.addi(field, i32(_TO_BF16 - DOWN)), i32(7))
    zero = arith.cmpi(arith.CmpIPredicate.eq, bits, i32(0))  # of a row that is none
    return arith.select(zero, i32(0), scale), arith.select(arith.ori(fits, zero), i32(0), i32(1))


def _scale_of_e8m0(byte):
    field = arith.minsi(arith.addi(byte, i32(_TO_BF16 - DOWN)), i32(255))
    scale = arith.shli(field, i32(7))
    nan = arith.cmpi(arith.CmpIPredicate.eq, byte, i32(255))
    return arith.select(nan, i32(0x7FC0), scale)


def _scale_of_e4m3(byte):
    """bf16 bits of an E4M3 scale times 2^-DOWN."""
    f32 = ir.F32Type.get()
    magnitude = llvm.bitcast(f32, arith.shli(arith.andi(byte, i32(0x7F)), i32(20)))
    scaled = llvm.bitcast(i32_type(), arith.mulf(magnitude, utils.c(2.0 ** (_TO_BF16 - DOWN), f32)))
    scale = arith.shrui(scaled, i32(16))
    scale = arith.ori(scale, arith.shli(arith.andi(byte, i32(0x80)), i32(8)))
    nan = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(byte, i32(0x7F)), i32(0x7F))
    return arith.select(nan, i32(0x7FC0), scale)


def key_fragment(raw_ref, scale_ref, odd_ref, which, chunk: int, layouts: tuple[Staged, ...], decoded_ref=None):
    """Values 64 * chunk .. + 63 of all 64 rows of a block as bf16 [64, 64], the left operand of a wgmma."""

    def twin(*_):
        return key_order(decoded_ref[:, pl.ds(64 * chunk, 64)])

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((BLOCK, 64), jnp.bfloat16, layout=WGMMA),
        twin=twin,
    )
    def load(_, raw_ref, scale_ref, odd_ref, which):
        raw, scales = utils.memref_ptr(raw_ref), utils.memref_ptr(scale_ref)

        def position(thread):
            """The lane's number in its quad, and its two tokens."""
            first = arith.addi(arith.muli(_warp(thread), i32(16)), _group(thread))
            return _quad(thread), [arith.addi(first, i32(8 * half)) for half in range(2)]

        def of(layout):
            tail = 64 * chunk >= layout.quantised > 0
            quad, tokens = position(own_thread() if tail else utils.thread_idx())  # rarely needed: not worth registers
            base = [arith.muli(token, i32(layout.stride)) for token in tokens]
            if 64 * chunk >= layout.quantised:  # bf16
                start = layout.tail + 2 * (64 * chunk - layout.quantised)
                return _key_words(lambda half, step: _bf16_pairs(raw, base[half], quad, start + 32 * step, layout.down))

            def scale(half, step):
                number = (64 * chunk + 16 * step) // layout.group
                at = arith.addi(arith.muli(tokens[half], i32(2)), i32(2 * BLOCK * number))
                return _twice(_load(scales, at, 16))

            def exact(half, step):
                factor = scale(half, step)
                if layout.kind == "fp4":
                    at = arith.addi(base[half], arith.addi(arith.muli(quad, i32(2)), i32(32 * chunk + 8 * step)))
                    four = arith.extui(i32_type(), _load(raw, at, 16))
                    return [_times(pair, factor) for pair in _fp4_pairs(four, across=False)]
                at = arith.addi(base[half], arith.addi(arith.muli(quad, i32(4)), i32(64 * chunk + 16 * step)))
                return [_times(pair, factor) for pair in _fp8_pairs(_load(raw, at, 32), magnitudes[half])]

            def general(half, step):  # any float32 scale
                at = arith.addi(base[half], arith.addi(arith.muli(quad, i32(4)), i32(64 * chunk + 16 * step)))
                at_scale = arith.addi(base[half], i32(layout.scale + 64 * chunk // layout.group * 4))
                factor = llvm.bitcast(ir.F32Type.get(), _load(raw, at_scale, 32))
                pairs = _fp8_pairs(_load(raw, at, 32), magnitudes[half])
                return [_times_floats(pair, factor, factor) for pair in pairs]

            def words(convert):
                """A NaN code would be read as 480: its row gets a NaN, with which all its scores are."""
                for found in magnitudes:
                    found.clear()
                registers = _key_words(convert)
                for half, found in enumerate(magnitudes if layout.kind == "fp8" else []):
                    nan = _has_nan_code(found)
                    bits = arith.select(nan, i32(0x7FFF7FFF), llvm.bitcast(i32_type(), registers[half]))
                    registers[half] = llvm.bitcast(_pair(), bits)
                return registers

            magnitudes = ([], [])
            fast = functools.partial(words, exact)
            if layout.format != V32():
                return fast()
            return _if(_is_odd(odd_ref), functools.partial(words, general), fast, [_pair()] * 16)

        registers = _by_layout(which, layouts, of, [_pair()] * 16)
        return _fragment(np.array(registers, dtype=object).reshape(8, 2), (BLOCK, 64))

    return load(raw_ref, scale_ref, odd_ref, which)


def _key_words(words):
    """Registers of [64, 64] in order (eight columns, half of the rows); words(half, step) gives two pairs."""
    registers = np.empty((8, 2), dtype=object)
    for half in range(2):
        for step in range(4):
            registers[2 * step, half], registers[2 * step + 1, half] = words(half, step)
    return list(registers.flat)


def value_fragment(
    raw_ref, scale_ref, odd_ref, which, part, half: int, layouts: tuple[Staged, ...], decoded_ref=None, may_be_tail=True
):
    """Values 128 * part .. + 127 of rows 32 * half .. + 31 of a block, as bf16 [128, 32], rows in `value_order`.

    part: int32 scalar, the same for all threads. may_be_tail: whether it may be the last part.
    """

    def twin(*args):
        block = decoded_ref[pl.ds(32 * half, 32), pl.ds(128 * args[-1], 128)]
        return value_order(block.T)

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((128, 32), jnp.bfloat16, layout=WGMMA),
        twin=twin,
    )
    def load(_, raw_ref, scale_ref, odd_ref, which, part):
        raw, scales = utils.memref_ptr(raw_ref), utils.memref_ptr(scale_ref)
        part = mosaic.scalar(part)

        def position(thread):
            """First value of the warp, and of this lane from there, and first token."""
            first = arith.addi(arith.muli(part, i32(128)), arith.muli(_warp(thread), i32(32)))
            return (
                first,
                arith.muli(_group(thread), i32(4)),
                arith.addi(arith.muli(_quad(thread), i32(2)), i32(32 * half)),
            )

        first, four, token = position(utils.thread_idx())

        def of(layout):
            base = arith.muli(token, i32(layout.stride))

            def bf16():
                first, four, token = position(own_thread())  # rarely needed: not worth registers
                base = arith.muli(token, i32(layout.stride))
                start = arith.addi(arith.muli(arith.subi(first, i32(layout.quantised)), i32(2)), i32(layout.tail))
                start = arith.addi(arith.addi(base, start), arith.muli(four, i32(2)))

                def words(step, later):
                    at = arith.addi(start, i32((16 * step + 8 * later) * layout.stride))
                    a, b = (_load_two(raw, arith.addi(at, i32(i * layout.stride))) for i in range(2))
                    pairs = []
                    for a_two, b_two in zip(a, b):
                        pairs += [permute(a_two, b_two, 0x5410), permute(a_two, b_two, 0x7632)]
                    return [_down(pair, layout.down) for pair in pairs]

                return _value_words(words)

            if not layout.quantised:
                return bf16()

            def quantised(convert):
                if layout.kind == "fp4":
                    start = arith.addi(base, arith.divui(arith.addi(first, four), i32(2)))
                else:
                    start = arith.addi(base, arith.addi(first, four))

                def words(step, later):
                    offset = 16 * step + 8 * later
                    at = arith.addi(start, i32(offset * layout.stride))
                    bits = 16 if layout.kind == "fp4" else 32
                    a, b = (_load(raw, arith.addi(at, i32(i * layout.stride)), bits) for i in range(2))
                    if layout.kind == "fp4":
                        both = permute(arith.extui(i32_type(), a), arith.extui(i32_type(), b), 0x5410)
                        pairs = _fp4_pairs(both, across=True)
                    else:
                        pairs = [pair for selector in (0x5410, 0x7632) for pair in _fp8_pairs(permute(a, b, selector))]
                    return convert(pairs, offset)

                return _value_words(words)

            def exact(pairs, offset):
                number = arith.divui(first, i32(layout.group))
                if layout.group < 32:
                    number = arith.addi(number, arith.divui(four, i32(layout.group)))
                at = arith.addi(arith.muli(number, i32(2 * BLOCK)), arith.muli(token, i32(2)))
                factor = _load(scales, arith.addi(at, i32(2 * offset)), 32)
                return [_times(pair, factor) for pair in pairs]

            def general(pairs, offset):
                at = arith.muli(arith.divui(first, i32(layout.group)), i32(4))
                at = arith.addi(arith.addi(base, at), i32(offset * layout.stride + layout.scale))
                f32 = ir.F32Type.get()
                a, b = (llvm.bitcast(f32, _load(raw, arith.addi(at, i32(i * layout.stride)), 32)) for i in range(2))
                return [_times_floats(pair, a, b) for pair in pairs]

            fast, sixteen = functools.partial(quantised, exact), [_pair()] * 16
            if layout.format == V32():
                return _if(_is_odd(odd_ref), functools.partial(quantised, general), fast, sixteen)
            if layout.quantised < 512 and may_be_tail:
                tail = arith.cmpi(arith.CmpIPredicate.sge, first, i32(layout.quantised))
                return _if(tail, bf16, fast, sixteen)
            return fast()

        registers = _by_layout(which, layouts, of, [_pair()] * 16)
        return _fragment(np.array(registers, dtype=object).reshape(2, 4, 2), (128, 32))

    return load(raw_ref, scale_ref, odd_ref, which, part)


def _value_words(words):
    """Registers of [128, 32] in order (64 rows, eight columns, half of the rows).

    words(step, later) gives pairs of two tokens for four values.
    """
    registers = np.empty((2, 4, 2), dtype=object)
    for step in range(2):
        for later in range(2):
            found = words(step, later)
            for value, pair in enumerate(found):
                registers[value // 2, 2 * step + later, value % 2] = pair
    return list(registers.flat)


def unpack(raw_ref, scale_ref, odd_ref, which, tile_ref, first: int, layouts: tuple[Staged, ...], decoded_ref=None):
    """Values first .. of all 64 rows of a block as bf16 to tile_ref [64, 64 or 128] (HALF_TILE), by a warpgroup.

    For tensor cores that take no left operand from registers. The values are in their own order.
    """
    columns = tile_ref.shape[1]

    def twin(_, scale_ref, odd_ref, which, tile_ref):
        tile_ref[...] = decoded_ref[:, pl.ds(first, columns)]

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), SCALAR, plgpu.RefType(HALF_TILE)), twin=twin
    )
    def write(_, raw_ref, scale_ref, odd_ref, which, tile_ref):
        raw, scales, to = (utils.memref_ptr(ref) for ref in (raw_ref, scale_ref, tile_ref))
        four = ir.VectorType.get((4,), i32_type())
        pieces = columns // 16
        thread = arith.remui(own_thread(), i32(128))
        for k in range(BLOCK * pieces // 128):
            piece = arith.addi(thread, i32(128 * k))
            row, column = arith.divui(piece, i32(pieces)), arith.muli(arith.remui(piece, i32(pieces)), i32(16))

            def of(layout, row=row, column=column):
                base = arith.muli(row, i32(layout.stride))
                value = arith.addi(column, i32(first))

                def bf16():
                    at = arith.muli(arith.subi(value, i32(layout.quantised)), i32(2))
                    at = arith.addi(arith.addi(base, at), i32(layout.tail))
                    words = _load_four(raw, at) + _load_four(raw, arith.addi(at, i32(16)))
                    return [llvm.bitcast(i32_type(), _down(word, layout.down)) for word in words]

                def quantised(convert):
                    magnitudes = []
                    if layout.kind == "fp4":
                        packed = _load_two(raw, arith.addi(base, arith.divui(value, i32(2))))
                        fours = [
                            word if not half else arith.shrui(word, i32(16)) for word in packed for half in range(2)
                        ]
                        pairs = [_fp4_pairs(f, across=False) for f in fours]
                    else:
                        pairs = [_fp8_pairs(word, magnitudes) for word in _load_four(raw, arith.addi(base, value))]
                    words = []
                    for two in pairs:
                        a, b = (llvm.bitcast(i32_type(), convert(pair)) for pair in two)
                        words += [permute(a, b, 0x5410), permute(a, b, 0x7632)]
                    if magnitudes:
                        words[0] = arith.select(_has_nan_code(magnitudes), i32(0x7FFF7FFF), words[0])
                    return words

                def exact():
                    group = arith.minsi(arith.divui(value, i32(layout.group)), i32(layout.groups - 1))
                    at = arith.addi(arith.muli(group, i32(2 * BLOCK)), arith.muli(row, i32(2)))
                    factor = _twice(_load(scales, at, 16))
                    return quantised(lambda pair: _times(pair, factor))

                def general():
                    at = arith.addi(base, arith.muli(arith.divui(value, i32(layout.group)), i32(4)))
                    factor = llvm.bitcast(ir.F32Type.get(), _load(raw, arith.addi(at, i32(layout.scale)), 32))
                    return quantised(lambda pair: _times_floats(pair, factor, factor))

                if first >= layout.quantised:
                    return bf16()
                if layout.format == V32():
                    return _if(_is_odd(odd_ref), general, exact, [i32_type()] * 8)
                if first + columns > layout.quantised:
                    tail = arith.cmpi(arith.CmpIPredicate.sge, value, i32(layout.quantised))
                    return _if(tail, bf16, exact, [i32_type()] * 8)
                return exact()

            words = _by_layout(which, layouts, of, [i32_type()] * 8)
            within = arith.remui(row, i32(8))
            at = arith.addi(
                arith.muli(arith.divui(row, i32(8)), i32(columns // 32 * 512)),
                arith.addi(arith.muli(arith.divui(column, i32(32)), i32(512)), arith.muli(within, i32(64))),
            )
            for part in range(2):
                chunk = arith.addi(arith.divui(arith.remui(column, i32(32)), i32(8)), i32(part))
                chunk = arith.xori(chunk, arith.divui(within, i32(2)))  # the 64-byte swizzle
                place = arith.addi(at, arith.muli(chunk, i32(16)))
                vectors = vector.from_elements(four, words[4 * part : 4 * part + 4])
                llvm.store(vectors, utils.getelementptr(to, [place], _i8()), alignment=16)

    write(raw_ref, scale_ref, odd_ref, which, tile_ref)


def _fp8_pairs(word, magnitudes=None):
    """Four FP8 numbers as 2^-120 times bf16 numbers: the first and third as a pair, then the second and fourth.

    Appends their magnitudes, for `_has_nan_code`.
    """
    sign, rest = i32(0x80008000), i32(0x07F007F0)
    low, high = arith.andi(arith.shli(word, i32(4)), rest), arith.andi(arith.shrui(word, i32(4)), rest)
    if magnitudes is not None:
        magnitudes += [low, high]
    low = arith.ori(arith.andi(arith.shli(word, i32(8)), sign), low)
    high = arith.ori(arith.andi(word, sign), high)
    return [llvm.bitcast(_pair(), low), llvm.bitcast(_pair(), high)]


def _has_nan_code(magnitudes):
    """Whether one of the magnitudes of `_fp8_pairs` is that of NaN, which is the largest there is."""
    most = magnitudes[0]
    for each in magnitudes[1:]:
        most = llvm.inline_asm(i32_type(), [most, each], "max.u16x2 $0, $1, $2;", "=r,r,r")
    above = arith.andi(arith.addi(most, i32(0x00100010)), i32(0x08000800))
    return arith.cmpi(arith.CmpIPredicate.ne, above, i32(0))


def _fp4_pairs(word, across: bool):
    """FP4 numbers as pairs of bf16 numbers.

    Not across: four in the lower 16 bits, the first and third as a pair, then the second and fourth. Across: four in
    the lower 16 bits and four in the upper, as four pairs of a lower and an upper one.
    """
    if not across:
        return [llvm.bitcast(_pair(), bits) for bits in _fp4_lookup(word, ((0x6240, 12, 20), (0x7351, 8, 16)))]
    every_second = i32(0x0F0F0F0F)
    found = []
    for nibbles in (arith.andi(word, every_second), arith.andi(arith.shrui(word, i32(4)), every_second)):
        nibbles = arith.ori(nibbles, arith.shrui(nibbles, i32(12)))  # the lower's and the upper's next to each other
        found.append([llvm.bitcast(_pair(), b) for b in _fp4_lookup(nibbles, ((0x5140, 12, 24), (0x7362, 4, 16)))])
    return [found[0][0], found[1][0], found[0][1], found[1][1]]


def _fp4_lookup(four, pairs):
    chosen = arith.andi(four, i32(0x7777))
    # Bytes of the bf16 of 0, 0.5, 1, 1.5, 2, 3, 4, 6, picked by the values' lower three bits.
    high = permute(i32(0x3F3F3F00), i32(0x40404040), chosen)
    low = permute(i32(0xC0800000), i32(0xC0804000), chosen)
    found = []
    for selector, first, second in pairs:
        bits = permute(low, high, selector)
        bits = arith.ori(bits, arith.andi(arith.shli(four, i32(first)), i32(0x8000)))
        found.append(arith.ori(bits, arith.andi(arith.shli(four, i32(second)), i32(0x80000000))))
    return found


def _bf16_pairs(raw, base, quad, start, down):
    """Four neighbouring bf16 values: the first and third as a pair, then the second and fourth."""
    a, b = _load_two(raw, arith.addi(base, arith.addi(arith.muli(quad, i32(8)), i32(start))))
    return [_down(permute(a, b, selector), down) for selector in (0x5410, 0x7632)]


def _down(bits, down):
    pair = llvm.bitcast(_pair(), bits)
    return _times(pair, i32((127 - down) << 7 | (127 - down) << 23)) if down else pair


def _times(pair, factor):
    return arith.mulf(pair, llvm.bitcast(_pair(), factor))


def _times_floats(pair, first, second):
    """A pair of `_fp8_pairs` times float32 factors, rounded to bf16, times 2^-DOWN."""
    f32, bits = ir.F32Type.get(), llvm.bitcast(i32_type(), pair)
    lift = utils.c(2.0**_TO_BF16, f32)
    values = [arith.shli(bits, i32(16)), arith.andi(bits, i32(0xFFFF0000))]
    values = [arith.mulf(arith.mulf(llvm.bitcast(f32, v), lift), s) for v, s in zip(values, (first, second))]
    rounded = [arith.truncf(ir.BF16Type.get(), v) for v in values]
    return _down(llvm.bitcast(i32_type(), vector.from_elements(_pair(), rounded)), DOWN)


def _is_odd(odd_ref):
    odd = i32(0)
    for warp in range(4):
        odd = arith.ori(odd, _load(utils.memref_ptr(odd_ref), i32(4 * warp), 32))
    return arith.cmpi(arith.CmpIPredicate.ne, odd, i32(0))


def _by_layout(which, layouts, of, types):
    """What of(layout) gives, for the layout number `which`."""
    if len(set(layouts)) == 1:
        return of(layouts[0])
    first = arith.cmpi(arith.CmpIPredicate.eq, mosaic.scalar(which), i32(0))
    return _if(first, lambda: of(layouts[0]), lambda: of(layouts[1]), types)


def _if(condition, then, otherwise, types):
    branch = scf.IfOp(condition, types, has_else=True)
    for block, make in ((branch.then_block, then), (branch.else_block, otherwise)):
        with ir.InsertionPoint(block):
            scf.yield_(make())
    return list(branch.results)


def _fragment(registers, shape):
    layout = WGMMA.to_mgpu()
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None
    )


def own_thread():
    """This thread's number, read anew: what is computed from it is not kept in registers until the next use."""
    return asm("mov.u32 $0, %tid.x;", "=r", [], i32_type())


def fresh_zero():
    """0 as a scalar that the compiler does not know: what is derived from it is computed where it is used."""

    @mosaic.lane_code(
        arg_types=(), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR), twin=lambda: jnp.int32(0)
    )
    def zero(_):
        register = np.array(asm("mov.u32 $0, 0;", "=r", [], i32_type()), dtype=object)
        return mgpu.FragmentedArray(_registers=register, _layout=SCALAR.to_mgpu(), _is_signed=True)

    return zero()


def _pair():
    return ir.VectorType.get((2,), ir.BF16Type.get())


def _warp(thread):
    return arith.divui(arith.remui(thread, i32(128)), i32(32))


def _group(thread):
    return arith.divui(arith.remui(thread, i32(32)), i32(4))


def _quad(thread):
    return arith.remui(thread, i32(4))


def _load(pointer, at, bits):
    return llvm.load(ir.IntegerType.get_signless(bits), utils.getelementptr(pointer, [at], _i8()))


def _load_two(pointer, at):
    words = llvm.load(ir.VectorType.get((2,), i32_type()), utils.getelementptr(pointer, [at], _i8()), alignment=8)
    return [vector.extract(words, [], ir.DenseI64ArrayAttr.get([i])) for i in range(2)]


def _load_four(pointer, at):
    words = llvm.load(ir.VectorType.get((4,), i32_type()), utils.getelementptr(pointer, [at], _i8()), alignment=16)
    return [vector.extract(words, [], ir.DenseI64ArrayAttr.get([i])) for i in range(4)]


def _twice(half_word):
    word = arith.extui(i32_type(), half_word)
    return permute(word, word, 0x1010)


def _i8():
    return ir.IntegerType.get_signless(8)


def i32_type():
    return ir.IntegerType.get_signless(32)


def i32(value):
    """A constant of 32 bits."""
    return arith.constant(i32_type(), ir.IntegerAttr.get(i32_type(), value - 2**32 if value >= 2**31 else value))


def permute(low, high, selector):
    """prmt: four bytes of the eight in `low` and `high`, one for each of the lower four nibbles of `selector`."""
    selector = i32(selector) if isinstance(selector, int) else selector
    return llvm.inline_asm(i32_type(), [low, high, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")


def asm(text, constraints, operands, result=None):
    """Inline PTX with side effects."""
    return llvm.inline_asm(result or ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)
