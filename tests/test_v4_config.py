"""V4's config, layer plan and parameters, from the official configs."""

import dataclasses
import json
import shutil

import pytest
from flax import nnx
from official_v4 import official_v4_config
from test_config import official_config
from tiny_v4 import CHECKPOINT, tiny_config

from dsa_jax.config import V41Config, YarnConfig, load_config
from dsa_jax.config_v4 import V4Config
from dsa_jax.layer_plan_v4 import draft_plan, layer_plan
from dsa_jax.layers.hybrid_attention import HybridAttention
from dsa_jax.layers.norm import RMSNorm
from dsa_jax.layers.self_mixed import SelfMixedBlock, StreamHead
from dsa_jax.loading import abstract_model, abstract_parameters, load_model
from dsa_jax.weights.plan import make_plan


def test_official_configs():
    flash, pro = (V4Config.from_dict(official_v4_config(size)) for size in ("flash", "pro"))
    assert (flash.index_topk, pro.index_topk) == (512, 1024)
    assert (flash.num_hidden_layers, pro.num_hidden_layers) == (43, 61)
    assert flash.rope_scaling == YarnConfig(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536)
    assert flash.image_token_id is None and hash(flash) != hash(pro)


@pytest.mark.parametrize("size", ["flash", "flash-0731", "pro"])
def test_ac_63_every_layer_has_the_rotation_of_its_ratio(size):
    """(ratio, theta, YaRN factor) by layer; entries behind the layers' belong to the MTP layer or the DSpark stages."""
    config = V4Config.from_dict(official_v4_config(size))
    window, indexed, every = (0, 10000.0, None), (4, 160000.0, 16.0), (128, 160000.0, 16.0)
    first = [every, every] if size == "pro" else [window, window]
    drafts = 3 if size == "flash-0731" else 1
    expected = [*first, *[indexed, every] * (29 if size == "pro" else 20), indexed, *[window] * drafts]
    roles = [*layer_plan(config), *draft_plan(config)]
    assert len(config.compress_ratios) == config.num_hidden_layers + drafts and len(draft_plan(config)) == drafts
    assert [(r.ratio, r.rope.theta, r.rope.yarn and r.rope.yarn.factor) for r in roles] == expected
    assert [r.mode for r in roles] == [{0: "window", 4: "indexed", 128: "all"}[ratio] for ratio, _, _ in expected]
    assert [r.index for r in roles if r.hash_routed] == [0, 1, 2]
    assert [r.overlap for r in roles] == [r.ratio == 4 for r in roles]
    assert [r.index for r in roles if r.draft_tap] == ([40, 41, 42] if drafts == 3 else [])


@pytest.mark.parametrize(
    ("size", "counts"),
    [
        ("flash", {0: 1565, 4: 1576, 128: 1569, "all": 69187}),
        ("flash-0731", {0: 1565, 4: 1576, 128: 1569, "all": 72317}),
        ("pro", {4: 2344, 128: 2337, "all": 145116}),
    ],
)
def test_parameters_are_the_tensors_of_the_official_checkpoint(size, counts):
    """The tensor counts that the published checkpoints have, by layer of each ratio and in all."""
    config = V4Config.from_dict(official_v4_config(size))
    experts = config.n_routed_experts

    def tensors(prefix: str) -> int:
        return sum(experts if ".ffn.experts." in name else 1 for name in parameters if name.startswith(prefix))

    parameters = abstract_parameters(config)
    for role in layer_plan(config):
        assert tensors(f"layers.{role.index}.") == counts[role.ratio], f"layer {role.index}"
    assert tensors("") == counts["all"]


def test_the_golden_checkpoint_is_read_by_its_model_type():
    config = load_config(CHECKPOINT)
    assert isinstance(config, V4Config) and config.compress_ratios == (0, 128, 4, 128, 4, 0)
    plan = make_plan(abstract_parameters(config), CHECKPOINT)
    table = next(entry for entry in plan.entries if entry.path == "layers.0.ffn.gate.tid2eid")
    assert table.conversion == "narrow" and table.dtype == "int32" and table.shape == (256, 2)
    assert not plan.notes, "nothing of a V4 checkpoint is left out"


def test_a_table_that_names_an_expert_which_is_not_there_is_refused(tmp_path):
    """One id of 256 times 2 is 4 where there are experts 0 to 3."""
    shutil.copytree(CHECKPOINT, tmp_path, dirs_exist_ok=True)
    plan = make_plan(abstract_parameters(load_config(tmp_path)), tmp_path)
    (table,) = next(entry for entry in plan.entries if entry.path == "layers.1.ffn.gate.tid2eid").sources
    data = bytearray(table.file.read_bytes())
    data[table.offset : table.offset + 8] = (4).to_bytes(8, "little")
    table.file.chmod(0o644)
    table.file.write_bytes(data)
    with pytest.raises(ValueError, match=r"layers\.1\.ffn\.gate\.tid2eid in .*expert ids from 0 to 4; the layer has experts 0 to 3"):
        load_model(tmp_path, progress=False)


