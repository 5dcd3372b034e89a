"""sparse_attention beyond its sums: gradient, dense form, offsets, the prefix's lse, and the Blackwell kernel interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from reference import ops as oracle

from dsa_jax import ops
from pallas_kernels import platform, sparse_attention
from pallas_kernels.sparse_attention import backward, dense, reference, sm100

BF16, INF = jnp.bfloat16, float("inf")
ROWS = (90, 12)


def slow(*parameters):
    return pytest.param(*parameters, marks=pytest.mark.slow)


def close(found, wanted, name):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(wanted))
    finite = np.isfinite(wanted)
    np.testing.assert_allclose(found[finite], wanted[finite], rtol=0, atol=tolerances.of(name))


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def problem(seed=0):
    """Two lists with entries that are none, out of range and listed twice; a row of nothing, lengths for one list."""
    rng = np.random.default_rng(seed)
    q, kvs = normal(rng, 5, 4, 16), tuple(normal(rng, n, 16) for n in ROWS)
    lists = [rng.integers(-3, n + 3, (5, k)).astype(np.int32) for n, k in zip(ROWS, (70, 9))]
    lists[0][0], lists[1][0] = -1, 12
    lists[0][1, :4] = 7
    lengths = np.array([70, 40, 3, 0, 66], np.int32)
    sink = jnp.asarray([0.3, -INF, INF, 2.0], jnp.float32)
    return q, kvs, tuple(map(jnp.asarray, lists)), (jnp.asarray(lengths), None), sink


def of_results(results):
    """A number that depends on every result, each in its own way; a lse of nothing is a constant."""
    return sum(jnp.sum(jnp.sin((i + 1) * jnp.where(jnp.isneginf(r), 0, r))) for i, r in enumerate(results))


PREFIX = 71  # ends within the second list


@pytest.fixture(scope="module")
def gradients():
    """The op's gradient, that of plain differentiation of the dense form, and the function itself."""
    q, kvs, lists, lengths, sink = problem()
    arguments = dict(topk_length=lengths, scale=0.3, v_width=12, lse_prefix=PREFIX)

    def ours(q, kvs, sink):
        return of_results(sparse_attention(q, kvs, lists, sink=sink, **arguments))

    def plain(q, kvs, sink):
        return of_results(dense.sparse_attention(q, kvs, lists, sink=sink, p_dtype=jnp.float32, **arguments))

    # A sink of infinity has no derivative that plain differentiation could find.
    finite = jnp.where(jnp.isinf(sink), 0.5, sink)
    at = (q, kvs, finite)
    return at, jax.grad(ours, (0, 1, 2))(*at), jax.grad(plain, (0, 1, 2))(*at), jax.jit(ours)


def test_gradient_equals_that_of_the_dense_form(gradients):
    _, found, wanted, _ = gradients
    jax.tree.map(lambda a, b: close(a, b, "ops.attention_gradient.f32"), found, wanted)
    assert all(np.abs(part).max() > 0.1 for part in jax.tree.leaves(found))


def test_gradient_equals_finite_differences(gradients):
    at, found, _, function = gradients
    rng = np.random.default_rng(3)
    for part in range(3):
        directions = jax.tree.map(lambda a: normal(rng, *a.shape), at[part])
        moved = [
            function(*at[:part], jax.tree.map(lambda a, d: a + step * d, at[part], directions), *at[part + 1 :])
            for step in (1e-2, -1e-2)
        ]
        wanted = float(moved[0] - moved[1]) / 2e-2
        slope = sum(float(jnp.vdot(g, d)) for g, d in zip(jax.tree.leaves(found[part]), jax.tree.leaves(directions)))
        assert abs(slope - wanted) <= tolerances.of("ops.attention_gradient.differences") * max(1, abs(wanted))


def test_gradient_where_there_is_nothing():
    """Empty rows (even of NaN), infinite sinks and rows that nobody lists give zeros, and spoil no others."""
    q, kvs, lists, lengths, sink = problem()

    def gradient(q, kvs, upto):
        def loss(q, kvs, sink):
            return of_results(r[:upto] for r in sparse_attention(q, kvs, lists, topk_length=lengths, sink=sink, scale=0.3))

        return jax.grad(loss, (0, 1, 2))(q, kvs, sink)

    clean = gradient(q, kvs, 5)
    assert all(np.isfinite(part).all() for part in jax.tree.leaves(clean))
    assert not np.asarray(clean[0][0]).any() and not np.asarray(clean[2][1:3]).any()
    listed = np.asarray(lists[0])[np.arange(70) < np.asarray(lengths[0])[:, None]]
    unlisted = np.setdiff1d(np.arange(ROWS[0]), listed)
    assert len(unlisted) and not np.asarray(clean[1][0])[unlisted].any()
    spoilt = gradient(q.at[0].set(jnp.nan), (kvs[0].at[unlisted].set(jnp.nan), kvs[1]), 5)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(spoilt)):
        np.testing.assert_array_equal(a, b)


