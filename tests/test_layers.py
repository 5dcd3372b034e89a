"""Layers against what DeepSeek's own modules computed (tests/golden/v41/ops)."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tolerances
from conftest import read_golden
from flax import nnx

from dsa_jax import ops
from dsa_jax.config import YarnConfig
from dsa_jax.layer_plan import RopeSpec
from dsa_jax.layers import engram, hyper_connections, linear, moe, rope
from dsa_jax.layers.compressor import Compressor
from dsa_jax.numerics import BF16, F32, MODES, matmul
from dsa_jax.step import Step
from pallas_kernels import platform

MODULE_MODES = {"f32": F32, "bf16": BF16}


@functools.cache
def both(name: str) -> dict[str, dict[str, np.ndarray]]:
    """The f32 file, and the bf16 file over it: tensors equal in both are in the f32 file only."""
    f32 = read_golden(f"v41/ops/{name}_f32")
    return {"f32": f32, "bf16": f32 | read_golden(f"v41/ops/{name}_bf16")}


def compare(ours, golden: np.ndarray, name: str) -> None:
    """Largest difference, relative to the largest value above 1."""
    ours = np.asarray(ours).astype(np.float32)
    golden = golden.astype(np.float32)
    assert ours.shape == golden.shape
    scale = max(1.0, float(np.abs(golden).max()))
    gap = float(np.abs(ours - golden).max()) / scale
    assert gap <= tolerances.of(name), f"{gap} > {tolerances.of(name)}"


def compare_ulp(ours, golden: np.ndarray) -> None:
    """Every value within one bf16 step of the golden value, on almost all exactly."""
    ours, golden = np.asarray(ours).astype(np.float32), golden.astype(np.float32)
    step = np.exp2(np.floor(np.log2(np.maximum(np.abs(golden), 1e-30))) - 7)
    assert (np.abs(ours - golden) <= step * tolerances.of("ops.bf16_ulps") * 1.001).all()


# ---------------------------------------------------------------- rotation

ROPE = sorted({n.rsplit(".", 1)[0] for n in read_golden("v41/ops/rope")})


def rope_spec(name: str) -> tuple[int, RopeSpec]:
    dim, original, base, factor = (int("".join(c for c in part if c.isdigit())) for part in name.split("_"))
    yarn = YarnConfig(factor=float(factor), beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=original)
    return dim, RopeSpec(float(base), yarn if original else None)


@pytest.mark.parametrize("name", ROPE)
def test_rope_tables_rotation_and_inverse(name):
    golden, (dim, spec) = read_golden("v41/ops/rope"), rope_spec(name)
    cos, sin = golden[name + ".cos"], golden[name + ".sin"]
    angles = rope.rope_angles(dim, spec, jnp.arange(len(cos), dtype=jnp.int32))
    compare(angles[0], cos, "model.rope.table")
    compare(angles[1], sin, "model.rope.table")
    x = jnp.asarray(golden[name + ".x"][0])
    first = tuple(a[: len(x)] for a in angles)
    compare(rope.apply_rope(x, first, F32), golden[name + ".rotated"][0], "model.rope")
    compare(rope.apply_rope(x, first, F32, inverse=True), golden[name + ".inverse"][0], "model.rope")


def test_yarn_frequencies_of_the_released_config():
    """The 32 values that the specification lists (base 160000, factor 16, original length 65536)."""
    listed = """1 .687656045 .472870797 .325172424 .223606795 .153764561 .105737135 .0727107748 .0500000007 .0343828015
    .0236435384 .0162586235 .0111803403 .00768822804 .00528685609 .00363553851 .00226562493 .00139680132 8.49689706e-4
    5.08081983e-4 2.96977785e-4 1.68179977e-4 9.08678412e-5 4.5444227e-5 1.95312532e-5 5.37231244e-6 3.69430336e-6
    2.5404097e-6 1.74692798e-6 1.20128561e-6 8.260713e-7 5.6805294e-7"""
    yarn = YarnConfig(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536)
    ours = rope.rope_frequencies(64, RopeSpec(160000.0, yarn))
    np.testing.assert_allclose(ours, np.array(listed.split(), np.float32), rtol=tolerances.of("model.yarn.listed"))


def test_ac_29_phases_far_out_are_float32_phases():
    """Cosine and sine at positions near 2^20 equal float64's of the same float32 angle; bf16 phases would be noise."""
    spec = RopeSpec(160000.0, YarnConfig(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536))
    t = np.array([0, 1, 65535, 1_000_000, 2**20 - 1], np.int32)
    cos, sin = jax.jit(lambda p: rope.rope_angles(64, spec, p))(jnp.asarray(t))
    angle = (t.astype(np.float32)[:, None] * rope.rope_frequencies(64, spec)).astype(np.float64)
    assert np.abs(np.asarray(cos) - np.cos(angle)).max() <= tolerances.of("model.rope.far")
    assert np.abs(np.asarray(sin) - np.sin(angle)).max() <= tolerances.of("model.rope.far")


