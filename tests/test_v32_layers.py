"""V3.2's layers and operations against what DeepSeek's own modules computed (tests/golden/v32/ops)."""

import copy
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
from test_attention import Unquantized
from test_layers import MODULE_MODES, compare, compare_ulp
from test_v32_config import RELEASED
from tiny_v32 import CHECKPOINT, tiny_config

from dsa_jax.cache.latent import new_latent_cache
from dsa_jax.config import load_config
from dsa_jax.config_v32 import V32Config, V32Yarn
from dsa_jax.layer_plan import RopeSpec
from dsa_jax.layer_plan_v32 import latent_plan
from dsa_jax.layers import rope, token_indexer
from dsa_jax.layers.grouped_moe import QuantizedExperts, route_in_groups
from dsa_jax.layers.hadamard import hadamard
from dsa_jax.layers.latent_attention import LatentAttention
from dsa_jax.layers.linear import QuantizedLinear
from dsa_jax.layers.norm import LayerNorm
from dsa_jax.loading import abstract_model
from dsa_jax.numerics import BF16, F32, matmul
from dsa_jax.step import Step
from dsa_jax.tap import Tap
from pallas_kernels import (
    V32,
    IndexFP8,
    PagedRows,
    dequantize_fp8,
    dequantize_weight,
    paged_indexer_logits,
    quantize_fp8,
)

FP8 = ml_dtypes.float8_e4m3fn
MLA_STEPS = 9


@functools.cache
def both(name: str) -> dict[str, dict[str, np.ndarray]]:
    """The f32 file, and the bf16 file over it: tensors equal in both are in the f32 file only."""
    f32 = read_golden(f"v32/ops/{name}_f32")
    return {"f32": f32, "bf16": f32 | read_golden(f"v32/ops/{name}_bf16")}


# ---------------------------------------------------------------- quantisation


def test_cache_records_keep_quantised_rows_to_the_bit():
    """What the layer quantises, the records store and give back: magnitudes from 2^-20 to 2^20, zero rows included."""
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((64, 576)) * 2.0 ** rng.integers(-20, 20, (64, 1))
    rows[3] = 0
    rows = jnp.asarray(rows, jnp.bfloat16)
    latent = jnp.concatenate([BF16.fake(rows[:, :512], "fp8_128"), rows[:, 512:]], axis=1)
    assert V32().row_bytes == 656 and np.array_equal(V32().decode(V32().encode(latent), jnp.bfloat16), latent)
    keys = BF16.fake(rows[:, :128], "fp8_128")
    assert IndexFP8().row_bytes == 132 and np.array_equal(IndexFP8().decode(IndexFP8().encode(keys), jnp.bfloat16), keys)


@pytest.mark.parametrize("kind", ["ue8m0", "fp32scale"])
def test_act_quant_in_groups_of_128(kind):
    golden = read_golden("v32/ops/act_quant")
    values, scale = quantize_fp8(jnp.asarray(golden["x"]), 128, power_of_two=kind == "ue8m0")
    assert np.array_equal(np.asarray(scale), golden[f"fp8.block128.{kind}.scale"])
    assert np.array_equal(np.asarray(values).view(np.uint8), golden[f"fp8.block128.{kind}.q"])
    dequantised = dequantize_fp8(values, scale, jnp.bfloat16).astype(jnp.float32)
    assert np.array_equal(dequantised, golden[f"fp8.block128.{kind}.dequant"])


def test_fp8_linear_with_float_scales_and_half_filled_tiles():
    """160 rows are one and a quarter tile; scales are float32 powers of two."""
    golden = read_golden("v32/ops/gemm")
    weight = golden["ue8m0.w_fp8"].view(FP8)
    layer = QuantizedLinear(*weight.shape, (128, 128))
    layer.weight.set_value(jnp.asarray(weight))
    layer.scale.set_value(jnp.asarray(golden["ue8m0.w_scale_inv"]))
    x = jnp.asarray(golden["ue8m0.x"])
    compare_ulp(layer(x.astype(jnp.bfloat16), BF16), golden["ue8m0.y_bf16"])
    largest = np.abs(golden["ue8m0.y_fp32"]).max()
    ours = np.asarray(layer(x.astype(jnp.bfloat16).astype(jnp.float32), dataclasses.replace(F32, quantize=True)))
    assert np.abs(ours - golden["ue8m0.y_fp32"]).max() <= tolerances.of("ops.gemm.f32") * largest