def test_gradient_does_not_depend_on_the_rows_taken_together(monkeypatch):
    """Blocks of two rows, the last filled up, against one block of all five."""
    q, kvs, lists, lengths, sink = problem()
    results = sparse_attention(q, kvs, lists, topk_length=lengths, sink=sink, scale=0.3)
    cotangents = (jnp.ones_like(results[0]), jnp.ones_like(results[1]))
    run = functools.partial(backward.gradient.__wrapped__, scale=0.3, lse_prefix=None)
    whole = run(q, kvs, lists, lengths, sink, results, cotangents)
    monkeypatch.setattr(backward.blocks, "BUDGET", 2 * 4 * (3 * 4 * 16 + 64 * (2 * 16 + 4 * 4)))
    parts = run(q, kvs, lists, lengths, sink, results, cotangents)
    jax.tree.map(lambda a, b: close(a, b, "ops.attention_gradient.f32"), parts, whole)


def test_memory_of_the_gradient_stays_bounded():
    """V4.1's prefill: gathering all keys at once would take 1.3 GB, and their gradients as much. Compiled, not run."""
    rows, heads, width, selected, total = 1024, 64, 512, 640, 4096
    q, kv = jax.ShapeDtypeStruct((rows, heads, width), BF16), jax.ShapeDtypeStruct((total, width), BF16)
    indices = jax.ShapeDtypeStruct((rows, selected), jnp.int32)
    lse = jax.ShapeDtypeStruct((rows, heads), jnp.float32)

    def run(q, kv, indices, lse):
        return backward.gradient(q, (kv,), (indices,), None, None, (q, lse), (q, lse), scale=0.1, lse_prefix=None)

    used = jax.jit(run).lower(q, kv, indices, lse).compile().memory_analysis().temp_size_in_bytes
    operands = 3 * rows * heads * width * 2 + 2 * rows * selected * 4  # q, out and dout, cut into blocks of rows
    assert used <= 2 * 64 * 2**20 + operands + 2 * total * width * 4


# ---------------------------------------------------------------- dense form


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, "ops.sparse_attn.f32"), slow(BF16, "ops.sparse_attn.bf16")])
def test_dense_form_equals_the_gathered(dtype, tolerance):
    q, kvs, lists, lengths, sink = problem()
    q, kvs = q.astype(dtype), tuple(kv.astype(dtype) for kv in kvs)
    run = functools.partial(
        sparse_attention, q, kvs, lists, topk_length=lengths, sink=sink, scale=0.3, v_width=12, lse_prefix=PREFIX
    )
    for a, b, name in zip(run(dense_below=sum(ROWS)), run(dense_below=0), (tolerance, "ops.lse.f32", "ops.lse.f32")):
        assert a.dtype == b.dtype
        close(a, b, name)


def test_dense_form_reads_no_row_that_is_not_listed():
    q, kvs, lists, _, sink = problem()
    kvs = (kvs[0].at[7].set(jnp.nan), kvs[1])  # row 1 lists it
    lists = (lists[0].at[jnp.arange(5) != 1].set(jnp.where(lists[0] == 7, -1, lists[0])[jnp.arange(5) != 1]), lists[1])
    found = [sparse_attention(q, kvs, lists, sink=sink, scale=0.3, dense_below=n) for n in (0, 1000)]
    for out, lse in found:
        assert np.isnan(np.asarray(out[1])).any() and np.isnan(np.asarray(lse[1])).all()
        assert not np.isnan(np.delete(np.asarray(out), 1, axis=0)).any()
    close(np.delete(found[0][0], 1, 0), np.delete(found[1][0], 1, 0), "ops.sparse_attn.f32")


