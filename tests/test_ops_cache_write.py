"""Writers: from a normalised row to the bytes of a page, byte for byte, and index queries."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from reference import ops as oracle

from pallas_kernels import (
    IndexFP8,
    IndexMXFP4,
    Model1,
    PagedRows,
    Plain,
    Rotation,
    V32,
    V41MXFP8,
    V41NVFP4,
    quantize_index_queries,
    write_rows,
)

FORMATS = {
    "v32": V32(),
    "model1": Model1(),
    "v41_mxfp8": V41MXFP8(),
    "v41_nvfp4": V41NVFP4(),
    "index_fp8": IndexFP8(),
    "index_mxfp4": IndexMXFP4(),
}
SIGNED = np.array([1, -1], np.float32)
E4M3_CODES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
E4M3_CODES = E4M3_CODES[np.isfinite(E4M3_CODES)]  # 254 of them, both zeros among them


def extremes(width):
    """bf16 rows that lie on the edges of the number formats."""
    rng = np.random.default_rng(1)
    codes = np.resize(E4M3_CODES, width)  # every E4M3 code in a row whose groups reach 448: stored as they are
    codes[::32] = 448
    nibbles = np.resize(np.outer(SIGNED, oracle.FP4_MAGNITUDES).reshape(-1), width)  # all 16 E2M1 codes
    tiny = np.full(width, 2.0**-130, np.float32) * rng.choice(SIGNED, width)  # subnormal
    return oracle.bf16(
        np.stack(
            [
                rng.standard_normal(width),
                np.zeros(width),
                -np.zeros(width),
                tiny,
                rng.standard_normal(width) * 2.0**-120,
                rng.standard_normal(width) * 2.0**100,
                np.full(width, 3.3895e38) * rng.choice(SIGNED, width),
                codes,
                nibbles,
                nibbles * 2.0**-20,
                codes * 2.0**-9,
                np.where(np.arange(width) % 32 == 5, 448 * 2.0**-6, 2.0**-9 * rng.standard_normal(width)),
                rng.standard_normal(width) * np.exp2(rng.integers(-14, 14, width)),
            ]
        ).astype(np.float32)
    )


def pages_of(kind, format, rows, page_size, stride, slots, filling):
    """Pages as the specification has them: `filling` where no record lies."""
    pages = np.full((4, stride), filling, np.uint8)
    for slot, x in zip(slots, rows):
        if 0 <= slot < 4 * page_size:
            page, row = divmod(int(slot), page_size)
            first, apart = oracle.record(kind, x)
            for part, start in ((first, row * len(first)), (apart, page_size * len(first) + row * len(apart))):
                pages[page, start : start + len(part)] = part
    return pages


@functools.partial(jax.jit, static_argnames=("hadamard", "rounding"), donate_argnums=0)
def write(cache, slots, x, rotation, hadamard=False, rounding=jnp.bfloat16):
    return write_rows(cache, slots, x, rotation=rotation, hadamard=hadamard, rounding=rounding)


@pytest.mark.parametrize("kind", FORMATS)
def test_ac_60_written_pages_byte_for_byte(kind):
    """Edges of every format, in odd pages with a wider stride; -1 and slots behind the cache write nothing."""
    format, page_size = FORMATS[kind], 5
    rows = extremes(format.width)
    stride = format.page_bytes(page_size) + 16 * 3
    slots = np.array([7, 0, 19, -1, 4, 12, 20, 5, 13, -7, 11, 2**31 - 1, 16], np.int32)
    cache = PagedRows(jnp.full((4, stride), 99, jnp.uint8), format, page_size)
    found = write(cache, jnp.asarray(slots), jnp.asarray(rows), None)
    expected = pages_of(kind, format, rows, page_size, stride, slots, 99)
    np.testing.assert_array_equal(np.asarray(found.pages), expected)
    over = np.where(np.arange(len(slots)) < 5, np.arange(5, 5 + len(slots)), -1).astype(np.int32)  # a page written anew
    found = write(found, jnp.asarray(over), jnp.asarray(rows), None)
    again = pages_of(kind, format, rows, page_size, stride, over, 0)
    held = pages_of(kind, format, rows, page_size, stride, over, 255) == again
    np.testing.assert_array_equal(np.asarray(found.pages), np.where(held, again, expected))


def rotated(rows, cos, sin, pairs, hadamard):
    turned = [oracle.bf16(oracle.rotate(*each, pairs)) for each in zip(rows, cos, sin)]
    return [oracle.bf16(oracle.hadamard(row)) for row in turned] if hadamard else turned


@pytest.mark.parametrize(
    "kind, pairs, hadamard",
    [
        ("v32", "interleaved", False),
        ("model1", "interleaved", False),
        ("v41_mxfp8", "interleaved", False),
        ("v41_nvfp4", "interleaved", False),
        ("index_fp8", "half_split", True),
        ("index_mxfp4", "interleaved", True),
    ],
)
def test_rotated_rows_are_rounded_and_then_quantised(kind, pairs, hadamard):
    format = FORMATS[kind]
    rng = np.random.default_rng(2)
    rows = oracle.bf16(rng.standard_normal((4, format.width)))
    angle = rng.uniform(0, 6, (4, 32)).astype(np.float32)
    cos, sin = np.cos(angle), np.sin(angle)
    slots = np.array([3, 0, 5, 1], np.int32)
    cache = PagedRows.zeros(format, 4, 3)
    found = write(cache, jnp.asarray(slots), jnp.asarray(rows), Rotation(cos, sin, pairs), hadamard=hadamard)
    expected = pages_of(kind, format, rotated(rows, cos, sin, pairs, hadamard), 3, cache.pages.shape[1], slots, 0)
    differ = np.asarray(found.pages) != expected
    # A multiplication and an addition may be one instruction: a bf16 tie decided otherwise changes one byte.
    assert differ.mean() < (1e-2 if hadamard else 2e-3)
    other = "interleaved" if pairs == "half_split" else "half_split"
    wrong = pages_of(kind, format, rotated(rows, cos, sin, other, hadamard), 3, cache.pages.shape[1], slots, 0)
    assert (wrong != expected).mean() > 10 * differ.mean() + 1e-2


def test_plain_rows_and_no_rounding():
    rows = np.random.default_rng(3).standard_normal((2, 64)).astype(np.float32)
    slots = jnp.asarray([4, 1], jnp.int32)
    found = write(PagedRows.zeros(Plain(64, jnp.float32), 2, 3), slots, jnp.asarray(rows), None, rounding=None)
    np.testing.assert_array_equal(np.asarray(found.pages).reshape(6, 64)[[4, 1]], rows)
    found = write(PagedRows.zeros(Plain(64, jnp.float32), 2, 3), slots, jnp.asarray(rows), None)
    np.testing.assert_array_equal(np.asarray(found.pages).reshape(6, 64)[[4, 1]], oracle.bf16(rows))


@pytest.mark.parametrize("kind", ["v32", "model1"])
def test_a_donated_cache_is_written_in_place(kind):
    cache = jax.eval_shape(lambda: PagedRows.zeros(FORMATS[kind], 2000, 64))
    slots, x = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((8, FORMATS[kind].width), jnp.bfloat16)
    memory = write.lower(cache, slots, x, None).compile().memory_analysis()
    assert memory.alias_size_in_bytes == cache.pages.size and memory.temp_size_in_bytes < cache.pages.size // 10


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_index_queries(format):
    rng = np.random.default_rng(4)
    q, weights = oracle.bf16(rng.standard_normal((3, 2, 128))), rng.standard_normal((3, 2)).astype(np.float32)
    angle = rng.uniform(0, 6, (3, 32)).astype(np.float32)
    rotation = Rotation(np.cos(angle), np.sin(angle), "half_split")
    values, scales, folded = jax.jit(functools.partial(quantize_index_queries, format=format, hadamard=True))(
        jnp.asarray(q), jnp.asarray(weights), rotation=rotation
    )
    wrong = total = 0
    for row, head in np.ndindex(3, 2):
        turned = oracle.bf16(oracle.rotate(q[row, head], rotation.cos[row], rotation.sin[row], "half_split"))
        turned = oracle.bf16(oracle.hadamard(turned))
        if format == "fp8":
            expected, scale = oracle.quantize_fp8(turned, 128)
            assert scales is None and float(folded[row, head]) == weights[row, head] * scale[0]
            found, expected = np.asarray(values[row, head]).view(np.uint8), expected.view(np.uint8)
        else:
            expected, scale = oracle.quantize_fp4(turned, 32, "e8m0")
            np.testing.assert_array_equal(scales[row, head], scale)
            assert float(folded[row, head]) == weights[row, head]
            found = np.asarray(values[row, head])
        wrong, total = wrong + (found != expected).sum(), total + found.size
    assert wrong <= total // 100  # where a bf16 tie was decided otherwise


def test_ac_06_nan_is_refused_where_it_can_be_seen():
    rows = np.zeros((2, 512), np.float32)
    rows[1, 3] = np.nan
    cache = PagedRows.zeros(V41MXFP8(), 2, 4)
    with pytest.raises(ValueError, match="NaN in row 1, which slot 2 would keep"):
        write_rows(cache, jnp.asarray([0, 2], jnp.int32), jnp.asarray(rows))
    padded = write_rows(cache, jnp.asarray([0, -1], jnp.int32), jnp.asarray(rows))
    clean = write_rows(cache, jnp.asarray([0, -1], jnp.int32), jnp.zeros((2, 512)))
    np.testing.assert_array_equal(padded.pages, clean.pages)
    kept = write(cache, jnp.asarray([0, 2], jnp.int32), jnp.asarray(rows), None)
    decoded = np.asarray(kept.gather(jnp.asarray([2], jnp.int32)))[0]
    assert np.isnan(decoded[:32]).all() and not decoded[32:].any()


@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments():
    cache, x, slots = PagedRows.zeros(V41MXFP8(), 2, 4), jnp.zeros((2, 512)), jnp.zeros(2, jnp.int32)
    angles = jnp.zeros((2, 300))
    cases = [
        (lambda: write_rows(cache, slots, x[:, :64]), "width is 512"),
        (lambda: write_rows(cache, slots[:1], x), "M is 2"),
        (lambda: write_rows(cache, slots, x, rotation=Rotation(angles, angles)), "turns 600 values"),
        (lambda: write_rows(cache, slots, x, rotation=Rotation(angles[:1], angles)), "rows is 2"),
        (lambda: Rotation(angles, angles, "pairs"), "interleaved, half_split"),
        (lambda: quantize_index_queries(jnp.zeros((1, 2, 96)), jnp.zeros((1, 2)), hadamard=True), "power of two"),
        (lambda: quantize_index_queries(jnp.zeros((1, 2, 48)), jnp.zeros((1, 2)), format="mxfp4"), "multiple of 32"),
        (lambda: quantize_index_queries(jnp.zeros((1, 2, 64)), jnp.zeros((1, 2)), format="fp6"), "fp8, mxfp4"),
    ]
    for call, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            call()
