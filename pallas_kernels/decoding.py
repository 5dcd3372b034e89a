"""FP8 and FP4 numbers as pairs of bf16 numbers, in registers."""

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.lane_ops import i32, i32_type, pair_type, permute

TO_BF16 = 120  # an E4M3 number's bits, three places from the top of a bf16 number's, are 2^-120 times its value
FP4_TO_BF16 = 126  # and an E2M1 number's 2^-126 times


def fp8_pairs(word, magnitudes=None):
    """Four FP8 numbers as 2^-120 times bf16 numbers: the first and third as a pair, then the second and fourth.

    Appends their magnitudes, for `has_nan_code`.
    """
    sign, rest = i32(0x80008000), i32(0x07F007F0)
    low, high = arith.andi(arith.shli(word, i32(4)), rest), arith.andi(arith.shrui(word, i32(4)), rest)
    if magnitudes is not None:
        magnitudes += [low, high]
    low = arith.ori(arith.andi(arith.shli(word, i32(8)), sign), low)
    high = arith.ori(arith.andi(word, sign), high)
    return [llvm.bitcast(pair_type(), low), llvm.bitcast(pair_type(), high)]


def has_nan_code(magnitudes):
    """Whether one of the magnitudes of `fp8_pairs` is that of NaN, which is the largest there is."""
    most = magnitudes[0]
    for each in magnitudes[1:]:
        most = llvm.inline_asm(i32_type(), [most, each], "max.u16x2 $0, $1, $2;", "=r,r,r")
    above = arith.andi(arith.addi(most, i32(0x00100010)), i32(0x08000800))
    return arith.cmpi(arith.CmpIPredicate.ne, above, i32(0))


def fp4_pairs(word, across: bool):
    """FP4 numbers as pairs of bf16 numbers.

    Not across: four in the lower 16 bits, the first and third as a pair, then the second and fourth. Across: four in
    the lower 16 bits and four in the upper, as four pairs of a lower and an upper one.
    """
    if not across:
        return [llvm.bitcast(pair_type(), bits) for bits in _fp4_lookup(word, ((0x6240, 12, 20), (0x7351, 8, 16)))]
    every_second = i32(0x0F0F0F0F)
    found = []
    for nibbles in (arith.andi(word, every_second), arith.andi(arith.shrui(word, i32(4)), every_second)):
        nibbles = arith.ori(nibbles, arith.shrui(nibbles, i32(12)))  # the lower's and the upper's next to each other
        found.append([llvm.bitcast(pair_type(), b) for b in _fp4_lookup(nibbles, ((0x5140, 12, 24), (0x7362, 4, 16)))])
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


def fp4_word_pairs(word):
    """The eight FP4 numbers of a word as 2^-126 times bf16 numbers: the first and fifth, the second and sixth, and so on.

    A product brings sign and magnitude of two numbers to their places at once.
    """
    later = arith.shrui(word, i32(8))
    found = []
    for number in range(4):
        four = i32(0x000F000F << 4 * (number % 2))
        bits = arith.andi(word if number < 2 else later, four)
        # Magnitudes to bits 6 .. 8 of a half, signs to bit 15; between them lies what is masked out.
        bits = arith.muli(bits, i32((1 << 6 | 1 << 12) >> 4 * (number % 2)))
        found.append(llvm.bitcast(pair_type(), arith.andi(bits, i32(0x81C081C0))))
    return found


def down_by(bits, down):
    """A pair of bf16 numbers, given as 32 bits, times 2^-down."""
    pair = llvm.bitcast(pair_type(), bits)
    return times(pair, i32((127 - down) << 7 | (127 - down) << 23)) if down else pair


def times(pair, factor):
    """A pair times the pair of bf16 numbers whose bits `factor` is."""
    return arith.mulf(pair, llvm.bitcast(pair_type(), factor))


def times_floats(pair, first, second, down):
    """A pair of `fp8_pairs` times float32 factors, rounded to bf16, times 2^-down."""
    f32, bits = ir.F32Type.get(), llvm.bitcast(i32_type(), pair)
    lift = utils.c(2.0**TO_BF16, f32)
    values = [arith.shli(bits, i32(16)), arith.andi(bits, i32(0xFFFF0000))]
    values = [arith.mulf(arith.mulf(llvm.bitcast(f32, v), lift), s) for v, s in zip(values, (first, second))]
    rounded = [arith.truncf(ir.BF16Type.get(), v) for v in values]
    return down_by(llvm.bitcast(i32_type(), vector.from_elements(pair_type(), rounded)), down)
