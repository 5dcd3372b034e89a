"""The scales of a block of staged rows, as its operands want them, and the way in which the block is read for that."""

import dataclasses

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import mosaic
from pallas_kernels.records import V32
from pallas_kernels.decoding import TO_BF16
from pallas_kernels.lane_ops import (
    SCALAR,
    asm,
    i8_type,
    i32,
    i32_type,
    load_bits,
    moved,
    own_thread,
    past,
)
from pallas_kernels.sparse_decode.rows import BLOCK, DOWN, Staged, by_layout


def prepare(raw_ref, scale_ref, odd_ref, which, layouts: tuple[Staged, ...]):
    """Writes the scales of a block of staged rows as the fragments want them, by a warpgroup.

    scale_ref: bf16 [>= groups * 64], a group's scales for all rows together. odd_ref: int32 [4], of which one is not 0
    where a scale of FP8 values is odd: no power of two that fits. Fragments then take the scales from the rows. which:
    number of the layout among `layouts`.
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
                at = arith.addi(at, arith.addi(i32(layout.scale), arith.muli(group, i32(layout.scale_bytes))))
                stored = load_bits(moved(raw, at), 8 * layout.scale_bytes)
                if layout.kind == "fp4":
                    bits = _scale_of_e4m3(arith.extui(i32_type(), stored))
                else:
                    of_scale = _scale_of_float if layout.format == V32() else _scale_of_e8m0
                    bits, strange = of_scale(stored)
                    odd = arith.ori(odd, strange)
                at = arith.addi(arith.muli(group, i32(2 * BLOCK)), arith.muli(token, i32(2)))
                i16 = ir.IntegerType.get_signless(16)
                llvm.store(arith.trunci(i16, bits), utils.getelementptr(to, [at], i8_type()))
            return [odd]

        (odd,) = by_layout(which, layouts, of, [i32_type()]) if any(x.quantised for x in layouts) else [i32(0)]
        if any(layout.kind == "fp8" for layout in layouts):
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
        arith.cmpi(arith.CmpIPredicate.ule, arith.subi(field, i32(1)), i32(254 - (TO_BF16 - DOWN) - 1)),
        arith.cmpi(arith.CmpIPredicate.eq, arith.andi(bits, i32(0x7FFFFF)), i32(0)),
    )
    scale = arith.shli(arith.addi(field, i32(TO_BF16 - DOWN)), i32(7))
    zero = arith.cmpi(arith.CmpIPredicate.eq, bits, i32(0))  # of a row that is none
    return arith.select(zero, i32(0), scale), arith.select(arith.ori(fits, zero), i32(0), i32(1))


def _scale_of_e8m0(byte):
    """bf16 bits of an E8M0 scale times 2^(120 - DOWN), and whether it does not fit or is NaN."""
    field = arith.addi(arith.extui(i32_type(), byte), i32(TO_BF16 - DOWN))
    return arith.shli(field, i32(7)), arith.extui(i32_type(), arith.cmpi(arith.CmpIPredicate.ugt, field, i32(254)))


def _scale_of_e4m3(byte):
    """bf16 bits of an E4M3 scale times 2^-DOWN."""
    f32 = ir.F32Type.get()
    magnitude = llvm.bitcast(f32, arith.shli(arith.andi(byte, i32(0x7F)), i32(20)))
    scaled = llvm.bitcast(i32_type(), arith.mulf(magnitude, utils.c(2.0 ** (TO_BF16 - DOWN), f32)))
    scale = arith.shrui(scaled, i32(16))
    scale = arith.ori(scale, arith.shli(arith.andi(byte, i32(0x80)), i32(8)))
    nan = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(byte, i32(0x7F)), i32(0x7F))
    return arith.select(nan, i32(0x7FC0), scale)


def float_scale(pointer, layout: Staged):
    """Inside lane code: float32 bits of a scale of FP8 values that a row has at `pointer`.

    An E8M0 byte of 0, 2^-127, becomes 0: every FP8 number times 2^-127 and 2^-DOWN is 0 in bf16.
    """
    stored = load_bits(pointer, 8 * layout.scale_bytes)
    if layout.format == V32():
        return stored
    bits = arith.shli(arith.extui(i32_type(), stored), i32(23))
    return arith.select(arith.cmpi(arith.CmpIPredicate.eq, bits, i32(0x7F800000)), i32(0x7FC00000), bits)


@dataclasses.dataclass(frozen=True)
class Reading:
    """One way in which the rows of a block are read: by their layout, and `general` where a scale is odd.

    FP8 values are then multiplied by their scales, whatever these are, as float32, and rounded to bf16.
    """

    layout: Staged
    general: bool = False


def readings(layouts: tuple[Staged, ...]) -> tuple[Reading, ...]:
    """The ways in which a kernel reads rows of these layouts, each once."""
    found = []
    for layout in dict.fromkeys(layouts):
        found.append(Reading(layout))
        if layout.kind == "fp8":
            found.append(Reading(layout, general=True))
    return tuple(found)


def reading_of(odd_ref, which, layouts: tuple[Staged, ...]):
    """Number among `readings` for a block of layout number `which`, which `prepare` has seen."""
    ways = readings(layouts)
    number = ways.index(Reading(layouts[0]))
    if len(set(layouts)) > 1:
        number = jnp.where(which == 0, number, ways.index(Reading(layouts[1])))
    if not any(way.general for way in ways):
        return jnp.int32(number)
    return number + _odd_flag(odd_ref)  # 0 for a layout without FP8 values


def _odd_flag(odd_ref):
    """1 where `prepare` found an odd scale, else 0."""

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR),
        twin=lambda _: jnp.int32(0),
    )
    def flag(_, odd_ref):
        register = np.array(arith.extui(i32_type(), is_odd(odd_ref)), dtype=object)
        return mgpu.FragmentedArray(_registers=register, _layout=SCALAR.to_mgpu(), _is_signed=True)

    return flag(odd_ref)


def is_odd(odd_ref):
    """Inside lane code: whether `prepare` found an odd scale."""
    odd = i32(0)
    for warp in range(4):
        odd = arith.ori(odd, load_bits(past(utils.memref_ptr(odd_ref), 4 * warp), 32))
    return arith.cmpi(arith.CmpIPredicate.ne, odd, i32(0))