def test_products_with_scales_that_are_no_powers_of_two():
    """The other branch of the reference's quantiser and product: no released config takes it, the operations carry it."""
    golden = {name.removeprefix("fp32scale."): v for name, v in read_golden("v32/ops/gemm").items() if "fp32scale" in name}
    x = dequantize_fp8(*quantize_fp8(jnp.asarray(golden["x"]), 128, power_of_two=False), jnp.float32)
    weight = dequantize_weight(jnp.asarray(golden["w_fp8"].view(FP8)), jnp.asarray(golden["w_scale_inv"]), 128, jnp.float32)
    y = matmul(x, weight)
    assert np.abs(y - golden["y_fp32"]).max() <= tolerances.of("ops.gemm.f32") * np.abs(golden["y_fp32"]).max()
    compare_ulp(y.astype(jnp.bfloat16), golden["y_bf16"])


# ---------------------------------------------------------------- rotations

ROPE = sorted({n.rsplit(".", 1)[0] for n in read_golden("v32/ops/rope")})


def yarn_spec(original: int, factor: float, base: float = 10000.0) -> RopeSpec:
    yarn = V32Yarn(
        factor=float(factor), beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=original,
        mscale=1.0, mscale_all_dim=1.0,
    )  # fmt: skip
    return RopeSpec(base, yarn)


@pytest.mark.parametrize("name", ROPE)
def test_rope_tables_and_both_pairings(name):
    golden = read_golden("v32/ops/rope")
    dim, original, factor, base, longest = (int("".join(c for c in part if c.isdigit())) for part in name.split("_"))
    spec = yarn_spec(original, factor, float(base)) if longest > original else RopeSpec(float(base), None)
    cos, sin = golden[name + ".cos"], golden[name + ".sin"]
    angles = rope.rope_angles(dim, spec, jnp.arange(len(cos), dtype=jnp.int32))
    compare(angles[0], cos, "model.rope.table")
    compare(angles[1], sin, "model.rope.table")
    x = jnp.asarray(golden[name + ".x"][0])
    first = tuple(a[: len(x)] for a in angles)
    compare(rope.apply_rope(x, first, F32), golden[name + ".rotated_interleaved"][0], "model.rope")
    compare(rope.apply_rope_half_split(x, first, F32), golden[name + ".rotated_half_split"][0], "model.rope")


def test_yarn_frequencies_of_the_released_config():
    """The values that the specification lists (base 10000, factor 40, original length 4096), of pairs 0, 1, 10, .."""
    listed = {0: 1, 1: 0.749894202, 10: 0.0562341288, 11: 0.0390069261, 16: 0.00550000044, 22: 1.7782794e-4,
              23: 3.33380376e-5, 24: 2.50000012e-5, 31: 3.33380376e-6}  # fmt: skip
    ours = rope.rope_frequencies(64, yarn_spec(4096, 40))
    np.testing.assert_allclose(ours[list(listed)], list(listed.values()), rtol=tolerances.of("model.yarn.listed"))


def test_ac_24_half_split_pairs_are_first_and_interleaved_pairs_are_last():
    """A known vector through both: positions of the pairs, and that the two differ."""
    spec, x = RopeSpec(10000.0, None), np.arange(1, 9, dtype=np.float32)[None]
    angles = rope.rope_angles(4, spec, jnp.array([3], jnp.int32))
    turn = 3 * np.array([1.0, 0.01])

    def rotated(a, b):
        return a * np.cos(turn) - b * np.sin(turn), a * np.sin(turn) + b * np.cos(turn)

    half_split, interleaved = x[0].copy(), x[0].copy()
    half_split[0:2], half_split[2:4] = rotated(x[0, 0:2], x[0, 2:4])
    interleaved[4::2], interleaved[5::2] = rotated(x[0, 4::2], x[0, 5::2])
    tolerance = tolerances.of("model.rope")
    ours = np.asarray(rope.apply_rope_half_split(jnp.asarray(x), angles, F32))[0]
    np.testing.assert_allclose(ours, half_split, rtol=tolerance, atol=tolerance)
    ours = np.asarray(rope.apply_rope(jnp.asarray(x), angles, F32))[0]
    np.testing.assert_allclose(ours, interleaved, rtol=tolerance, atol=tolerance)


