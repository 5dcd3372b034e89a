"""V3.2: inspection and memory plans, from headers and config alone."""

import json
import re

import numpy as np
import pytest
from test_inspect import without_checks
from test_v32_config import RELEASED
from tiny_v32 import CHECKPOINT

from dsa_jax.cli import main
from dsa_jax.config import load_config
from dsa_jax.config_v32 import V32Config
from dsa_jax.demo import write_demo_checkpoint
from dsa_jax.inspect import inspect_checkpoint
from dsa_jax.loading import load_model
from dsa_jax.memory import latent_cache_bytes, weights_per_device
from dsa_jax.weights.checkpoint import scan_checkpoint
from dsa_jax.weights.names import official_name
from dsa_jax.weights.official_v32 import file_name, official_tensors

PUBLISHED_TENSORS = 92_425


@pytest.fixture(scope="module")
def tensors():
    with without_checks():
        return official_tensors(V32Config.from_dict(RELEASED))


def test_official_list_has_the_published_count(tensors):
    assert len(tensors) == PUBLISHED_TENSORS
    assert sum(name.startswith("layers.61.") for name in tensors) == 21 + 1544 + 6
    weights = sum(s.nbytes for n, s in tensors.items() if not n.endswith(".scale"))
    assert 685e9 < weights < 695e9  # 671 billion parameters and the MTP layer's 14 billion, most of them a byte


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.5.attn.wkv_a.weight", "F8_E4M3", (576, 7168)),
        ("layers.5.attn.wkv_a.scale", "F32", (5, 56)),
        ("layers.5.attn.wq_b.weight", "F8_E4M3", (24576, 1536)),
        ("layers.5.attn.wkv_b.scale", "F32", (256, 4)),
        ("layers.5.attn.wo.weight", "F8_E4M3", (7168, 16384)),
        ("layers.5.attn.indexer.wk.scale", "F32", (1, 56)),
        ("layers.5.attn.indexer.wq_b.scale", "F32", (64, 12)),
        ("layers.5.attn.indexer.weights_proj.weight", "BF16", (64, 7168)),
        ("layers.2.ffn.w1.scale", "F32", (144, 56)),
        ("layers.3.ffn.experts.255.w2.scale", "F32", (56, 16)),
        ("layers.3.ffn.gate.bias", "F32", (256,)),
        ("layers.61.eh_proj.weight", "BF16", (7168, 14336)),
    ],
)
def test_official_shapes(tensors, name, dtype, shape):
    assert tensors[name] == (dtype, shape)


def test_file_names_are_the_way_back():
    config = load_config(CHECKPOINT)
    expected = official_tensors(config)
    assert all(official_name(file_name(name)) == name for name in expected)
    stored = scan_checkpoint(CHECKPOINT).tensors
    assert set(stored) <= {file_name(name) for name in expected}
    for name, tensor in stored.items():
        spec = expected[official_name(name)]
        assert tensor.shape == spec.shape
        assert tensor.dtype == spec.dtype or (tensor.dtype, spec.dtype) == ("BF16", "F32")


def test_golden_checkpoint_is_inspected(capsys, tmp_path):
    """The golden folder holds a part of the MTP layer: what is missing of it is named, and nothing else is."""
    report = inspect_checkpoint(CHECKPOINT, context=100, batch=2)
    assert report.problems and all(
        re.match(r"layers\.3\..* is in no file, though the config implies it", problem) for problem in report.problems
    )
    assert "other" not in report.by_part and report.by_part["draft (left out)"][0] == 83
    assert report.by_part["dense feed-forward"] == (6, 3 * (256 * 256 + 4 * 4))
    left_out = report.by_part["draft (left out)"][1]
    assert report.weights_per_device[1] == report.total_bytes - left_out
    assert main(["inspect", str(CHECKPOINT), "--json", str(tmp_path / "report.json")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["layer", "0", "dense", "24", "10000", "x4"] in lines and ["layer", "2", "moe", "24", "10000", "x4"] in lines
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["model_type"] == "deepseek_v32" and len(written["layer_plan"]) == 3


def test_cache_bytes_of_the_official_model():
    """656 and 132 bytes a token and layer."""
    config = V32Config.from_dict(RELEASED)
    found = latent_cache_bytes(config, 163840, 2)
    assert found.per_token == 61 * (656 + 132)
    assert found.parts == {"latent KV": 2 * 61 * 163840 * 656, "index keys": 2 * 61 * 163840 * 132}
    for context, batch, sentence in ((0, 1, "outside 1..163840"), (163841, 1, "outside"), (5, 0, "batch = 0")):
        with pytest.raises(ValueError, match=sentence):
            latent_cache_bytes(config, context, batch)


def test_heads_and_experts_are_divided():
    config = V32Config.from_dict(RELEASED)
    heads = ("attn.wq_b.weight", "attn.wkv_b.scale", "attn.wo.weight", "attn.indexer.wq_b.scale")
    for name in (*heads, "ffn.experts.0.w1.weight"):
        assert weights_per_device(config, [(f"layers.9.{name}", 1024)], [8]) == {8: 128}
    for name in ("attn.wkv_a.weight", "ffn.shared_experts.w1.weight", "ffn.gate.weight"):
        assert weights_per_device(config, [(f"layers.9.{name}", 1024)], [8]) == {8: 1024}


def test_demo_checkpoint_is_official_in_every_tensor_and_loads(tmp_path):
    config = write_demo_checkpoint(tmp_path / "demo", family="v32")
    assert load_config(tmp_path / "demo") == config and isinstance(config, V32Config)
    report = inspect_checkpoint(tmp_path / "demo")
    assert report.problems == () and report.found_tensors == report.tensors and report.shards == 3
    assert set(report.by_dtype) == {"BF16", "F32", "F8_E4M3"}
    assert {role.ffn for role in report.plan} == {"dense", "moe"} and report.by_part["draft (left out)"][0] > 0
    stored = scan_checkpoint(tmp_path / "demo").tensors
    assert all(name.startswith(("model.", "lm_head.")) for name in stored)
    for name in ("0.mlp.up_proj", "1.mlp.experts.3.down_proj", "2.self_attn.kv_a_proj_with_mqa"):
        name = "model.layers." + name
        weight, scale = (stored[name + end].view().astype(np.float64) for end in (".weight", ".weight_scale_inv"))
        values = weight * np.repeat(np.repeat(scale, 128, 0), 128, 1)[: weight.shape[0], : weight.shape[1]]
        assert 224 < np.abs(weight).max() <= 448 and 0.9 < values.std() * np.sqrt(weight.shape[1]) < 1.1
    lm = load_model(tmp_path / "demo", progress=False)
    assert lm.parameter("layers.1.ffn.experts.w1.weight").shape == (8, 128, 256)


def test_a_demo_of_an_unknown_family_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no demo of the family 'v5'. Allowed: v41, v4, v32"):
        write_demo_checkpoint(tmp_path / "demo", family="v5")
