"""The kernels of the indexer's scores, interpreted with race detection, against the plain references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances

from pallas_kernels import aot, mosaic
from pallas_kernels.candidate_logits import candidate_logits, expand_candidates, ragged_candidate_logits
from pallas_kernels.candidate_logits import sm90 as candidate_sm90
from pallas_kernels.indexer_logits import indexer_logits, paged_indexer_logits
from pallas_kernels.indexer_logits import sm90 as dense_sm90
from pallas_kernels.indexer_logits import sm100 as dense_sm100
from pallas_kernels.records import IndexFP8, IndexMXFP4, PagedRows

FP8 = jnp.float8_e4m3fn


@pytest.fixture(autouse=True)
def few_cores(monkeypatch):
    """Two multiprocessors: the interpreter takes every thread block in turn."""
    monkeypatch.setattr(mosaic, "CORES", 2)


def agree(found, wanted):
    found, wanted = np.asarray(found), np.asarray(wanted)
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(wanted))
    visible = ~np.isneginf(wanted)
    if visible.any():
        scale = np.abs(wanted[visible]).max()
        bound = tolerances.of("kernels_indexer.logits") * scale
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
    with mosaic.interpreter():
        return jax.block_until_ready(function(*args, **kwargs))


RAGGED = [
    # heads, rows, keys, columns, groups, math, unroll, scaled, rounding
    (64, 5, 203, 128, 1, 2, 1, True, None),  # rows and keys that fill no tile
    (64, 5, 331, 128, 2, 2, 4, True, None),  # two query groups a tile, several wgmmas ahead
    (32, 3, 64, 128, 1, 2, 2, False, None),  # no scales
    (16, 9, 70, 64, 1, 2, 1, True, jnp.bfloat16),  # the released models' rounding
    (8, 11, 129, 64, 1, 2, 1, True, None),
]


@pytest.mark.parametrize("heads, rows, keys, columns, groups, math, unroll, scaled, rounding", RAGGED)
def test_ragged(heads, rows, keys, columns, groups, math, unroll, scaled, rounding):
    rng = np.random.default_rng(heads + keys)
    q, weights = queries(rng, rows, heads)
    if rounding is not None:
        weights = weights.astype(rounding)
    k, scale = packed(rng, keys)
    start = rng.integers(0, keys, rows).astype(np.int32)
    end = rng.integers(0, keys + 1, rows).astype(np.int32)
    start[0], end[0] = 0, keys  # everything
    end[1] = start[1]  # nothing
    arguments = dict(row_start=jnp.asarray(start), row_end=jnp.asarray(end), rounding=rounding)
    if scaled:
        arguments["k_scale"] = scale
    config = dense_sm90.TuningConfig(columns=columns, groups=groups, math=math, stages=2 * math, runs=1, unroll=unroll)
    found = interpreted(dense_sm90.indexer_logits, q, k, weights, config=config, **arguments)
    agree(found, indexer_logits(q, k, weights, implementation="reference", **arguments))


PAGED = [
    # heads, batch, rows, page size, table width, longest
    (64, 2, 1, 64, 3, 150),
    (32, 2, 3, 32, 3, 96),  # next_n of 3
    (8, 3, 1, 128, 1, 128),
    (64, 1, 5, 64, 2, 128),  # more rows than a block holds
]


@pytest.mark.parametrize("heads, batch, rows, page_size, table_width, longest", PAGED)
def test_paged(heads, batch, rows, page_size, table_width, longest):
    rng = np.random.default_rng(heads + page_size)
    q, weights = queries(rng, batch, rows, heads)
    lengths = rng.integers(1, longest + 1, (batch, rows)).astype(np.int32)
    lengths[0, 0] = longest
    lengths[-1, -1] = 0
    keys, table = paged(rng, batch, table_width, page_size, lengths)
    arguments = dict(context_lens=jnp.asarray(lengths), block_table=table)
    config = dense_sm90.TuningConfig(columns=128, groups=1, math=2, stages=4, runs=1, unroll=1)
    found = interpreted(dense_sm90.paged_indexer_logits, q, keys, weights, config=config, **arguments)
    agree(found, paged_indexer_logits(q, keys, weights, implementation="reference", **arguments))


@pytest.mark.parametrize("heads, rows, page_size, longest", [(32, 1, 64, 130), (64, 3, 32, 70)])
def test_paged_mxfp4(heads, rows, page_size, longest):
    rng = np.random.default_rng(page_size)
    q, weights = queries(rng, 2, rows, heads)
    q = q.astype(jnp.bfloat16)
    lengths = rng.integers(1, longest + 1, (2, rows)).astype(np.int32)
    lengths[0, 0] = longest
    keys, table = paged(rng, 2, 3, page_size, lengths, IndexMXFP4(128))
    arguments = dict(context_lens=jnp.asarray(lengths), block_table=table)
    config = dense_sm90.TuningConfig(columns=128, groups=1, math=2, stages=4, runs=1, unroll=1)
    found = interpreted(dense_sm90.paged_indexer_logits, q, keys, weights, config=config, **arguments)
    agree(found, paged_indexer_logits(q, keys, weights, implementation="reference", **arguments))


def test_public_function_runs_the_kernel_and_garbage_stays_unseen():
    rng = np.random.default_rng(3)
    q, weights = queries(rng, 2, 1, 32)
    lengths = np.array([[70], [5]], np.int32)
    keys, table = paged(rng, 2, 2, 64, lengths)
    arguments = dict(context_lens=jnp.asarray(lengths), block_table=table)
    found = paged_indexer_logits(q, keys, weights, implementation="interpret_sm90", **arguments)
    agree(found, paged_indexer_logits(q, keys, weights, implementation="reference", **arguments))
    # NaN in every row that no request sees changes nothing.
    seen = np.zeros(keys.num_slots, bool)
    for b, length in enumerate(lengths[:, 0]):
        position = np.arange(length)
        seen[np.asarray(table)[b, position // 64] * 64 + position % 64] = True
    unseen = jnp.asarray(np.flatnonzero(~seen).astype(np.int32))
    poisoned = keys.scatter(unseen, jnp.full((unseen.shape[0], 128), jnp.nan))
    again = paged_indexer_logits(q, poisoned, weights, implementation="interpret_sm90", **arguments)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(again))


CANDIDATE = dense_sm90.TuningConfig(columns=64, groups=1, math=2, stages=4, runs=1, unroll=1)


@pytest.mark.parametrize("heads, page_size, size, count", [(32, 64, 8, 11), (8, 32, 16, 5)])
def test_candidates(heads, page_size, size, count, monkeypatch):
    monkeypatch.setattr(candidate_sm90, "_AHEAD", 1)
    monkeypatch.setattr(candidate_sm90, "_LISTED", 32)  # several lists a row
    rng = np.random.default_rng(heads)
    q, weights = queries(rng, 2, 2, heads)
    lengths = np.array([[150, 97], [0, 3]], np.int32)
    keys, table = paged(rng, 2, -(-150 // page_size), page_size, lengths)
    ids = np.stack([rng.permutation(150 // size + 4)[:count] - 1 for _ in range(4)]).reshape(2, 2, -1).astype(np.int32)
    ids[1, 1, 0] = 0 if 0 not in ids[1, 1] else ids[1, 1, 0]
    candidates = expand_candidates(jnp.asarray(ids), jnp.asarray(lengths), size)
    arguments = dict(context_lens=jnp.asarray(lengths), block_table=table)
    found = interpreted(
        candidate_sm90.candidate_logits, q, keys, weights, candidates, config=CANDIDATE, **arguments
    )
    agree(found, candidate_logits(q, keys, weights, candidates, implementation="reference", **arguments))


def test_ragged_candidates_up_to_the_last_key(monkeypatch):
    monkeypatch.setattr(candidate_sm90, "_AHEAD", 1)
    monkeypatch.setattr(candidate_sm90, "_LISTED", 32)  # several lists a row
    rng = np.random.default_rng(5)
    q, weights = queries(rng, 3, 32)
    k, scale = packed(rng, 61)
    start, end = np.array([0, 17, 40], np.int32), np.array([61, 61, 40], np.int32)
    ids = np.stack([rng.permutation(8) for _ in range(3)]).astype(np.int32)
    candidates = expand_candidates(jnp.asarray(ids), jnp.asarray(end - start), 8)
    arguments = dict(row_start=jnp.asarray(start), row_end=jnp.asarray(end), k_scale=scale)
    function = candidate_sm90.ragged_candidate_logits
    found = interpreted(function, q, k, weights, candidates, config=CANDIDATE, **arguments)
    agree(found, ragged_candidate_logits(q, k, weights, candidates, implementation="reference", **arguments))


@pytest.mark.parametrize("heads, rounding", [(64, None), (16, jnp.bfloat16)])
def test_blackwell_ragged(heads, rounding):
    rng = np.random.default_rng(heads)
    q, weights = queries(rng, 3, heads)
    weights = weights if rounding is None else weights.astype(rounding)
    k, scale = packed(rng, 403)
    start, end = np.array([0, 30, 140], np.int32), np.array([403, 30, 200], np.int32)
    arguments = dict(row_start=jnp.asarray(start), row_end=jnp.asarray(end), k_scale=scale, rounding=rounding)
    found = indexer_logits(q, k, weights, implementation="interpret_sm100", **arguments)
    agree(found, indexer_logits(q, k, weights, implementation="reference", **arguments))


@pytest.mark.parametrize("heads, rows, page_size", [(32, 3, 64), (8, 1, 32)])
def test_blackwell_paged(heads, rows, page_size):
    rng = np.random.default_rng(heads)
    q, weights = queries(rng, 2, rows, heads)
    lengths = np.full((2, rows), 150, np.int32)
    lengths[1] = np.arange(rows)
    keys, table = paged(rng, 2, -(-150 // page_size), page_size, lengths)
    arguments = dict(context_lens=jnp.asarray(lengths), block_table=table)
    found = interpreted(dense_sm100.paged_indexer_logits, q, keys, weights, **arguments)
    agree(found, paged_indexer_logits(q, keys, weights, implementation="reference", **arguments))


@pytest.mark.parametrize("seed", range(8))
def test_schedule_covers_every_visible_tile_once_in_even_runs(seed, monkeypatch):
    monkeypatch.setattr(mosaic, "CORES", 7)
    rng = np.random.default_rng(seed)
    batch, rows, heads = rng.integers(1, 9), rng.integers(1, 6), rng.choice([8, 64])
    lengths = rng.integers(0, 2000, (batch, rows)) * rng.integers(0, 2, (batch, rows))
    schedule = dense_sm90.make_schedule(jnp.asarray(lengths, jnp.int32), int(heads))
    segments, first = np.asarray(schedule.segments), np.asarray(schedule.first)
    width = dense_sm90.queries_per_block(int(rows), int(heads))
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
    with pytest.raises(NotImplementedError, match="8, 16, 32, 64 heads of width 128, and q has 24"):
        indexer_logits(q, k, weights, implementation="interpret_sm90", **bounds)
    q, weights = queries(rng, 2, 32)
    with pytest.raises(NotImplementedError, match="float8_e4m3fn queries here, not float32"):
        indexer_logits(q.astype(jnp.float32), k, weights, implementation="interpret_sm90", **bounds)
    with pytest.raises(ValueError, match="columns=96"):
        dense_sm90.TuningConfig(columns=96, groups=1, math=2, stages=4, runs=1, unroll=1)


@pytest.mark.parametrize("operation", ["indexer_logits", "candidate_logits"])
def test_compiles_for_hopper_without_spills(operation):
    if (reason := aot.missing()) is not None:
        pytest.skip(reason)
    report = aot.compile_report(("h200",), operation)
    assert report.kernels and not report.unsupported, report.text()
    for kernel in report.kernels:
        assert kernel.spill_stores + kernel.spill_loads == 0, report.text()
        assert kernel.instructions["QGMMA"] + kernel.instructions["HGMMA"] >= 4, report.text()
        assert kernel.instructions["UTMALDG"] >= 2, report.text()


def test_compiles_for_blackwell_without_spills():
    if (reason := aot.missing()) is not None:
        pytest.skip(reason)
    report = aot.compile_report(("b200",), "indexer_logits")
    assert report.kernels
    for kernel in report.kernels:
        assert kernel.spill_stores + kernel.spill_loads == 0, report.text()
        assert kernel.instructions["UTCxMMA"] >= 4 and kernel.instructions["LDTM"] >= 1, report.text()
        assert kernel.instructions["UTMALDG"] >= 2, report.text()
    assert all("IndexFP8" in reason for *_, reason in report.unsupported), report.text()