def test_ac_24_the_pairs_are_interleaved_and_last():
    """V4.1 rotates neighbours (2i, 2i+1) of the last dims, in the indexer too; half-split pairs give another vector."""
    spec, x = RopeSpec(10000.0, None), np.arange(1, 9, dtype=np.float32)[None]
    angles = rope.rope_angles(4, spec, jnp.array([3], jnp.int32))
    ours = np.asarray(rope.apply_rope(jnp.asarray(x), angles, F32))[0]
    f = np.array([1.0, 0.01])
    a, b = x[0, 4::2], x[0, 5::2]
    expected = x[0].copy()
    expected[4::2], expected[5::2] = a * np.cos(3 * f) - b * np.sin(3 * f), a * np.sin(3 * f) + b * np.cos(3 * f)
    np.testing.assert_allclose(ours, expected, rtol=tolerances.of("model.rope"), atol=tolerances.of("model.rope"))
    a, b = x[0, 4:6], x[0, 6:8]
    half_split = np.concatenate([x[0, :4], a * np.cos(3 * f) - b * np.sin(3 * f), a * np.sin(3 * f) + b * np.cos(3 * f)])
    assert np.abs(ours - half_split).max() > 0.1


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize("name", sorted(read_golden("v41/ops/window_idxs")))
def test_window_lists(name):
    """Positions of a prefill, ring slots of a decode step; the order inside a row is free."""
    golden = read_golden("v41/ops/window_idxs")[name]
    window, rows, start = (int("".join(c for c in part if c.isdigit())) for part in name.split("_"))
    one = jnp.ones((1,), jnp.int32)
    step = Step.of(start * one, rows * one, jnp.zeros((1, 1), jnp.int32), rows)
    ours = np.asarray(step.window(window))[0]
    if start:  # the released decode writes its ring first; ours reads the old ring and the new row
        ours = np.where(ours < 0, -1, ours % window)
    for row, expected in zip(ours, golden, strict=True):
        assert sorted(row[row >= 0]) == sorted(expected[expected >= 0])


# ---------------------------------------------------------------- experts