def test_ac_29_phases_at_the_last_positions_are_float32_phases():
    """Position 163839 of the released config, and a million: equal to float64's of the same float32 angle."""
    t = np.array([0, 1, 4095, 163_839, 1_000_000], np.int32)
    cos, sin = jax.jit(lambda p: rope.rope_angles(64, yarn_spec(4096, 40), p))(jnp.asarray(t))
    angle = (t.astype(np.float32)[:, None] * rope.rope_frequencies(64, yarn_spec(4096, 40))).astype(np.float64)
    assert np.abs(np.asarray(cos) - np.cos(angle)).max() <= tolerances.of("model.rope.far")
    assert np.abs(np.asarray(sin) - np.sin(angle)).max() <= tolerances.of("model.rope.far")


def test_ac_29_bf16_inputs_are_rotated_in_float32():
    """A bf16 vector at a far position: the result is the float32 rotation, rounded once."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 128)), jnp.bfloat16)
    angles = rope.rope_angles(64, yarn_spec(4096, 40), jnp.array([150_001], jnp.int32))
    for rotate in (rope.apply_rope, rope.apply_rope_half_split):
        exact = np.asarray(rotate(x.astype(jnp.float32), angles, F32))
        ours = rotate(x, angles, BF16)
        assert ours.dtype == jnp.bfloat16
        assert np.array_equal(np.asarray(ours), exact.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("width", [64, 128])
def test_hadamard(width):
    golden = read_golden("v32/ops/hadamard")
    x = jnp.asarray(golden[f"x{width}"])
    compare(hadamard(x, F32), golden[f"f32_{width}"], "model.hadamard")
    compare_ulp(hadamard(x.astype(jnp.bfloat16), BF16), golden[f"bf16_{width}"])


def test_ac_25_both_sides_rotated_keep_the_products_and_one_side_alone_does_not():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((n, 128)), jnp.float32) for n in (8, 40))
    plain = np.asarray(q) @ np.asarray(k).T
    rotated = np.asarray(hadamard(q, F32)) @ np.asarray(hadamard(k, F32)).T
    assert np.abs(rotated - plain).max() <= tolerances.of("ops.rotation.f32") * np.abs(plain).max()
    one_side = np.asarray(hadamard(q, F32)) @ np.asarray(k).T
    assert not np.array_equal(np.argsort(-one_side)[:, :6], np.argsort(-plain)[:, :6])
    # Planted: the one key that a query is made of. The rotation of the query alone loses it.
    assert (np.asarray(hadamard(k, F32)) @ np.asarray(hadamard(k[7], F32))).argmax() == 7
    assert (np.asarray(k) @ np.asarray(hadamard(k[7], F32))).argmax() != 7


def test_a_width_that_is_no_power_of_two_is_refused():
    with pytest.raises(ValueError, match="must be a power of two"):
        hadamard(jnp.zeros((2, 96)), F32)


def test_layer_norm_is_numpys():
    rng = np.random.default_rng(1)
    layer = LayerNorm(128, 1e-6)
    weight, bias, x = (rng.standard_normal(shape).astype(np.float32) for shape in (128, 128, (5, 128)))
    layer.weight.set_value(jnp.asarray(weight))
    layer.bias.set_value(jnp.asarray(bias))
    x = 3 + x
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6) * weight + bias
    compare(layer(jnp.asarray(x), F32), expected, "model.modules")


# ---------------------------------------------------------------- indexer scores


def test_fp8_index_scores():
    """Quantised operands and scores: the query's scale in the weights, the key's read from its record."""
    golden = read_golden("v32/ops/fp8_index")
    q, k = (jnp.asarray(golden[name]) for name in ("q", "k"))
    q8, sq = quantize_fp8(q, 128)
    assert np.array_equal(np.asarray(q8).view(np.uint8), golden["q_fp8"])
    assert np.array_equal(np.asarray(sq), golden["q_scale"])
    batch, n, _ = k.shape
    cache = PagedRows.zeros(IndexFP8(128), batch, 64)
    slots = (jnp.arange(batch)[:, None] * 64 + jnp.arange(n)).reshape(-1).astype(jnp.int32)
    cache = cache.scatter(slots, k.reshape(-1, 128))
    stored = np.asarray(cache.gather_bytes(slots)).reshape(batch, n, 132)
    assert np.array_equal(stored[..., :128], golden["k_fp8"])
    assert np.array_equal(np.ascontiguousarray(stored[..., 128:]).view(np.float32), golden["k_scale"])
    score = paged_indexer_logits(
        q8, cache, jnp.asarray(golden["head_weights"]) * sq[..., 0],
        context_lens=jnp.full(q.shape[:2], n, jnp.int32), block_table=jnp.arange(batch, dtype=jnp.int32)[:, None],
    )  # fmt: skip
    compare(np.asarray(score)[..., :n], golden["score"], "model.gate")


# ---------------------------------------------------------------- experts

GATES = {
    "groups1_bias": (1, 1, True, "sigmoid"),
    "groups4of2_bias": (4, 2, True, "sigmoid"),
    "groups4of2_nobias": (4, 2, False, "sigmoid"),
    "groups8of4_bias": (8, 4, True, "sigmoid"),
    "softmax_groups1_nobias": (1, 1, False, "softmax"),
}


@pytest.mark.parametrize("mode", ["f32", "bf16"])
@pytest.mark.parametrize("name", GATES)
def test_gate(mode, name):
    golden = both("gate")[mode]
    groups, kept, biased, scoring = GATES[name]
    k = golden[name + ".indices"].shape[1]
    bias = jnp.asarray(golden["bias"]) if biased else None
    chosen, weights = route_in_groups(
        jnp.asarray(golden["x"]), jnp.asarray(golden["weight"]), bias, k, n_group=groups, topk_group=kept,
        scoring_func=scoring, routed_scaling_factor=float(golden["route_scale"]),
    )  # fmt: skip
    sure = np.ones(len(golden["x"]), bool)
    if not biased:  # scores that saturate, or are equal, leave the choice free
        logits = golden["x"].astype(np.float64) @ golden["weight"].astype(np.float64).T
        logits -= logits.max(axis=-1, keepdims=True) if scoring == "softmax" else 0
        scores = np.exp(np.minimum(logits, 0)) if scoring == "softmax" else 1 / (1 + np.exp(-np.clip(logits, -700, 700)))
        sure = (np.diff(np.sort(scores, axis=-1)[:, -k - 1 :]) > 1e-6).all(axis=-1)
        assert sure.sum() >= 5
    assert np.array_equal(np.asarray(chosen)[sure], golden[name + ".indices"][sure])
    compare(np.asarray(weights)[sure], golden[name + ".weights"][sure], "model.gate")


@pytest.mark.parametrize("tokens", [1, 40])
def test_fp8_experts_equal_a_loop_over_them(tokens):
    """Half-filled edge tiles, float scales per tile, the route weight after w2; idle rows give 0."""
    rng = np.random.default_rng(tokens)
    experts, width, inner, k = 5, 192, 96, 3
    layer = QuantizedExperts(experts, width, inner, (128, 128))
    for linear in (layer.w1, layer.w2, layer.w3):
        linear.weight.set_value(jnp.asarray(rng.standard_normal(linear.weight.shape).astype(FP8)))
        scale = (2.0 ** rng.integers(-6, -2, linear.scale.shape)).astype(np.float32)
        linear.scale.set_value(jnp.asarray(scale))
    x = jnp.asarray(rng.standard_normal((tokens, width)), jnp.float32)
    chosen = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
    weights = rng.random((tokens, k)).astype(np.float32)
    valid = rng.random(tokens) < 0.8
    valid[0] = True
    ours = np.asarray(layer(x, jnp.asarray(chosen), jnp.asarray(weights), jnp.asarray(valid), F32))

    def dense(linear, e):
        values, scale = (np.asarray(v[...])[e].astype(np.float64) for v in (linear.weight, linear.scale))
        return values * np.repeat(np.repeat(scale, 128, 0), 128, 1)[: values.shape[0], : values.shape[1]]

    expected = np.zeros((tokens, width))
    for t in np.flatnonzero(valid):
        for e, w in zip(chosen[t], weights[t], strict=True):
            row = np.asarray(x[t], np.float64)
            g, u = dense(layer.w1, e) @ row, dense(layer.w3, e) @ row
            expected[t] += dense(layer.w2, e) @ (g / (1 + np.exp(-g)) * u) * w
    compare(ours / np.abs(expected).max(), expected / np.abs(expected).max(), "model.experts")


# ---------------------------------------------------------------- attention


@functools.cache
def mla_config():
    yarn = dataclasses.replace(load_config(CHECKPOINT).rope_scaling, factor=4.0, original_max_position_embeddings=32)
    return tiny_config(
        hidden_size=128, num_attention_heads=4, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=32,
        qk_rope_head_dim=32, v_head_dim=64, index_n_heads=8,
        index_head_dim=128, index_topk=9, max_position_embeddings=64, rope_scaling=yarn,
    )  # fmt: skip


def file_sizes():
    """The file's query latent of 64 and its values of 48 are no widths of FP8 groups; its weights are bf16, so they need
    not be, and are set past the config's rules."""
    config = copy.copy(mla_config())
    object.__setattr__(config, "q_lora_rank", 64)
    object.__setattr__(config, "v_head_dim", 48)
    return config


