"""Inspection and memory plans, from headers and config alone: the golden checkpoint and the official one's headers."""

import collections
import contextlib
import json
import re
import shutil
import time

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from official_v41 import official_config
from safetensors_files import write_index, write_raw

from dsa_jax.config import V41Config, load_config
from dsa_jax.inspect import inspect_checkpoint
from dsa_jax.memory import cache_bytes, human, part_of, weights_per_device
from dsa_jax.weights import make_plan
from dsa_jax.weights.header import scan_file
from dsa_jax.weights.names import left_out_reason, target
from dsa_jax.weights.official import official_tensors

OFFICIAL_BYTES = 510_286_023_000
GIB = 2**30


@pytest.fixture(scope="module")
def official():
    return V41Config.from_dict(official_config())


@pytest.fixture(scope="module")
def tensors(official):
    with without_checks():
        return official_tensors(official)


@contextlib.contextmanager
def without_checks():
    """No annotation checks while a hundred thousand tensors pass: the small checkpoints go through the same code."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def checkpoint(request):
    return request.config.rootpath / "tests/golden/v41/checkpoint"


def shard_of(name):
    """The shard of the published checkpoint that holds the tensor `name`."""
    layer = re.match(r"layers\.(\d+)\.", name)
    if name.startswith(("vision.", "aligner.")):
        return 1
    if name.startswith(("embed.", "image_")):
        return 2
    if ".engram." in name:
        return 47 if layer[1] == "1" else 48
    if layer:
        return 3 + int(layer[1])
    if name.startswith("mtp."):
        return 44 + int(name.split(".")[1])
    return 43


@pytest.fixture(scope="module")
def official_folder(tmp_path_factory, tensors):
    """The published checkpoint's headers over holes instead of data."""
    folder = tmp_path_factory.mktemp("official")
    shards = collections.defaultdict(dict)
    for name, spec in tensors.items():
        shards[f"model-{shard_of(name):05d}-of-00048.safetensors"][name] = (spec.dtype, spec.shape, None)
    for file, held in shards.items():
        write_raw(folder / file, held, sparse=True)
    write_index(folder, {name: file for file, held in shards.items() for name in held})
    (folder / "config.json").write_text(json.dumps(official_config()))
    return folder


# ---------------------------------------------------------------- the official tensor list


def test_official_list_has_the_published_counts(tensors):
    assert len(tensors) == 96_085
    assert sum(spec.nbytes for spec in tensors.values()) == OFFICIAL_BYTES
    per_layer = collections.Counter(
        int(name.split(".")[1]) for name in tensors if name.startswith("layers.") and ".engram." not in name
    )
    published = (
        dict.fromkeys(range(40), 2334) | dict.fromkeys((24, 28, 32, 36), 2337) | {20: 2341, 2: 2342, 8: 2342, 14: 2342}
    )
    assert per_layer == published
    assert sum(".ffn.experts." in name for name in tensors) == 94_464
    assert sum(".engram." in name for name in tensors) == 12
    assert sum(name.startswith(("vision.", "aligner.", "image_")) for name in tensors) == 266
    assert sum(name.startswith("mtp.") and ".experts." not in name for name in tensors) == 97
    assert sum(name in ("embed.weight", "head.weight", "norm.weight") for name in tensors) == 3


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("embed.weight", "BF16", (129280, 5120)),
        ("layers.0.hc_attn_fn", "F32", (24, 20480)),
        ("layers.0.attn.wq_b.weight", "F8_E4M3", (32768, 1280)),
        ("layers.0.attn.wq_b.scale", "F8_E8M0", (1024, 40)),
        ("layers.0.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.0.attn.wo_b.scale", "F8_E8M0", (160, 256)),
        ("layers.5.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.5.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.20.attn.compressor.wkv.weight", "BF16", (512, 5120)),
        ("layers.24.attn.indexer.wq_b.weight", "F8_E4M3", (4096, 1280)),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384016682, 256)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.1.engram.wkv.weight", "F8_E4M3", (25600, 6144)),
        ("mtp.0.main_proj.weight", "F8_E4M3", (5120, 15360)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("vision.patch_embed.proj.weight", "BF16", (1024, 588)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
    ],
)
def test_official_shapes(tensors, name, dtype, shape):
    assert tensors[name] == (dtype, shape)