def test_the_family_follows_the_exact_model_type(tmp_path):
    for model_type, kind in (("deepseek_v4", V4Config), ("deepseek_v41", V41Config)):
        raw = official_v4_config("flash") if kind is V4Config else official_config()
        (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": model_type}))
        assert type(load_config(tmp_path)) is kind


REQUIRED = sorted(
    set(official_v4_config("flash"))
    - {"architectures", "model_type", "attention_bias", "attention_dropout", "initializer_range", "torch_dtype"}
    - {"num_key_value_heads", "tie_word_embeddings", "topk_method", "expert_dtype"}
)


@pytest.mark.parametrize("size", ["flash", "pro"])
def test_ac_64_epsilon_comes_from_the_file_and_reaches_every_norm(size):
    """Norms with weights, queries without, the statistics of the hyper-connections; hc_eps is a key of its own."""
    config = V4Config.from_dict(official_v4_config(size) | {"rms_norm_eps": 3e-5, "hc_eps": 2e-6})
    config = dataclasses.replace(tiny_config(), rms_norm_eps=config.rms_norm_eps, hc_eps=config.hc_eps)
    modules = [module for _, module in nnx.iter_modules(abstract_model(config))]
    norms = [module for module in modules if isinstance(module, RMSNorm)]
    # A layer has 4 norms and one more in each compressor (1 at ratio 4, 1 of its indexer, 1 at ratio 128); the MTP layer
    # has 3 of its own.
    assert len(norms) == 4 * 4 + 3 + 3 + 1 and {norm.eps for norm in norms} == {3e-5}
    assert {m.eps for m in modules if isinstance(m, SelfMixedBlock | HybridAttention)} == {3e-5}
    assert {m.hc_eps for m in modules if isinstance(m, SelfMixedBlock)} == {2e-6}
    assert {(m.head_eps, m.head_norm_eps) for m in modules if isinstance(m, StreamHead)} == {(2e-6, 3e-5)}


@pytest.mark.parametrize("key", REQUIRED)
def test_ac_16_a_missing_key_is_an_error(key):
    raw = official_v4_config("pro") | {}
    del raw[key]
    with pytest.raises(ValueError, match=key):
        V4Config.from_dict(raw)


DSPARK = official_v4_config("flash-0731")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"index_topk": 0}, "index_topk = 0 must be positive"),
        ({"compress_ratios": [4] * 43}, "compress_ratios has 43 entries; 43 layers and 1 MTP layers need 44"),
        ({"compress_ratios": [4] * 44}, "the MTP layers see the window alone"),
        ({"num_nextn_predict_layers": 3}, "num_nextn_predict_layers = 3 is not supported; allowed: 0, 1"),
        (
            {"dspark_block_size": 5},
            "no safe default: dspark_noise_token_id, dspark_target_layer_ids, dspark_markov_rank",
        ),
        (DSPARK | {"compress_ratios": [0] * 43}, "compress_ratios has 43 entries; the dspark_ keys announce draft stages"),
        (DSPARK | {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2 is not supported; allowed: 1, 3"),
        (DSPARK | {"dspark_target_layer_ids": [40, 43]}, "dspark_target_layer_ids = [40, 43] names a layer outside 0..42"),
        (DSPARK | {"dspark_noise_token_id": 129280}, "dspark_noise_token_id = 129280 is outside the vocabulary"),
        ({"expert_dtype": "fp8"}, "expert_dtype = 'fp8' is not supported; allowed: 'fp4'"),
        ({"num_hash_layers": 44}, "num_hash_layers = 44 is outside 0..43"),
        ({"index_head_dim": 96}, "index_head_dim = 96 must be a power of two"),
        ({"head_dim": 500}, "must be a positive multiple of 64"),
        ({"hidden_size": 4100}, "hidden_size = 4100 must be a multiple of 128"),
        ({"scoring_func": "tanh"}, "scoring_func = 'tanh' is not supported"),
        ({"swiglu_limit": -1.0}, "swiglu_limit = -1.0 must not be negative"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type = 'linear' is not supported; allowed: 'yarn'"),
        (
            {"rope_scaling": official_v4_config("flash")["rope_scaling"] | {"mscale": 1.0}},
            "rope_scaling.mscale is set, but V4 scales attention by head_dim^-0.5 alone",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, sentence):
    with pytest.raises(ValueError) as caught:
        V4Config.from_dict(official_v4_config("flash") | change)
    assert sentence in str(caught.value)


def test_all_problems_are_said_at_once():
    raw = official_v4_config("flash") | {"index_topk": 0, "hidden_act": "gelu"}
    del raw["quantization_config"]["scale_fmt"]
    with pytest.raises(ValueError, match="3 problems"):
        V4Config.from_dict(raw)
