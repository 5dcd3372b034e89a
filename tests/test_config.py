"""Config and layer plan: the checkpoint's values, every fault in one sentence list, the official plan."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from official_v41 import official_config

from dsa_jax.config import V41Config, load_config
from dsa_jax.layer_plan import draft_plan, layer_plan

GOLDEN = "tests/golden/v41/checkpoint"

OUTSIDE_TEXT = {"rope_scaling", "bos_token_id", "eos_token_id", "image_token_id", "pad_token_id", "weight_block_size"}
TEXT_KEYS = sorted({f.name for f in dataclasses.fields(V41Config)} - OUTSIDE_TEXT - {"vision_config"})


@pytest.fixture
def golden(request):
    return request.config.rootpath / GOLDEN


def changed(**values):
    """The official config with values of text_config replaced; None removes the key."""
    raw = official_config()
    for key, value in values.items():
        if value is None:
            del raw["text_config"][key]
        else:
            raw["text_config"][key] = value
    return raw


def refused(raw):
    with pytest.raises(ValueError) as caught:
        V41Config.from_dict(raw)
    return str(caught.value)


def test_golden_checkpoint(golden):
    config = load_config(golden)
    raw = json.loads((golden / "config.json").read_text())
    for key in TEXT_KEYS:
        value = raw["text_config"][key]
        assert getattr(config, key) == (tuple(value) if isinstance(value, list) else value), key
    assert config.rope_scaling.original_max_position_embeddings == 4096
    assert config.weight_block_size == (32, 32)
    assert (config.bos_token_id, config.eos_token_id, config.image_token_id) == (0, 1, 5)
    assert config.pad_token_id is None
    assert config.vision_config["hidden_size"] == 32


def test_config_is_a_static_argument(golden):
    first, second = load_config(golden), load_config(golden)
    assert first == second and hash(first) == hash(second)
    calls = []

    def scale(x, config):
        calls.append(config)
        return x * config.routed_scaling_factor

    step = jax.jit(scale, static_argnums=1)
    assert step(jnp.float32(2), first) == step(jnp.float32(2), second) == 3
    assert len(calls) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.index_topk = 1


def test_vision_is_optional():
    raw = official_config()
    del raw["vision_config"]
    assert V41Config.from_dict(raw).vision_config is None
    raw["vision_config"] = 3
    assert "vision_config is not an object" in refused(raw)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("model_type", ["deepseek_v4_text", "deepseek_v41_text", "deepseek_v410", "", None])
def test_unknown_model_type(tmp_path, model_type):
    (tmp_path / "config.json").write_text(json.dumps(official_config() | {"model_type": model_type}))
    with pytest.raises(ValueError) as caught:
        load_config(tmp_path)
    assert repr(model_type) in str(caught.value) and "'deepseek_v41'" in str(caught.value)


def test_no_config_file(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '"text"', "\x00"])
def test_config_file_is_no_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json"):
        load_config(tmp_path)


# ---------------------------------------------------------------- missing keys, wrong types


@pytest.mark.parametrize("topk", [512, 1024, 2048])
def test_ac_16_topk_comes_from_the_file(tmp_path, topk):
    (tmp_path / "config.json").write_text(json.dumps(changed(index_topk=topk)))
    assert load_config(tmp_path).index_topk == topk


def test_ac_16_absent_topk_is_an_error():
    assert "text_config.index_topk" in refused(changed(index_topk=None))


@pytest.mark.parametrize("key", [*TEXT_KEYS, "rope_scaling", "hidden_act"])
def test_missing_text_key(key):
    message = refused(changed(**{key: None}))
    assert "missing" in message and f"text_config.{key}" in message


@pytest.mark.parametrize("key", ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings"])
def test_missing_yarn_key(key):
    raw = official_config()
    del raw["text_config"]["rope_scaling"][key]
    assert f"text_config.rope_scaling.{key}" in refused(raw)


@pytest.mark.parametrize("key", ["quant_method", "scale_fmt", "expert_dtype", "weight_block_size"])
def test_missing_quantization_key(key):
    raw = official_config()
    del raw["quantization_config"][key]
    assert f"quantization_config.{key}" in refused(raw)


@pytest.mark.parametrize(
    "key", ["bos_token_id", "eos_token_id", "image_token_id", "text_config", "quantization_config"]
)
def test_missing_outer_key(key):
    raw = official_config()
    del raw[key]
    assert key in refused(raw)


def test_all_missing_keys_at_once():
    raw = changed(index_topk=None, sliding_window=None, rope_theta=None)
    del raw["eos_token_id"]
    message = refused(raw)
    for key in ("text_config.index_topk", "text_config.sliding_window", "text_config.rope_theta", "eos_token_id"):
        assert key in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("index_topk", "512"),
        ("index_topk", 512.0),
        ("hidden_size", True),
        ("rms_norm_eps", "1e-20"),
        ("norm_topk_prob", 1),
        ("compress_ratios", 2),
        ("kv_source_layer_ids", [2, 8, 14, "20"]),
        ("rope_scaling", 16),
    ],
)
def test_wrong_type(key, value):
    message = refused(changed(**{key: value}))
    assert f"text_config.{key} is {value!r}" in message


# ---------------------------------------------------------------- options and values


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("text_config", "attention_bias", True),
        ("text_config", "tie_word_embeddings", True),
        ("text_config", "hidden_act", "gelu"),
        ("text_config", "scoring_func", "relu"),
        ("text_config", "topk_method", "greedy"),
        ("text_config", "num_key_value_heads", 8),
        ("text_config", "n_shared_experts", 2),
        ("text_config", "model_type", "deepseek_v4"),
        ("quantization_config", "quant_method", "awq"),
        ("quantization_config", "scale_fmt", "float"),
        ("quantization_config", "expert_dtype", "fp8"),
        ("quantization_config", "activation_scheme", "static"),
        ("quantization_config", "fmt", "e5m2"),
    ],
)
def test_unsupported_option(section, key, value):
    raw = official_config()
    raw[section][key] = value
    message = refused(raw)
    assert f"{section}.{key} = {value!r} is not supported" in message and "allowed:" in message


def test_tied_embeddings_of_the_outer_object():
    assert "tie_word_embeddings" in refused(official_config() | {"tie_word_embeddings": True})


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", None])
def test_unsupported_rope(rope_type):
    raw = official_config()
    raw["text_config"]["rope_scaling"]["rope_type"] = rope_type
    assert f"rope_type = {rope_type!r} is not supported; allowed: 'yarn'" in refused(raw)


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
def test_scoring_functions(scoring):
    assert V41Config.from_dict(changed(scoring_func=scoring)).scoring_func == scoring


def test_ac_09_consumer_without_a_source():
    message = refused(changed(kv_source_layer_ids=[8, 14, 20], index_source_layer_ids=[8, 14, 20, 24, 28, 32, 36]))
    assert "layer 2 (ratio 2) has no KV source" in message and "kv_source_layer_ids" in message
    assert "layer 7 (ratio 2) has no index source" in message and "index_source_layer_ids" in message
    assert "layer 8 (ratio 2)" not in message
    message = refused(changed(index_source_layer_ids=[8, 14, 20, 24, 28, 32, 36]))
    assert "layer 3 (ratio 2) has no index source" in message
    assert "layer 2 is in kv_source_layer_ids but not in index_source_layer_ids" in message


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 2}, "compress_ratios has 42 entries"),
        ({"compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0, 0, 1]}, "the draft stages see the window alone"),
        ({"compress_ratios": [0] * 2 + [2] * 18 + [-1] * 20 + [0] * 3}, "negative"),
        (
            {"compress_ratios": [0] * 3 + [2] * 17 + [1] * 20 + [0] * 3},
            "layer 2 is a source, but its compress ratio is 0",
        ),
        (
            {"compress_ratios": [0] * 2 + [2] * 17 + [1] * 21 + [0] * 3},
            "layer 19 has ratio 1, but its KV source, layer 14",
        ),
        ({"kv_source_layer_ids": [8, 2, 14, 20]}, "must ascend without repeats"),
        ({"index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 40]}, "names a layer outside 0..39"),
        ({"candidate_source_layer_id": 21}, "candidate_source_layer_id = 21 is not in index_source_layer_ids"),
        ({"candidate_source_layer_id": 14}, "layer 20 would choose inside the candidates of layer 14"),
        ({"candidate_source_layer_id": -2}, "neither -1 (none) nor a layer"),
        ({"candidate_topk_blocks": 64}, "may hold as few as 505 visible rows, fewer than index_topk = 512"),
        ({"head_dim": 500}, "head_dim = 500 must be a multiple of 32"),
        ({"index_head_dim": 48}, "qk_rope_head_dim = 64 is wider than index_head_dim = 48"),
        ({"qk_rope_head_dim": 33}, "must be even"),
        ({"o_groups": 7}, "o_groups = 7 must divide num_attention_heads = 64"),
        ({"sliding_window": 0}, "sliding_window = 0 must be positive"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps = 0.0 must be positive"),
        ({"num_experts_per_tok": 385}, "num_experts_per_tok = 385 is above n_routed_experts = 384"),
        ({"dspark_num_experts_per_tok": 129}, "above dspark_n_routed_experts = 128"),
        ({"swiglu_limit": -1.0}, "swiglu_limit = -1.0 must not be negative"),
        ({"norm_topk_prob": False}, "norm_topk_prob = false is not supported"),
        ({"engram_num_embeddings": [384006168]}, "engram_num_embeddings has 1 entries for 2 engram_layer_ids"),
        ({"engram_layer_ids": [1, 40]}, "engram_layer_ids = [1, 40] names a layer outside"),
        ({"engram_num_embeddings": [384006168, 2**31]}, "must lie between 1 and 2^31 - 1"),
        ({"engram_max_ngram_size": 1}, "must be at least 2"),
        ({"engram_pad_token_id": 129280}, "engram_pad_token_id = 129280 is outside the vocabulary"),
        ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids is empty"),
        ({"dspark_target_layer_ids": [37, 38, 40]}, "dspark_target_layer_ids = [37, 38, 40] names a layer outside"),
        ({"dspark_noise_token_id": -1}, "dspark_noise_token_id = -1 is outside the vocabulary"),
    ],
)
def test_values_that_do_not_fit(values, sentence):
    assert sentence in refused(changed(**values))


def test_block_size():
    for size in ([32], [16, 32], [0, 0], [32, 32, 32]):
        raw = official_config()
        raw["quantization_config"]["weight_block_size"] = size
        assert f"weight_block_size = {size}" in refused(raw)


def test_token_ids_inside_the_vocabulary():
    assert "image_token_id = 129280 is outside the vocabulary of 129280" in refused(
        official_config() | {"image_token_id": 129280}
    )


def test_all_problems_in_one_error():
    raw = changed(index_topk=None, o_groups="8", hidden_act="gelu")
    raw["quantization_config"]["scale_fmt"] = "float"
    message = refused(raw)
    for part in ("index_topk", "o_groups is '8'", "hidden_act = 'gelu'", "scale_fmt = 'float'", "4 problems"):
        assert part in message
    message = refused(changed(o_groups=7, candidate_topk_blocks=64, sliding_window=128, engram_layer_ids=[1, 44]))
    for part in ("o_groups = 7", "candidate_topk_blocks = 64", "engram_layer_ids"):
        assert part in message


def test_a_config_made_by_hand_is_checked_too():
    with pytest.raises(ValueError, match="o_groups = 7"):
        dataclasses.replace(V41Config.from_dict(official_config()), o_groups=7)


# ---------------------------------------------------------------- layer plan


def official_table():
    """(layers, ratio, mode, KV and index keys from, top-k from, candidates) of DeepSeek-V4.1-Flash, as published."""
    return [
        (range(0, 2), 0, "window", None, None, ""),
        ([2], 2, "full", 2, 2, ""),
        (range(3, 8), 2, "reuse", 2, 2, ""),
        ([8], 2, "full", 8, 8, ""),
        (range(9, 14), 2, "reuse", 8, 8, ""),
        ([14], 2, "full", 14, 14, ""),
        (range(15, 20), 2, "reuse", 14, 14, ""),
        ([20], 1, "full", 20, 20, "makes"),
        (range(21, 24), 1, "reuse", 20, 20, ""),
        ([24], 1, "reindex", 20, 24, "uses"),
        (range(25, 28), 1, "reuse", 20, 24, ""),
        ([28], 1, "reindex", 20, 28, "uses"),
        (range(29, 32), 1, "reuse", 20, 28, ""),
        ([32], 1, "reindex", 20, 32, "uses"),
        (range(33, 36), 1, "reuse", 20, 32, ""),
        ([36], 1, "reindex", 20, 36, "uses"),
        (range(37, 40), 1, "reuse", 20, 36, ""),
    ]


def test_official_plan():
    plan = layer_plan(V41Config.from_dict(official_config()))
    rows = {layer: row for layers, *row in official_table() for layer in layers}
    assert len(plan) == len(rows) == 40
    for role in plan:
        candidates = "makes" if role.makes_candidates else "uses" if role.uses_candidates else ""
        found = [role.ratio, role.mode, role.kv_source, role.index_source, candidates]
        assert found == rows[role.index], role.index
        assert role.engram == (role.index in (1, 14))
        assert role.draft_tap == (role.index in (37, 38, 39))


def test_ac_63_rotary_base_and_yarn_by_layer():
    config = V41Config.from_dict(official_config())
    plan = layer_plan(config) + draft_plan(config)
    assert [role.index for role in plan] == list(range(43))
    for role in plan:
        compressed = 2 <= role.index < 40
        assert role.rope.theta == (160000 if compressed else 10000), role.index
        if compressed:
            yarn = role.rope.yarn
            assert (yarn.factor, yarn.beta_fast, yarn.beta_slow) == (16, 32, 1)
            assert yarn.original_max_position_embeddings == 65536
        else:
            assert role.rope.yarn is None
    assert all((role.ratio, role.mode, role.kv_source) == (0, "window", None) for role in plan[40:])


def test_ac_63_ratios_cover_the_draft_stages():
    ratios = official_config()["text_config"]["compress_ratios"]
    for wrong in (ratios[:-1], [*ratios, 0]):
        message = refused(changed(compress_ratios=wrong))
        assert f"{len(wrong)} entries" in message and "need 43" in message


@pytest.mark.parametrize("eps", [1e-20, 1e-6, 1e-5])
def test_ac_64_epsilon_comes_from_the_file(eps):
    assert V41Config.from_dict(changed(rms_norm_eps=eps)).rms_norm_eps == eps


def test_ac_64_absent_epsilon_is_an_error():
    assert "text_config.rms_norm_eps" in refused(changed(rms_norm_eps=None))


@pytest.mark.parametrize("key", ["mscale", "mscale_all_dim", "attention_factor"])
def test_ac_64_attention_factor_is_refused(key):
    raw = official_config()
    raw["text_config"]["rope_scaling"][key] = 1.0
    assert f"rope_scaling.{key} is set" in refused(raw)


@pytest.mark.parametrize("factor", [1, 40])
def test_ac_64_yarn_factor_reaches_the_plan(factor):
    raw = official_config()
    raw["text_config"]["rope_scaling"]["factor"] = factor
    assert layer_plan(V41Config.from_dict(raw))[2].rope.yarn.factor == factor


def test_plan_without_draft_engram_and_candidates():
    raw = changed(
        num_nextn_predict_layers=0,
        compress_ratios=[0] * 2 + [2] * 18 + [1] * 20,
        engram_layer_ids=[],
        engram_num_embeddings=[],
        candidate_source_layer_id=-1,
    )
    config = V41Config.from_dict(raw)
    assert draft_plan(config) == ()
    for role in layer_plan(config):
        assert not (role.draft_tap or role.engram or role.makes_candidates or role.uses_candidates)