def test_official_list_of_the_golden_checkpoint(checkpoint):
    expected = official_tensors(load_config(checkpoint))
    found = {}
    for path in checkpoint.glob("*.safetensors"):
        found |= {tensor.name: (tensor.dtype, tensor.shape) for tensor in scan_file(path).tensors}
    assert found == expected


# ---------------------------------------------------------------- the official checkpoint's headers


@pytest.fixture(scope="module")
def official_report(official_folder):
    with without_checks():
        return inspect_checkpoint(official_folder, context=131072, batch=2)


def test_official_checkpoint_is_inspected(official_report):
    report = official_report
    lines = report.lines()
    assert report.problems == () and report.missing_shards == ()
    assert (report.shards, report.tensors, report.found_tensors) == (48, 96_085, 96_085)
    assert report.total_bytes == report.found_bytes == OFFICIAL_BYTES
    assert sum(size for _, size in report.by_part.values()) == OFFICIAL_BYTES
    assert sum(size for _, size in report.by_dtype.values()) == OFFICIAL_BYTES
    assert "other" not in report.by_part
    assert report.by_part["experts"] == (92_160, 40 * 384 * (3 * 2304 * 5120 // 2 + 3 * 2304 * 5120 // 32))
    assert report.by_part["engram"][0] == 12 and report.by_part["vision (left out)"][0] == 263
    assert any("48 of 48 shards found, 96085 of 96085 tensors whole" in line for line in lines)
    assert any(
        line.split() == ["layer", "20", "1", "full", "20", "20", "makes", "-", "-", "160000", "x16"] for line in lines
    )
    assert json.loads(json.dumps(report.as_dict()))["total_bytes"] == OFFICIAL_BYTES


def test_official_checkpoint_is_planned_for_devices_in_seconds(official_folder):
    """From the headers of files that hold nothing: 475 GiB on four devices, with the Engram tables on the host."""
    begun = time.process_time()
    with without_checks():
        report = inspect_checkpoint(official_folder, context=131072, batch=8, devices=4)
    assert time.process_time() - begun < 15  # seconds of one core
    plan = report.device_plan
    assert plan.mesh == {"ep": 1, "tp": 4, "cp": 1} and plan.fits and plan.total < 80 * GIB < plan.total + plan.host / 4
    (others,) = (share.nbytes for share in plan.shares if share.part == "engram")  # projections
    assert plan.host == report.by_part["engram"][1] - others
    (experts,) = (share.nbytes for share in plan.shares if share.part == "experts")
    assert experts == 40 * 384 * (3 * 2304 * 5120 // 2 + 3 * 2304 * 5120 // 32) // 4
    assert report.lines()[-1].startswith("Fits: mesh ep=1, tp=4, cp=1, Engram tables of 188.83 GiB in host memory")


def test_official_checkpoint_is_planned(official_folder, tensors):
    kinds = {
        "I8": jnp.uint8,
        "F8_E8M0": jnp.uint8,
        "F8_E4M3": jnp.float8_e4m3fn,
        "BF16": jnp.bfloat16,
        "F32": jnp.float32,
    }
    abstract, experts = {}, collections.Counter()
    with without_checks():
        for name, spec in tensors.items():
            if left_out_reason(name):
                continue
            place = target(name)
            experts[place.path] += 1
            shape = spec.shape if place.expert is None else (experts[place.path], *spec.shape)
            abstract[place.path] = jax.ShapeDtypeStruct(shape, kinds[spec.dtype])
        plan = make_plan(abstract, official_folder)
    assert len(plan.entries) == len(abstract)
    vision = sum(spec.nbytes for name, spec in tensors.items() if left_out_reason(name))
    assert plan.nbytes == OFFICIAL_BYTES - vision
    assert sum(entry.nbytes for entry in plan.entries) == plan.nbytes


def test_official_checkpoint_with_most_shards_missing(official_folder, tmp_path):
    """What an interrupted download leaves: the index and a few shards."""
    there = {1: 263, 2: 4, 43: 2, 48: 6}
    for name in [
        "config.json",
        "model.safetensors.index.json",
        *(f"model-{i:05d}-of-00048.safetensors" for i in there),
    ]:
        (tmp_path / name).symlink_to(official_folder / name)
    with without_checks():
        report = inspect_checkpoint(tmp_path, context=4096)
    assert report.shards == 48 and len(report.missing_shards) == 44
    assert report.tensors == 96_085 and report.found_tensors == sum(there.values())
    assert report.total_bytes == OFFICIAL_BYTES > report.found_bytes  # what is missing is known from the config
    assert len(report.problems) == 44
    assert "model-00005-of-00048.safetensors is missing (with 2342 tensors)" in report.problems
    assert "model-00047-of-00048.safetensors is missing (with 6 tensors)" in report.problems
    text = "\n".join(report.lines())
    assert "4 of 48 shards found, 275 of 96085 tensors whole" in text and "and 24 more" in text


# ---------------------------------------------------------------- small checkpoints, whole and damaged


def test_golden_checkpoint(checkpoint):
    report = inspect_checkpoint(checkpoint, context=1000, batch=2)
    assert report.problems == () and report.tensors == 957 and report.total_bytes == 4_469_924
    assert report.by_dtype["I8"] == (264, 11 * 1024 * 96)  # 88 experts of 3 matrices of 64 x 64 bytes
    assert len(report.plan) == 10 and len(report.draft) == 2
    text = "\n".join(report.lines())
    for part in ("Layer plan", "mtp.1", "reindex", "makes", "vision (left out)", "2 of 2 shards found", "devices"):
        assert part in text


def test_config_alone(checkpoint, tmp_path):
    shutil.copy(checkpoint / "config.json", tmp_path)
    report = inspect_checkpoint(tmp_path)
    assert report.total_bytes == 4_469_924 and report.found_bytes == 0
    assert report.problems[0] == "there is neither model.safetensors.index.json nor a .safetensors file"


def test_cut_shard_and_strange_tensors(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    write_raw(folder / "model-00003-of-00002.safetensors", {"norm.weight": ("F64", (2,), bytes(16))})
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    del index["head.weight"]
    index["layers.0.attn.extra.weight"] = "model-00001-of-00002.safetensors"
    write_index(folder, index)
    report = inspect_checkpoint(folder)
    assert report.found_tensors == 956
    text = "\n".join(report.problems)
    assert "model-00002-of-00002.safetensors is cut: 1 of" in text
    assert "holds head.weight, which model.safetensors.index.json does not know" in text
    assert "places layers.0.attn.extra.weight in model-00001-of-00002.safetensors, whose header" in text


def test_tensors_that_differ_from_the_config(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] = 96
    config["text_config"]["index_source_layer_ids"] = [2, 4, 5, 9]
    (folder / "config.json").write_text(json.dumps(config))
    text = "\n".join(inspect_checkpoint(folder).problems)
    assert "layers.0.ffn.experts.0.w1.weight is I8 [64, 64]; the config implies I8 [96, 64]" in text
    assert "layers.7.attn.indexer.wq_b.weight (F8_E4M3 [512, 96]) belongs to no tensor that the config implies" in text


def test_vision_config_without_sizes():
    raw = official_config()
    raw["vision_config"] = {"hidden_size": 1024}
    with pytest.raises(
        ValueError, match="vision_config must give these sizes as integers: intermediate_size, patch_size"
    ):
        official_tensors(V41Config.from_dict(raw))


@pytest.mark.parametrize(
    ("context", "batch", "sentence"),
    [(0, 1, "context = 0 is outside 1..65536"), (65537, 1, "context = 65537"), (16, 0, "batch = 0 must be at least 1")],
)
def test_sizes_that_do_not_fit(checkpoint, context, batch, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        inspect_checkpoint(checkpoint, context=context, batch=batch)


# ---------------------------------------------------------------- memory


def test_cache_bytes_of_the_official_model(official):
    """890 bytes a token and 40 x 128 window rows of 528 bytes a request, as published."""
    found = cache_bytes(official, 1_048_576, 1)
    assert found.per_token == 890
    assert found.parts["compressed KV"] + found.parts["index keys"] == 890 * 1_048_576
    assert found.parts["window rows"] == 40 * 128 * 528
    assert found.parts["draft window rows"] == 3 * 128 * 528
    assert found.parts["open groups"] == 3 * 2 * 2 * 512 * 4
    assert found.parts["Engram ids"] == 12
    assert cache_bytes(official, 4095, 3).parts["compressed KV"] == 3 * (3 * 2047 + 4095) * 288
    assert cache_bytes(official, 4095, 3).total == 3 * cache_bytes(official, 4095, 1).total


def test_memory_of_several_devices(official_report, tensors):
    report = official_report
    weights = report.weights_per_device
    left_out = report.by_part["vision (left out)"][1]
    assert weights[1] == OFFICIAL_BYTES - left_out
    # What is divided and what is not, counted once more by hand.
    divided = re.compile(
        r"(^embed|^head|markov_head\.\w+)\.weight$|\.experts\.|wq_b\.|attn_sink$|\.wo_[ab]\.|weights_proj|engram\.embed"
    )
    shared = sum(s.nbytes for n, s in tensors.items() if not divided.search(n) and part_of(n) != "vision (left out)")
    for devices in (2, 4, 8):
        even = shared + (weights[1] - shared) / devices
        # Engram's prime row counts do not divide evenly: at most one row more, of 256 + 8 bytes, in each table.
        assert even <= weights[devices] <= even + 2 * 264
    assert weights[8] < 80 * GIB < weights[4]


def test_units_are_not_split(checkpoint):
    """Two output groups keep two devices of eight busy; eight experts all of them."""
    config = load_config(checkpoint)
    assert weights_per_device(config, [("layers.0.attn.wo_b.weight", 1000)], [8]) == {8: 500}
    assert weights_per_device(config, [("layers.0.ffn.experts.3.w1.weight", 1000)], [8]) == {8: 125}
    assert weights_per_device(config, [("layers.0.ffn.shared_experts.w1.weight", 1000)], [8]) == {8: 1000}
    assert weights_per_device(config, [("vision.norm.weight", 1000)], [1]) == {1: 0}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("layers.3.attn.wq_a.weight", "attention"),
        ("layers.3.attn.q_norm.weight", "attention"),
        ("layers.3.attn_norm.weight", "norms"),
        ("layers.2.attn.compressor.norm.weight", "compressor"),
        ("layers.2.attn.indexer.k_norm.weight", "indexer"),
        ("layers.2.ffn.experts.3.w1.scale", "experts"),
        ("layers.2.ffn.shared_experts.w1.scale", "shared experts"),
        ("layers.2.ffn.gate.bias_vl", "router"),
        ("layers.2.hc_ffn_base", "mHC"),
        ("layers.1.engram.wkv.scale", "engram"),
        ("mtp.0.ffn.experts.0.w1.weight", "draft"),
        ("image_start", "embedding"),
        ("norm.weight", "norms"),
        ("something.else", "other"),
    ],
)
def test_parts(name, part):
    assert part_of(name) == part


def test_human_sizes():
    assert [human(n) for n in (0, 1023, 1024, 3 * 2**20, 475.24 * GIB, 5000 * GIB)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "3.00 MiB",
        "475.24 GiB",
        "5,000.00 GiB",
    ]
