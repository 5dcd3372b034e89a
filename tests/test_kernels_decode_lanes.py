"""The lane code of the Hopper decode kernel, run lane by lane in NumPy: bytes to operands, softmax, output."""

import types

import jax.numpy as jnp
import lane_emulator as emulator
import ml_dtypes
import numpy as np
import pytest
from lane_emulator import Memory, wgmma_array, wgmma_registers
from reference import ops as oracle

from pallas_kernels import Model1, Plain, V32, V41MXFP8, V41NVFP4, decoding, lane_ops
from pallas_kernels.sparse_decode import lanes, operands, rows, scaling

BF16 = ml_dtypes.bfloat16
ROWS = (lane_ops, rows, decoding, scaling, operands)  # modules that read a block
FORMATS = {
    "v32": V32(),
    "v32 of any scale": V32(),
    "model1": Model1(),
    "model1 of any scale": Model1(),
    "v41_mxfp8": V41MXFP8(),
    "v41_mxfp8 of any scale": V41MXFP8(),
    "v41_nvfp4": V41NVFP4(),
    "plain": Plain(512, jnp.bfloat16),
}
PAGE_SIZE, PAGES = 5, 20


def cache_of(name, rng):
    """(pages, stored bytes of every slot) with all E4M3 codes but NaN, all E2M1 codes and scales of many sizes.

    Of any scale: E8M0 scales one after the other, so that the first 37 slots have all but NaN.
    """
    format = FORMATS[name]
    slots = PAGES * PAGE_SIZE
    if isinstance(format, Plain):
        values = oracle.bf16(rng.standard_normal((slots, format.width))).astype(BF16)
        return values.reshape(PAGES, PAGE_SIZE, -1), values.view(np.uint8).reshape(slots, -1)
    stored = rng.integers(0, 256, (slots, format.row_bytes)).astype(np.uint8)
    stored[(stored & 0x7F) == 0x7F] ^= 1  # NaN, or a scale of NaN
    layout = rows.staged(format)
    groups = layout.groups
    if name.startswith("v32"):
        scales = np.exp2(rng.integers(-30, 30, (slots, groups))).astype(np.float32)
        scales = scales * np.float32(1.37) if "any" in name else scales
        stored[:, 512:528] = scales.view(np.uint8)
    elif layout.kind == "fp8":
        scales = np.arange(slots * groups) % 255 if "any" in name else rng.integers(0, 127 + 56, slots * groups)
        stored[:, layout.scale : layout.scale + groups] = scales.reshape(slots, groups)
    if layout.tail:
        tail = oracle.bf16(rng.standard_normal((slots, 64))).astype(BF16)
        stored[:, layout.tail : layout.tail + 128] = tail.view(np.uint8)
    pages = rng.integers(0, 256, (PAGES, -(-format.page_bytes(PAGE_SIZE) // 16) * 16 + 32)).astype(np.uint8)
    for slot in range(slots):
        page, row, at = slot // PAGE_SIZE, slot % PAGE_SIZE, 0
        for field in format.fields(PAGE_SIZE):
            start = field.offset + row * field.stride
            pages[page, start : start + field.size] = stored[slot, at : at + field.size]
            at += field.size
    return pages, stored


def staged_block(name, rng):
    """A block of 64 slots, some of them none, copied to shared memory: (layout, slots, values as read, memory)."""
    format = FORMATS[name]
    layout = rows.staged(format)
    pages, stored = cache_of(name, rng)
    slots = np.full(64, -1, np.int32)
    slots[np.delete(np.arange(64), [3, 40, 63])] = rng.permutation(61)
    lane = np.arange(128)
    places = emulator.Value(slots[16 * (lane // 32) + lane % 16].view(np.uint32), "i32")
    places = emulator.in_registers([emulator.Vector([places])])
    raw = Memory(np.full(64 * layout.stride, 0xAA, np.uint8))
    bias = Memory(np.full(64, np.nan, np.float32))
    with np.errstate(over="ignore"):
        barriers = types.SimpleNamespace(ref=Memory(np.zeros(4, np.int32)))
        rows.copy(raw, bias, Memory(pages), places, barriers, emulator.value(1), layout, PAGE_SIZE)
    none = slots < 0
    np.testing.assert_array_equal(bias.array, np.where(none, -np.inf, 0))
    found = raw.array.reshape(64, -1)[:, : stored.shape[1]]
    np.testing.assert_array_equal(found, np.where(none[:, None], 0, stored[slots]))
    scale, odd = Memory(np.zeros(64 * (layout.groups + 1), BF16)), Memory(np.zeros(4, np.int32))
    scaling.prepare(raw, scale, odd, emulator.value(0), (layout,))
    assert odd.array.any() == ("any" in name)
    if isinstance(format, Plain):
        values = stored.reshape(-1).view(BF16).reshape(len(stored), -1)
    else:
        values = np.asarray(format.decode(jnp.asarray(stored), jnp.bfloat16))
    with np.errstate(over="ignore", under="ignore"):
        values = (values.astype(np.float32) * np.float32(2.0**-layout.down)).astype(BF16).astype(np.float32)
    return layout, np.where(none[:, None], 0, values[slots]), (raw, scale, odd)


def keys(memory, chunk, reading):
    words = operands.load_keys(*memory[:2], chunk, reading)
    return wgmma_array(operands.key_fragment(words, chunk, reading).registers, (64, 64))


@pytest.mark.parametrize("name", FORMATS)
def test_ac_69_stored_bytes_become_operands(name):
    """Keys and values of a block, exactly as the format decodes, whatever the codes and scales."""
    with emulator.emulated(*ROWS):
        layout, values, memory = staged_block(name, np.random.default_rng(5))
        reading = scaling.Reading(layout, general="any" in name)
        assert reading in scaling.readings((layout,))
        width = values.shape[1]
        for chunk in range(width // 64):
            found = keys(memory, chunk, reading)
            expected = operands.key_order(values[:, 64 * chunk : 64 * chunk + 64])
            np.testing.assert_array_equal(found, np.asarray(expected))
        for part, half in np.ndindex(4, 2):
            at = emulator.value(part)
            words = operands.load_values(*memory[:2], at, half, reading, may_be_tail=part == 3)
            found = operands.value_fragment(words, at, half, reading, may_be_tail=part == 3)
            found = wgmma_array(found.registers, (128, 32))
            block = values[32 * half : 32 * half + 32, 128 * part : 128 * part + 128]
            np.testing.assert_array_equal(found, operands.value_order(block.T))
            np.testing.assert_array_equal(operands.value_order_back(found), block.T)
        for first, columns in [(128 * c, 128) for c in range(4)] + [(512, 64)] * (width == 576):
            unpacked = Memory(np.zeros((64, columns), BF16))
            operands.unpack(*memory, emulator.value(0), unpacked, first, (layout,))
            expected = tile(values[:, first : first + columns].astype(BF16), 64)
            np.testing.assert_array_equal(unpacked.array.reshape(-1), expected.reshape(-1))


@pytest.mark.parametrize("name", ["model1", "v41_mxfp8"])
@pytest.mark.parametrize("byte", [182, 183, 254, 255])
def test_one_scale_decides_how_a_block_is_read(name, byte):
    """2^56 and above, or NaN, in any of its rows."""
    with emulator.emulated(*ROWS):
        layout, values, (raw, scale, odd) = staged_block(name, np.random.default_rng(6))
        for row, group in ((0, 0), (30, 3), (62, layout.groups - 1)):
            stored = raw.array.reshape(64, -1)
            before, at = stored[row, layout.scale + group], layout.scale + group
            stored[row, at] = byte
            scaling.prepare(raw, scale, odd, emulator.value(0), (layout,))
            assert odd.array.any() == (byte > 182)
            chunk = group * layout.group // 64
            found = keys((raw, scale), chunk, scaling.Reading(layout, general=byte > 182))
            own = slice(group * layout.group, (group + 1) * layout.group)
            expected = values.copy()
            with np.errstate(over="ignore", invalid="ignore"):
                code = stored[row, own].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
                new = code * (np.float32(np.nan) if byte == 255 else np.float32(2.0) ** (byte - 127))
            expected[row, own] = new * np.float32(2.0**-layout.down)
            expected = operands.key_order(expected[:, 64 * chunk : 64 * chunk + 64])
            np.testing.assert_array_equal(found, np.asarray(expected))
            stored[row, at] = before


@pytest.mark.parametrize("name", [name for name in FORMATS if rows.staged(FORMATS[name]).kind == "fp8"])
def test_ac_69_a_nan_code_makes_its_row_nan(name):
    """Everywhere else keys are as they were; as a value it is not looked at, since its probability is NaN."""
    with emulator.emulated(*ROWS):
        layout, values, (raw, scale, odd) = staged_block(name, np.random.default_rng(6))
        for row, value in ((5, 0), (9, 70), (62, 447)):
            raw.array.reshape(64, -1)[row, value] = 0x7F | (row % 2) << 7
        for chunk in range(layout.quantised // 64):
            found = keys((raw, scale), chunk, scaling.Reading(layout, general="any" in name))
            spoilt = [row for row, value in ((5, 0), (9, 70), (62, 447)) if value // 64 == chunk]
            np.testing.assert_array_equal(np.isnan(found).any(1), np.isin(np.arange(64), spoilt))
            expected = np.asarray(operands.key_order(values[:, 64 * chunk : 64 * chunk + 64]))
            np.testing.assert_array_equal(np.delete(found, spoilt, 0), np.delete(expected, spoilt, 0))
        unpacked = Memory(np.zeros((64, 128), BF16))
        operands.unpack(raw, scale, odd, emulator.value(0), unpacked, 0, (layout,))
        bad = np.isnan(unpacked.array.astype(np.float32)).reshape(8, -1).any(1)  # of eight rows together
        np.testing.assert_array_equal(bad, np.isin(np.arange(8), (5 // 8, 9 // 8)))


def tile(array, swizzle):
    """Bytes of [rows, columns] bf16 as TMA tiles them: eight rows of `swizzle` bytes, 16-byte pieces exchanged."""
    count, columns = array.shape
    wide = swizzle // 2
    tiles = array.reshape(count // 8, 8, columns // wide, wide).swapaxes(1, 2)
    pieces = tiles.reshape(*tiles.shape[:3], wide // 8, 8)
    swapped = np.empty_like(pieces)
    for row in range(8):
        turn = row if swizzle == 128 else row // 2
        for piece in range(wide // 8):
            swapped[:, :, row, piece ^ turn] = pieces[:, :, row, piece]
    return swapped


@pytest.mark.parametrize("heads, width", [(8, 576), (24, 512), (64, 512)])
def test_queries_are_laid_out_for_the_tensor_cores(heads, width):
    rng = np.random.default_rng(6)
    q = rng.standard_normal((2 * heads, width)).astype(BF16)
    with emulator.emulated(lane_ops, lanes):
        q_s = Memory(np.zeros((heads, width), BF16))
        for wg in range(2):
            lanes.load_queries(Memory(q), q_s, emulator.value(heads), emulator.value(wg), 2)
    expected = tile(np.asarray(operands.key_order(q[heads:])), 128)
    np.testing.assert_array_equal(q_s.array.reshape(-1), expected.reshape(-1))


def test_heads_are_copied():
    rng = np.random.default_rng(9)
    given = rng.standard_normal(48).astype(np.float32)
    with emulator.emulated(lane_ops, lanes):
        to = Memory(np.zeros(128, np.float32))
        lanes.copy_heads(Memory(given), to, emulator.value(24))
    np.testing.assert_array_equal(to.array, np.pad(given[24:], (0, 104), mode="edge"))


@pytest.mark.parametrize("heads", [8, 24, 40, 64])
def test_softmax_over_tokens(heads):
    """Three turns of two warpgroups: what scores are taken against, sums and probabilities of every head.

    In the second turn no maximum is far enough above the first's to be followed, in the third some are.
    """
    rng = np.random.default_rng(7)
    scores = rng.standard_normal((3, 2, 64, heads)).astype(np.float32) * 30
    scores[0, 1, :, 3] = -np.inf
    scores[1] = np.minimum(scores[1], scores[0].max((0, 1)) + 8)
    number = emulator.value
    with emulator.emulated(lane_ops, lanes):
        high_s = Memory(np.zeros((6, heads), np.int32))
        sums_s = Memory(np.full((8, heads), np.nan, np.float32))
        p_s = Memory(np.zeros((2, heads, 32), BF16))
        maxima = lanes.Maxima(high_s)
        turn = 4
        maxima.reset(number(turn))
        zero = emulator.Vector([number(0.0, "f32")] * 2)
        sums = [lanes._lane_sums(zero) for _ in range(2)]
        high = np.full(heads, -1e30, np.float32)
        for t in range(3):
            for wg in range(2):
                maxima.offer(wgmma_registers(scores[t, wg]), number(turn + t), number(wg))
            before, most = high, scores[t].max((0, 1))
            high = np.where(most > before + 8, most, before)
            for wg in range(2):
                np.testing.assert_array_equal(per_head(maxima.before(number(turn + t)), heads), before)
                np.testing.assert_array_equal(per_head(maxima.read(number(turn + t)), heads), high)
                moved = np.asarray(maxima.moved(number(turn + t)).registers.item().data)
                assert (moved == (t != 1)).all()
                p = np.exp2(scores[t, wg] - high)
                sums[wg] = maxima.add(sums[wg], wgmma_registers(p), number(turn + t))
                lanes.write_probabilities(p_s, wgmma_registers(p))
                expected = [tile(np.ascontiguousarray(p.astype(BF16)[32 * h : 32 * h + 32].T), 64) for h in range(2)]
                np.testing.assert_array_equal(p_s.array.reshape(-1), np.stack(expected).reshape(-1))
            maxima.pass_on(number(turn + t))
        for wg in range(2):
            lanes.offer_sums(sums[wg], sums_s, number(wg))
    assert (before != high).any() and (before == high).any() or heads == 8
    total = np.exp2(scores.astype(np.float64) - high).sum((0, 1, 2))
    np.testing.assert_allclose(sums_s.array.sum(0), total, rtol=1e-5)


def per_head(array, heads):
    found = np.empty(heads, np.float32)
    lane = np.arange(128)
    for i, register in enumerate(array.registers.reshape(-1)):
        for e in range(2):
            found[8 * i + 2 * (lane % 4) + e] = register.elements[e].data
            assert (found[8 * i + 2 * (lane % 4) + e] == register.elements[e].data).all()
    return found


def per_head_registers(array):
    lane = np.arange(128)
    vectors = [
        emulator.Vector(emulator.Value(array[8 * i + 2 * (lane % 4) + e], "f32") for e in range(2))
        for i in range(len(array) // 8)
    ]
    found = emulator.in_registers(vectors)
    found.shape = array.shape
    return found


@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize("heads", [8, 64])
def test_output_of_every_head(heads, dtype):
    rng = np.random.default_rng(8)
    values = rng.standard_normal((2, 2, 128, heads)).astype(np.float32)
    with emulator.emulated(lane_ops, lanes):
        out = Memory(np.zeros((3 * heads, 512), dtype))
        for wg in range(2):
            accs = [wgmma_registers(operands.value_order(x)) for x in values[wg]]
            lanes.store_output(out, accs, emulator.value(heads), emulator.value(wg))
        lse = Memory(np.full(3 * heads, 7, np.float32))
        numbers = rng.standard_normal(heads).astype(np.float32)
        lanes.store_heads(lse, per_head_registers(numbers), emulator.value(heads))
    np.testing.assert_array_equal(lse.array, np.concatenate([np.full(heads, 7), numbers, np.full(heads, 7)]))
    expected = values.reshape(512, heads).T.astype(dtype)
    np.testing.assert_array_equal(out.array[heads : 2 * heads], expected)
    assert not out.array[:heads].any() and not out.array[2 * heads :].any()
