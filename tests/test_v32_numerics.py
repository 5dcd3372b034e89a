"""V3.2: `dsa-jax numerics` against what DeepSeek's own code computed, and what of a checkpoint is loaded."""

import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from numerics_command import check, files
from safetensors_files import write_sharded
from tiny_v32 import CHECKPOINT

from dsa_jax.config import load_config
from dsa_jax.families import family_of
from dsa_jax.loading import abstract_parameters, load_model
from dsa_jax.weights import make_plan
from dsa_jax.weights.checkpoint import scan_checkpoint
from dsa_jax.weights.names import official_name

V32 = GOLDEN / "v32"


@pytest.mark.parametrize("name", files("short_f32", "golden_f32", "golden_f32q", "golden_ref"))
def test_numerics_agrees_with_every_golden_file(name, tmp_path, capsys):
    check(CHECKPOINT, V32 / f"{name}.safetensors", 14, tmp_path, capsys)


def plan_of(directory):
    config = load_config(directory)
    return make_plan(abstract_parameters(config), directory, family_of(config).left_out(config))


def test_every_parameter_is_filled_and_the_mtp_layer_is_left_out_with_one_line(caplog):
    plan = plan_of(CHECKPOINT)
    assert len(plan.notes) == 1 and plan.notes[0].startswith("left out: ")
    assert plan.notes[0].endswith("the MTP layer: drafting with it is not carried")
    stored = scan_checkpoint(CHECKPOINT).tensors
    filled = {source.name for entry in plan.entries for source in entry.sources}
    assert filled == {name for name in stored if not name.startswith("model.layers.3.")}
    with caplog.at_level(logging.INFO, "dsa_jax"):
        lm = load_model(CHECKPOINT, "bf16", progress=False)
    assert caplog.text.count("left out") == 1
    weight, scale = (lm.parameter(f"layers.1.ffn.experts.w2.{kind}") for kind in ("weight", "scale"))
    assert (weight.shape, weight.dtype) == ((8, 256, 128), jnp.float8_e4m3fn)
    assert (scale.shape, scale.dtype) == ((8, 2, 1), jnp.uint8)
    # 160 rows are one and a quarter tile.
    assert lm.parameter("layers.0.attn.wkv_a.scale").shape == (2, 2)
    assert lm.parameter("layers.0.attn.q_norm.weight").dtype == jnp.float32
    expert = stored["model.layers.1.mlp.experts.5.down_proj.weight_scale_inv"].view()
    assert np.array_equal(2.0 ** (np.asarray(scale, np.float64)[5] - 127), expert)


def test_converted_names_fill_the_same_parameters(tmp_path):
    """The same tensors under the names that DeepSeek's converter gives them, as a re-export has them."""
    stored = scan_checkpoint(CHECKPOINT).tensors
    renamed = {official_name(name): t for name, t in stored.items() if not name.startswith("model.layers.3.")}
    shutil.copy(CHECKPOINT / "config.json", tmp_path)
    write_sharded(
        tmp_path, {"model.safetensors": {n: (t.dtype, t.shape, t.view().tobytes()) for n, t in renamed.items()}}
    )
    assert any(n.endswith("attn.wkv_b.scale") for n in renamed) and not any("self_attn" in n for n in renamed)
    originals, converted = ({e.path: e for e in plan_of(folder).entries} for folder in (CHECKPOINT, tmp_path))
    assert set(converted) == set(originals)
    for path, entry in originals.items():
        other = converted[path]
        assert (entry.shape, entry.dtype, entry.conversion) == (other.shape, other.dtype, other.conversion)
        assert entry.sources[0].view().tobytes() == other.sources[0].view().tobytes(), path


def test_a_layer_beyond_the_config_s_is_not_left_out(tmp_path):
    """Layer 3 is the MTP layer only because the config says that there is one behind the 3 layers."""
    for path in CHECKPOINT.iterdir():
        shutil.copyfile(path, tmp_path / path.name)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match="unexpected tensors"):
        plan_of(tmp_path)


def test_ac_62_a_missing_and_a_cut_shard_are_one_error(tmp_path, monkeypatch):
    for path in CHECKPOINT.iterdir():
        if "00001" not in path.name:
            shutil.copyfile(path, tmp_path / path.name)
    cut = tmp_path / "model-00002-of-00002.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    monkeypatch.setattr(jax, "device_put", lambda *_: pytest.fail("something was allocated"))
    with pytest.raises(ValueError) as caught:
        load_model(tmp_path, "bf16")
    message = str(caught.value)
    assert "model-00001-of-00002.safetensors is missing (with 134 tensors)" in message
    assert cut.name in message and "1 of 2 shards found" in message and "To resume the download" in message


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.embed_tokens.weight", "embed.weight"),
        ("lm_head.weight", "head.weight"),
        ("model.norm.weight", "norm.weight"),
        ("model.layers.7.input_layernorm.weight", "layers.7.attn_norm.weight"),
        ("model.layers.7.post_attention_layernorm.weight", "layers.7.ffn_norm.weight"),
        ("model.layers.7.self_attn.q_a_proj.weight_scale_inv", "layers.7.attn.wq_a.scale"),
        ("model.layers.7.self_attn.q_a_layernorm.weight", "layers.7.attn.q_norm.weight"),
        ("model.layers.7.self_attn.q_b_proj.weight", "layers.7.attn.wq_b.weight"),
        ("model.layers.7.self_attn.kv_a_proj_with_mqa.weight", "layers.7.attn.wkv_a.weight"),
        ("model.layers.7.self_attn.kv_a_layernorm.weight", "layers.7.attn.kv_norm.weight"),
        ("model.layers.7.self_attn.kv_b_proj.weight", "layers.7.attn.wkv_b.weight"),
        ("model.layers.7.self_attn.o_proj.weight", "layers.7.attn.wo.weight"),
        ("model.layers.7.self_attn.indexer.k_norm.bias", "layers.7.attn.indexer.k_norm.bias"),
        ("model.layers.7.self_attn.indexer.wk.weight_scale_inv", "layers.7.attn.indexer.wk.scale"),
        ("model.layers.0.mlp.gate_proj.weight", "layers.0.ffn.w1.weight"),
        ("model.layers.0.mlp.up_proj.weight", "layers.0.ffn.w3.weight"),
        ("model.layers.0.mlp.down_proj.weight_scale_inv", "layers.0.ffn.w2.scale"),
        ("model.layers.7.mlp.gate.e_score_correction_bias", "layers.7.ffn.gate.bias"),
        ("model.layers.7.mlp.experts.255.up_proj.weight", "layers.7.ffn.experts.255.w3.weight"),
        ("model.layers.7.mlp.shared_experts.down_proj.weight", "layers.7.ffn.shared_experts.w2.weight"),
        # The converted files of DeepSeek's inference code.
        ("layers.7.attn.wkv_b.scale", "layers.7.attn.wkv_b.scale"),
    ],
)
def test_names(stored, name):
    assert official_name(stored) == name
