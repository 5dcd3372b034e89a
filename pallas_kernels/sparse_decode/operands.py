"""Staged rows as operands of a wgmma, made in registers, and as tiles for tensor cores that take none from there.

A thread reads the bytes that its registers of an operand stand for and converts them there, once as keys (tokens are
rows of the operand) and once as values (tokens are columns). A dot product's terms and an output's rows may come in any
order, so both take the order in which four neighbouring bytes are nearest to hand: see `key_order` and `value_order`.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import mosaic
from pallas_kernels.decoding import down_by, fp4_pairs, fp8_pairs, has_nan_code, times, times_floats
from pallas_kernels.lane_ops import (
    SCALAR,
    WGMMA,
    carried_words,
    either,
    fragment,
    group_of,
    i8_type,
    i32,
    i32_type,
    is_narrow,
    load_bits,
    load_four,
    load_two,
    moved,
    own_thread,
    pair_type,
    past,
    permute,
    quad_of,
    twice,
    warp_of,
)
from pallas_kernels.sparse_decode.rows import BLOCK, DOWN, VALUES, Staged, by_layout
from pallas_kernels.sparse_decode.scaling import Reading, float_scale, is_odd

HALF_TILE = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))


def key_order(x):
    """Values [.., n] (n a multiple of 16) in the order in which a wgmma takes them."""
    return x.reshape(*x.shape[:-1], -1, 4, 2, 2).swapaxes(-1, -2).swapaxes(-2, -3).reshape(x.shape)


def value_order(x):
    """Values [128, ..] in the order of the rows of two wgmmas of 64."""
    return x.reshape(4, 8, 2, 2, -1).transpose(2, 0, 3, 1, 4).reshape(128, -1)


def value_order_back(x):
    """The inverse of `value_order`."""
    return x.reshape(2, 4, 2, 8, -1).transpose(1, 3, 0, 2, 4).reshape(128, -1)


def _key_place(thread):
    """A lane's number in its quad, and its two tokens."""
    first = arith.addi(arith.muli(warp_of(thread), i32(16)), group_of(thread))
    return quad_of(thread), [arith.addi(first, i32(8 * half)) for half in range(2)]