def mla_layer(golden, form: type = LatentAttention) -> LatentAttention:
    layer = form(file_sizes(), latent_plan(mla_config())[0].rope)
    for name, value in golden.items():
        if not name.startswith("mla.w."):
            continue
        *path, last = name.removeprefix("mla.w.").split(".")
        owner = layer
        for part in path[:-1]:
            owner = getattr(owner, part)
        if "norm" not in path[-1] and path[-1] != "weights_proj":
            setattr(owner, path[-1], Unquantized(*value.shape))
        old = getattr(getattr(owner, path[-1]), last)
        assert old[...].shape == value.shape, name
        old.set_value(jnp.asarray(value).astype(old[...].dtype))
    return layer


class Expanding(LatentAttention):
    """The expanded form over the same lists, as a mask over all of a request's 64 rows."""

    def attend(self, q, rows, slots, block_table, numerics):
        every = jnp.arange(128, dtype=jnp.int32).reshape(2, 64)
        mask = (slots[..., None] == every[:, None, None]).any(-2)
        return self.attend_expanded(q, rows.gather(every, numerics.dtype), mask, numerics)


@functools.cache
def mla_runner(mode: str, form: type = LatentAttention):
    """The file's layer, compiled for up to 45 rows of both requests: (x, count, cache, start) -> (y, cache, taps)."""
    numerics = MODULE_MODES[mode]
    graphdef, state = nnx.split(mla_layer(both("mla")[mode], form))
    whole = new_latent_cache(mla_config(), numerics, 2, 64)

    @jax.jit
    def run(x, count, cache, start):
        rows = jnp.full((2,), count, jnp.int32)
        step, tap = Step.of(jnp.full((2,), start, jnp.int32), rows, whole.block_table, x.shape[1]), Tap()
        y, cache = nnx.merge(graphdef, state)(numerics.round(x), step, cache, numerics, tap)
        return y, cache, tap.values

    return run, whole.layers[0]


