"""Cache records byte for byte, paged reading and writing, and indexing where -1 means none."""

import ast
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ops as oracle

import dsa_jax
import pallas_kernels
from pallas_kernels import indexing
from pallas_kernels.records import (
    IndexFP8,
    IndexMXFP4,
    Model1,
    PagedRows,
    Plain,
    V32,
    V41MXFP8,
    V41NVFP4,
)

# format, oracle's name, bytes of a row, of a page of 64 (cache-formats: the record table)
FORMATS = {
    "v32": (V32(), 656, 64 * 656),
    "model1": (Model1(), 584, 37440),
    "v41_mxfp8": (V41MXFP8(), 528, 64 * 528),
    "v41_nvfp4": (V41NVFP4(), 288, 64 * 288),
    "index_fp8": (IndexFP8(), 132, 64 * 132),
    "index_mxfp4": (IndexMXFP4(), 68, 64 * 68),
}
TINY = {
    "v41_mxfp8": (V41MXFP8(64), 66),
    "v41_nvfp4": (V41NVFP4(64), 36),
    "index_fp8": (IndexFP8(64), 68),
    "index_mxfp4": (IndexMXFP4(64), 34),
}


def rows_of(width, count, seed=0):
    """bf16 values, as a model gives them, with a zero row and an outlier."""
    x = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
    x[count // 2] = 0
    x[-1, width // 3] = 700
    return oracle.bf16(x)


def ids(*slots):
    return jnp.asarray(slots, jnp.int32)


@jax.jit
def scatter(cache, slots, x):
    return cache.scatter(slots, x)


@functools.partial(jax.jit, static_argnames="dtype")
def gather(cache, slots, dtype=jnp.float32):
    return cache.gather(slots, dtype)


# ---------------------------------------------------------------- AC-60: bytes


@pytest.mark.parametrize("kind", FORMATS)
def test_ac_60_sizes(kind):
    format, row_bytes, page_bytes = FORMATS[kind]
    assert format.row_bytes == row_bytes
    assert format.page_bytes(64) == page_bytes
    fields = format.fields(64)
    assert sum(f.size for f in fields) == row_bytes
    assert fields[-1].offset + 64 * fields[-1].stride <= page_bytes


def test_ac_60_where_the_fields_lie():
    assert Model1().fields(64) == ((0, 576, 576), (576 * 64, 8, 8))
    assert IndexFP8().fields(64) == ((0, 128, 128), (128 * 64, 4, 4))
    assert IndexMXFP4().fields(64) == ((0, 64, 64), (64 * 64, 4, 4))
    assert V32().fields(64) == ((0, 656, 656),)
    assert Model1().page_bytes(1) == 1152 and Model1().page_bytes(4) == 2880
    assert V41MXFP8(alignment=512).page_bytes(64) == 33792 and V41MXFP8(alignment=512).page_bytes(2) == 1536


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("kind", FORMATS)
def test_ac_60_pages_byte_for_byte(kind, page_size):
    """Every row of page 1 written: its bytes are the oracle's, and no other page changes."""
    format = FORMATS[kind][0]
    x = rows_of(format.width, page_size, seed=page_size)
    cache = scatter(PagedRows.zeros(format, 3, page_size), jnp.arange(page_size, 2 * page_size, dtype=jnp.int32), x)
    expected = np.zeros((3, format.page_bytes(page_size)), np.uint8)
    expected[1] = oracle.page(kind, x, format.page_bytes(page_size))
    np.testing.assert_array_equal(np.asarray(cache.pages), expected)


@pytest.mark.parametrize("kind", TINY)
def test_ac_60_tiny_widths(kind):
    format, row_bytes = TINY[kind]
    assert format.row_bytes == row_bytes
    x = rows_of(64, 4)
    cache = scatter(PagedRows.zeros(format, 2, 4), jnp.arange(4, dtype=jnp.int32), x)
    np.testing.assert_array_equal(np.asarray(cache.pages[0]), oracle.page(kind, x, format.page_bytes(4)))


@pytest.mark.parametrize("kind", FORMATS)
def test_ac_60_round_trip(kind):
    """Decoding what was stored gives the fake-quantised row, in float32 and (exactly) in bf16."""
    format = FORMATS[kind][0]
    x = rows_of(format.width, 5)
    slots = ids(9, 0, 4, 7, 2)
    cache = scatter(PagedRows.zeros(format, 3, 4), slots, x)
    split = 64 if kind in ("v32", "model1") else 0
    head = x[:, : format.width - split]
    if "fp8" in kind or split:
        group = {"v32": 128, "model1": 64, "v41_mxfp8": 32, "index_fp8": 128}[kind]
        parts = [oracle.quantize_fp8(row, group) for row in head]
    else:
        group, scale = {"v41_nvfp4": (16, "e4m3"), "index_mxfp4": (32, "e8m0")}[kind]
        parts = [oracle.quantize_fp4(row, group, scale) for row in head]
        parts = [(oracle.unpack_fp4(packed), scales) for packed, scales in parts]
    expected = np.concatenate([np.stack([oracle.dequantize(*part) for part in parts]), x[:, head.shape[1] :]], axis=1)
    for dtype in (jnp.float32, jnp.bfloat16):
        found = gather(cache, slots, dtype)
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found, np.float64), expected)


