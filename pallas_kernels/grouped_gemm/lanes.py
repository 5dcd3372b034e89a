"""The lane code of the Hopper kernel: stored bytes and scales of a weight to an operand in registers, sums to device memory.

Rows of the weight are rows of the products. Lane `l` of warp `w` has rows ``16 w + l // 4`` and eight further down, and of a
row's 128 bytes the 32 that begin at ``32 * (l % 4)``, in two parts of 16 bytes. So it reads 16 bytes at a time, of a row in
few groups of values under one scale. The inputs' columns are in the order in which operands then are: `in_column_order`.
"""

import dataclasses

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import mosaic, quantize
from pallas_kernels.decoding import FP4_TO_BF16, TO_BF16, fp4_word_pairs, fp8_pairs, has_nan_code, times
from pallas_kernels.lane_ops import (
    SCALAR,
    WGMMA,
    carried_words,
    fragment,
    group_of,
    i8_type,
    i32,
    i32_type,
    load_bits,
    load_four,
    moved,
    own_thread,
    pair_type,
    past,
    permute,
    quad_of,
    warp_of,
)

ROWS = 64  # of a wgmma
BYTES = 128  # of a row in a tile
PARTS = 2  # pieces of 16 bytes of a row that a lane reads
TILE = (plgpu.SwizzleTransform(128),)
UP = 63  # powers of two by which a scale's factor is above it


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a weight [E, N, K] is stored: FP8 or packed FP4 values, one E8M0 scale for `block` = (rows, columns) of them."""

    fp4: bool
    block: tuple[int, int]

    @property
    def values(self) -> int:
        """Values of a row in a tile."""
        return BYTES * 2 if self.fp4 else BYTES

    @property
    def pieces(self) -> int:
        """Columns of operands, 64 each, that a tile makes."""
        return self.values // 64

    @property
    def down(self) -> int:
        """Operands are 2^-down times what is stored, so that one product makes them of a number's bits and its scale. It is
        exact for scales from 2^-63 on; one of 2^65 counts as infinite, and larger ones as NaN."""
        return (FP4_TO_BF16 if self.fp4 else TO_BF16) - UP

    @property
    def lane_groups(self) -> int:
        """Scales of a row that a lane needs of a tile: one, or one a part."""
        return PARTS if self.fp4 else 1


def stored_as(x, weight, block, family: str) -> Stored:
    """How the weight is stored; NotImplementedError unless the kernels of this operation carry the call."""
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the {family} kernel multiplies bfloat16 inputs, not {x.dtype}.")
    fp4 = weight.dtype == jnp.uint8
    stored = Stored(fp4, (1, 32) if fp4 else quantize.tile(block))
    rows, columns = stored.block
    if (ROWS % rows and rows % ROWS) or columns % 32 or (stored.values % columns and columns % stored.values):
        raise NotImplementedError(
            f"the {family} kernel takes scales of tiles that divide {ROWS} rows or are whole times as many, and of 32 columns "
            f"or multiples that divide {stored.values} or are whole times as many; block is {stored.block}."
        )
    if weight.shape[-2] % ROWS or x.shape[-1] % stored.values:
        raise NotImplementedError(
            f"the {family} kernel takes weights of multiples of {ROWS} rows and {stored.values} columns, not of "
            f"{weight.shape[-2]} x {x.shape[-1]}."
        )
    if weight.size // weight.shape[-1] >= 2**31:
        raise NotImplementedError(f"the {family} kernel counts the rows of all weights in 31 bits.")
    return stored


def in_column_order(x, stored: Stored):
    """Inputs [.., K] with the columns of every tile in the order of the operands."""
    if stored.fp4:  # quad, part, operand, half, column of a pair, step, pair
        split, order = (4, 2, 2, 2, 2, 2, 2), (1, 2, 3, 5, 6, 0, 4)
    else:  # quad, part, step, column of a pair, pair
        split, order = (4, 2, 4, 2, 2), (1, 2, 4, 0, 3)
    lead = x.shape[:-1]
    axes = [*range(len(lead) + 1), *[len(lead) + 1 + axis for axis in order]]
    return x.reshape(*lead, -1, *split).transpose(axes).reshape(x.shape)


def load_scales(scale_refs, which, row, column, stored: Stored, rows_of_group: int):
    """The scales of rows row .. + 63 of stacked weights and a tile's columns column .. + values - 1, for `factors`.

    scale_refs: uint8, device memory, [E * scale rows, scale columns] each, of which scale_refs[which] is read; which, row,
    column: int32 scalars, row and column multiples of 64 and of a tile's values. rows_of_group: rows N of a weight; the last
    tile of scales may be partial.
    int32 [128 * 2]: of a lane's two rows, a byte a group. Interpreted: the scale of every value, uint8 [64, values].
    """
    carried, pack, _ = carried_words(2)
    block_rows, block_columns = stored.block
    per_group = -(-rows_of_group // block_rows)

    def twin(which, row, column, *scale_refs):
        first = row // rows_of_group * per_group + row % rows_of_group // block_rows
        count = max(1, ROWS // block_rows)
        columns = max(1, stored.values // block_columns)

        def read(ref):
            return lambda: ref[pl.ds(first, count), pl.ds(column // block_columns, columns)]

        found = lax.switch(which, [read(ref) for ref in scale_refs])
        return jnp.repeat(jnp.repeat(found, ROWS // count, axis=0), stored.values // columns, axis=1)

    @mosaic.lane_code(
        arg_types=(SCALAR, SCALAR, SCALAR, *[plgpu.RefType()] * len(scale_refs)),
        return_type=plgpu.ShapeDtypeStruct((128 * 2,), jnp.int32, layout=carried),
        twin=twin,
    )
    def load(_, which, row, column, *scale_refs):
        i64 = ir.IntegerType.get_signless(64)
        thread = utils.thread_idx()
        width = ir.MemRefType(scale_refs[0].type).shape[1]
        which, row, column = (mosaic.scalar(each) for each in (which, row, column))
        base = mosaic.global_pointer(scale_refs[0])
        for number, ref in enumerate(scale_refs[1:], 1):
            is_it = arith.cmpi(arith.CmpIPredicate.eq, which, i32(number))
            base = arith.select(is_it, mosaic.global_pointer(ref), base)
        group = arith.divui(row, i32(rows_of_group))
        within = arith.subi(row, arith.muli(group, i32(rows_of_group)))
        own = arith.addi(column, arith.muli(quad_of(thread), i32(stored.values // 4)))
        at = arith.divui(own, i32(block_columns))
        found = []
        for half in range(2):
            first = arith.addi(arith.muli(warp_of(thread), i32(16)), arith.addi(group_of(thread), i32(8 * half)))
            line = arith.divui(arith.addi(within, first), i32(block_rows))
            line = arith.addi(arith.muli(group, i32(per_group)), line)
            start = arith.addi(arith.muli(arith.extui(i64, line), utils.c(width, i64)), arith.extui(i64, at))
            pointer = utils.getelementptr(base, [start], i8_type())
            found.append(arith.extui(i32_type(), load_bits(pointer, 8 * stored.lane_groups)))
        return pack(found)

    return load(which, row, column, *scale_refs)


def load_words(raw_ref, part: int):
    """A part of the bytes of a tile, uint8 [64, 128] (TILE) in shared memory, for `operand`.

    int32 [128 * 8]: four words of each of a lane's two rows. Interpreted: the tile.
    """
    carried, pack, _ = carried_words(8)

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(TILE),),
        return_type=plgpu.ShapeDtypeStruct((128 * 8,), jnp.int32, layout=carried),
        twin=lambda raw_ref: raw_ref[...],
    )
    def load(_, raw_ref):
        thread = utils.thread_idx()
        group = group_of(thread)
        row = arith.addi(arith.muli(warp_of(thread), i32(16)), group)
        piece = arith.addi(arith.muli(quad_of(thread), i32(2)), i32(part))
        at = arith.addi(arith.muli(row, i32(BYTES)), arith.muli(arith.xori(piece, group), i32(16)))
        own = moved(utils.memref_ptr(raw_ref), at)
        return pack([word for half in range(2) for word in load_four(past(own, 8 * BYTES * half))])

    return load(raw_ref)


def factors(scales, stored: Stored):
    """What scales of `load_scales` stand for, times 2^UP, in bf16, for `operand`: of each row both that a lane needs."""
    carried, pack, unpack = carried_words(2)

    @mosaic.lane_code(
        arg_types=(carried,),
        return_type=plgpu.ShapeDtypeStruct((128 * 2,), jnp.int32, layout=carried),
        twin=lambda scales: scales,
    )
    def convert(_, scales):
        found = []
        for codes in unpack(scales):
            codes = permute(codes, i32(0), 0x4140 if stored.lane_groups > 1 else 0x4040)
            bits = arith.addi(arith.muli(codes, i32(1 << 7)), i32(UP << 7 | UP << 23))
            # Above infinity, which is 255 << 7, lie codes that are too large, and that of NaN.
            found.append(llvm.inline_asm(i32_type(), [bits, i32(0x7FFF7FFF)], "min.u16x2 $0, $1, $2;", "=r,r,r"))
        return pack(found)

    return convert(scales)


def operand(words, scales, pieces, stored: Stored):
    """`pieces` (numbers, 64 values each) of the 64 rows of a tile as bf16 [64, 64 * pieces], the left operand of a wgmma.

    words: of `load_words`, of every part that has some of the pieces; scales: of `factors`. A NaN code among FP8 values makes
    a NaN of its row.
    """
    words_layout, _, unpack_words = carried_words(8)
    scales_layout, _, unpack_scales = carried_words(2)
    parts = [piece * PARTS // stored.pieces for piece in pieces]

    def twin(scales, *raw):
        if stored.fp4:
            values = quantize.unpack_fp4(raw[0])
        else:
            values = jnp.asarray(raw[0]).view(jnp.float8_e4m3fn).astype(jnp.float32)
        dense = (values * quantize.e8m0_to_float32(scales) * 2.0**-stored.down).astype(jnp.bfloat16)
        return in_column_order(dense, stored)[:, 64 * pieces[0] : 64 * pieces[-1] + 64]

    @mosaic.lane_code(
        arg_types=(scales_layout, *[words_layout] * len(words)),
        return_type=plgpu.ShapeDtypeStruct((ROWS, 64 * len(pieces)), jnp.bfloat16, layout=WGMMA),
        twin=twin,
    )
    def convert(_, scales, *words):
        words = [unpack_words(each) for each in words]
        registers = np.empty((len(pieces), 8, 2), dtype=object)
        for half, factor in enumerate(unpack_scales(scales)):
            for n, (piece, part) in enumerate(zip(pieces, parts)):
                own = words[part - parts[0]][4 * half : 4 * half + 4]
                magnitudes, of_part = [], factor
                if stored.fp4:
                    number = piece % (stored.pieces // PARTS)
                    pairs = [pair for word in own[2 * number : 2 * number + 2] for pair in fp4_word_pairs(word)]
                    of_part = permute(factor, factor, (0x1010, 0x3232)[part])
                else:
                    pairs = [pair for word in own for pair in fp8_pairs(word, magnitudes)]
                for i, pair in enumerate(pairs):
                    registers[n, i, half] = times(pair, of_part)
                if magnitudes:
                    bits = llvm.bitcast(i32_type(), registers[n, 0, half])
                    bits = arith.select(has_nan_code(magnitudes), i32(0x7FFF7FFF), bits)
                    registers[n, 0, half] = llvm.bitcast(pair_type(), bits)
        return fragment(registers, (ROWS, 64 * len(pieces)))

    return convert(scales, *words)


def store(out_ref, sums, row, column):
    """Stores sums [64, R], transposed, to rows row .. of out_ref [rows, N] (float32 or bf16, device memory), column .. + 63."""
    count = sums.shape[1]

    def twin(out_ref, sums, row, column):
        out_ref[pl.ds(row, count), pl.ds(column, ROWS)] = sums.T.astype(out_ref.dtype)

    @mosaic.lane_code(arg_types=(plgpu.RefType(), WGMMA, SCALAR, SCALAR), twin=twin)
    def write(_, out_ref, sums, row, column):
        i64 = ir.IntegerType.get_signless(64)
        width = ir.MemRefType(out_ref.type).shape[1]
        size = 4 if wide else 2
        thread = own_thread()
        line = arith.addi(mosaic.scalar(row), arith.muli(quad_of(thread), i32(2)))
        first = arith.addi(arith.muli(warp_of(thread), i32(16)), group_of(thread))
        at = arith.muli(arith.extui(i64, line), utils.c(width, i64))
        at = arith.addi(at, arith.extui(i64, arith.addi(mosaic.scalar(column), first)))
        pointer = utils.getelementptr(mosaic.global_pointer(out_ref), [arith.muli(at, utils.c(size, i64))], i8_type())
        registers = sums.registers.reshape(count // 8, 2)
        for i in range(count // 8):
            for half in range(2):
                for e in range(2):
                    found = vector.extract(registers[i, half], [], ir.DenseI64ArrayAttr.get([e]))
                    found = found if wide else arith.truncf(ir.BF16Type.get(), found)
                    to = past(pointer, ((8 * i + e) * width + 8 * half) * size)
                    llvm.store(found, to, alignment=size)

    wide = jnp.dtype(out_ref.dtype) == jnp.float32
    write(out_ref, sums, row, column)


def set_aside(ref, sums):
    """Writes sums [64, R] to ref, float32 [64 * R] in shared memory, for `add_aside` by the same threads of a warpgroup."""

    def twin(ref, sums):
        ref[...] = sums.reshape(-1)

    @mosaic.lane_code(arg_types=(plgpu.RefType(), WGMMA), twin=twin)
    def write(_, ref, sums):
        own = _own_pairs(ref)
        for i, register in enumerate(sums.registers.flat):
            llvm.store(register, past(own, 8 * 128 * i), alignment=8)

    write(ref, sums)


def add_aside(sums, ref):
    """sums [64, R] and what `set_aside` wrote to ref."""

    @mosaic.lane_code(
        arg_types=(WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=WGMMA),
        twin=lambda sums, ref: sums + ref[...].reshape(sums.shape),
    )
    def add(_, sums, ref):
        own = _own_pairs(ref)
        registers = np.empty(sums.registers.size, dtype=object)
        for i, register in enumerate(sums.registers.flat):
            more = llvm.load(register.type, past(own, 8 * 128 * i), alignment=8)
            registers[i] = arith.addf(register, more)
        return fragment(registers, sums.shape)

    return add(sums, ref)


def _own_pairs(ref):
    """A pointer to the first pair of numbers of this thread of its warpgroup; the next is that of all its threads further."""
    return moved(utils.memref_ptr(ref), arith.muli(arith.remui(own_thread(), i32(128)), i32(8)))