def test_which_form_runs(monkeypatch):
    """Up to the limit the dense form, above it the implementation; by itself only on a GPU and where none is named."""
    taken = []
    monkeypatch.setattr(dense, "sparse_attention", lambda *_, **__: taken.append("dense") or (jnp.zeros(()),) * 2)
    monkeypatch.setattr(reference, "sparse_attention", lambda *_, **__: taken.append("reference") or (jnp.zeros(()),) * 2)
    q, kvs, lists, _, _ = problem()
    run = functools.partial(sparse_attention, q, kvs, lists, scale=0.3)
    run(dense_below=102), run(dense_below=101), run(), run(dense_below=0)
    assert taken == ["dense", "reference", "reference", "reference"]
    assert dense.rows_below(None, 640) == 0
    monkeypatch.setattr(platform, "capability", lambda: (9, 0))
    monkeypatch.setattr(platform, "kernel_name", lambda: "sm90")
    assert dense.rows_below(None, 640) == int(640 * dense.FACTORS["sm90"])
    assert dense.rows_below("sm90", 640) == 0
    monkeypatch.setattr(platform, "kernel_name", lambda: None)
    assert dense.rows_below(None, 640) == int(640 * dense.FACTORS["reference"])


# ---------------------------------------------------------------- offsets, prefix, errors


def test_a_packed_batch_is_its_requests():
    """Relative indices with row_start and row_end are what each request gives on its own."""
    rng = np.random.default_rng(1)
    lengths, rows = (5, 40, 0), (2, 1, 2)
    kv, q = normal(rng, sum(lengths), 16), normal(rng, sum(rows), 4, 16)
    lists = jnp.asarray(rng.integers(-4, 44, (sum(rows), 30)), jnp.int32)
    edge = 2**31 - 1
    lists = lists.at[0, 0].set(edge)
    start = np.repeat(np.cumsum([0, *lengths[:-1]]), rows).astype(np.int32)
    end = (start + np.repeat(lengths, rows)).astype(np.int32)
    found = sparse_attention(q, kv, lists, row_start=jnp.asarray(start), row_end=jnp.asarray(end), scale=0.3)
    for t in range(len(q)):
        own = sparse_attention(q[t : t + 1], kv[start[t] : end[t]], lists[t : t + 1], scale=0.3)
        for a, b in zip(found, own):
            np.testing.assert_array_equal(a[t : t + 1], b)


@pytest.mark.parametrize("prefix", [1, 64, 70, 71, 79])
def test_lse_of_a_prefix(prefix):
    q, kvs, lists, lengths, sink = problem()
    _, lse, leading = sparse_attention(
        q, kvs, lists, topk_length=lengths, sink=sink, scale=0.3, lse_prefix=prefix
    )
    first, second = (np.asarray(each) for each in lists)
    cut = [first[:, :prefix], second[:, : max(0, prefix - 70)]]
    limits = [np.minimum(np.asarray(lengths[0]), prefix), None]
    _, wanted = oracle.sparse_attention(*map(np.asarray, (q,)), [np.asarray(kv) for kv in kvs], cut, limits, None, 0.3, 16)
    close(leading, wanted, "ops.lse.f32")
    if prefix == 79:
        np.testing.assert_array_equal(leading, lse)