@pytest.mark.parametrize("mode", ["f32", "bf16"])
@pytest.mark.parametrize("name", ["sqrtsoftplus", "sigmoid", "softmax", "top1", "image"])
def test_gate(mode, name):
    golden = both("gate")[mode]
    bias = np.broadcast_to(golden["bias"], (len(golden["x"]), len(golden["bias"])))
    if name == "image":
        bias = np.where(golden["image_mask"][:, None] != 0, golden["bias_vl"], bias)
    chosen, weights = moe.route(
        jnp.asarray(golden["x"]), jnp.asarray(golden["weight"]), jnp.asarray(bias), 1 if name == "top1" else int(golden["topk"]),
        scoring_func=name if name in ("sigmoid", "softmax") else "sqrtsoftplus",
        routed_scaling_factor=float(golden["route_scale"]),
    )  # fmt: skip
    assert np.array_equal(chosen, golden[name + ".indices"])
    compare(weights, golden[name + ".weights"], "model.gate")


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_expert_clamps_and_route_weight(mode):
    golden, numerics = both("modules")[mode], MODULE_MODES[mode]
    w1, w2, w3 = (jnp.asarray(golden[f"expert.w.w{i}.weight"]) for i in (1, 2, 3))
    x = numerics.round(jnp.asarray(golden["expert.x"]))

    def linear(x, w):
        return numerics.round(matmul(x, w.astype(x.dtype)))

    for weight, name in ((None, "expert.out"), (jnp.asarray(golden["expert.route_weight"]), "expert.out_weighted")):
        a = numerics.round(moe.swiglu(linear(x, w1), linear(x, w3), 1.0, weight))
        if mode == "f32":
            compare(linear(a, w2), golden[name], "model.modules")
        else:
            compare_ulp(linear(a, w2), golden[name])


def test_ac_65_the_clamp_comes_before_the_product_and_the_gate_is_cut_above_only():
    gate, up = jnp.array([[20.0, -20.0, 3.0]]), jnp.array([[-30.0, 30.0, 2.0]])

    def silu(v):
        return v / (1 + np.exp(-v))

    limited = np.asarray(moe.swiglu(gate, up, 10.0, None))[0]
    np.testing.assert_allclose(limited, [silu(10.0) * -10, silu(-20.0) * 10, silu(3.0) * 2], rtol=1e-6)
    free = np.asarray(moe.swiglu(gate, up, 0.0, None))[0]
    np.testing.assert_allclose(free, [silu(20.0) * -30, silu(-20.0) * 30, silu(3.0) * 2], rtol=1e-6)


# How pairs of tokens and experts are cut: for weights that are dequantised, and for kernels that take them as stored, whose
# references run here. Tiles of few rows: more than one for some experts.
CUTS = {
    "dequantised": {(moe, "ROWS_OF_DEQUANTIZING"): 4, (moe, "ROWS_OF_READING"): 1},
    "stored": {(moe.ops, "multiplies_stored"): lambda *_, **__: True},
    "stored, few rows": {(moe.ops, "multiplies_stored"): lambda *_, **__: True, (linear, "TILE_ROWS"): (1, 4)},
}


def cut_as(name, monkeypatch):
    for (module, attribute), value in CUTS[name].items():
        monkeypatch.setattr(module, attribute, value)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_experts_equal_a_loop_over_them(tokens, cut, monkeypatch):
    """Grouping by expert, tiles and the ascending sum against one expert at a time; idle rows give 0."""
    cut_as(cut, monkeypatch)
    rng = np.random.default_rng(tokens)
    experts, width, inner, k = 5, 64, 32, 3
    layer = moe.Experts(experts, width, inner, 10.0)
    for part in (layer.w1, layer.w2, layer.w3):
        part.weight.set_value(jnp.asarray(rng.integers(0, 256, part.weight.shape, np.uint8)))
        part.scale.set_value(jnp.asarray(rng.integers(120, 124, part.scale.shape, np.uint8)))
    x = jnp.asarray(rng.standard_normal((tokens, width)), jnp.float32)
    chosen = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
    chosen[: tokens // 2] = np.sort(chosen[:1])[:, ::-1]  # many rows with the same experts: more than one tile
    weights = jnp.asarray(rng.random((tokens, k)), jnp.float32)
    valid = rng.random(tokens) < 0.8
    valid[0] = True
    ours = np.asarray(layer(x, jnp.asarray(chosen), weights, jnp.asarray(valid), F32))
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)

    def dense(part, e):
        packed = np.asarray(part.weight[...])[e]
        values = np.stack([codes[packed & 15], codes[packed >> 4]], -1).reshape(len(packed), -1)
        return values * np.repeat(2.0 ** (np.asarray(part.scale[...])[e].astype(float) - 127), 32, axis=1)

    expected = np.zeros((tokens, width))
    for t in np.flatnonzero(valid):
        for e, w in zip(chosen[t], np.asarray(weights)[t], strict=True):
            row = np.asarray(x[t], np.float64)
            g, u = np.minimum(dense(layer.w1, e) @ row, 10), np.clip(dense(layer.w3, e) @ row, -10, 10)
            expected[t] += dense(layer.w2, e) @ (g / (1 + np.exp(-g)) * u * w)
    scale = np.abs(expected).max()
    assert np.abs(ours - expected).max() <= tolerances.of("model.experts") * scale
    assert not ours[~valid].any()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("valid", [0, 1, 64])
