"""V4's layers against what DeepSeek's own modules computed (tests/golden/v4/ops)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tolerances
from conftest import read_golden
from flax import nnx
from test_attention import TIE, check, layer_of, margin
from test_layers import MODULE_MODES, compare, compare_ulp, rope_spec
from tiny_v4 import CHECKPOINT, tiny_model

from dsa_jax import ops
from dsa_jax.cache.state_v4 import new_cache
from dsa_jax.config import load_config
from dsa_jax.config_v4 import OVERLAP_RATIO
from dsa_jax.layer_plan_v4 import layer_plan
from dsa_jax.layers import hash_moe, moe, rope
from dsa_jax.layers.hadamard import hadamard
from dsa_jax.layers.hybrid_attention import HybridAttention
from dsa_jax.layers.hyper_connections import collapse, expand, mixes
from dsa_jax.layers.linear import ExpertLinears, QuantizedLinear
from dsa_jax.layers.self_mixed import StreamHead
from dsa_jax.numerics import BF16, F32, F32Q
from dsa_jax.step import Step
from dsa_jax.tap import Tap
from pallas_kernels import dequantize_fp4, dequantize_fp8, quantize_fp8, quantize_mxfp4, sparse_attention


@functools.cache
def both(name: str) -> dict[str, dict[str, np.ndarray]]:
    """The f32 file, and the bf16 file over it: tensors equal in both are in the f32 file only."""
    f32 = read_golden(f"v4/ops/{name}_f32")
    return {"f32": f32, "bf16": f32 | read_golden(f"v4/ops/{name}_bf16")}


# ---------------------------------------------------------------- operations


@pytest.mark.parametrize("kind", ["ue8m0", "fp32scale"])
@pytest.mark.parametrize("group", [64, 128])
def test_fp8_quantiser(group, kind):
    golden = read_golden("v4/ops/act_quant")
    stored = {k.rpartition(".")[2]: v for k, v in golden.items() if k.startswith(f"fp8.block{group}.{kind}.")}
    values, scales = quantize_fp8(jnp.asarray(golden["x"]), group, power_of_two=kind == "ue8m0")
    assert np.array_equal(np.asarray(values).view(np.uint8), stored["q"]) and np.array_equal(scales, stored["scale"])
    scales = jnp.asarray(stored.get("scale_e8m0", stored["scale"]))
    assert np.array_equal(dequantize_fp8(values, scales, jnp.bfloat16).astype(jnp.float32), stored["dequant"])


def test_fp4_quantiser():
    golden = read_golden("v4/ops/act_quant")
    packed, scales = quantize_mxfp4(jnp.asarray(golden["x"]))
    assert np.array_equal(packed, golden["fp4.block32.e8m0.packed"])
    assert np.array_equal(scales, golden["fp4.block32.e8m0.scale_raw"])
    values = dequantize_fp4(packed, scales, jnp.bfloat16).astype(jnp.float32)
    assert np.array_equal(values, golden["fp4.block32.e8m0.dequant"])


@pytest.mark.parametrize("sink", ["sink", "sink_special"])
@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_sparse_attention(mode, sink):
    """Lists with single, interleaved, leading and trailing -1 and repeated rows; ordinary and extreme sinks."""
    golden, dtype = read_golden("v4/ops/sparse_attn"), MODULE_MODES[mode].dtype
    for b in range(2):
        out, _ = sparse_attention(
            jnp.asarray(golden["q"][b], dtype), jnp.asarray(golden["kv"][b], dtype), jnp.asarray(golden["topk_idxs"][b]),
            sink=jnp.asarray(golden[sink]), scale=float(golden["scale"]),
        )  # fmt: skip
        wanted = golden[f"out_{'sink_special_' if sink == 'sink_special' else ''}{mode}"][b]
        if mode == "f32":
            compare(out, wanted, "ops.sparse_attn.f32")
        else:
            compare_ulp(out, wanted)


# ---------------------------------------------------------------- linears


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_linears_quantise_their_input_in_groups_of_128(kind):
    golden = read_golden("v4/ops/gemm")
    weight, scale = golden[f"w_{kind}"], golden[f"w_{kind}_scale_e8m0"]
    x = jnp.asarray(golden["x"])
    if kind == "fp8":
        layer = QuantizedLinear(*weight.shape, (128, 128))
        layer.weight.set_value(jnp.asarray(weight.view(ml_dtypes.float8_e4m3fn)))
        layer.scale.set_value(jnp.asarray(scale))
        apply = layer
    else:
        layer = ExpertLinears(1, weight.shape[0], 2 * weight.shape[1], 128)
        layer.weight.set_value(jnp.asarray(weight[None]))
        layer.scale.set_value(jnp.asarray(scale[None]))

        def apply(x, numerics):
            return layer(layer.quantized(x, numerics)[None], jnp.zeros(1, jnp.int32), numerics)[0]

    exact, wanted = np.asarray(apply(x, F32Q)), golden[f"y_{kind}_fp32"]
    assert np.abs(exact - wanted).max() <= tolerances.of("ops.gemm.f32") * np.abs(wanted).max()
    compare_ulp(apply(x.astype(jnp.bfloat16), BF16), golden[f"y_{kind}_bf16"])


# ---------------------------------------------------------------- rotations


@pytest.mark.parametrize("n", [32, 64, 128])
def test_hadamard(n):
    golden = read_golden("v4/ops/hadamard")
    compare(hadamard(jnp.asarray(golden[f"x{n}"]), F32), golden[f"f32_{n}"], "model.rope")
    compare_ulp(hadamard(jnp.asarray(golden[f"x{n}"]).astype(jnp.bfloat16), BF16), golden[f"bf16_{n}"])


def test_ac_25_the_hadamard_rotation_is_applied_to_queries_and_keys():
    """Rotating both leaves q·k as it was; rotating the queries alone chooses other keys."""
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((1, 128)).astype(np.float32), rng.standard_normal((200, 128)).astype(np.float32)
    turned_q, turned_k = (np.asarray(hadamard(jnp.asarray(x), F32)) for x in (q, k))
    plain, both_turned, one_turned = q @ k.T, turned_q @ turned_k.T, turned_q @ k.T
    np.testing.assert_allclose(both_turned, plain, atol=tolerances.of("ops.rotation.f32") * np.abs(plain).max())
    best = [set(np.argsort(-s[0])[:16].tolist()) for s in (plain, both_turned, one_turned)]
    assert best[0] == best[1] and len(best[0] & best[2]) < 8


def test_a_hadamard_rotation_needs_a_power_of_two():
    with pytest.raises(ValueError, match="Hadamard rotation of 96 values: the width must be a power of two"):
        hadamard(jnp.zeros((1, 96)), F32)


@pytest.mark.parametrize("name", sorted({n.rsplit(".", 1)[0] for n in read_golden("v4/ops/rope")}))
def test_rope_where_yarn_starts_at_the_first_pair(name):
    """A short original length: the lower limit of the ramp is below 0 and cut there."""
    golden, (dim, spec) = read_golden("v4/ops/rope"), rope_spec(name)
    cos, sin = golden[name + ".cos"], golden[name + ".sin"]
    angles = rope.rope_angles(dim, spec, jnp.arange(len(cos), dtype=jnp.int32))
    compare(angles[0], cos, "model.rope.table")
    compare(angles[1], sin, "model.rope.table")
    x = jnp.asarray(golden[name + ".x"][0])
    first = tuple(a[: len(x)] for a in angles)
    compare(rope.apply_rope(x, first, F32), golden[name + ".rotated"][0], "model.rope")
    compare(rope.apply_rope(x, first, F32, inverse=True), golden[name + ".inverse"][0], "model.rope")


# ---------------------------------------------------------------- lists


@pytest.mark.parametrize("name", sorted(read_golden("v4/ops/idxs")))
def test_window_and_compressed_lists(name):
    """What each row sees, in the released offsets: prefill positions or ring slots; the order inside a row is free."""
    golden = read_golden("v4/ops/idxs")[name]
    kind, *numbers = name.split("_")
    numbers = [int("".join(c for c in part if c.isdigit())) for part in [kind, *numbers] if any(c.isdigit() for c in part)]
    first, rows, start = numbers[:3]
    one = jnp.ones((1,), jnp.int32)
    step = Step.of(start * one, rows * one, jnp.zeros((1, 1), jnp.int32), rows)
    if kind.startswith("window"):
        ours = np.asarray(step.window(first))[0]
        ours = np.where(ours < 0, -1, ours % first) if start else ours
    else:
        columns = (start + rows) // first
        seen = np.arange(columns) < np.asarray(step.visible(first))[0][:, None]
        ours = np.where(seen, np.arange(columns) + numbers[3], -1)
    for row, expected in zip(ours, golden, strict=True):
        assert sorted(row[row >= 0]) == sorted(expected[expected >= 0])


# ---------------------------------------------------------------- experts


@pytest.mark.parametrize("mode", ["f32", "bf16"])
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
def test_gate(mode, table, scoring):
    golden, prefix = both("gate")[mode], "hash." if table else ""
    x, weight = golden[prefix + "x"], golden[prefix + "weight"]
    ids, k = jnp.asarray(golden[prefix + "token_ids"]), golden[f"{prefix}{scoring}.indices"].shape[1]
    if table:
        gate = hash_moe.TableGate(*weight.shape, k, len(golden["hash.tid2eid"]))
        gate.tid2eid.set_value(jnp.asarray(golden["hash.tid2eid"]))
    else:
        gate = hash_moe.ScoreGate(*weight.shape, k)
        gate.bias.set_value(jnp.asarray(golden["bias"]))
    scores = moe.expert_scores(jnp.asarray(x), jnp.asarray(weight), scoring)
    chosen = gate.choose(scores, ids)
    assert np.array_equal(chosen, golden[f"{prefix}{scoring}.indices"])
    weights = hash_moe.chosen_weights(scores, chosen, scoring, float(golden[prefix + "route_scale"]))
    compare(weights, golden[f"{prefix}{scoring}.weights"], "v4.gate." + ("softmax" if scoring == "softmax" else "ratio"))


def test_ac_65_hash_layers_take_experts_by_token_and_weights_from_scores():
    """A token's experts are its table row, in the table's order, whatever the activations; the weights follow the scores."""
    lm = tiny_model()
    tokens = np.array([[5, 9, 5, 33, 60]], np.int32)
    _, _, taps = lm.forward(lm.new_cache(1, 512), np.pad(tokens, ((0, 0), (0, 59))), np.array([5], np.int32))
    table = np.asarray(lm.parameter("layers.0.ffn.gate.tid2eid"))
    assert np.array_equal(np.asarray(taps["layer0.gate_indices"])[0, :5], table[tokens[0]])
    weights = np.asarray(taps["layer0.gate_weights"])[0, :5]
    np.testing.assert_allclose(weights.sum(-1), lm.config.routed_scaling_factor, rtol=1e-6)
    assert not np.array_equal(weights[0], weights[2]), "the same token in another context: same experts, other weights"
    assert "layers.0.ffn.gate.bias" not in lm._names and "layers.1.ffn.gate.tid2eid" not in lm._names


def test_ac_65_the_clamp_reaches_routed_and_shared_experts():
    """With a limit of 0.01 both kinds of expert give less than with none; each is tested apart."""
    rng, width, inner = np.random.default_rng(0), 64, 32
    x = jnp.asarray(4 * rng.standard_normal((3, width)), jnp.float32)
    outputs = {}
    for limit in (0.01, 0.0):
        shared = moe.SharedExpert(width, inner, (32, 32), limit)
        routed = moe.Experts(1, width, inner, limit, 32)
        for linear in (shared.w1, shared.w2, shared.w3):
            values = np.random.default_rng(1).standard_normal(linear.weight.shape)
            linear.weight.set_value(jnp.asarray(values, jnp.float8_e4m3fn))
            linear.scale.set_value(jnp.full(linear.scale.shape, 127, jnp.uint8))
        for linear in (routed.w1, routed.w2, routed.w3):
            linear.weight.set_value(jnp.asarray(np.random.default_rng(2).integers(0, 256, linear.weight.shape, np.uint8)))
            linear.scale.set_value(jnp.full(linear.scale.shape, 127, jnp.uint8))
        ones = jnp.ones((3, 1), jnp.float32)
        outputs[limit] = (
            shared(x, F32),
            routed(x, jnp.zeros((3, 1), jnp.int32), ones, jnp.ones(3, bool), F32),
        )
    for limited, free in zip(outputs[0.01], outputs[0.0], strict=True):
        # |silu(g)·u| is at most 0.01 · max(0.01, 0.28): silu of a gate below 0 is not cut and at least -0.28.
        assert np.abs(np.asarray(limited)).max() < 0.05 * np.abs(np.asarray(free)).max()


# ---------------------------------------------------------------- hyper-connections


@pytest.mark.parametrize("name", sorted({n.rsplit(".", 1)[0] for n in read_golden("v4/ops/hc_sinkhorn")}))
def test_split_mixes(name):
    golden = read_golden("v4/ops/hc_sinkhorn")
    copies, iterations, eps = name.split("_")
    ours = ops.split_mixes(
        *(jnp.asarray(golden[f"{name}.{part}"]) for part in ("mixes", "scale", "base")),
        copies=int(copies[2:]), iterations=int(iterations[2:]), eps=float(eps[3:]),
    )  # fmt: skip
    for part, value in zip(("pre", "post", "comb"), ours, strict=True):
        compare(value, golden[f"{name}.{part}"], "model.hc")


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_mixes_collapse_and_expand(mode):
    """A sub-layer reads by the mix that it makes itself."""
    golden, numerics = both("modules")[mode], MODULE_MODES[mode]
    stream = numerics.round(jnp.asarray(golden["hc.residual"]))
    parts = [jnp.asarray(golden[f"hc.{part}"]) for part in ("fn", "scale", "base")]
    mix, post, comb = mixes(stream, *parts, iterations=20, eps=1e-6, norm_eps=1e-6)
    compare(post, golden["hc.post"], "model.hc")
    compare(comb, golden["hc.comb"], "model.hc")
    read = collapse(stream, mix, numerics)
    written = expand(numerics.round(jnp.asarray(golden["hc.y"])), stream, post, comb, numerics)
    for ours, name in ((read, "hc.hc_pre_out"), (written, "hc.hc_post_out")):
        if mode == "f32":
            compare(ours, golden[name], "model.modules")
        else:
            compare_ulp(ours, golden[name])


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_head_mix(mode):
    golden, numerics = both("modules")[mode], MODULE_MODES[mode]
    copies, width = golden["hc.residual"].shape[-2:]
    head = StreamHead(dataclasses.replace(load_config(CHECKPOINT), hidden_size=width, hc_mult=copies))
    for part in ("fn", "base", "scale"):
        getattr(head, "hc_head_" + part).set_value(jnp.asarray(golden["hc.head_" + part]))
    ours = head.read_stream(numerics.round(jnp.asarray(golden["hc.residual"])), numerics)
    if mode == "f32":
        compare(ours, golden["hc.hc_head_out"], "model.modules")
    else:
        compare_ulp(ours, golden["hc.hc_head_out"])


# ---------------------------------------------------------------- cache rows


@pytest.mark.parametrize("seed", range(3))
def test_cache_records_hold_what_the_quantiser_gives(seed):
    """A 584-byte record of bf16 rows equals FP8 fake quantisation of the first 448 dims in groups of 64, to the bit."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((40, 512)) * 10.0 ** rng.uniform(-6, 4, (40, 512)), jnp.bfloat16)
    rows = BF16.partly_rotated_rows(512, 64)
    assert rows.format.row_bytes == 584 and rows.prepare(x) is x
    stored = np.asarray(rows.format.decode(rows.format.encode(x), jnp.bfloat16))
    assert np.array_equal(stored[:, 448:], np.asarray(x)[:, 448:])
    assert np.array_equal(stored[:, :448], np.asarray(ops.fake_quantize(x[:, :448], "fp8_64")))
    fake = F32Q.partly_rotated_rows(512, 64).prepare(x.astype(jnp.float32))
    assert np.array_equal(np.asarray(fake), stored.astype(np.float32))


