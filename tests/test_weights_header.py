"""Headers: every dtype, packed and logical shapes, and sentences for every kind of damage."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors_files import write_index, write_raw, write_sharded

from dsa_jax.weights import names
from dsa_jax.weights.checkpoint import scan_checkpoint
from dsa_jax.weights.header import scan_file

RANDOM = np.random.default_rng(3).integers(0, 256, 4096, np.uint8).tobytes()


def scanned(path):
    header = scan_file(path)
    return {tensor.name: tensor for tensor in header.tensors}, list(header.problems)


def header_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_ac_61_all_dtypes_with_stored_and_logical_shapes(tmp_path):
    kinds = {
        "BF16": (ml_dtypes.bfloat16, (3, 4), (3, 4)),
        "F32": (np.float32, (3, 4), (3, 4)),
        "F64": (np.float64, (3, 4), (3, 4)),
        "F16": (np.float16, (3, 4), (3, 4)),
        "F8_E4M3": (ml_dtypes.float8_e4m3fn, (3, 4), (3, 4)),
        "F8_E8M0": (ml_dtypes.float8_e8m0fnu, (3, 4), (3, 4)),
        "I8": (np.int8, (3, 4), (3, 8)),  # DeepSeek's packed FP4: the header gives the stored shape
        "F4": (np.uint8, (3, 2), (3, 4)),  # the header gives the logical shape
        "U8": (np.uint8, (3, 4), (3, 4)),
        "I16": (np.int16, (3, 4), (3, 4)),
        "I32": (np.int32, (3, 4), (3, 4)),
        "I64": (np.int64, (3, 4), (3, 4)),
    }
    header_shape = (3, 4)
    tensors = {
        # An odd number of bytes first, so that the others are not aligned.
        "odd": ("U8", (3,), b"abc"),
        **{
            kind: (kind, header_shape, RANDOM[: int(np.prod(stored)) * np.dtype(dtype).itemsize])
            for kind, (dtype, stored, _) in kinds.items()
        },
    }
    write_raw(tmp_path / "a.safetensors", tensors)
    found, problems = scanned(tmp_path / "a.safetensors")
    assert problems == [] and list(found) == ["odd", *kinds]
    for kind, (dtype, stored, logical) in kinds.items():
        info = found[kind]
        assert (info.dtype, info.shape, info.logical_shape) == (kind, stored, logical)
        view = info.view()
        assert view.dtype == dtype and view.shape == stored
        assert view.tobytes() == tensors[kind][2]
        assert not view.flags.writeable


def test_ac_61_odd_width_of_f4_is_refused(tmp_path):
    header_file(tmp_path / "a.safetensors", {"w": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, b"abc")
    found, problems = scanned(tmp_path / "a.safetensors")
    assert found == {} and len(problems) == 1
    assert "w has dtype F4 and shape [2, 3]" in problems[0] and "must be even" in problems[0]


def test_scalars_and_empty_tensors(tmp_path):
    write_raw(tmp_path / "a.safetensors", {"s": ("F32", (), b"\0\0\x80?"), "e": ("BF16", (0, 5), b"")})
    found, problems = scanned(tmp_path / "a.safetensors")
    assert problems == [] and found["s"].view() == 1.0 and found["e"].view().shape == (0, 5)


@pytest.mark.parametrize(
    ("header", "data", "sentence"),
    [
        (b"{", b"", "not JSON"),
        (b"[]", b"", "no JSON object"),
        (b"\xff\xfe", b"", "not JSON"),
        ({"w": 3}, b"", "entry of w is damaged"),
        ({"w": {"dtype": "F32", "shape": [1]}}, b"abcd", "entry of w is damaged"),
        ({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"abcd", "entry of w is damaged"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"abcd", "entry of w is damaged"),
        ({"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, b"abcd", "entry of w is damaged"),
        (
            {"w": {"dtype": "F6", "shape": [1], "data_offsets": [0, 4]}},
            b"abcd",
            "dtype F6, which is not known. Allowed:",
        ),
        (
            {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            b"abcd",
            "takes 8 bytes, but its header gives it 4",
        ),
        (
            {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
            b"abcde",
            "1 bytes more than its header describes",
        ),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"abcd", "is cut: 4 of"),
        (
            b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"a",
            "describes w twice",
        ),
        (
            {
                "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                "b": {"dtype": "U8", "shape": [4], "data_offsets": [3, 7]},
            },
            b"abcdefg",
            "b overlaps a",
        ),
        (
            {
                "a": {"dtype": "U8", "shape": [6], "data_offsets": [0, 6]},
                "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
                "c": {"dtype": "U8", "shape": [2], "data_offsets": [4, 6]},
            },
            b"abcdef",
            "c overlaps a",
        ),
    ],
)
def test_damaged_headers_become_sentences(tmp_path, header, data, sentence):
    path = header_file(tmp_path / "part.safetensors", header, data)
    _, problems = scanned(path)
    assert any(sentence in problem and "part.safetensors" in problem for problem in problems), problems


@pytest.mark.parametrize("size", [0, 7, 8, 20])
def test_file_cut_in_its_header(tmp_path, size):
    write_raw(tmp_path / "a.safetensors", {"w": ("F32", (2,), b"abcdefgh")}, size=size)
    found, problems = scanned(tmp_path / "a.safetensors")
    assert found == {} and len(problems) == 1 and f"holds {size} bytes" in problems[0]


def test_announced_header_too_long(tmp_path):
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)
    assert "announces a header of 200000000 bytes" in scan_file(path).problems[0]


# ---------------------------------------------------------------- folders


def tensors(*wanted):
    return {name: ("U8", (4,), b"abcd") for name in wanted}


def test_index_against_files(tmp_path):
    write_raw(tmp_path / "one.safetensors", tensors("a", "b", "stray"))
    write_raw(tmp_path / "two.safetensors", tensors("c", "a"))
    write_index(
        tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors", "d": "one.safetensors"}
    )
    problems = scan_checkpoint(tmp_path).problems
    for sentence in (
        "one.safetensors holds b, which model.safetensors.index.json places in two.safetensors",
        "one.safetensors holds stray, which model.safetensors.index.json does not know",
        "model.safetensors.index.json places d in one.safetensors, whose header does not describe it",
        "model.safetensors.index.json places b in two.safetensors, whose header does not describe it",
        "two.safetensors holds a, which model.safetensors.index.json places in one.safetensors",
        "a is in two files: one.safetensors and two.safetensors",
    ):
        assert sentence in problems
    assert len(problems) == 6


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": "../b.safetensors"}}']
)
def test_damaged_index(tmp_path, text):
    write_raw(tmp_path / "model.safetensors", tensors("a"))
    (tmp_path / "model.safetensors.index.json").write_text(text)
    problems = scan_checkpoint(tmp_path).problems
    assert len(problems) == 1 and "model.safetensors.index.json is damaged" in problems[0]


def test_without_an_index_the_numbering_tells_what_is_missing(tmp_path):
    shards = {f"model-{i:05d}-of-00004.safetensors": tensors(f"t{i}") for i in (1, 2, 4)}
    write_sharded(tmp_path, shards, index=False)
    found = scan_checkpoint(tmp_path)
    assert found.missing_files == ("model-00003-of-00004.safetensors",)
    assert found.problems == ("model-00003-of-00004.safetensors is missing",)
    assert found.counts().startswith("3 of 4 shards found, with 3 whole tensors")


def test_single_file(tmp_path):
    write_raw(tmp_path / "model.safetensors", tensors("a"))
    found = scan_checkpoint(tmp_path)
    assert found.problems == () and found.files == ("model.safetensors",) and list(found.tensors) == ["a"]


def test_no_folder(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        scan_checkpoint(tmp_path / "nowhere")


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "official"),
    [
        ("layers.3.attn.wq_a.weight", "layers.3.attn.wq_a.weight"),
        ("model.layers.3.self_attn.wq_a.weight_scale_inv", "layers.3.attn.wq_a.scale"),
        ("model.layers.3.mlp.experts.7.w1.weight", "layers.3.ffn.experts.7.w1.weight"),
        ("layers.3.mlp.gate.e_score_correction_bias", "layers.3.ffn.gate.bias"),
        ("vision.blocks.0.mlp.w1.weight", "vision.blocks.0.mlp.w1.weight"),
        ("model.vision.blocks.0.mlp.w1.weight", "vision.blocks.0.mlp.w1.weight"),
        ("mtp.0.mlp.shared_experts.w2.weight", "mtp.0.ffn.shared_experts.w2.weight"),
    ],
)
def test_renames(name, official):
    assert names.official_name(name) == official


@pytest.mark.parametrize("name", ["vision.norm.weight", "aligner.w1.bias", "mtp.0.embed.weight", "mtp.12.head.weight"])
def test_left_out(name):
    assert names.left_out_reason(name)


@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "image_start",
        "mtp.2.markov_head.embed.weight",
        "mtp.2.markov_head.head.weight",
        "mtp.2.norm.weight",
    ],
)
def test_not_left_out(name):
    assert names.left_out_reason(name) is None


def test_targets():
    assert names.target("layers.3.ffn.experts.17.w2.scale") == names.Target("layers.3.ffn.experts.w2.scale", 17)
    assert names.target("mtp.0.ffn.experts.0.w1.weight") == names.Target("mtp.0.ffn.experts.w1.weight", 0)
    for name in ("layers.3.ffn.shared_experts.w2.scale", "layers.3.attn.wq_a.weight"):
        assert names.target(name) == names.Target(name, None)