@pytest.mark.parametrize("used", ["one", "rest", "all"])
def test_experts_of_a_lopsided_routing(used, valid, cut, monkeypatch):
    """No routing needs more tiles than are computed, and none changes what a row gets: each expert multiplies by its id."""
    experts, width, tokens = 8, 32, 64
    cut_as(cut, monkeypatch)
    layer = moe.Experts(experts, width, width, 0.0)

    def weighted(rows, expert, weight, numerics):
        return rows * weight * expert[:, None, None].astype(jnp.float32)

    monkeypatch.setattr(layer, "weighted", weighted)
    # rest: seven experts have one row each, the last one the others.
    few = np.minimum(np.arange(tokens), experts - 1)
    chosen = {"one": np.full(tokens, 5), "rest": few, "all": np.arange(tokens) % experts}[used].astype(np.int32)
    x = jnp.arange(1, tokens + 1, dtype=jnp.float32)[:, None] * jnp.ones(width)
    ours = layer(x, jnp.asarray(chosen)[:, None], jnp.full((tokens, 1), 2.0), jnp.arange(tokens) < valid, F32)
    expected = np.arange(1, tokens + 1) * 2.0 * chosen * (np.arange(tokens) < valid)
    assert np.array_equal(np.asarray(ours), np.broadcast_to(expected[:, None], ours.shape))


