"""V3.2's config: read from the file, nothing by default, all problems at once; and the plan made of it."""

import dataclasses
import json

import pytest
from flax import nnx
from tiny_v32 import CHECKPOINT, tiny_config

from dsa_jax.config import load_config
from dsa_jax.config_v32 import V32Config
from dsa_jax.families import FAMILIES
from dsa_jax.layer_plan_v32 import latent_plan
from dsa_jax.layers.norm import RMSNorm
from dsa_jax.loading import abstract_model
from dsa_jax.models.deepseek_v32 import DeepseekV32

# The released config.json, of what the library reads.
RELEASED = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "vocab_size": 129280,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
READ = [field.name for field in dataclasses.fields(V32Config) if field.name != "weight_block_size"]


def write(folder, **changes):
    (folder / "config.json").write_text(json.dumps(RELEASED | changes))
    return folder


def test_released_config_and_plan(tmp_path):
    config = load_config(write(tmp_path))
    assert isinstance(config, V32Config) and FAMILIES[type(config)].model is DeepseekV32
    assert hash(config) == hash(load_config(tmp_path))
    plan = latent_plan(config)
    assert [role.ffn for role in plan] == ["dense"] * 3 + ["moe"] * 58
    assert all(role.rope.theta == 10000 and role.rope.yarn.factor == 40 for role in plan)


def test_golden_config():
    config = load_config(CHECKPOINT)
    assert (config.index_topk, config.n_group, config.topk_group, config.first_k_dense_replace) == (24, 4, 2, 1)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v32_exp", "deepseek_v320"])
def test_only_the_exact_model_type(tmp_path, model_type):
    with pytest.raises(ValueError, match="deepseek_v32"):
        load_config(write(tmp_path, model_type=model_type))


@pytest.mark.parametrize("topk", [512, 1024, 2048])
def test_ac_16_topk_comes_from_the_file(tmp_path, topk):
    assert load_config(write(tmp_path, index_topk=topk)).index_topk == topk


@pytest.mark.parametrize("key", READ)
def test_ac_16_absent_keys_are_errors(key):
    raw = {name: value for name, value in RELEASED.items() if name != key}
    with pytest.raises(ValueError, match=f"no safe default: {key}"):
        V32Config.from_dict(raw)


@pytest.mark.parametrize("key", [f.name for f in dataclasses.fields(tiny_config().rope_scaling)])
def test_absent_yarn_keys_are_errors(key):
    rope = {name: value for name, value in RELEASED["rope_scaling"].items() if name != key}
    with pytest.raises(ValueError, match=f"no safe default: rope_scaling.{key}"):
        V32Config.from_dict(RELEASED | {"rope_scaling": rope})


@pytest.mark.parametrize("key", ["quant_method", "scale_fmt", "weight_block_size"])
def test_absent_quantisation_keys_are_errors(key):
    values = {name: value for name, value in RELEASED["quantization_config"].items() if name != key}
    with pytest.raises(ValueError, match=f"no safe default: quantization_config.{key}"):
        V32Config.from_dict(RELEASED | {"quantization_config": values})


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_ac_64_epsilon_comes_from_the_file(tmp_path, eps):
    assert load_config(write(tmp_path, rms_norm_eps=eps)).rms_norm_eps == eps


def test_ac_64_epsilon_reaches_every_norm():
    """All but the index keys' LayerNorm, whose epsilon is no key of the config."""
    model = abstract_model(tiny_config(rms_norm_eps=3e-5))
    norms = [module for _, module in nnx.iter_modules(model) if isinstance(module, RMSNorm)]
    assert len(norms) == 3 * 4 + 1 and {norm.eps for norm in norms} == {3e-5}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts = 2 is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"index_topk": 0}, "index_topk = 0 must be positive"),
        ({"index_topk": 2048.5}, "index_topk is 2048.5; it must be an integer"),
        ({"index_head_dim": 192}, "index_head_dim = 192 is not supported; allowed: 32, 64, 128"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63 must be even"),
        ({"kv_lora_rank": 500}, "kv_lora_rank = 500 must be a multiple of 128"),
        ({"num_attention_heads": 3, "v_head_dim": 64}, "num_attention_heads * v_head_dim = 192 must be a multiple of 128"),
        ({"n_group": 7}, "n_group = 7 must divide n_routed_experts = 256"),
        ({"n_group": 256}, "n_group = 256 makes groups of 1 expert"),
        ({"topk_group": 9}, "topk_group = 9 is above n_group = 8"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok = 129 is above the 128 experts"),
        ({"first_k_dense_replace": 62}, "first_k_dense_replace = 62 is outside 0..61"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers = -1 must not be negative"),
        ({"bos_token_id": 129280}, "bos_token_id = 129280 is outside the vocabulary"),
        ({"quantization_config": None}, "quantization_config is missing"),
        ({"quantization_config": RELEASED["quantization_config"] | {"weight_block_size": [32, 32]}}, "[32, 32]"),
        ({"quantization_config": RELEASED["quantization_config"] | {"scale_fmt": "fp32"}}, "scale_fmt = 'fp32'"),
        ({"rope_scaling": None}, "rope_scaling is None; it must be an object"),
        ({"rope_scaling": RELEASED["rope_scaling"] | {"type": "linear"}}, "rope_scaling.type = 'linear'"),
        ({"rope_scaling": RELEASED["rope_scaling"] | {"mscale_all_dim": 0.7}}, "the rotation itself would be scaled"),
        ({"rope_scaling": RELEASED["rope_scaling"] | {"beta_fast": 0.5}}, "must not be below beta_slow"),
        ({"rope_scaling": RELEASED["rope_scaling"] | {"factor": 0.5}}, "rope_scaling.factor = 0.5 must be at least 1"),
    ],
)
def test_what_is_not_carried_is_said(changes, sentence):
    with pytest.raises(ValueError) as caught:
        V32Config.from_dict(RELEASED | changes)
    assert sentence in str(caught.value)


def test_all_problems_in_one_error():
    raw = RELEASED | {"scoring_func": "softmax", "n_group": "8"}
    del raw["index_topk"]
    with pytest.raises(ValueError) as caught:
        V32Config.from_dict(raw, "here")
    message = str(caught.value)
    assert message.startswith("here has 3 problems") and message.count("\n") == 3


def test_a_config_made_by_hand_is_checked_too():
    with pytest.raises(ValueError, match="topk_group = 9 is above n_group"):
        tiny_config(topk_group=9)


def test_without_yarn_below_the_original_length():
    """YaRN belongs to lengths beyond the original one; at that length the rotation and the scale are the plain ones."""
    config = tiny_config(max_position_embeddings=16)
    assert config.yarn is None and latent_plan(config)[0].rope.yarn is None
    assert config.attention_scale == pytest.approx(48**-0.5)