# ---------------------------------------------------------------- attention

PREFILL, STEPS = 35, 8
PRESENT = sorted({int(n[5]) for n in read_golden("v4/ops/attention_f32")})  # of window, ratio 8, ratio 4


@pytest.fixture(scope="module")
def config():
    g, base = both("attention")["f32"], load_config(CHECKPOINT)
    any_layer = f"layer{PRESENT[-1]}."
    heads, d = len(g[any_layer + "w.attn_sink"]), len(g[any_layer + "w.kv_norm.weight"])
    return dataclasses.replace(
        base,
        hidden_size=g[any_layer + "x"].shape[-1],
        num_hidden_layers=3,
        num_hash_layers=0,
        num_attention_heads=heads,
        head_dim=d,
        q_lora_rank=len(g[any_layer + "w.q_norm.weight"]),
        o_groups=heads * d // g[any_layer + "w.wo_a.weight"].shape[1],
        o_lora_rank=32,
        sliding_window=8,
        compress_ratios=(0, 8, 4),
        index_topk=g["layer2.prefill.attn_topk_idxs"].shape[-1] - 8,
        index_n_heads=len(g["layer2.w.indexer.weights_proj.weight"]),
        weight_block_size=(32, 32),
        rope_scaling=dataclasses.replace(base.rope_scaling, original_max_position_embeddings=1024),
        num_nextn_predict_layers=0,
    )