def test_v32_reads_scales_that_are_no_powers_of_two():
    format = V32()
    row = oracle.record("v32", rows_of(576, 1)[0])[0].copy()
    scales = np.array([0.3, 1.7, 5e-3, 11.0], np.float32)
    row[512:528] = scales.view(np.uint8)
    found = np.asarray(format.decode(jnp.asarray(row), jnp.bfloat16), np.float32)
    values = row[:512].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.repeat(scales, 128)
    np.testing.assert_array_equal(found[:512], oracle.bf16(values))


def test_plain_rows_keep_their_dtype():
    cache = PagedRows.zeros(Plain(8, jnp.bfloat16), 2, 4)
    assert cache.pages.shape == (2, 4, 8) and cache.pages.dtype == jnp.bfloat16
    x = rows_of(8, 2)
    found = scatter(cache, ids(5, 1), x).gather(ids(1, 5, -1, 8), jnp.float32)
    np.testing.assert_array_equal(np.asarray(found), np.concatenate([x[::-1], np.zeros((2, 8))]))
    assert Plain(8, jnp.bfloat16) == Plain(8, np.dtype("bfloat16")) and Plain(512, jnp.bfloat16).row_bytes == 1024


@pytest.mark.parametrize("kind", ["v32", "model1", "index_fp8"])
def test_wider_page_strides_are_honoured(kind):
    """FlashMLA's pages hold a spare row: the stride comes from the array, and the surplus stays as it was."""
    format = FORMATS[kind][0]
    x = rows_of(format.width, 8)
    need = format.page_bytes(4)
    wide = PagedRows(jnp.full((2, need + 656), 7, jnp.uint8), format, 4)
    wide = scatter(wide, jnp.arange(8, dtype=jnp.int32), x)
    tight = scatter(PagedRows.zeros(format, 2, 4), jnp.arange(8, dtype=jnp.int32), x)
    used = 4 * format.row_bytes
    np.testing.assert_array_equal(np.asarray(wide.pages[:, :used]), np.asarray(tight.pages[:, :used]))
    assert (np.asarray(wide.pages[:, used:]) == 7).all()
    order = ids(6, 1, 3)
    np.testing.assert_array_equal(np.asarray(gather(wide, order)), np.asarray(gather(tight, order)))


@pytest.mark.parametrize("kind", FORMATS)
def test_ac_07_none_rows_decode_to_zero_even_from_a_spoilt_cache(kind):
    format = FORMATS[kind][0]
    cache = PagedRows(jnp.full((2, format.page_bytes(4)), 255, jnp.uint8), format, 4)  # NaN everywhere
    assert not np.asarray(gather(cache, ids(-1, 8, 2**30, -(2**31)))).any()


# ---------------------------------------------------------------- AC-03, AC-04, AC-70: none is none


@pytest.mark.parametrize("kind", FORMATS)
def test_ac_03_scatter_of_none_writes_nowhere(kind):
    format = FORMATS[kind][0]
    canary = PagedRows(jnp.full((3, format.page_bytes(4)), 77, jnp.uint8), format, 4)
    cache = scatter(canary, ids(-1, 2, -1, 12, 2**31 - 1, -5), rows_of(format.width, 6))
    changed = np.asarray(cache.pages) != 77
    touched = np.zeros_like(changed)
    for field in format.fields(4):
        touched[0, field.offset + 2 * field.stride : field.offset + 2 * field.stride + field.size] = True
    assert changed.any() and not (changed & ~touched).any()


def test_ac_03_scatter_rows_canaries():
    rows = jnp.full((5, 3), 77.0)
    found = np.asarray(indexing.scatter_rows(rows, ids(-1, 2, -1), jnp.ones((3, 3))))
    assert (found[2] == 1).all() and (np.delete(found, 2, 0) == 77).all()


