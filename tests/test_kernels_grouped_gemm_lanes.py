"""The lane code of products with stored weights, run lane by lane in NumPy: scales, operands, sums."""

import lane_emulator as emulator
import ml_dtypes
import numpy as np
import pytest
from lane_emulator import Memory, wgmma_array, wgmma_registers
from reference import ops as oracle

from pallas_kernels import decoding, lane_ops
from pallas_kernels.grouped_gemm import lanes
from pallas_kernels.grouped_gemm.lanes import Stored

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
MODULES = (lane_ops, decoding, lanes)
FP4, FP8 = Stored(True, (1, 32)), Stored(False, (32, 32))
LANE = np.arange(emulator.LANES)
ROW = np.stack([16 * (LANE // 32) + LANE % 32 // 4 + 8 * half for half in range(2)])  # [half, lane]


def bits(array):
    """Float32 numbers as words: zeros of either sign differ."""
    return np.ascontiguousarray(array, np.float32).view(np.uint32)


def factors_of(stored, scale, row, column, outputs):
    """(words for `operand`, the numbers in them [64, columns]): the factors of a tile, a column for the values of a scale."""
    refs = [Memory(scale + 1), Memory(scale), Memory(scale + 2)]  # of three weights, the second is read
    words = lanes.factors(lanes.load_scales(refs, 1, row, column, stored, outputs), stored)
    found = np.empty((64, 4, 2), np.float32)
    for half, word in enumerate(words.registers.reshape(-1)):
        found[ROW[half], LANE % 4] = word.elements[0].data.view(BF16).reshape(-1, 2).astype(np.float32)
    if not stored.fp4:  # a pair's halves have one factor
        np.testing.assert_array_equal(found[..., 0], found[..., 1])
        found = found[..., :1]
    return words, found.reshape(64, -1)


def meant(scale):
    """What E8M0 bytes mean as factors: 2^63 times themselves, where that is a bf16 number."""
    sizes = [2.0**63 * oracle.e8m0(byte) for byte in range(192)]
    return np.array([*sizes, np.inf, *[np.nan] * 63], np.float32)[scale]


@pytest.mark.parametrize(
    "fp4, block, outputs, inputs",
    [
        (True, (1, 32), 64, 512),
        (False, (32, 32), 128, 768),
        (False, (64, 64), 192, 512),
        (False, (128, 128), 192, 640),  # the last scales of a weight are of 64 rows
        (False, (128, 32), 192, 512),
        (False, (256, 256), 320, 640),  # and of 128 columns
    ],
)
def test_scales_become_factors(fp4, block, outputs, inputs):
    """All tiles of three stacked weights; in FP4 and FP8 with all 256 bytes among their scales."""
    stored, rng = Stored(fp4, block), np.random.default_rng(1)
    lines, columns = -(-outputs // block[0]), -(-inputs // block[1])
    scale = rng.permutation(101 * np.arange(3 * lines * columns) % 256).astype(np.uint8)  # all of them for 256
    scale = scale.reshape(3, lines, columns)
    wanted = scale.repeat(block[0], 1)[:, :outputs].repeat(block[1], 2)[..., :inputs]
    assert len(np.unique(wanted)) == min(scale.size, 256)
    per_lane = stored.values // (8 if fp4 else 4)  # values that share a factor in a lane
    for expert in range(3):
        for row in range(0, outputs, 64):
            for column in range(0, inputs, stored.values):
                with emulator.emulated(*MODULES, warpgroup=expert):
                    stacked = scale.reshape(3 * lines, columns)
                    _, found = factors_of(stored, stacked, expert * outputs + row, column, outputs)
                of_tile = wanted[expert, row : row + 64, column : column + stored.values]
                np.testing.assert_array_equal(found.repeat(per_lane, 1), meant(of_tile))


def every_code(rng, exclude=()):
    """Bytes [64, 128] with every one in every place of a word, but those to `exclude`."""
    codes = np.setdiff1d(np.arange(256), exclude)
    words = [rng.permutation(codes[np.arange(2048) % len(codes)]) for _ in range(4)]
    return np.stack(words, axis=-1).reshape(64, 128).astype(np.uint8)


def swizzled(tile):
    """A tile as TMA writes it: pieces of 16 bytes of a row change places with the row's number in its eight."""
    pieces, found = tile.reshape(64, 8, 16), np.empty((64, 8, 16), np.uint8)
    for row, piece in np.ndindex(64, 8):
        found[row, piece ^ row % 8] = pieces[row, piece]
    return found.reshape(64, 128)


def operand(stored, raw, scaling, pieces):
    """The operand of some pieces, from the parts that hold them."""
    parts = sorted({piece * 2 // stored.pieces for piece in pieces})
    words = [lanes.load_words(raw, part) for part in parts]
    found = lanes.operand(words, scaling, pieces, stored).registers
    return wgmma_array(found, (64, 64 * len(pieces)))


def calls(stored):
    """The pieces of every call of the kernels, and all of a tile."""
    count = stored.pieces
    return [(i,) for i in range(count)] + [(i, i + 1) for i in range(0, count, 2)] + [tuple(range(count))] * stored.fp4


def values_of(stored, raw):
    """The numbers that the bytes of a tile stand for [64, values]."""
    return oracle.unpack_fp4(raw) if stored.fp4 else raw.view(E4M3).astype(np.float32)


NAN_CODES = (0x7F, 0xFF)


@pytest.mark.parametrize("block", [None, (32, 32), (64, 64), (128, 128)])
@pytest.mark.parametrize("warpgroup", [0, 3])
def test_stored_bytes_become_operands(block, warpgroup):
    """All codes, under all scales of which that is promised: exactly value · scale · 2^-down, in the inputs' order."""
    stored, rng = Stored(block is None, block or (1, 32)), np.random.default_rng(2)
    codes = every_code(rng, () if stored.fp4 else NAN_CODES)
    lines, columns = -(-192 // stored.block[0]), -(-2 * stored.values // stored.block[1])
    scale = rng.permutation(64 + np.arange(2 * lines * columns) % 128).astype(np.uint8)  # 2^-63 .. 2^64
    of_weight = scale.reshape(2, lines, columns)[1].repeat(stored.block[0], 0).repeat(stored.block[1], 1)
    sizes = np.ldexp(1.0, of_weight[128:192, stored.values : 2 * stored.values].astype(int) - 127)
    wanted = values_of(stored, codes) * sizes * 2.0**-stored.down
    np.testing.assert_array_equal(wanted.astype(BF16), wanted)
    wanted = lanes.in_column_order(wanted, stored)
    with emulator.emulated(*MODULES, warpgroup=warpgroup):
        raw = Memory(swizzled(codes))
        scaling, _ = factors_of(stored, scale.reshape(2 * lines, columns), 192 + 128, stored.values, 192)
        for pieces in calls(stored):
            found = operand(stored, raw, scaling, pieces)
            np.testing.assert_array_equal(bits(found), bits(wanted[:, 64 * pieces[0] : 64 * pieces[-1] + 64]))


@pytest.mark.parametrize("stored", [FP4, FP8], ids=["fp4", "fp8"])
def test_scales_beyond_those_of_numbers(stored):
    """Small ones become smaller numbers, rounded; 2^65 is infinite and a larger one, or 255, NaN, in its group alone."""
    rng = np.random.default_rng(3)
    codes = every_code(rng, () if stored.fp4 else NAN_CODES)
    lines, columns = 64 // stored.block[0], stored.values // 32
    scale = rng.choice([0, 1, 30, 63, 192, 193, 254, 255], (lines, columns)).astype(np.uint8)
    of_values = scale.repeat(stored.block[0], 0).repeat(32, 1)
    with np.errstate(invalid="ignore"):
        wanted = values_of(stored, codes) * meant(of_values).astype(np.float64) * 2.0 ** -(stored.down + 63)
    wanted = lanes.in_column_order(oracle.bf16(wanted), stored)
    with emulator.emulated(*MODULES):
        scaling, _ = factors_of(stored, scale, 0, 0, 64)
        for pieces in calls(stored):
            found = operand(stored, Memory(swizzled(codes)), scaling, pieces)
            np.testing.assert_array_equal(found, wanted[:, 64 * pieces[0] : 64 * pieces[-1] + 64])


@pytest.mark.parametrize("code", NAN_CODES)
def test_a_nan_code_makes_its_row_nan(code):
    """Wherever in a row it is, in the operand of its piece; other rows, and the row's other pieces, are as they were."""
    rng = np.random.default_rng(4)
    codes, scale = every_code(rng, NAN_CODES), np.full((2, 4), 127, np.uint8)
    wanted = lanes.in_column_order(values_of(FP8, codes) * 2.0**-FP8.down, FP8)
    piece_of = np.argsort(lanes.in_column_order(np.arange(128), FP8)) // 64
    for i, columns in enumerate(rng.permutation(128).reshape(4, 32)):
        rows, spoilt = np.arange(i % 2, 64, 2), codes.copy()
        spoilt[rows, columns] = code
        with emulator.emulated(*MODULES):
            scaling, _ = factors_of(FP8, scale, 0, 0, 64)
            for piece in range(2):
                found = operand(FP8, Memory(swizzled(spoilt)), scaling, (piece,))
                lost = np.isin(np.arange(64), rows[piece_of[columns] == piece])
                np.testing.assert_array_equal(np.isnan(found).any(axis=1), lost)
                of_piece = wanted[:, 64 * piece : 64 * piece + 64]
                np.testing.assert_array_equal(bits(found[~lost]), bits(of_piece[~lost]))


@pytest.mark.parametrize("stored", [FP4, FP8], ids=["fp4", "fp8"])
def test_the_order_of_columns_stays_within_tiles(stored):
    order = lanes.in_column_order(np.arange(3 * stored.values)[None].repeat(2, 0), stored)
    assert order.shape == (2, 3 * stored.values)
    order = order.reshape(2, 3, -1)
    np.testing.assert_array_equal(np.sort(order), np.arange(3 * stored.values).reshape(3, -1)[None].repeat(2, 0))
    np.testing.assert_array_equal(order - order[:, :, :1], (order - order[:, :, :1])[:1, :1].repeat(2, 0).repeat(3, 1))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("rows", [8, 16, 128])
@pytest.mark.parametrize("warpgroup", [0, 2])
def test_sums_are_stored_transposed(rows, dtype, warpgroup):
    """A row of the output for a column of the sums; nothing else is written."""
    rng = np.random.default_rng(5)
    sums = rng.standard_normal((64, rows)).astype(np.float32)
    sums[3, 1], sums[9, 5], sums[60, 7] = np.inf, -0.0, np.nan
    wanted = np.full((3 * rows, 320), 7, dtype)
    wanted[rows : 2 * rows, 192:256] = sums.T.astype(dtype)
    with emulator.emulated(*MODULES, warpgroup=warpgroup):
        out = Memory(np.full((3 * rows, 320), 7, dtype))
        lanes.store(out, wgmma_registers(sums), rows, 192)
    np.testing.assert_array_equal(out.array.view(f"u{wanted.itemsize}"), wanted.view(f"u{wanted.itemsize}"))


@pytest.mark.parametrize("rows", [8, 128])
def test_sums_of_warpgroups_are_added(rows):
    """What one sets aside another adds to its own, each thread to the same places."""
    rng = np.random.default_rng(6)
    theirs, ours = rng.standard_normal((2, 64, rows)).astype(np.float32)
    with emulator.emulated(*MODULES, warpgroup=3):
        aside = Memory(np.full(64 * rows, np.nan, np.float32))
        lanes.set_aside(aside, wgmma_registers(theirs))
        assert not np.isnan(aside.array).any()
        written = aside.array.copy()
    with emulator.emulated(*MODULES, warpgroup=1):
        found = lanes.add_aside(wgmma_registers(ours), Memory(written))
    np.testing.assert_array_equal(wgmma_array(found.registers, (64, rows)), ours + theirs)