def run_mla(mode: str, splits: list[int], total: int, runner=mla_runner):
    """(first, last, outputs, taps) of the chunks that `splits` cut `total` tokens of both requests into, and the cache."""
    x, (run, cache), results = both("mla")[mode]["x"], runner(mode), []
    for first, last in zip([0, *splits], [*splits, total], strict=True):
        part = np.zeros_like(x)
        part[:, : last - first] = x[:, first:last]
        y, cache, taps = run(part, jnp.int32(last - first), cache, jnp.int32(first))
        y, taps = (jax.tree.map(lambda a: np.asarray(a)[:, : last - first].astype(np.float32), v) for v in (y, taps))
        results.append((first, last, y, taps))
    return results, cache


def check(ours: np.ndarray, golden: np.ndarray, mode: str, what: str) -> None:
    finite = np.isfinite(golden)
    assert np.array_equal(finite, np.isfinite(ours)), what
    scale = max(1.0, float(np.abs(golden[finite]).max(initial=0)))
    gap = float(np.abs(ours[finite] - golden[finite]).max(initial=0)) / scale
    assert gap <= tolerances.of("model.mla." + mode), f"{what}: {gap}"


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_latent_attention_in_prefill_and_decode(mode):
    """36 tokens at once, then 9 one by one, and 45 at once: scores, lists, cached rows and outputs."""
    golden = both("mla")[mode]
    results, _ = run_mla(mode, list(range(36, 45)), 45)
    assert len(results) == 1 + MLA_STEPS
    for first, last, out, taps in results:
        name = "prefill36" if first == 0 else f"step{first}"
        score = taps["index_score"][:, :, :last]
        check(score, golden[name + ".index_score"], mode, name + " scores")
        if first == 0:
            check(taps["index_weights"][..., None], golden[name + ".index_weights"], mode, "weights")
        for b in range(2):
            for row in range(last - first):
                visible, wanted = first + row + 1, golden[name + ".topk_indices"][b, row]
                ours = taps["selected"][b, row]
                assert np.array_equal(ours[ours >= 0], np.sort(wanted[wanted < visible])), f"{name} row {row}"
        check(out, golden[name + "_out"], mode, name + " output")
    ((_, _, out, _),), _ = run_mla(mode, [], 45)
    check(out, golden["prefill45_out"], mode, "one shot output")


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_expanded_attention_is_the_references_prefill(mode):
    """The form that the reference takes in a prefill gives its outputs too; in bf16 it rounds where the reference does, so
    it is nearer to it than the absorbed form."""
    wanted, gaps = both("mla")[mode]["prefill45_out"], {}
    for form in (LatentAttention, Expanding):
        ((_, _, out, _),), _ = run_mla(mode, [], 45, functools.partial(mla_runner, form=form))
        check(out, wanted, mode, f"one shot output of {form.__name__}")
        gaps[form] = np.linalg.norm(out - wanted)
    if mode == "bf16":
        assert gaps[Expanding] < gaps[LatentAttention]


