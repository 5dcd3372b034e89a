"""The kernels of the indexer's scores, interpreted with race detection, against the plain references."""

import jax
import jax.numpy as jnp
import numpy as np
import on_chip
import pytest
import tolerances

from pallas_kernels import aot, dequantize_fp4, mosaic, platform, quantize_mxfp4
from pallas_kernels.candidate_logits import (
    candidate_logits,
    expand_candidates,
    make_candidate_schedule,
    make_ragged_candidate_schedule,
    ragged_candidate_logits,
)
from pallas_kernels.candidate_logits import sm90 as candidate_sm90
from pallas_kernels.indexer_logits import indexer_logits, make_indexer_schedule, paged_indexer_logits
from pallas_kernels.indexer_logits import sm90 as dense_sm90
from pallas_kernels.indexer_logits import sm100 as dense_sm100
from pallas_kernels.indexer_logits.ring import TuningConfig
from pallas_kernels.records import IndexFP8, IndexMXFP4, PagedRows

FP8 = jnp.float8_e4m3fn


@pytest.fixture(autouse=True)
def few_cores(monkeypatch):
    """Two multiprocessors: the interpreter takes every thread block in turn."""
    monkeypatch.setattr(mosaic, "CORES", 2)


def agree(found, wanted, rounding=None):
    """On a GPU, FP8 products are summed in fewer bits, which may change what a score is rounded to."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(wanted))
    visible = ~np.isneginf(wanted)
    if visible.any():
        scale = np.abs(wanted[visible]).max()
        name = "logits" if platform.kernel_name() is None else "hopper" if rounding is None else "hopper.rounded"
        bound = tolerances.of(f"kernels_indexer.{name}") * scale
        np.testing.assert_allclose(found[visible], wanted[visible], rtol=0, atol=bound)


def queries(rng, *shape):
    """FP8 queries [*shape, 128] and weights of both signs."""
    q = jnp.asarray(rng.normal(size=(*shape, 128)), jnp.float32).astype(FP8)
    return q, jnp.asarray(rng.normal(size=shape), jnp.float32)


def packed(rng, count):
    keys = jnp.asarray(rng.normal(size=(count, 128)), jnp.float32).astype(FP8)
    return keys, jnp.asarray(2.0 ** rng.integers(-3, 4, count), jnp.float32)


def paged(rng, batch, table_width, page_size, lengths, form=IndexFP8(128)):
    """A cache with pages in random order; entries of the table behind the visible pages are garbage."""
    pages = batch * table_width + 3
    keys = PagedRows.zeros(form, pages, page_size)
    rows = rng.normal(size=(pages * page_size, 128)) * np.exp(rng.normal(size=(pages * page_size, 1)))
    keys = keys.scatter(jnp.arange(pages * page_size, dtype=jnp.int32), jnp.asarray(rows, jnp.float32))
    table = rng.permutation(pages)[: batch * table_width].reshape(batch, table_width).astype(np.int32)
    for b in range(batch):
        table[b, -(-int(lengths[b].max()) // page_size) :] = rng.choice([-7, 10**9, 2**31 - 1])
    return keys, jnp.asarray(table)


def interpreted(function, *args, **kwargs):
    with on_chip.place():
        return jax.block_until_ready(function(*args, **kwargs))


def mxfp4(x):
    """Packed values and exponents of rows `x`."""
    return quantize_mxfp4(jnp.asarray(x, jnp.float32), 32)


def packed_mxfp4(rng, count):
    return mxfp4(rng.normal(size=(count, 128)) * np.exp(rng.normal(size=(count, 1))))


def slow(*parameters):
    return pytest.param(*parameters, marks=pytest.mark.slow)


RAGGED = [
    # heads, rows, keys, columns, scaled, mxfp4, rounding
    (64, 5, 203, 128, True, False, None),  # rows and keys that fill no tile
    slow(32, 3, 64, 128, False, False, None),  # no scales
    slow(16, 9, 70, 64, True, False, jnp.bfloat16),  # the released models' rounding
    slow(8, 11, 129, 64, True, False, None),
    (32, 5, 70, 64, True, True, jnp.bfloat16),  # DeepSeek-V4.1's form
    slow(8, 9, 130, 64, True, True, None),
]


@pytest.mark.parametrize("heads, rows, keys, columns, scaled, packed_keys, rounding", RAGGED)
def test_ragged(heads, rows, keys, columns, scaled, packed_keys, rounding):
    rng = np.random.default_rng(heads + keys)
    q, weights = queries(rng, rows, heads)
    if rounding is not None:
        weights = weights.astype(rounding)
    if packed_keys:
        q, (k, scale) = q.astype(jnp.bfloat16), packed_mxfp4(rng, keys)
    else:
        k, scale = packed(rng, keys)
    start = rng.integers(0, keys, rows).astype(np.int32)
    end = rng.integers(0, keys + 1, rows).astype(np.int32)
    start[0], end[0] = 0, keys  # everything
    end[1] = start[1]  # nothing
    arguments = dict(row_start=jnp.asarray(start), row_end=jnp.asarray(end), rounding=rounding)
    if scaled:
        arguments["k_scale"] = scale
    config = TuningConfig(columns=columns, math=2, stages=4)
    found = interpreted(dense_sm90.indexer_logits, q, k, weights, config=config, **arguments)
    agree(found, indexer_logits(q, k, weights, implementation="reference", **arguments), rounding)


@pytest.mark.parametrize("implementation", ["reference", slow(on_chip.implementation("sm90"))])
def test_compressed_rows_and_bf16_scores(implementation):
    if implementation == "reference" and platform.kernel_name() is not None:
        pytest.skip("on a GPU, XLA sums other shapes in another order")
    rng = np.random.default_rng(2)
    q, weights = queries(rng, 5, 32)
    k, scale = packed(rng, 150)
    start, end = np.array([0, 40, 140, -3, 9], np.int32), np.array([150, 99, 140, 70, 200], np.int32)
    arguments = dict(row_start=jnp.asarray(start), row_end=jnp.asarray(end), k_scale=scale)
    dense = np.asarray(indexer_logits(q, k, weights, implementation=implementation, **arguments))
    wanted = np.full((5, 100), -np.inf, np.float32)
    for row in range(5):
        for column in range(100):
            key = start[row] + column
            if 0 <= key < min(end[row], 150):
                wanted[row, column] = dense[row, key]
    found = indexer_logits(q, k, weights, compressed=100, implementation=implementation, **arguments)
    np.testing.assert_array_equal(found, wanted)
    half = indexer_logits(q, k, weights, dtype=jnp.bfloat16, implementation=implementation, **arguments)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, jnp.asarray(dense).astype(jnp.bfloat16))


@pytest.mark.parametrize("seed", range(4))
def test_ragged_work_is_shared_out_once_and_evenly(seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        blocks, tiles = int(rng.integers(1, 3000)), int(rng.integers(1, 3000))
        splits = dense_sm90._splits(blocks, tiles)
        assert 1 <= splits <= tiles
        assert blocks * splits >= min(mosaic.CORES, blocks * tiles)


PAGED = [
    # heads, batch, rows, page size, table width, longest, format
    slow(64, 2, 1, 64, 3, 150, IndexFP8(128)),
    (32, 2, 3, 32, 3, 96, IndexFP8(128)),  # next_n of 3
    slow(8, 3, 1, 128, 1, 128, IndexFP8(128)),
    slow(64, 1, 5, 64, 2, 128, IndexFP8(128)),  # more rows than a block holds
    slow(16, 1, 8, 64, 2, 100, IndexFP8(128)),
    slow(32, 2, 1, 64, 3, 130, IndexMXFP4(128)),
    slow(64, 1, 3, 32, 3, 70, IndexMXFP4(128)),
    slow(8, 1, 2, 128, 1, 100, IndexMXFP4(128)),
]


@pytest.mark.parametrize("heads, batch, rows, page_size, table_width, longest, form", PAGED)
def test_paged(heads, batch, rows, page_size, table_width, longest, form):
    rng = np.random.default_rng(heads + page_size)
    q, weights = queries(rng, batch, rows, heads)
    if form == IndexMXFP4(128):
        q = q.astype(jnp.bfloat16)
    lengths = rng.integers(1, longest + 1, (batch, rows)).astype(np.int32)
    lengths[0, 0] = longest
    lengths[-1, -1] = 0
    keys, table = paged(rng, batch, table_width, page_size, lengths, form)
    arguments = dict(context_lens=jnp.asarray(lengths), block_table=table)
    config = TuningConfig(columns=128, math=2, stages=4)
    found = interpreted(dense_sm90.paged_indexer_logits, q, keys, weights, config=config, **arguments)
    agree(found, paged_indexer_logits(q, keys, weights, implementation="reference", **arguments))


def test_public_function_runs_the_kernel_and_garbage_stays_unseen():
    rng = np.random.default_rng(3)
    q, weights = queries(rng, 2, 1, 32)
    lengths = np.array([[70], [5]], np.int32)
    keys, table = paged(rng, 2, 2, 64, lengths)
    arguments = dict(context_lens=jnp.asarray(lengths), block_table=table, implementation=on_chip.implementation("sm90"))
    found = paged_indexer_logits(q, keys, weights, **arguments)
    agree(found, paged_indexer_logits(q, keys, weights, **arguments | {"implementation": "reference"}))
    # NaN in every row that no request sees changes nothing; nor does a schedule made beforehand.
    seen = np.zeros(keys.num_slots, bool)
    for b, length in enumerate(lengths[:, 0]):
        position = np.arange(length)
        seen[np.asarray(table)[b, position // 64] * 64 + position % 64] = True
    unseen = jnp.asarray(np.flatnonzero(~seen).astype(np.int32))
    poisoned = keys.scatter(unseen, jnp.full((unseen.shape[0], 128), jnp.nan))
    schedule = make_indexer_schedule(jnp.asarray(lengths), 32, implementation=on_chip.implementation("sm90"))
    again = paged_indexer_logits(q, poisoned, weights, schedule=schedule, **arguments)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(again))


CANDIDATES = [
    # heads, page size, block size, blocks, format
    (32, 64, 8, 11, IndexFP8(128)),
    slow(8, 32, 16, 5, IndexFP8(128)),
    slow(32, 32, 8, 9, IndexMXFP4(128)),
    slow(64, 64, 16, 6, IndexMXFP4(128)),
]


def candidates_of(rng, rows, lengths, size, count):
    """`count` blocks of up to four beyond the longest row, among them none and unreachable ones."""
    longest = int(lengths.max())
    ids = np.stack([rng.permutation(longest // size + 4)[:count] - 1 for _ in range(rows)])
    ids[-1, 0] = 0 if 0 not in ids[-1] else ids[-1, 0]
    return expand_candidates(jnp.asarray(ids.reshape(*lengths.shape, -1), jnp.int32), jnp.asarray(lengths), size)


@pytest.mark.parametrize("heads, page_size, size, count, form", CANDIDATES)
def test_candidates(heads, page_size, size, count, form):
    rng = np.random.default_rng(heads)
    q, weights = queries(rng, 2, 2, heads)
    if form == IndexMXFP4(128):
        q = q.astype(jnp.bfloat16)
    lengths = np.array([[150, 97], [0, 3]], np.int32)
    keys, table = paged(rng, 2, -(-150 // page_size), page_size, lengths, form)
    candidates = candidates_of(rng, 4, lengths, size, count)
    arguments = dict(context_lens=jnp.asarray(lengths), block_table=table)
    config = TuningConfig(columns=64, math=2, stages=4)
    found = interpreted(candidate_sm90.candidate_logits, q, keys, weights, candidates, config=config, **arguments)
    agree(found, candidate_logits(q, keys, weights, candidates, implementation="reference", **arguments))


@pytest.mark.parametrize("packed_keys, count", [slow(False, 8), (True, 8), slow(False, 40)])
def test_ragged_candidates_up_to_the_last_key(packed_keys, count):
    rng = np.random.default_rng(5)
    q, weights = queries(rng, 3, 32)
    total = 8 * count - 3
    k, scale = packed_mxfp4(rng, total) if packed_keys else packed(rng, total)
    q = q.astype(jnp.bfloat16) if packed_keys else q
    start, end = np.array([0, 17, 40], np.int32), np.array([total, total, 40], np.int32)
    ids = np.stack([rng.permutation(count) for _ in range(3)]).astype(np.int32)
    candidates = expand_candidates(jnp.asarray(ids), jnp.asarray(end - start), 8)
    arguments = dict(row_start=jnp.asarray(start), row_end=jnp.asarray(end), k_scale=scale)
    schedule = make_ragged_candidate_schedule(
        candidates, row_start=arguments["row_start"], row_end=arguments["row_end"], heads=32,
        implementation=on_chip.implementation("sm90"),
    )  # fmt: skip
    function = candidate_sm90.ragged_candidate_logits
    config = TuningConfig(columns=64, math=2, stages=4)
    found = interpreted(function, q, k, weights, candidates, config=config, schedule=schedule, **arguments)
    agree(found, ragged_candidate_logits(q, k, weights, candidates, implementation="reference", **arguments))


@pytest.mark.parametrize("form", [IndexMXFP4(128), slow(IndexFP8(128))])
def test_a_thread_block_with_many_rows_of_few_candidates(form):
    """As in the first chunk of a prompt: rows one after the other, none with the tiles that a producer can have under way.
    A producer that tells of a tile only when it has begun so many others waits for ever."""
    rng = np.random.default_rng(12)
    q, weights = queries(rng, 1, 8, 32)
    if form == IndexMXFP4(128):
        q = q.astype(jnp.bfloat16)
    lengths = np.arange(1, 9, dtype=np.int32)[None] * 9
    keys, table = paged(rng, 1, 2, 64, lengths, form)
    ids = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), (1, 8, 16))
    candidates = expand_candidates(ids, jnp.asarray(lengths), 8)
    arguments = dict(context_lens=jnp.asarray(lengths), block_table=table)
    found = interpreted(candidate_sm90.candidate_logits, q, keys, weights, candidates, **arguments)
    agree(found, candidate_logits(q, keys, weights, candidates, implementation="reference", **arguments))


BLACKWELL_RAGGED = [
    # heads, mxfp4, rounding
    slow(64, False, None),
    slow(16, False, jnp.bfloat16),
    slow(32, True, jnp.bfloat16),
]


@pytest.mark.parametrize("heads, packed_keys, rounding", BLACKWELL_RAGGED)
def test_blackwell_ragged(heads, packed_keys, rounding):
    rng = np.random.default_rng(heads)
    q, weights = queries(rng, 3, heads)
    weights = weights if rounding is None else weights.astype(rounding)
    k, scale = packed_mxfp4(rng, 403) if packed_keys else packed(rng, 403)
    q = q.astype(jnp.bfloat16) if packed_keys else q
    start, end = np.array([0, 30, 140], np.int32), np.array([403, 30, 200], np.int32)
    arguments = dict(row_start=jnp.asarray(start), row_end=jnp.asarray(end), k_scale=scale, rounding=rounding)
    found = indexer_logits(q, k, weights, implementation="interpret_sm100", **arguments)
    agree(found, indexer_logits(q, k, weights, implementation="reference", **arguments))


BLACKWELL_PAGED = [slow(32, 3, 64, IndexFP8(128)), slow(8, 1, 32, IndexFP8(128)), (32, 1, 64, IndexMXFP4(128))]


@pytest.mark.parametrize("heads, rows, page_size, form", BLACKWELL_PAGED)
def test_blackwell_paged(heads, rows, page_size, form):
    rng = np.random.default_rng(heads)
    q, weights = queries(rng, 2, rows, heads)
    lengths = np.full((2, rows), 150, np.int32)
    lengths[1] = np.arange(rows)
    keys, table = paged(rng, 2, -(-150 // page_size), page_size, lengths, form)
    arguments = dict(context_lens=jnp.asarray(lengths), block_table=table)
    if form == IndexMXFP4(128):  # packed queries, which the reference reads as they are
        q, arguments["q_scale"] = mxfp4(q)
    found = interpreted(dense_sm100.paged_indexer_logits, q, keys, weights, **arguments)
    agree(found, paged_indexer_logits(q, keys, weights, implementation="reference", **arguments))


@pytest.mark.parametrize("size, form", [slow(8, IndexFP8(128)), slow(16, IndexMXFP4(128))])
def test_blackwell_candidates(size, form):
    rng = np.random.default_rng(size)
    q, weights = queries(rng, 2, 1, 64)
    q = q if form == IndexFP8(128) else q.astype(jnp.bfloat16)
    lengths = np.array([[300], [3]], np.int32)
    keys, table = paged(rng, 2, 5, 64, lengths, form)
    candidates = candidates_of(rng, 2, lengths, size, 160 // size)
    arguments = dict(context_lens=jnp.asarray(lengths), block_table=table)
    found = candidate_logits(q, keys, weights, candidates, implementation="interpret_sm100", **arguments)
    agree(found, candidate_logits(q, keys, weights, candidates, implementation="reference", **arguments))


def test_packed_queries_and_keys_are_their_decoded_values():
    rng = np.random.default_rng(1)
    q, q_scale = mxfp4(rng.normal(size=(3, 32, 128)))
    k, k_scale = packed_mxfp4(rng, 75)
    weights = jnp.asarray(rng.normal(size=(3, 32)), jnp.float32)
    start, end = jnp.array([0, 9, 75], jnp.int32), jnp.array([75, 20, 75], jnp.int32)
    bounds = dict(row_start=start, row_end=end, implementation="reference")
    found = indexer_logits(q, k, weights, k_scale=k_scale, q_scale=q_scale, **bounds)
    plain = indexer_logits(dequantize_fp4(q, q_scale), dequantize_fp4(k, k_scale), weights, **bounds)
    np.testing.assert_array_equal(found, plain)
    candidates = expand_candidates(jnp.array([[3, 0], [1, -1], [0, 1]], jnp.int32), end - start, 8)
    some = ragged_candidate_logits(q, k, weights, candidates, k_scale=k_scale, q_scale=q_scale, **bounds)
    # On a GPU, XLA sums other shapes in another order.
    bound = 0 if platform.kernel_name() is None else tolerances.of("kernels_indexer.logits")
    np.testing.assert_allclose(some[0], jnp.concatenate([plain[0, :8], plain[0, 24:32]]), rtol=0, atol=bound * plain[0].max())


def test_wrong_scales_and_schedules_are_named(unchecked):
    rng = np.random.default_rng(1)
    q, weights = queries(rng, 2, 1, 32)
    lengths = np.array([[70], [5]], np.int32)
    keys, table = paged(rng, 2, 2, 64, lengths)
    arguments = dict(context_lens=jnp.asarray(lengths), block_table=table)
    packed_q, q_scale = mxfp4(q)
    with pytest.raises(ValueError, match="q_scale is None; it must be uint8 of shape"):
        paged_indexer_logits(packed_q, keys, weights, **arguments)
    with pytest.raises(ValueError, match="Packed queries need MXFP4 keys"):
        paged_indexer_logits(packed_q, keys, weights, q_scale=q_scale, **arguments)
    with pytest.raises(ValueError, match="only packed MXFP4 queries"):
        paged_indexer_logits(q, keys, weights, q_scale=q_scale, **arguments)
    other = make_indexer_schedule(jnp.zeros((3, 1), jnp.int32), 32, implementation=on_chip.implementation("sm90"))
    with pytest.raises(ValueError, match="schedule holds 3 blocks .* 2 requests of 1 rows"):
        paged_indexer_logits(q, keys, weights, schedule=other, implementation=on_chip.implementation("sm90"), **arguments)
    candidates = expand_candidates(jnp.zeros((2, 1, 4), jnp.int32), jnp.asarray(lengths), 4)
    with pytest.raises(NotImplementedError, match="blocks of 8 or 16 positions, not 4"):
        make_candidate_schedule(candidates, keys, heads=32, implementation=on_chip.implementation("sm90"), **arguments)
    with pytest.raises(NotImplementedError, match="8, 16, 32, 64 heads, and q has 24"):
        make_indexer_schedule(jnp.asarray(lengths), 24, implementation=on_chip.implementation("sm90"))
    assert make_indexer_schedule(jnp.asarray(lengths), 24, implementation="reference") is None


@pytest.mark.parametrize("seed", range(8))
def test_schedule_covers_every_visible_tile_once_in_even_runs(seed, monkeypatch):
    monkeypatch.setattr(mosaic, "CORES", 7)
    rng = np.random.default_rng(seed)
    batch, rows, heads = rng.integers(1, 9), rng.integers(1, 6), rng.choice([8, 64])
    lengths = rng.integers(0, 2000, (batch, rows)) * rng.integers(0, 2, (batch, rows))
    schedule = dense_sm90.make_schedule(jnp.asarray(lengths, jnp.int32), int(heads))
    segments, first = np.asarray(schedule.segments), np.asarray(schedule.first)
    width = dense_sm90.queries_per_block(int(rows), int(heads), 128)
    per_request = -(-rows // width)
    wanted = set()
    for b in range(batch):
        for block in range(per_request):
            longest = lengths[b, block * width : (block + 1) * width].max()
            wanted |= {(b * per_request + block, tile) for tile in range(-(-longest // 64))}
    assert first[0] == 0 and np.all(np.diff(first) >= 0)
    found, loads = [], []
    for thread in range(7):
        tiles = [(b, t) for b, low, high in segments[first[thread] : first[thread + 1]] for t in range(low, high)]
        found += tiles
        loads.append(len(tiles))
    assert len(found) == len(set(found)) and set(found) == wanted
    assert max(loads) - min(loads) <= 1


def test_what_is_not_carried_says_so():
    rng = np.random.default_rng(0)
    q, weights = queries(rng, 2, 24)
    k, _ = packed(rng, 64)
    bounds = dict(row_start=jnp.zeros(2, jnp.int32), row_end=jnp.full(2, 64, jnp.int32))
    with pytest.raises(NotImplementedError, match="8, 16, 32, 64 heads, and q has 24"):
        indexer_logits(q, k, weights, implementation=on_chip.implementation("sm90"), **bounds)
    q, weights = queries(rng, 2, 32)
    with pytest.raises(NotImplementedError, match="it needs float8_e4m3fn, and q is float32"):
        indexer_logits(q.astype(jnp.float32), k, weights, implementation=on_chip.implementation("sm90"), **bounds)
    with pytest.raises(ValueError, match="columns=96"):
        TuningConfig(columns=96, math=2, stages=4)


@pytest.mark.parametrize("operation", [slow("indexer_logits"), "candidate_logits"])
def test_compiles_for_hopper_without_spills(operation):
    if (reason := aot.missing()) is not None:
        pytest.skip(reason)
    report = aot.compile_report(("h200",), operation)
    assert report.kernels and not report.unsupported, report.text()
    for kernel in report.kernels:
        assert kernel.spill_stores + kernel.spill_loads == 0, report.text()
        assert kernel.instructions["QGMMA"] + kernel.instructions["HGMMA"] >= 4, report.text()
        assert kernel.instructions["UTMALDG"] >= 2, report.text()


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["indexer_logits", "candidate_logits"])
def test_compiles_for_blackwell_without_spills(operation):
    if (reason := aot.missing()) is not None:
        pytest.skip(reason)
    report = aot.compile_report(("b200",), operation)
    assert report.kernels and not report.unsupported, report.text()
    for kernel in report.kernels:
        assert kernel.spill_stores + kernel.spill_loads == 0, report.text()
        assert kernel.instructions["UTCxMMA"] >= 4 and kernel.instructions["LDTM"] >= 1, report.text()
        assert kernel.instructions["UTMALDG"] >= 2, report.text()
        if kernel.shape.endswith("packed"):  # scales go to TMEM
            assert kernel.instructions["UTCCP"] >= 2, report.text()