@pytest.mark.parametrize("tile", [1, 8])
@pytest.mark.parametrize("experts", [[4, 0, 7, 2, 31, 9], [4, 32, 7, 32, 31, 9], [32] * 6])
def test_pairs_lie_where_the_tiles_say(experts, tile):
    """One token, whose pairs need no sorting; 32 means none."""
    held = jnp.asarray(experts, jnp.int32)
    for expert, pair, row in (moe.tiles_of_one_token(held, 32, tile), moe.sorted_tiles(held, 32, tile, 6)):
        expert, pair, row = map(np.asarray, (expert, pair, row))
        assert pair.shape == (6, tile) and sorted(pair[pair >= 0]) == [i for i, e in enumerate(experts) if e < 32]
        for i, e in enumerate(experts):
            assert (row[i] == -1) if e == 32 else (pair.reshape(-1)[row[i]] == i and expert[row[i] // tile] == e)
        assert all(e == -1 for e, own in zip(expert, pair, strict=True) if (own < 0).all())


@pytest.mark.parametrize("tokens, experts, k", [(1, 32, 6), (1, 6, 6), (7, 8, 3), (33, 5, 2), (200, 12, 6), (300, 3, 1)])
@pytest.mark.parametrize("tile_rows", [(8, 128), (1, 4)])
def test_no_routing_needs_more_tiles_than_there_are(tokens, experts, k, tile_rows, monkeypatch):
    """All pairs on as few experts as can be, spread evenly, one each and the rest on one, at random, some on none: every pair
    has one place in a tile of its expert, and tiles without pairs have no expert."""
    monkeypatch.setattr(linear, "TILE_ROWS", tile_rows)
    rng = np.random.default_rng(tokens)
    pairs = tokens * k
    few = np.sort(np.tile(np.arange(experts - k, experts), tokens))
    even = np.sort(np.arange(pairs) % experts)
    rest = np.sort(np.concatenate([np.arange(min(experts, pairs)), np.repeat(np.arange(k), tokens)])[:pairs])
    most = np.sort(np.concatenate([rng.permutation(experts)[:k] for _ in range(tokens)]))
    some = np.sort(np.where(rng.random(pairs) < 0.3, experts, most))
    cuts = {moe.tiling(tokens, pairs, experts), *(moe.stored_tiling(tokens, pairs, experts, ways) for ways in (1, 4))}
    for tile, tiles in cuts:
        for routing in (few, even, rest, most, some, np.full(pairs, experts)):
            if np.bincount(routing[routing < experts], minlength=1).max() > tokens:
                continue  # a token's experts differ
            found, place = map(np.asarray, moe.tiles_of_pairs(jnp.asarray(routing, jnp.int32), experts, tile, tiles))
            assert found.shape == (tiles,) and place.shape == (tiles, tile)
            of_pair = np.full(pairs, experts)
            for expert, own in zip(found, place, strict=True):
                assert (own >= 0).any() == (0 <= expert < experts) and (expert >= 0 or expert == -1)
                of_pair[own[own >= 0]] = expert
            held = np.sum(routing < experts)
            assert np.array_equal(of_pair, routing) and np.sum(place >= 0) == held


@pytest.mark.parametrize(
    "tokens, experts, ways, expected",
    [
        (1, 32, 1, (8, 6)),  # a tensor core's rows; a tile a pair
        (32, 256, 1, (8, 192)),
        (32, 32, 1, (16, 44)),  # 6 pairs an expert, 9.7 rows wanted
        (128, 32, 1, (32, 56)),  # 24 and 31.3
        (2048, 32, 1, (128, 128)),
        (2048, 256, 1, (64, 448)),
        (2048, 32, 8, (64, 224)),  # the same experts on eight devices
        (16, 2, 1, (16, 2)),  # no more than the tokens
    ],
)
def test_tiles_of_stored_weights(tokens, experts, ways, expected):
    assert moe.stored_tiling(tokens, 6 * tokens, experts, ways) == expected


@pytest.mark.parametrize(("tokens", "iterations"), [(1, 1), (10, 3), (32, 2), (2048, 4)])
def test_the_experts_have_no_loop_of_a_length_that_a_routing_changes(tokens, iterations):
    """At V4.1's widths with 32 experts: a loop of data-dependent length waits for the host in every iteration on a GPU. The
    reference's three products run over as many tiles as DEQUANTIZED_BYTES allows at a time."""
    graph, state = nnx.split(nnx.eval_shape(lambda: moe.Experts(32, 5120, 2304, 10.0)))
    kinds = ((5120,), jnp.bfloat16), ((6,), jnp.int32), ((6,), jnp.float32), ((), jnp.bool_)
    arrays = [jax.ShapeDtypeStruct((tokens, *shape), dtype) for shape, dtype in kinds]
    with moe.ops.preferred("reference"):
        program = str(jax.make_jaxpr(lambda state, *arrays: nnx.merge(graph, state)(*arrays, BF16))(state, *arrays))
    assert "while[" not in program and "cond[" not in program
    assert set(re.findall(r"\blength=(\d+)", program)) == {str(iterations)}


@pytest.mark.parametrize("tokens", [1, 32, 2048])
def test_on_hopper_experts_dequantise_no_weight_into_memory(tokens, monkeypatch):
    """Traced at V4.1's widths with 32 experts: three kernels on the tiles that stored weights want, and no array as large as
    a dequantised weight has its shape. In float32, which the kernel does not take, the reference's tiles and products."""
    monkeypatch.setattr(platform, "kernel_name", lambda: "sm90")
    graph, state = nnx.split(nnx.eval_shape(lambda: moe.Experts(32, 5120, 2304, 10.0)))

    def traced(numerics):
        kinds = ((5120,), numerics.dtype), ((6,), jnp.int32), ((6,), jnp.float32), ((), jnp.bool_)
        arrays = [jax.ShapeDtypeStruct((tokens, *shape), dtype) for shape, dtype in kinds]
        return str(jax.make_jaxpr(lambda state, *arrays: nnx.merge(graph, state)(*arrays, numerics))(state, *arrays))

    weight = r"(bf16|f32)\[(\d+,)*(2304,(5120|2560)|5120,(2304|1152))\]"
    program, reference = traced(BF16), traced(F32)
    tile, tiles = moe.stored_tiling(tokens, 6 * tokens, 32)
    assert f"bf16[{tiles},{tile},5120]" in program and not re.search(weight, program)
    assert program.count("name=_multiply") == 2 and "scan[" not in program  # w1 and w3 together, and w2
    assert re.search(weight, reference) and "name=_multiply" not in reference


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("batch, count", [(1, 1), (2, 3), (3, 67), (1, 300)])
def test_outputs_of_a_group_are_made_of_its_inputs_alone(batch, count, stored, monkeypatch):
    """Groups of outputs as tiles of stored weights, some of them filled up, and as dequantised ones, against float64."""
    monkeypatch.setattr(linear.ops, "multiplies_stored", lambda *_, **__: stored)
    rng, groups, inputs, outputs = np.random.default_rng(count), 3, 64, 32
    layer = linear.QuantizedLinear(groups * outputs, inputs, (16, 32))
    codes = rng.standard_normal((groups * outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.integers(125, 130, layer.scale.shape).astype(np.uint8)
    layer.weight.set_value(jnp.asarray(codes))
    layer.scale.set_value(jnp.asarray(scale))
    x = rng.standard_normal((batch, count, groups, inputs)).astype(np.float32)
    weight = codes.astype(np.float64) * np.kron(2.0 ** (scale.astype(float) - 127), np.ones((16, 32)))
    wanted = np.einsum("bsgi,goi->bsgo", x.astype(np.float64), weight.reshape(groups, outputs, inputs))
    found = layer.per_group(jnp.asarray(x), F32)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= tolerances.of("ops.gemm.f32") * np.abs(wanted).max()


# ---------------------------------------------------------------- hyper-connections


@pytest.mark.parametrize("name", sorted({n.rsplit(".", 1)[0] for n in read_golden("v41/ops/hc_sinkhorn")}))
def test_split_mixes(name):
    golden = read_golden("v41/ops/hc_sinkhorn")
    copies, iterations, eps = name.split("_")
    ours = ops.split_mixes(
        *(jnp.asarray(golden[f"{name}.{part}"]) for part in ("mixes", "scale", "base")),
        copies=int(copies[2:]), iterations=int(iterations[2:]), eps=float(eps[3:]),
    )  # fmt: skip
    for part, value in zip(("pre", "post", "comb"), ours, strict=True):
        compare(value, golden[f"{name}.{part}"], "model.hc")


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_mixes_collapse_and_expand(mode):
    golden, numerics = both("modules")[mode], MODULE_MODES[mode]
    stream = numerics.round(jnp.asarray(golden["hc.residual"]))
    parts = hyper_connections.mixes(
        stream, *(jnp.asarray(golden[f"hc.{p}"]) for p in ("fn", "scale", "base")), iterations=20, eps=1e-6, norm_eps=1e-20
    )
    for part, value in zip(("pre", "post", "comb"), parts, strict=True):
        compare(value, golden["hc." + part], "model.hc")
    read = hyper_connections.collapse(stream, jnp.asarray(golden["hc.pre_mix"]), numerics)
    y = numerics.round(jnp.asarray(golden["hc.y"]))
    written = hyper_connections.expand(y, stream, jnp.asarray(golden["hc.post"]), jnp.asarray(golden["hc.comb"]), numerics)
    if mode == "f32":
        compare(read, golden["hc.hc_pre_out"], "model.modules")
        compare(written, golden["hc.hc_post_out"], "model.modules")
    else:
        compare_ulp(read, golden["hc.hc_pre_out"])
        compare_ulp(written, golden["hc.hc_post_out"])


# ---------------------------------------------------------------- Engram


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_engram_lookup_gate_and_mask(mode):
    golden, numerics = both("modules")[mode], MODULE_MODES[mode]
    table = engram.Table(*golden["engram.table_e4m3"].shape)
    table.weight.set_value(jnp.asarray(golden["engram.table_e4m3"].view(ml_dtypes.float8_e4m3fn)))
    table.scale.set_value(jnp.asarray(golden["engram.table_scale_e8m0"]))
    rows = table(jnp.asarray(golden["engram.hash_ids"]), numerics)
    assert np.array_equal(np.asarray(rows).astype(np.float32), golden["engram.lookup"])
    flat = rows.reshape(*rows.shape[:2], -1)
    kv = numerics.round(matmul(flat, jnp.asarray(golden["engram.wkv"]).astype(flat.dtype)))
    stream = numerics.round(jnp.asarray(golden["engram.h"]))
    q_weight, k_weight = jnp.asarray(golden["engram.q_weight"]), jnp.asarray(golden["engram.k_weight"])
    for is_image, name in ((None, "engram.out"), (golden["engram.token_mask"] == 0, "engram.out_masked")):
        image = None if is_image is None else jnp.asarray(is_image)
        out = engram.inject(stream, kv, q_weight, k_weight, image, 1e-20, numerics)
        if mode == "f32":
            compare(out, golden[name], "model.modules")
        else:
            compare_ulp(out, golden[name])


# ---------------------------------------------------------------- compressor


def compressor(golden: dict, ratio: int) -> Compressor:
    head_dim, width = golden[f"r{ratio}.w.wkv.weight"].shape
    layer = Compressor(width, head_dim, ratio, 1e-20)
    for name in ("wkv", "norm") + (("wgate",) if ratio > 1 else ()):
        getattr(layer, name).weight.set_value(jnp.asarray(golden[f"r{ratio}.w.{name}.weight"]))
    return layer


@pytest.mark.parametrize("mode", ["f32", "bf16"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_compressor_in_one_shot_and_step_by_step(ratio, mode):
    from dsa_jax.cache import CompressorTail

    golden, numerics = both("compressor")[mode], MODULE_MODES[mode]
    layer, x = compressor(golden, ratio), numerics.round(jnp.asarray(golden[f"r{ratio}.x"]))
    requests, n, _ = x.shape
    graphdef, state = nnx.split(layer)

    @jax.jit
    def run(x, start, tail):
        count = jnp.full((requests,), x.shape[1], jnp.int32)
        step = Step.of(jnp.full((requests,), start), count, jnp.zeros((requests, 1), jnp.int32), x.shape[1])
        return nnx.merge(graphdef, state)(x, tail, step, numerics)

    def empty():
        shape = (requests, ratio, golden[f"r{ratio}.w.wkv.weight"].shape[0])
        return CompressorTail(jnp.zeros(shape), jnp.zeros(shape)) if ratio > 1 else None

    def split_run(splits):
        tail, found = empty(), []
        for first, last in zip([0, *splits], [*splits, n], strict=True):
            latent, groups, tail = run(x[:, first:last], jnp.int32(first), tail)
            found += [latent[:, g] for g in range(groups.shape[1]) if int(groups[0, g]) >= 0]
        return np.stack([np.asarray(f).astype(np.float32) for f in found], axis=1), tail

    tolerance = "model.compressor." + mode
    whole, tail = split_run([])
    compare(whole, golden[f"r{ratio}.prefill29"], tolerance)
    compare(split_run(list(range(9, n)))[0], golden[f"r{ratio}.prefill9_then_steps"], tolerance)
    if ratio == 2:  # 29 tokens leave one in slot 0
        compare(tail.kv[:, 0], golden["r2.kv_state_after_prefill29"][:, 0], "model.modules")
        compare(tail.gate[:, 0], golden["r2.score_state_after_prefill29"][:, 0], "model.modules")


def test_modes_are_the_three_that_are_documented():
    assert sorted(MODES) == ["bf16", "f32", "f32q"]
    assert [MODES[m].quantize for m in ("f32", "f32q", "bf16")] == [False, True, True]
