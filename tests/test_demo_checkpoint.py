"""The demo checkpoint: official names and dtypes, the same bytes for a seed, values that keep activations near 1."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from dsa_jax.config import load_config
from dsa_jax.demo import write_demo_checkpoint
from dsa_jax.inspect import inspect_checkpoint
from dsa_jax.layer_plan import draft_plan, layer_plan
from dsa_jax.layers.engram_hash import EngramHash, EngramTokenMap
from dsa_jax.weights.checkpoint import scan_checkpoint

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo") / "new" / "folder"
    write_demo_checkpoint(directory)
    return directory


@pytest.fixture(scope="module")
def stored(folder):
    return {name: tensor.view() for name, tensor in scan_checkpoint(folder).tensors.items()}


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_official_in_every_tensor(folder):
    report = inspect_checkpoint(folder)
    assert report.problems == () and report.shards == 3 and report.missing_shards == ()
    assert report.found_tensors == report.tensors
    assert set(report.by_dtype) == {"BF16", "F32", "F8_E4M3", "F8_E8M0", "I8"}
    for part in ("engram", "draft", "vision (left out)", "compressor", "indexer", "mHC"):
        assert report.by_part[part][0] > 0
    assert 3_000_000 < report.total_bytes < 10_000_000


def test_every_role(folder):
    config = load_config(folder)
    plan = layer_plan(config)
    assert {(role.mode, role.ratio) for role in plan} == {
        ("window", 0),
        ("full", 2),
        ("full", 1),
        ("reuse", 2),
        ("reuse", 1),
        ("reindex", 1),
    }
    for flag in ("makes_candidates", "uses_candidates", "engram", "draft_tap"):
        assert any(getattr(role, flag) for role in plan)
    assert len(draft_plan(config)) == 2 and config.vision_config is not None


def test_the_format_s_own_library_reads_the_headers(folder):
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118
                shapes[name] = tuple(file.get_slice(name).get_shape())
            if "layers.0.attn.attn_sink" in file.keys():  # noqa: SIM118
                sink = file.get_tensor("layers.0.attn.attn_sink")
    found = scan_checkpoint(folder).tensors
    assert shapes == {name: tensor.shape for name, tensor in found.items()}
    np.testing.assert_array_equal(sink, found["layers.0.attn.attn_sink"].view())


def test_tensors_lie_aligned(folder):
    for tensor in scan_checkpoint(folder).tensors.values():
        assert tensor.offset % tensor.view().dtype.itemsize == 0, tensor.name


def test_same_seed_same_bytes(folder, tmp_path):
    write_demo_checkpoint(tmp_path / "again")
    write_demo_checkpoint(tmp_path / "other", seed=1)
    first, again, other = contents(folder), contents(tmp_path / "again"), contents(tmp_path / "other")
    assert first == again and first.keys() == other.keys()
    assert {name for name in first if first[name] != other[name]} == {n for n in first if n.endswith(".safetensors")}


def test_written_over_itself_but_over_nothing_else(folder, tmp_path):
    write_demo_checkpoint(tmp_path / "twice", seed=1)
    write_demo_checkpoint(tmp_path / "twice")
    assert contents(tmp_path / "twice") == contents(folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is not empty and holds no demo checkpoint"):
        write_demo_checkpoint(tmp_path / "mine")
    assert contents(tmp_path / "mine") == {"config.json": b"{}"}
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        write_demo_checkpoint(tmp_path / "file")


def test_tokenizer(folder):
    config = load_config(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert [tokenizer.id_to_token(i) for i in range(3)] == [
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜▁pad▁｜>",
    ]
    assert tokenizer.token_to_id("<｜deepseek_image｜>") == config.image_token_id
    assert tokenizer.id_to_token(config.dspark_noise_token_id) == "<｜draft▁noise｜>"
    for text in ("Once upon a time", "naïve Ｗｉｄｅ 世界 🙂\n\tx = 1", "\x00\x7f"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text and max(ids) < config.vocab_size
    assert len(tokenizer.encode("Attention reads the rows that were kept").ids) < 20
    names = json.loads((folder / "tokenizer_config.json").read_text())
    assert names["bos_token"] == tokenizer.id_to_token(config.bos_token_id)
    assert names["eos_token"] == tokenizer.id_to_token(config.eos_token_id)


def test_engram_fits(folder):
    config = load_config(folder)
    tokens = EngramTokenMap.from_checkpoint(folder, config)
    assert tokens.ids.max() + 1 == config.engram_compressed_vocab_size < config.vocab_size
    assert [layer.layer for layer in EngramHash.from_config(config).layers] == [1, 4]


def dequantised(stored, name):
    weight, scale = stored[f"{name}.weight"], stored[f"{name}.scale"].astype(np.float32)
    if weight.dtype == np.int8:
        codes = weight.view(np.uint8)
        values = np.stack([FP4[codes & 15], FP4[codes >> 4]], -1).reshape(len(codes), -1)
        return values, values * np.repeat(scale, 32, 1)
    values = weight.astype(np.float32)
    rows = 1 if name.endswith("engram.embed") else 32
    spread = np.repeat(np.repeat(scale, rows, 0), 32, 1)[: values.shape[0], : values.shape[1]]
    return values, values * spread


def test_weights_keep_the_size_of_their_input(stored):
    quantised = [name.removesuffix(".scale") for name in stored if name.endswith(".scale")]
    for name in quantised:
        values, weight = dequantised(stored, name)
        # The scales are as small as they can be: the largest value is in the upper half of the format's range.
        largest = 6 if stored[f"{name}.weight"].dtype == np.int8 else 448
        assert largest / 2 < np.abs(values).max() <= largest, name
        gain = weight.std() * (1 if name.endswith("engram.embed") else np.sqrt(weight.shape[1]))
        assert 0.9 < gain < 1.1, name
    for name, array in stored.items():
        values = array.astype(np.float32)
        assert np.isfinite(values).all(), name
        if name.endswith("norm.weight"):
            assert 0.5 < values.min() and values.max() < 1.5, name
    assert 0.9 < stored["embed.weight"].astype(np.float32).std() < 1.1


def test_copies_collapse_to_their_mean(stored):
    """The biases alone: four copies are collapsed with weights near 1/4 and written back with weights near 1."""
    bases = np.stack([array for name, array in stored.items() if name.endswith("_base")])
    assert np.abs(1 / (1 + np.exp(-bases[:, :4])) - 0.25).max() < 0.1
    assert np.abs(2 / (1 + np.exp(-bases[:, 4:8])) - 1).max() < 0.3
    assert stored["layers.0.hc_attn_fn"].dtype == np.float32
    assert stored["layers.0.attn.wq_a.scale"].dtype == ml_dtypes.float8_e8m0fnu