@pytest.mark.usefixtures("unchecked")
def test_wrong_options():
    q, kvs, lists, lengths, _ = problem()
    run = functools.partial(sparse_attention, q, kvs, lists, scale=0.3)
    for arguments, sentence in [
        (dict(lse_prefix=0), "lse_prefix is 0.*lists of 79"),
        (dict(lse_prefix=80), "lse_prefix is 80"),
        (dict(dense_below=-1), "dense_below is -1"),
        (dict(row_start=lengths[0]), "2 arrays of rows.*one array of lengths"),
        (dict(row_end=(lengths[0][:4], None)), r"row_end\[0\] has shape \(4,\)"),
        (dict(sink=jnp.zeros(4, jnp.int32)), "sink has dtype int32"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            run(**arguments)


# ---------------------------------------------------------------- in the models


def test_models_decode_rows_once_where_many_list_them(monkeypatch):
    """By shapes, on a GPU with kernels; the results are those of sparse_decode in every bit."""
    rng = np.random.default_rng(2)
    caches = tuple(
        ops.PagedRows.zeros(form, pages, 4).scatter(jnp.arange(4 * pages, dtype=jnp.int32), normal(rng, 4 * pages, 64))
        for form, pages in ((ops.Plain(64, BF16), 3), (ops.Plain(64, jnp.float32), 5))
    )
    q = normal(rng, 2, 2, 4, 64).astype(BF16)
    slots = tuple(jnp.asarray(rng.integers(-2, 22, (2, 2, n)), jnp.int32) for n in (12, 20))  # 128 for 32 slots
    few = tuple(each[..., :-1] for each in slots)
    sink = normal(rng, 4)
    wanted = ops.attend(q, caches, slots, sink=sink, scale=0.2, v_width=48)
    decided = []
    rule = ops._decodes_once
    monkeypatch.setattr(ops, "_decodes_once", lambda *a: decided.append(rule(*a)) or decided[-1])
    monkeypatch.setattr(ops._platform, "kernel_name", lambda: "sm90")
    with ops.preferred("reference"):
        found = ops.attend(q, caches, slots, sink=sink, scale=0.2, v_width=48)
    for a, b in zip(found, wanted):
        np.testing.assert_array_equal(a, b)
    assert decided == [True]
    assert not rule(q, caches, few) and not rule(q.astype(jnp.float32), caches, slots)
    monkeypatch.setattr(ops, "_MOST_SLOTS", 31)
    assert not rule(q, caches, slots)


# ---------------------------------------------------------------- Blackwell, interpreted

INTERPRETED = [
    # rows, heads, width, columns of the lists, lengths, prefix
    (1, 16, 512, (128, 40), False, 128),
    slow(2, 64, 576, (192,), True, 128),
    slow(2, 8, 512, (70,), True, 70),
    slow(2, 128, 512, (64, 64), False, 128),
]


@pytest.mark.parametrize("tokens, heads, width, columns, with_lengths, prefix", INTERPRETED)
def test_blackwell_kernel(tokens, heads, width, columns, with_lengths, prefix):
    rng = np.random.default_rng(heads)
    q = normal(rng, tokens, heads, width).astype(BF16)
    kvs = tuple(normal(rng, 150 - 60 * i, width).astype(BF16) for i in range(len(columns)))
    lists = []
    for kv, count in zip(kvs, columns):
        indices = rng.integers(0, len(kv), (tokens, count))
        indices[0, : count // 2] = -1  # a block of nothing comes first
        indices[-1, -count // 2 :: 5] = rng.choice([-1, -(2**31), 2**31 - 1, len(kv)], len(range(0, (count + 1) // 2, 5)))
        lists.append(jnp.asarray(indices, jnp.int32))
    kvs = (kvs[0].at[0].set(jnp.nan), *kvs[1:])  # what an index that is none might be taken for
    lists[0] = jnp.where(lists[0] == 0, 1, lists[0])
    lengths = (jnp.asarray([columns[0] // 2, 0][:tokens], jnp.int32),) * len(columns) if with_lengths else None
    sink = jnp.asarray(np.resize([-INF, 0, 20, INF, 0.5], heads), jnp.float32)
    run = functools.partial(
        sparse_attention, q, kvs, tuple(lists), topk_length=lengths, sink=sink, scale=width**-0.5, lse_prefix=prefix
    )
    found, wanted = run(implementation="interpret_sm100"), run(implementation="reference")
    difference = np.asarray(found[0] - wanted[0], np.float32)
    size = np.linalg.norm(np.asarray(wanted[0], np.float32))
    assert np.linalg.norm(difference) <= tolerances.of("kernels.sparse_attention") * size
    for a, b in zip(found[1:], wanted[1:]):
        close(a, b, "ops.lse.f32")


def test_what_the_blackwell_kernel_does_not_carry():
    q, kv, lists = jnp.zeros((1, 16, 512), BF16), jnp.zeros((9, 512), BF16), jnp.zeros((1, 64), jnp.int32)
    run = functools.partial(sparse_attention, scale=1.0, implementation="interpret_sm100")
    for arguments, sentence in [
        ((q[:, :12], kv, lists), "multiples of 8 up to 64"),
        ((jnp.zeros((1, 72, 512), BF16), kv, lists), "and of 64 above, not 72"),
        ((q[..., :256], kv[:, :256], lists), "width 512 or 576"),
        ((q.astype(jnp.float32), kv, lists), "takes bfloat16"),
        ((q, (kv,) * 3, (lists,) * 3), "one or two lists, not 3"),
    ]:
        with pytest.raises(NotImplementedError, match=sentence):
            run(*arguments)
    with pytest.raises(NotImplementedError, match="prefix of 60"):
        run(q, kv, lists, lse_prefix=60)
    assert "never run on a GPU" in sm100.unproven("sparse_attention", (q, (kv,), (lists,)))
    out, lse = run(q, kv[:0], lists)
    assert not np.asarray(out, np.float32).any() and np.isneginf(np.asarray(lse)).all()