def _key_words(layout, chunk: int) -> tuple[bool, int, int]:
    """Of values 64 * chunk .. + 63: whether they are bf16, scales of a token, and words that a thread carries."""
    plain = 64 * chunk >= layout.quantised
    scales = 0 if plain else max(1, 64 // layout.group)
    return plain, scales, 16 if plain else 8 + 2 * scales


def load_keys(raw_ref, scale_ref, chunk: int, reading: Reading, decoded_ref=None):
    """The stored words of values 64 * chunk .. + 63 of a block, for `key_fragment`; loaded a fragment ahead.

    int32 [128 * n], n to a thread: of its two tokens first the scales, then the values. Interpreted: the fragment.
    """
    layout = reading.layout
    plain, scales, count = _key_words(layout, chunk)
    carried, pack, _ = carried_words(count)

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((128 * count,), jnp.int32, layout=carried),
        twin=lambda *_: key_order(decoded_ref[:, pl.ds(64 * chunk, 64)]),
    )
    def load(_, raw_ref, scale_ref):
        raw, table = utils.memref_ptr(raw_ref), utils.memref_ptr(scale_ref)
        quad, tokens = _key_place(own_thread() if plain else utils.thread_idx())
        bases = [moved(raw, arith.muli(token, i32(layout.stride))) for token in tokens]
        found = []
        if plain:
            start = layout.tail + 2 * (64 * chunk - layout.quantised)
            for base in bases:
                own = moved(base, arith.muli(quad, i32(8)))
                for step in range(4):
                    found += load_two(past(own, start + 32 * step))
            return pack(found)
        numbers = [64 * chunk // layout.group + i for i in range(scales)]
        for token, base in zip(tokens, bases):
            if reading.general:
                found += [float_scale(past(base, layout.scale + n * layout.scale_bytes), layout) for n in numbers]
            else:
                own = moved(table, arith.muli(token, i32(2)))
                found += [load_bits(past(own, 2 * BLOCK * n), 16) for n in numbers]
        narrow = layout.kind == "fp4"
        for base in bases:
            own = moved(base, arith.muli(quad, i32(2 if narrow else 4)))
            for step in range(4):
                at = (64 * chunk + 16 * step) // (2 if narrow else 1)
                found.append(load_bits(past(own, at), 16 if narrow else 32))
        return pack(found)

    return load(raw_ref, scale_ref)


def key_fragment(words, chunk: int, reading: Reading):
    """Values 64 * chunk .. + 63 of all 64 rows of a block as bf16 [64, 64], the left operand of a wgmma.

    words: of `load_keys`. A NaN code would be read as 480: its row gets a NaN, with which all its scores are.
    """
    layout = reading.layout
    plain, scales, count = _key_words(layout, chunk)
    carried, _, unpack = carried_words(count)

    @mosaic.lane_code(
        arg_types=(carried,),
        return_type=plgpu.ShapeDtypeStruct((BLOCK, 64), jnp.bfloat16, layout=WGMMA),
        twin=lambda words: words,
    )
    def convert(_, words):
        words = unpack(words)
        registers = np.empty((8, 2), dtype=object)
        for half in range(2):
            magnitudes = []
            if plain:
                own = words[8 * half : 8 * half + 8]
            else:
                own = words[2 * scales + 4 * half : 2 * scales + 4 * half + 4]
                factors = words[scales * half : scales * half + scales]
                if reading.general:
                    factors = [llvm.bitcast(ir.F32Type.get(), f) for f in factors]
                else:
                    factors = [twice(f) for f in factors]
            for step in range(4):
                if plain:
                    pairs = [permute(own[2 * step], own[2 * step + 1], selector) for selector in (0x5410, 0x7632)]
                    pairs = [down_by(pair, layout.down) for pair in pairs]
                elif layout.kind == "fp4":
                    factor = factors[step * scales // 4]
                    pairs = [times(pair, factor) for pair in fp4_pairs(own[step], across=False)]
                elif reading.general:
                    factor = factors[step * scales // 4]
                    pairs = [times_floats(pair, factor, factor, DOWN) for pair in fp8_pairs(own[step], magnitudes)]
                else:
                    factor = factors[step * scales // 4]
                    pairs = [times(pair, factor) for pair in fp8_pairs(own[step], magnitudes)]
                registers[2 * step, half], registers[2 * step + 1, half] = pairs
            if magnitudes:
                bits = llvm.bitcast(i32_type(), registers[0, half])
                bits = arith.select(has_nan_code(magnitudes), i32(0x7FFF7FFF), bits)
                registers[0, half] = llvm.bitcast(pair_type(), bits)
        return fragment(registers, (BLOCK, 64))

    return convert(words)


def _value_place(thread, part, half):
    """First value of the warp, of this lane from there, and the lane's first token."""
    first = arith.addi(arith.muli(part, i32(128)), arith.muli(warp_of(thread), i32(32)))
    token = arith.addi(arith.muli(quad_of(thread), i32(2)), i32(32 * half))
    return first, arith.muli(group_of(thread), i32(4)), token


def _value_words(reading: Reading):
    """Words of a fragment of values: whether all, some or none are bf16, and how many words those are."""
    layout = reading.layout
    if not layout.quantised:
        return 16
    if layout.quantised < VALUES:
        return 16
    return 16 if reading.general else 12


def load_values(raw_ref, scale_ref, part, half: int, reading: Reading, decoded_ref=None, may_be_tail=True):
    """The stored words of values 128 * part .. + 127 of rows 32 * half .. + 31 of a block, for `value_fragment`.

    part: int32 scalar, the same for all threads. may_be_tail: whether it may be the last part.
    """
    layout, count = reading.layout, _value_words(reading)
    carried, pack, _ = carried_words(count)

    def twin(raw_ref, scale_ref, part):
        return value_order(decoded_ref[pl.ds(32 * half, 32), pl.ds(128 * part, 128)].T)

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((128 * count,), jnp.int32, layout=carried),
        twin=twin,
    )
    def load(_, raw_ref, scale_ref, part):
        raw, table = utils.memref_ptr(raw_ref), utils.memref_ptr(scale_ref)
        part = mosaic.scalar(part)
        offsets = [(16 * step + 8 * later) for step in range(2) for later in range(2)]

        def bf16():
            first, four, token = _value_place(own_thread(), part, half)  # rarely needed: not worth registers
            start = arith.muli(arith.addi(arith.subi(first, i32(layout.quantised)), four), i32(2))
            own = moved(raw, arith.addi(arith.addi(arith.muli(token, i32(layout.stride)), start), i32(layout.tail)))
            return [w for n in offsets for i in range(2) for w in load_two(past(own, (n + i) * layout.stride))]

        def quantised():
            first, four, token = _value_place(utils.thread_idx(), part, half)
            row = moved(raw, arith.muli(token, i32(layout.stride)))
            if reading.general:
                own = moved(row, arith.muli(arith.divui(first, i32(layout.group)), i32(layout.scale_bytes)))
                at = [layout.scale + (n + i) * layout.stride for n in offsets for i in range(2)]
                found = [float_scale(past(own, a), layout) for a in at]
            else:
                number = arith.divui(first, i32(layout.group))
                if layout.group < 32:
                    number = arith.addi(number, arith.divui(four, i32(layout.group)))
                at = arith.addi(arith.muli(number, i32(2 * BLOCK)), arith.muli(token, i32(2)))
                found = [load_bits(past(moved(table, at), 2 * n), 32) for n in offsets]
            narrow = layout.kind == "fp4"
            value = arith.addi(first, four)
            own = moved(row, arith.divui(value, i32(2)) if narrow else value)
            bits = 16 if narrow else 32
            found += [load_bits(past(own, (n + i) * layout.stride), bits) for n in offsets for i in range(2)]
            found = [arith.extui(i32_type(), word) if is_narrow(word) else word for word in found]
            return found + [i32(0)] * (count - len(found))

        if not layout.quantised:
            return pack(bf16())
        if layout.quantised < VALUES and may_be_tail:
            return pack(either(_in_tail(part, layout), bf16, quantised, [i32_type()] * count))
        return pack(quantised())

    return load(raw_ref, scale_ref, part)


def value_fragment(words, part, half: int, reading: Reading, may_be_tail=True):
    """Values 128 * part .. + 127 of rows 32 * half .. + 31 of a block, as bf16 [128, 32], rows in `value_order`.

    words, part, may_be_tail: those of `load_values`.
    """
    layout, count = reading.layout, _value_words(reading)
    carried, _, unpack = carried_words(count)

    @mosaic.lane_code(
        arg_types=(carried, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((128, 32), jnp.bfloat16, layout=WGMMA),
        twin=lambda words, _: words,
    )
    def convert(_, words, part):
        words = unpack(words)
        part = mosaic.scalar(part)

        def bf16():
            found = []
            for n in range(4):
                both = zip(words[4 * n : 4 * n + 2], words[4 * n + 2 : 4 * n + 4])
                pairs = [permute(*two, selector) for two in both for selector in (0x5410, 0x7632)]
                found.append([down_by(pair, layout.down) for pair in pairs])
            return _value_registers(found)

        def quantised():
            scales = 8 if reading.general else 4
            found = []
            for n in range(4):
                a, b = words[scales + 2 * n : scales + 2 * n + 2]
                if layout.kind == "fp4":
                    pairs = fp4_pairs(permute(a, b, 0x5410), across=True)
                else:
                    pairs = [pair for selector in (0x5410, 0x7632) for pair in fp8_pairs(permute(a, b, selector))]
                if reading.general:
                    factors = [llvm.bitcast(ir.F32Type.get(), w) for w in words[2 * n : 2 * n + 2]]
                    found.append([times_floats(pair, *factors, DOWN) for pair in pairs])
                else:
                    found.append([times(pair, words[n]) for pair in pairs])
            return _value_registers(found)

        if not layout.quantised:
            registers = bf16()
        elif layout.quantised < VALUES and may_be_tail:
            registers = either(_in_tail(part, layout), bf16, quantised, [pair_type()] * 16)
        else:
            registers = quantised()
        return fragment(np.array(registers, dtype=object).reshape(2, 4, 2), (128, 32))

    return convert(words, part)


def _in_tail(part, layout):
    """Whether the values of a warp are among the bf16 ones."""
    first = _value_place(utils.thread_idx(), part, 0)[0]
    return arith.cmpi(arith.CmpIPredicate.sge, first, i32(layout.quantised))


def _value_registers(found):
    """Registers of [128, 32] in order (64 rows, eight columns, half of the rows).

    found: of every eight tokens, pairs of two tokens for four values.
    """
    registers = np.empty((2, 4, 2), dtype=object)
    for column, pairs in enumerate(found):
        for value, pair in enumerate(pairs):
            registers[value // 2, column, value % 2] = pair
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
                    words = load_four(moved(raw, at)) + load_four(moved(raw, arith.addi(at, i32(16))))
                    return [llvm.bitcast(i32_type(), down_by(word, layout.down)) for word in words]

                def quantised(convert):
                    magnitudes = []
                    if layout.kind == "fp4":
                        packed = load_two(moved(raw, arith.addi(base, arith.divui(value, i32(2)))))
                        fours = [
                            word if not half else arith.shrui(word, i32(16)) for word in packed for half in range(2)
                        ]
                        pairs = [fp4_pairs(f, across=False) for f in fours]
                    else:
                        pairs = [fp8_pairs(word, magnitudes) for word in load_four(moved(raw, arith.addi(base, value)))]
                    words = []
                    for two in pairs:
                        a, b = (llvm.bitcast(i32_type(), convert(pair)) for pair in two)
                        words += [permute(a, b, 0x5410), permute(a, b, 0x7632)]
                    if magnitudes:
                        words[0] = arith.select(has_nan_code(magnitudes), i32(0x7FFF7FFF), words[0])
                    return words

                def group_of_value():
                    return arith.minsi(arith.divui(value, i32(layout.group)), i32(layout.groups - 1))

                def exact():
                    at = arith.addi(arith.muli(group_of_value(), i32(2 * BLOCK)), arith.muli(row, i32(2)))
                    factor = twice(load_bits(moved(scales, at), 16))
                    return quantised(lambda pair: times(pair, factor))

                def general():
                    at = arith.addi(base, arith.muli(group_of_value(), i32(layout.scale_bytes)))
                    bits = float_scale(moved(raw, arith.addi(at, i32(layout.scale))), layout)
                    factor = llvm.bitcast(ir.F32Type.get(), bits)
                    return quantised(lambda pair: times_floats(pair, factor, factor, DOWN))

                def any_scale():
                    if layout.kind == "fp4":
                        return exact()
                    return either(is_odd(odd_ref), general, exact, [i32_type()] * 8)

                if first >= layout.quantised:
                    return bf16()
                if first + columns > layout.quantised:
                    tail = arith.cmpi(arith.CmpIPredicate.sge, value, i32(layout.quantised))
                    return either(tail, bf16, any_scale, [i32_type()] * 8)
                return any_scale()

            words = by_layout(which, layouts, of, [i32_type()] * 8)
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
                llvm.store(vectors, utils.getelementptr(to, [place], i8_type()), alignment=16)

    write(raw_ref, scale_ref, odd_ref, which, tile_ref)