@pytest.mark.parametrize("mode", ["f32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_attention_layers_in_prefill_and_decode(config, mode):
    golden, numerics = both("attention")[mode], MODULE_MODES[mode]
    roles = [layer_plan(config)[i] for i in PRESENT]
    layers = [nnx.split(layer_of(HybridAttention(config, role), role.index, golden)) for role in roles]
    cache = new_cache(config, numerics, 2, 64)
    caches = [cache.layers[role.index] for role in roles]

    @jax.jit
    def compiled(xs, caches, start, count):
        window = (config.sliding_window, config.sliding_window)
        step = Step.of(jnp.full((2,), start), jnp.full((2,), count), cache.block_table, PREFILL + STEPS, window)
        outs, after, taps = [], [], Tap()
        for role, (graphdef, state), x, own in zip(roles, layers, xs, caches, strict=True):
            out, own = nnx.merge(graphdef, state)(x, step, own, numerics, taps.within(f"{role.index}."))
            outs.append(out)
            after.append(own)
        return outs, after, taps.values

    def run(caches, first, last):
        """The rows first .. last-1, in one compiled step for any number of them."""
        xs = [golden[f"layer{role.index}.x"][:, first:last] for role in roles]
        xs = [np.pad(x, ((0, 0), (0, PREFILL + STEPS - (last - first)), (0, 0))) for x in xs]
        xs = [numerics.round(jnp.asarray(x)) for x in xs]
        outs, after, taps = compiled(xs, caches, jnp.int32(first), jnp.int32(last - first))
        cut = jax.tree.map(lambda rows: np.asarray(rows)[:, : last - first], (outs, taps))
        return cut[0], after, cut[1]

    for name, first, last in [("prefill", 0, PREFILL)] + [(f"step{t}", t, t + 1) for t in range(PREFILL, PREFILL + STEPS)]:
        outs, caches, taps = run(caches, first, last)
        for role, out, own in zip(roles, outs, caches, strict=True):
            compare_layer(config, role, golden, name, last, np.asarray(out, np.float32), taps, mode)
            if name == "prefill":
                compare_caches(cache, role, own, golden, "prefill", PREFILL, mode)
    for role, own in zip(roles, caches, strict=True):
        compare_caches(cache, role, own, golden, "end", PREFILL + STEPS, mode)
    outs, _, taps = run([cache.layers[role.index] for role in roles], 0, PREFILL + STEPS)
    for role, out in zip(roles, outs, strict=True):
        sure = sure_rows(config, role, taps, PREFILL + STEPS)
        wanted = golden[f"layer{role.index}.prefill{PREFILL + STEPS}_out"]
        check(np.asarray(out, np.float32)[sure], wanted[sure], mode, f"layer{role.index} one shot output")


def sure_rows(config, role, taps, last) -> np.ndarray:
    """The rows whose selection is no tie, bool [B, S]."""
    if role.mode != "indexed":
        return slice(None)
    score = np.asarray(taps[f"{role.index}.index_score"])[:, :, : last // role.ratio]
    return np.stack([margin(r, config.index_topk) for r in score]) > TIE


def compare_layer(config, role, golden, name, last, out, taps, mode) -> None:
    label, columns = f"layer{role.index}", last // role.ratio if role.ratio else 0
    sure = sure_rows(config, role, taps, last)
    if role.mode == "indexed":
        score = np.asarray(taps[f"{role.index}.index_score"])[:, :, :columns]
        check(score, golden[f"{label}.{name}.index_score"], mode, f"{label} {name} scores")
        if f"{label}.{name}.index_weights" in golden:
            weights = np.asarray(taps[f"{role.index}.index_weights"], np.float32)
            check(weights, golden[f"{label}.{name}.index_weights"], mode, f"{label} {name} weights")
        if f"{label}.{name}.attn_topk_idxs" in golden:
            listed = golden[f"{label}.{name}.attn_topk_idxs"][:, :, config.sliding_window :]
            offset = PREFILL if name == "prefill" else config.sliding_window
            ours = np.asarray(taps[f"{role.index}.selected"])
            for b, row in zip(*np.nonzero(sure), strict=True):
                wanted = sorted(listed[b, row][listed[b, row] >= 0] - offset)
                assert list(ours[b, row][ours[b, row] >= 0]) == wanted, f"{label} {name} list of row {row}"
    check(out[sure], golden[f"{label}.{name}_out"][sure], mode, f"{label} {name} output")


def compare_caches(cache, role, own, golden, name, n, mode) -> None:
    label = f"layer{role.index}.{name}"
    for field, owned in (("compress_kv", own.compressed), ("index_k", own.index_keys)):
        if owned is None or f"{label}.{field}" not in golden:
            continue
        for b in range(2):
            slots = cache.block_table[b, 0] * owned.rows.page_size + jnp.arange(n // role.ratio, dtype=jnp.int32)
            check(np.asarray(owned.rows.gather(slots, jnp.float32)), golden[f"{label}.{field}"][b], mode, f"{label} {field}")
    if f"{label}.kv_state" in golden:
        # The file keeps the group before (where groups overlap) in the first rows and the open group behind them.
        before = role.ratio if role.ratio == OVERLAP_RATIO else 0
        positions = np.arange(n - n % role.ratio - before, n)
        rows, slots = positions - positions[0], positions % own.compressed.tail.kv.shape[1]
        for field, tail in (("kv_state", own.compressed.tail.kv), ("score_state", own.compressed.tail.gate)):
            check(np.asarray(tail)[:, slots], golden[f"{label}.{field}"][:, rows], mode, f"{label} {field}")
