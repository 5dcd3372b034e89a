"""Small pieces of the code that kernels write lane by lane: numbers, addresses, loads, branches, PTX."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from pallas_kernels import mosaic

WGMMA = plgpu.Layout.WGMMA
SCALAR = plgpu.Layout.WG_SPLAT(())


def either(condition, then, otherwise, types):
    """What then() or otherwise() gives, a list of values of these types."""
    branch = scf.IfOp(condition, types, has_else=True)
    for block, make in ((branch.then_block, then), (branch.else_block, otherwise)):
        with ir.InsertionPoint(block):
            scf.yield_(make())
    return list(branch.results)


def fragment(registers, shape):
    """Registers as an array in the layout of a wgmma."""
    layout = WGMMA.to_mgpu()
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None
    )


def carried_words(count: int):
    """The layout of `count` 32-bit words of every thread, and what packs them for other lane code and unpacks them."""
    layout = plgpu.Layout.WG_STRIDED((128 * count,), vec_size=1)

    def pack(words):
        one = ir.VectorType.get((1,), i32_type())
        words = [arith.extui(i32_type(), word) if is_narrow(word) else word for word in words]
        words += [i32(0)] * (count - len(words))
        registers = np.array([vector.from_elements(one, [word]) for word in words], dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)

    def unpack(array):
        return [vector.extract(r, [], ir.DenseI64ArrayAttr.get([0])) for r in array.registers.reshape(-1)]

    return layout, pack, unpack


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


def opaque(x):
    """A scalar int32 of which the compiler does not know how it came about, and so does not compute it again."""

    @mosaic.lane_code(
        arg_types=(SCALAR,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR),
        twin=lambda x: x,
    )
    def same(_, x):
        register = np.array(asm("mov.u32 $0, $1;", "=r,r", [mosaic.scalar(x)], i32_type()), dtype=object)
        return mgpu.FragmentedArray(_registers=register, _layout=SCALAR.to_mgpu(), _is_signed=True)

    return same(x)


def pair_type():
    """Two bf16 numbers."""
    return ir.VectorType.get((2,), ir.BF16Type.get())


def warp_of(thread):
    """Number of a thread's warp in its warpgroup."""
    return arith.divui(arith.remui(thread, i32(128)), i32(32))


def group_of(thread):
    """Number of a lane's four in its warp."""
    return arith.divui(arith.remui(thread, i32(32)), i32(4))


def quad_of(thread):
    """A lane's number among its four."""
    return arith.remui(thread, i32(4))


def moved(pointer, offset):
    """The pointer `offset` bytes further (a value)."""
    return utils.getelementptr(pointer, [offset], i8_type())


def past(pointer, offset: int):
    """A constant offset in a step of its own, which ends up in the instruction and in no register."""
    return utils.getelementptr(pointer, [offset], i8_type())


def load_bits(pointer, bits):
    """A word of 8, 16 or 32 bits."""
    return llvm.load(ir.IntegerType.get_signless(bits), pointer)


def load_two(pointer):
    """Two words, aligned to their size."""
    words = llvm.load(ir.VectorType.get((2,), i32_type()), pointer, alignment=8)
    return [vector.extract(words, [], ir.DenseI64ArrayAttr.get([i])) for i in range(2)]


def load_four(pointer):
    """Four words, aligned to their size."""
    words = llvm.load(ir.VectorType.get((4,), i32_type()), pointer, alignment=16)
    return [vector.extract(words, [], ir.DenseI64ArrayAttr.get([i])) for i in range(4)]


def twice(word):
    """The lower 16 bits of a word, as its upper ones too."""
    word = arith.extui(i32_type(), word) if is_narrow(word) else word
    return permute(word, word, 0x1010)


def is_narrow(word):
    """Whether a word has fewer than 32 bits."""
    return word.type != i32_type()


def i8_type():
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
