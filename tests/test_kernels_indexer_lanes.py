"""The lane code that finishes scores on Hopper, run lane by lane in NumPy against its definition."""

import lane_emulator as emulator
import ml_dtypes
import numpy as np
import pytest
import tolerances
from lane_emulator import Memory, Value, Vector, wgmma_registers

from pallas_kernels.indexer_logits import lanes

BF16 = ml_dtypes.bfloat16


def per_column(values, kind):
    """Registers of an array with a value per column of a wgmma's result."""
    lane = np.arange(emulator.LANES)
    pairs = [[values[8 * c + 2 * (lane % 4) + e] for e in range(2)] for c in range(len(values) // 8)]
    return emulator.in_registers([Vector(Value(x, kind) for x in pair) for pair in pairs])


def per_key(values):
    row = 16 * (np.arange(emulator.LANES) // 32) + np.arange(emulator.LANES) % 32 // 4
    return emulator.in_registers([Vector([Value(values[row + 8 * half], "f32")]) for half in range(2)])


CASES = [
    # queries, heads, weights, scaled, output, compressed
    (4, 32, BF16, False, np.float32, False),
    (4, 32, np.float32, False, np.float32, False),
    (1, 64, BF16, True, np.float32, False),
    (2, 64, BF16, False, BF16, True),
    (8, 8, BF16, True, np.float32, True),
]


@pytest.mark.parametrize("rounding", [True, False])
@pytest.mark.parametrize("queries, heads, weight_dtype, scaled, out_dtype, compressed", CASES)
def test_scores_are_finished_and_stored(queries, heads, weight_dtype, scaled, out_dtype, compressed, rounding):
    rng = np.random.default_rng(heads)
    columns, first, column, rows = 200, 3, 64, 3 + queries
    dots = rng.normal(size=(64, queries * heads)).astype(np.float32) * 5
    weights = rng.normal(size=queries * heads).astype(weight_dtype if rounding else np.float32)
    scale = np.exp2(rng.integers(-3, 4, 64)).astype(np.float32) if scaled else None
    start, end = rng.integers(40, 80, rows).astype(np.int32), rng.integers(100, 140, rows).astype(np.int32)
    limit = rows - (queries > 1)  # the last query is left out
    before = np.full((rows, columns), 7, out_dtype)
    with emulator.emulated(lanes):
        out = Memory(before)
        bounds = lanes.load_bounds(Memory(start), Memory(end), first, limit, queries=queries)
        lanes.store_scores(
            out, wgmma_registers(dots), per_column(weights, {BF16: "bf16"}.get(weights.dtype.type, "f32")),
            per_key(scale) if scaled else None, bounds, first, limit, column,
            queries=queries, heads=heads, rounding=rounding, compressed=compressed,
        )  # fmt: skip
        found = out.array
    as_bf16 = lambda x: x.astype(BF16).astype(np.float32) if rounding else x  # noqa: E731
    products = as_bf16(np.maximum(as_bf16(dots), 0) * weights.astype(np.float32))
    wanted = before.astype(np.float32)
    for j in range(min(queries, limit - first)):
        scores = as_bf16(products[:, j * heads : (j + 1) * heads].sum(axis=1, dtype=np.float64).astype(np.float32))
        scores = scores if scale is None else scores * scale
        for key in range(64):
            position = column + key
            seen = start[first + j] <= position < end[first + j]
            at = position - start[first + j] if compressed else position
            if seen or not compressed:
                wanted[first + j, at] = scores[key] if seen else -np.inf
    there, stored = np.isfinite(wanted), np.isfinite(wanted) & (wanted != before.astype(np.float32))
    assert stored.sum() > 20
    np.testing.assert_array_equal(np.isneginf(found.astype(np.float32)), ~there)
    name = "kernels_indexer.hopper.rounded" if rounding or out_dtype == BF16 else "kernels_indexer.logits"
    bound = tolerances.of(name) * np.abs(wanted[there]).max()
    np.testing.assert_allclose(found.astype(np.float32)[there], wanted[there], rtol=0, atol=bound)
    if rounding and out_dtype == np.float32:  # sums in another order: few fall on the other side of a rounding
        assert np.mean(found[stored] == wanted[stored]) > 0.95
