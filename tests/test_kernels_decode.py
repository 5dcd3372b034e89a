"""The decode kernels in the GPU interpreter, races included, and what they compile to."""

import jax
import jax.numpy as jnp
import numpy as np
import on_chip
import pytest
import tolerances

from pallas_kernels import Model1, PagedRows, Plain, V32, V41MXFP8, V41NVFP4, aot, dispatch, sparse_decode
from pallas_kernels.sparse_decode import rows, sm90, sm100

BF16 = jnp.bfloat16
V41 = (V41MXFP8(), V41NVFP4())
CASES = {  # formats, widths of the lists, heads, how lists are split
    "v41": (V41, (70, 130), 16, {}),
    "v41 in three parts": (V41, (70, 130), 8, {"num_splits": 3}),
    "v32": (V32(), (200,), 72, {"split_size": 128}),
    "model1": ((Model1(), Model1()), (70, 130), 8, {}),
    "plain": (Plain(512, BF16), (140,), 8, {}),
}


def cache_of(format, seed):
    """Six pages with a stride wider than need be."""
    page_size = 7 + seed
    rows = np.random.default_rng(seed).standard_normal((6 * page_size, format.width)).astype(np.float32)
    rows[2] = np.nan  # of a slot that no list has: nothing may touch it
    if isinstance(format, Plain):
        cache = PagedRows.zeros(format, 6, page_size)
    else:
        stride = -(-format.page_bytes(page_size) // 16) * 16 + 32
        cache = PagedRows(jnp.full((6, stride), 255, jnp.uint8), format, page_size)
    return jax.jit(PagedRows.scatter)(cache, jnp.arange(len(rows), dtype=jnp.int32), jnp.asarray(rows))


RUNS = [(family, name) for family in ("sm90", "sm100") for name in CASES]


@pytest.mark.parametrize(
    "family, name", [run if run == ("sm90", "v41") else pytest.param(*run, marks=pytest.mark.slow) for run in RUNS]
)
def test_a_kernel_attends_as_the_reference(family, name):
    """Slots that are none or listed twice, lists that end early, a row with nothing, parts, several rows a block."""
    formats, widths, heads, ways = CASES[name]
    formats = formats if isinstance(formats, tuple) else (formats,)
    if family == "sm100" and heads > 64:
        heads = 64
    rng = np.random.default_rng(3)
    width = formats[0].width
    caches = tuple(cache_of(format, seed) for seed, format in enumerate(formats))
    q = jnp.asarray(rng.standard_normal((3, 1, heads, width)), BF16)
    lists = [rng.integers(-9, cache.num_slots + 9, (3, 1, k)) for cache, k in zip(caches, widths)]
    lists = tuple(jnp.asarray(np.where(slots == 2, 2**30, slots), jnp.int32) for slots in lists)
    lengths = [rng.integers(1, k + 1, (3, 1)) for k in widths]
    for length in lengths:
        length[1] = 0
    lengths = tuple(jnp.asarray(length, jnp.int32) for length in lengths)
    sink = jnp.asarray(rng.standard_normal(heads), jnp.float32).at[0].set(-jnp.inf).at[1].set(jnp.inf)

    def run(implementation, **ways):
        return sparse_decode(
            q, caches, lists, topk_lengths=lengths, sink=sink, scale=width**-0.5, v_width=512, out_dtype=jnp.float32,
            implementation=implementation, **ways,
        )  # fmt: skip

    wanted, wanted_lse = run("reference")
    found, lse = run(on_chip.implementation(family), **ways)
    assert float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)) < tolerances.of("kernels_decode.out")
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(wanted_lse))
    finite = np.isfinite(wanted_lse)
    np.testing.assert_allclose(lse[finite], wanted_lse[finite], atol=tolerances.of("kernels_decode.lse"))
    assert not np.asarray(found)[1].any() and not np.asarray(found)[:, :, 1].any()


