"""The Hopper kernels of sparse_attention, interpreted with race detection, against the plain reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import on_chip
import pytest
import tolerances

from pallas_kernels import aot, mosaic
from pallas_kernels.sparse_attention import few, sm90, sparse_attention, wide
from pallas_kernels.sparse_attention.cases import CASES

BF16, INF = jnp.bfloat16, float("inf")
ROWS = 90
INTERPRETED = on_chip.implementation("sm90")


@pytest.fixture(autouse=True)
def few_cores(monkeypatch):
    """Two multiprocessors: the interpreter takes every thread block in turn."""
    monkeypatch.setattr(mosaic, "CORES", 2)


def slow(*parameters):
    return pytest.param(*parameters, marks=pytest.mark.slow)


def problem(tokens, heads, width, columns):
    """Lists that begin with a run of -1, name rows that are not there, and one row twice; the last row has nothing."""
    rng = np.random.default_rng(heads + width + sum(columns))
    q = jnp.asarray(rng.normal(size=(tokens, heads, width)), BF16)
    kvs = tuple(jnp.asarray(rng.normal(size=(ROWS, width)), BF16) for _ in columns)
    # What is listed as none must not be read either: its row would make NaN of everything.
    kvs = tuple(kv.at[0].set(jnp.nan) for kv in kvs)
    lists = [rng.integers(1, ROWS, (tokens, k)).astype(np.int32) for k in columns]
    for each in lists:
        each[:, 3:7] = [ROWS, 2**31 - 1, -(2**31), -1]
        each[:, 8] = each[:, 9]
        each[0, : min(66, each.shape[1] - 8)] = -1
    if tokens > 1:
        for each in lists:
            each[-1] = -1
    sink = jnp.asarray(np.resize([0.0, 20.0, -INF, INF], heads), jnp.float32)
    return q, kvs, tuple(map(jnp.asarray, lists)), sink


def agree(found, wanted):
    """out within the bound of its norm, and zeros and infinities where they belong."""
    out, expected = (np.asarray(each[0], np.float64) for each in (found, wanted))
    assert np.isfinite(out).all()
    bound = tolerances.of("kernels.sparse_attention") * np.linalg.norm(expected)
    assert np.linalg.norm(out - expected) <= bound
    np.testing.assert_array_equal(out[:, 3::4], 0)  # a sink of infinity leaves nothing
    bound = tolerances.of("kernels.sparse_attention.lse")
    for lse, other in zip(found[1:], wanted[1:]):
        lse, other = np.asarray(lse), np.asarray(other)
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(other))
        finite = np.isfinite(other)
        np.testing.assert_allclose(lse[finite], other[finite], rtol=0, atol=bound)


SHAPES = [
    (3, 8, 512, (10, 70), None, None),  # two lists, more rows than thread blocks, a row of nothing
    (1, 64, 576, (74,), None, None),
    (3, 64, 512, (130,), ((130, 0, 70),), None),
    (2, 16, 576, (70, 20), ((3, 20), None), None),
    (1, 32, 512, (200,), None, 70),
    (1, 24, 576, (20,), None, None),
    (1, 32, 576, (70,), None, None),  # the shortest ring
    (2, 48, 576, (20,), None, None),  # fewer heads than a thread block takes
    (1, 72, 512, (20,), None, None),  # heads for both kernels
    (1, 128, 576, (200,), None, None),
]


@pytest.mark.parametrize(
    "tokens, heads, width, columns, lengths, prefix", SHAPES[:2] + [slow(*each) for each in SHAPES[2:]]
)
def test_equals_the_reference(tokens, heads, width, columns, lengths, prefix):
    q, kvs, lists, sink = problem(tokens, heads, width, columns)
    if lengths is not None:
        lengths = tuple(None if each is None else jnp.asarray(each, jnp.int32) for each in lengths)
    options = dict(topk_length=lengths, sink=sink, scale=width**-0.5, v_width=512, lse_prefix=prefix)
    run = functools.partial(sparse_attention, q, kvs, lists, **options)
    agree(run(implementation=INTERPRETED), run(implementation="reference"))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [8, 64])
def test_a_row_does_not_depend_on_the_others(heads):
    q, kvs, lists, sink = problem(3, heads, 512, (70,))
    run = functools.partial(sparse_attention, scale=0.1, sink=sink, implementation=INTERPRETED)
    together = run(q, kvs, lists)
    for found, wanted in zip(run(q[1:2], kvs, (lists[0][1:2],)), together):
        np.testing.assert_array_equal(found[0], wanted[1])


def test_nothing_to_attend_runs_no_kernel():
    q, kvs, lists, sink = problem(2, 8, 512, (20, 20))
    empty = (kvs[0][:0], kvs[1]), (lists[0], lists[1][:, :0])
    out, lse, leading = sparse_attention(q, *empty, scale=0.1, sink=sink, lse_prefix=3, implementation=INTERPRETED)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -INF)
    np.testing.assert_array_equal(leading, -INF)


def test_what_the_kernels_do_not_carry():
    q, kvs, lists, _ = problem(2, 8, 512, (20,))
    run = functools.partial(sparse_attention, scale=0.1, implementation=INTERPRETED)
    with pytest.raises(NotImplementedError, match="takes bfloat16, and q have float32"):
        run(q.astype(jnp.float32), kvs, lists, p_dtype=BF16)
    with pytest.raises(NotImplementedError, match="512 or 576 values with 512 of them, not 256 with 256"):
        run(q[..., :256], (kvs[0][:, :256],), lists)
    with pytest.raises(NotImplementedError, match="multiples of 8 heads from 8 to 128, not 12"):
        run(jnp.concatenate([q, q], 1)[:, :12], kvs, lists)
    with pytest.raises(NotImplementedError, match="one or two lists, not 3"):
        run(q, kvs * 3, lists * 3)
    with pytest.raises(NotImplementedError, match="a scale above 0, not -0.1"):
        run(q, kvs, lists, scale=-0.1)


def test_configurations_check_themselves():
    with pytest.raises(ValueError, match="are 11 or 12"):
        wide.TuningConfig(ring=10, score=160, apply=160, gather=32)
    with pytest.raises(ValueError, match="multiples of 8"):
        wide.TuningConfig(ring=12, score=161, apply=160, gather=24)
    with pytest.raises(ValueError, match="have 512 registers together"):
        wide.TuningConfig(ring=12, score=176, apply=160, gather=32)
    for heads in few.HEADS:
        for width in sm90.WIDTHS:
            assert 9 <= few.ring_blocks(heads, width) <= 12


def test_named_shapes():
    """Every row of the figures that this operation is compared with."""
    shapes = {case.shape for case in CASES}
    assert len(shapes) == len(CASES)
    assert {f"h128 d576 k2048 sq4096 skv{rows} +sink" for rows in (8192, 32768, 131072)} <= shapes
    assert {f"h{heads} d512 k640 sq4096 skv65536 +sink" for heads in (8, 16, 32, 64, 128)} <= shapes


@pytest.mark.slow
def test_compiles_for_hopper():
    """cp.async and wgmma are there. Only a few registers, kept for once a query row, leave a thread."""
    if (reason := aot.missing()) is not None:
        pytest.skip(reason)
    report = aot.compile_report(("h200",), "sparse_attention")
    assert report.kernels and not report.unsupported, report.text()
    for kernel in report.kernels:
        wide_keys = "d576" in kernel.shape and not kernel.shape.startswith("h16")
        assert kernel.spill_stores <= (28 if wide_keys else 0), report.text()
        assert kernel.instructions["HGMMA"] >= 40 and kernel.instructions["LDGSTS"] >= 32, report.text()


@pytest.mark.slow
@pytest.mark.parametrize("tokens, heads, width, columns", [each[:4] for each in SHAPES])
def test_no_copy_has_an_address_beside_its_cache_policy(tokens, heads, width, columns):
    """ptxas 13.0 to 13.5 keeps the part of an address that all threads share in the registers of the policy, and uses
    them as the policy of other copies, which is an illegal instruction: a sum in `gather` does that for 1, 64, 576."""
    if (reason := aot.missing()) is not None:
        pytest.skip(reason)
    q, kvs, lists, sink = problem(tokens, heads, width, columns)
    kernel = functools.partial(sm90.sparse_attention, scale=0.1, v_width=512)
    kernels = aot.compile_for("h200", lambda q, kvs, lists, sink: kernel(q, kvs, lists, sink=sink), q, kvs, lists, sink)
    assert kernels
    for each in kernels:
        assert each.instructions["LDGSTS"] >= 32 and each.instructions["LDGSTS.UR"] == 0, each