@pytest.mark.parametrize("total", [1, 3, 8, 20])
def test_unscored_tokens_are_those_that_scores_choose(total, monkeypatch):
    """Steps of no more than k tokens, and of more; few rows are always scored."""
    (scored,), _ = run_mla("f32", [], total)
    monkeypatch.setattr(token_indexer, "ROWS_TO_SKIP", 1)
    (unscored,), _ = run_mla("f32", [], total, mla_runner.__wrapped__)
    assert np.array_equal(scored[3]["selected"], unscored[3]["selected"])


@pytest.mark.parametrize(("rows", "asks"), [(1, False), (4, False), (512, True)])
def test_a_decode_step_never_asks_the_host(rows, asks):
    config = V32Config.from_dict(RELEASED | {"num_hidden_layers": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0})
    graphdef, state = nnx.split(abstract_model(config))

    def forward(state, tokens):
        cache = new_latent_cache(config, BF16, 1, 4096)
        return nnx.merge(graphdef, state)(cache, tokens, jnp.ones(1, jnp.int32), BF16)[0]

    program = str(jax.make_jaxpr(forward)(state, jax.ShapeDtypeStruct((1, rows), jnp.int32)))
    assert ("cond[" in program) == asks


def test_a_row_that_sees_nothing_gives_zeros_in_the_expanded_form():
    layer = LatentAttention(mla_config(), latent_plan(mla_config())[0].rope)
    layer.wkv_b.scale.set_value(jnp.full_like(layer.wkv_b.scale[...], 127))  # 2^0
    layer.wkv_b.weight.set_value(jnp.ones_like(layer.wkv_b.weight[...]))
    mask = jnp.zeros((1, 2, 4), bool).at[0, 1, 0].set(True)
    out, lse = layer.attend_expanded(jnp.ones((1, 2, 4, 64)), jnp.ones((1, 4, 160)), mask, F32)
    out, lse = np.asarray(out), np.asarray(lse)
    assert not out[0, 0].any() and (out[0, 1] == 128).all()
    assert np.isneginf(lse[0, 0]).all() and np.isfinite(lse[0, 1]).all()