def cache_of_all_scales(format, seed):
    """A cache of 60 slots whose rows have all E8M0 scales but NaN, with codes that keep values under 2^122."""
    rng, layout = np.random.default_rng(seed), rows.staged(format)
    stored = rng.integers(0, 256, (60, format.row_bytes)).astype(np.uint8)
    scales = np.arange(60 * layout.groups) % 255
    assert len(set(scales)) == 255
    codes = rng.integers(0, 127, (60, layout.groups, layout.group)) | rng.integers(0, 2, (60, 1, 1)) << 7
    codes = np.where(scales.reshape(60, -1, 1) < 227, codes, codes & 0x87)  # subnormal ones of large scales
    stored[:, : layout.quantised] = codes.reshape(60, -1)
    if layout.tail:
        tail = rng.standard_normal((60, format.width - layout.quantised)).astype(BF16)
        stored[:, layout.tail : layout.scale] = tail.view(np.uint8)
    stored[:, layout.scale : layout.scale + layout.groups] = scales.reshape(60, -1)
    page_size = 20
    pages = np.zeros((3, -(-format.page_bytes(page_size) // 16) * 16), np.uint8)
    for slot, row in enumerate(stored):
        at = 0
        for field in format.fields(page_size):
            start = field.offset + slot % page_size * field.stride
            pages[slot // page_size, start : start + field.size] = row[at : at + field.size]
            at += field.size
    return PagedRows(jnp.asarray(pages), format, page_size)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sm90", "sm100"])
def test_ac_69_scales_of_every_size(family):
    """Blocks with E8M0 scales of 2^-127 to 2^127, with queries so small that scores are not."""
    rng = np.random.default_rng(5)
    caches = (cache_of_all_scales(Model1(), 1), cache_of_all_scales(V41MXFP8(), 2))
    q = jnp.asarray(np.ldexp(rng.standard_normal((2, 1, 8, 512)), -60), BF16)
    lists = tuple(jnp.asarray(rng.integers(0, 60, (2, 1, 130)), jnp.int32) for _ in caches)

    def run(implementation):
        return sparse_decode(
            q, caches, lists, scale=2.0**-64, v_width=512, out_dtype=jnp.float32, implementation=implementation
        )

    (wanted, wanted_lse), (found, lse) = run("reference"), run(on_chip.implementation(family))
    wanted, found = (np.asarray(x, np.float64) for x in (wanted, found))
    assert np.isfinite(found).all() and np.abs(wanted).max() > 2.0**110
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < tolerances.of("kernels_decode.out")
    np.testing.assert_allclose(lse, wanted_lse, atol=tolerances.of("kernels_decode.lse"))


@pytest.mark.slow
def test_ac_53_a_row_has_the_same_bits_alone_and_in_a_batch():
    """With parts of a fixed size: whichever thread blocks have them. No lengths: no schedule is read."""
    rng = np.random.default_rng(4)
    caches = tuple(cache_of(format, seed) for seed, format in enumerate(V41))
    q = jnp.asarray(rng.standard_normal((3, 1, 8, 512)), BF16)
    lists = [rng.integers(-9, cache.num_slots, (3, 1, 100)) for cache in caches]
    lists = tuple(jnp.asarray(np.where(slots == 2, -1, slots), jnp.int32) for slots in lists)
    sink = jnp.asarray(rng.standard_normal(8), jnp.float32)

    def run(rows, implementation=on_chip.implementation("sm90")):
        found = sparse_decode(
            q[rows], caches, tuple(slots[rows] for slots in lists), sink=sink, scale=0.05, split_size=128,
            out_dtype=jnp.float32, implementation=implementation,
        )  # fmt: skip
        return [np.asarray(x) for x in found]

    together, wanted = run(slice(0, 3)), run(slice(0, 3), "reference")
    for a, b in zip(run(slice(2, 3)), together):
        np.testing.assert_array_equal(a[0], b[2])
    assert np.linalg.norm(together[0] - wanted[0]) / np.linalg.norm(wanted[0]) < tolerances.of("kernels_decode.out")
    np.testing.assert_allclose(together[1], wanted[1], atol=tolerances.of("kernels_decode.lse"))


def test_what_the_kernel_does_not_carry():
    q, slots = jnp.zeros((1, 1, 8, 512), BF16), (jnp.zeros((1, 1, 64), jnp.int32),)
    cache = PagedRows.zeros(V41MXFP8(), 2, 64)

    def run(q=q, cache=cache, **options):
        return sparse_decode(q, (cache,), slots, scale=1.0, implementation=on_chip.implementation("sm90"), **options)

    odd_stride = PagedRows(jnp.zeros((2, 528 * 64 + 8), jnp.uint8), V41MXFP8(), 64)
    cases = [
        (lambda: run(q.astype(jnp.float32)), "q have float32"),
        (lambda: run(q[:, :, :4]), "multiples of 8 heads from 8 to 128, not 4"),
        (lambda: run(v_width=256), "values of 512, not of 256"),
        (lambda: run(cache=odd_stride), "make the page stride a multiple of 16"),
        (lambda: run(cache=PagedRows.zeros(Plain(512, jnp.float32), 2, 64)), "kernels read V32"),
        (lambda: run(out_dtype=jnp.float16), "bfloat16 or float32"),
        (lambda: sm90.TuningConfig(math=240, gather=40), "have 504 registers"),
        (lambda: sm90.TuningConfig(stages=1), "two blocks are attended to at once"),
    ]
    for call, sentence in cases:
        with pytest.raises((NotImplementedError, ValueError), match=sentence):
            call()


@pytest.mark.parametrize(
    "heads, format, groups",
    [
        (8, V32(), 1),
        (24, V32(), 1),
        (72, V32(), 3),
        (128, V32(), 2),
        (64, Plain(576, BF16), 2),  # two blocks of these rows do not fit with the queries of 64 heads
        (40, Plain(576, BF16), 1),
    ],
)
def test_heads_are_divided_so_that_rows_fit(heads, format, groups):
    layouts = (rows.staged(format),)
    assert sm90.arrangement(heads, format.width, layouts) == groups
    assert sm90.stages_of(heads // groups, format.width, layouts) >= sm90.WARPGROUPS


def test_ac_76_a_kernel_is_held_back_until_it_has_run():
    """Never chosen by itself: the reference runs, and one line says why."""
    with pytest.raises(NotImplementedError, match="name it to run it"):
        dispatch._refuse_unproven(sm100.sparse_decode, "sparse_decode", ())


@pytest.mark.slow
@pytest.mark.parametrize("chip, products, spills", [("h200", "HGMMA", 0), ("b200", "UTCxMMA", 128)])
def test_compiles_for_a_chip(chip, products, spills):
    if (reason := aot.missing()) is not None:
        pytest.skip(reason)
    report = aot.compile_report((chip,), "sparse_decode")
    assert report.kernels and not report.unsupported, report.text()
    for kernel in report.kernels:
        if kernel.smem:  # the other kernel combines parts
            assert kernel.instructions[products] >= 40 and kernel.instructions["UBLKCP"] >= 1, report.text()
        assert kernel.spill_stores <= spills and kernel.spill_loads <= spills, report.text()