def test_ac_04_padded_writes_leave_the_last_slot():
    pages = jnp.full((2, 4, 3), 77.0)
    found = np.asarray(indexing.scatter_paged(pages, ids(1, -1, -1), jnp.ones((3, 3)))).reshape(8, 3)
    assert (found[1] == 1).all() and (np.delete(found, 1, 0) == 77).all()


def test_ac_04_what_jax_itself_does():
    """The reason for indexing.py, pinned: when this fails, jax has changed."""
    assert float(jnp.arange(3.0).at[-1].set(9, mode="drop")[2]) == 9
    assert float(jnp.arange(3.0)[jnp.asarray(-1)]) == 2


BEHAVIOUR = [(-(2**31), None), (-2, None), (-1, None), (0, 0), (3, 3), (4, None), (5, None), (2**31 - 1, None)]


@pytest.mark.parametrize("index, row", BEHAVIOUR)
def test_ac_70_behaviour_table(index, row):
    """What gather and scatter do with every kind of index, for rows and for pages, outside and inside jit."""
    rows = jnp.arange(1.0, 5.0)[:, None]
    pages = rows.reshape(2, 2, 1)
    expected_rows = np.zeros(1) if row is None else np.asarray(rows[row])
    written = np.asarray(rows).copy()
    if row is not None:
        written[row] = -7
    for wrap in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(wrap(indexing.gather_rows)(rows, ids(index))[0], expected_rows)
        np.testing.assert_array_equal(wrap(indexing.gather_paged)(pages, ids(index))[0], expected_rows)
        new = jnp.full((1, 1), -7.0)
        np.testing.assert_array_equal(wrap(indexing.scatter_rows)(rows, ids(index), new), written)
        paged = wrap(indexing.scatter_paged)(pages, ids(index), new)
        np.testing.assert_array_equal(np.asarray(paged).reshape(4, 1), written)


def test_gather_from_no_rows():
    assert np.asarray(indexing.gather_rows(jnp.zeros((0, 3)), ids(0, -1))).shape == (2, 3)
    assert not np.asarray(indexing.gather_rows(jnp.zeros((0, 3)), ids(0, -1))).any()


CACHE_NAMES = {"pages", "kv", "keys", "block_table", "ring"}


def raw_indexing(tree):
    """Line numbers at which a syntax tree indexes outside the helpers.

    jnp.take, lax.gather, lax.scatter*; and an index that is data (a name, a call, an expression) into any ``x.at[..]``
    or into something called like a cache. Slices, numbers, None, ... and take_along_axis are innocent, and so is
    `.at[..]` on a Pallas reference (a name that ends in _ref, _smem, _gmem or _tmem).
    """
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            value = node.value
            if isinstance(value, ast.Attribute) and value.attr == "at":
                base = ast.unparse(value.value)
                if not base.endswith(("_ref", "_smem", "_gmem", "_tmem")) and not _static(node.slice):
                    lines.append(node.lineno)
            elif _last_name(value) in CACHE_NAMES and not _static(node.slice):
                lines.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            module, name = ast.unparse(node.func.value), node.func.attr
            if (module in ("jnp", "jax.numpy") and name == "take") or (
                module in ("lax", "jax.lax") and (name == "gather" or name.startswith("scatter"))
            ):
                lines.append(node.lineno)
    return lines


def _last_name(node):
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def _static(index):
    if isinstance(index, ast.Tuple):
        return all(_static(i) for i in index.elts)
    return isinstance(index, ast.Slice | ast.Constant) or (
        isinstance(index, ast.UnaryOp) and isinstance(index.operand, ast.Constant)
    )


def test_ac_70_no_cache_is_indexed_outside_indexing():
    found = []
    for package in (pallas_kernels, dsa_jax):
        for path in sorted(Path(package.__file__).parent.rglob("*.py")):
            text = path.read_text()
            if path.name == "indexing.py" or "pallas.mosaic_gpu" in text:  # a kernel bounds its indices by hand
                continue
            found += [f"{path.relative_to(Path(package.__file__).parent)}:{line}" for line in raw_indexing(ast.parse(text))]
    assert not found, f"index through gather_rows, scatter_rows or PagedRows instead: {found}"


@pytest.mark.parametrize(
    "source, hits",
    [
        ("x.at[i].set(1)", 1),
        ("x.at[:, 0].set(1)", 0),
        ("jnp.take(kv, i)", 1),
        ("lax.gather(kv, i, d, s)", 1),
        ("self.pages[slots]", 1),
        ("kv[i, :]", 1),
        ("block_table[request]", 1),
        ("kv[:, :64]; kv[0]; kv[..., None]; kv[-1]", 0),
        ("jnp.take_along_axis(scores, i, -1); scores[i]; q[t]", 0),
        ("acc_ref.at[pl.ds(0, 4)]", 0),
    ],
)
def test_ac_70_the_source_check_itself(source, hits):
    assert len(raw_indexing(ast.parse(source))) == hits