def test_where_the_expanded_form_pays():
    """171 query rows at the released widths: 512 · 256 products a cached row against 768 a pair."""
    released = tiny_config(
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, index_head_dim=128
    )
    rope = latent_plan(released)[0].rope
    assert nnx.eval_shape(lambda: LatentAttention(released, rope)).rows_to_expand == 171


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_cached_rows_are_the_references(mode):
    """Latent, rotated key and index key after the prefill, read back from their records: in bf16, FP8 and bit for bit
    but for single roundings."""
    golden = both("mla")[mode]
    _, cache = run_mla(mode, [], 36)
    for b in range(2):
        slots = b * 64 + jnp.arange(36, dtype=jnp.int32)
        rows = np.asarray(cache.latent.gather(slots, jnp.float32))
        check(rows[:, :128], golden["prefill36.kv_cache"][b], mode, "latent")
        check(rows[:, 128:], golden["prefill36.pe_cache"][b], mode, "rotated key")
        keys = np.asarray(cache.index_keys.gather(slots, jnp.float32))
        check(keys, golden["prefill36.index_k"][b], mode, "index keys")
        if mode == "bf16":
            assert (rows[:, :128] == golden["prefill36.kv_cache"][b]).mean() > 0.99


def test_ac_64_attention_scale_has_the_squared_yarn_factor():
    """The file's scale (factor 4); the released config's, as the specification lists it (factor 40); none without YaRN."""
    layer = LatentAttention(file_sizes(), latent_plan(mla_config())[0].rope)
    assert layer.scale == pytest.approx(float(both("mla")["f32"]["softmax_scale"]), rel=1e-6)
    released = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 128, "max_position_embeddings": 163840}
    yarn = yarn_spec(4096, 40).yarn
    assert tiny_config(**released, rope_scaling=yarn).attention_scale == pytest.approx(0.13523378, rel=1e-7)
    for plain in (
        tiny_config(**released, rope_scaling=dataclasses.replace(yarn, factor=1.0)),
        tiny_config(**released | {"max_position_embeddings": 4096}, rope_scaling=yarn),
    ):
        assert plain.attention_scale == pytest.approx(192**-0.5, rel=1e-7)


def interleaved_first(x, angles, numerics):
    """The pairing of the first public demo, in the indexer's place: interleaved over the first dims."""
    turned = 2 * angles[0].shape[-1]
    return jnp.concatenate([rope.apply_rope(x[..., :turned], angles, numerics), x[..., turned:]], axis=-1)


def half_split_last(x, angles, numerics):
    turned = 2 * angles[0].shape[-1]
    return jnp.concatenate(
        [x[..., :-turned], rope.apply_rope_half_split(x[..., -turned:], angles, numerics)], axis=-1
    )


@pytest.mark.parametrize(
    ("module", "function", "wrong"),
    [
        ("token_indexer", "apply_rope_half_split", interleaved_first),
        ("latent_attention", "apply_rope", half_split_last),
    ],
)
def test_ac_24_swapped_pairings_fail(monkeypatch, module, function, wrong):
    """With the other pairing in the indexer the scores, and in the attention the outputs, are far from the golden ones."""
    golden = both("mla")["f32"]
    monkeypatch.setattr(f"dsa_jax.layers.{module}.{function}", wrong)
    ((_, _, out, taps),), _ = run_mla("f32", [], 36, mla_runner.__wrapped__)
    if module == "token_indexer":
        ours, wanted = taps["index_score"][:, :, :36], golden["prefill36.index_score"]
        visible = np.isfinite(wanted)
        ours, wanted = ours[visible], wanted[visible]
    else:
        ours, wanted = out, golden["prefill36_out"]
    assert np.abs(ours - wanted).max() > 1000 * tolerances.of("model.mla.f32")