# ---------------------------------------------------------------- AC-19: no flat byte number


@pytest.mark.parametrize("format", [Model1(), V32()])
def test_ac_19_slots_times_row_bytes_pass_2_to_31(format):
    """Abstract lowering at 4,000,000 slots and more: the only indices are pages and offsets within a page."""
    pages = 4_000_000 // 64 + 1
    assert 4_000_000 * format.row_bytes > 2**31
    cache = jax.eval_shape(lambda: PagedRows.zeros(format, pages, 64))
    slots = jax.ShapeDtypeStruct((8,), jnp.int32)
    text = jax.jit(lambda cache, slots: cache.gather_bytes(slots)).lower(cache, slots).as_text()
    assert f"tensor<{pages}x{format.page_bytes(64)}xui8>" in text
    assert f"tensor<{pages * format.page_bytes(64)}xui8>" not in text  # never reshaped to flat bytes


def test_ac_19_a_flat_number_would_wrap():
    """Why (page, row): the product wraps in int32, the pair does not."""
    slot = np.array([4_000_000], np.int32)
    with np.errstate(over="ignore"):
        assert int((slot * np.int32(576))[0]) < 0 and int((slot * np.int32(656))[0]) < 0
    page, row, inside = indexing.page_and_row(jnp.asarray(slot), 64, 62501)
    assert (int(page[0]), int(row[0]), bool(inside[0])) == (62500, 0, True)
    assert not bool(indexing.page_and_row(jnp.asarray(slot), 64, 62500)[2][0])


# ---------------------------------------------------------------- properties


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_cache_is_a_dictionary_of_rows(data):
    """Writes in any order to any slots, then reads of any slots: what was written last, or zeros."""
    format = data.draw(st.sampled_from([V41NVFP4(32), IndexMXFP4(32), IndexFP8(32), V41MXFP8(32), Plain(32, jnp.float32)]))
    num_pages, page_size = 3, 4
    total = num_pages * page_size
    cache, written = PagedRows.zeros(format, num_pages, page_size), {}
    for step in range(2):
        slots = data.draw(st.permutations(range(total)))[:5]
        slots = [s if data.draw(st.booleans()) else data.draw(st.sampled_from([-1, -9, total, total + 3])) for s in slots]
        x = rows_of(32, 5, seed=data.draw(st.integers(0, 9)) + step)
        cache = scatter(cache, ids(*slots), jnp.asarray(x))
        decoded = np.asarray(format.decode(format.encode(jnp.asarray(x))))
        written |= {s: decoded[i] for i, s in enumerate(slots) if 0 <= s < total}
    asked = data.draw(st.lists(st.integers(-3, total + 3), min_size=7, max_size=7))
    found = np.asarray(gather(cache, ids(*asked)))
    for i, slot in enumerate(asked):
        np.testing.assert_array_equal(found[i], written.get(slot, np.zeros(32)))


def test_formats_are_static_and_caches_are_pytrees():
    for format, *_ in FORMATS.values():
        assert hash(format) == hash(dataclasses.replace(format))
    cache = PagedRows.zeros(IndexFP8(), 2, 4)
    leaves, tree = jax.tree.flatten(cache)
    assert len(leaves) == 1 and cache.num_slots == 8
    assert tree != jax.tree.structure(PagedRows.zeros(IndexFP8(), 2, 8))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: V41MXFP8(48), "positive multiple of 32"),
        (lambda: Model1(100, 64), "width - rope is 36"),
        (lambda: Plain(0, jnp.float32), "at least 1"),
        (lambda: Plain(8, jnp.float8_e4m3fn), "FP8 rows need a scale"),
        (lambda: PagedRows.zeros(V32(), 0, 64), "num_pages is 0"),
        (lambda: V32().encode(jnp.zeros((2, 512))), "have 576 values"),
        (lambda: PagedRows(jnp.zeros((2, 100), jnp.uint8), V32(), 4).gather(ids(0)), "needs 2624 bytes"),
        (lambda: PagedRows.zeros(V32(), 2, 4).scatter(ids(0), jnp.zeros((2, 576))), "M is 1"),
        (lambda: indexing.gather_rows(jnp.zeros((3, 2)), jnp.zeros(2)), "must be int32"),
    ],
)
def test_wrong_arguments(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
