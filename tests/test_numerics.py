"""`dsa-jax numerics` against what DeepSeek's own code computed, and what it refuses."""

import json

import numpy as np
import pytest
from conftest import GOLDEN
from numerics_command import check, files, main
from tiny import CHECKPOINT

V41 = GOLDEN / "v41"


@pytest.mark.parametrize("name", files("short_f32", "golden_f32", "golden_f32q", "golden_ref", "image_f32", "image_ref"))
def test_numerics_agrees_with_every_golden_file(name, tmp_path, capsys):
    check(CHECKPOINT, V41 / f"{name}.safetensors", 20, tmp_path, capsys)


def changed_golden(source, target, name: str, change) -> None:
    """A copy of a golden file in which one float32 tensor is changed."""
    data = bytearray(source.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    first, last = json.loads(data[8:start])[name]["data_offsets"]
    values = np.frombuffer(bytes(data[start + first : start + last]), np.float32).copy()
    change(values)
    data[start + first : start + last] = values.tobytes()
    target.write_bytes(data)


def test_numerics_fails_where_one_value_is_wrong(tmp_path, capsys):
    def nudge(values):
        values[77] += 1e-3

    changed_golden(V41 / "short_f32.safetensors", tmp_path / "short_f32.safetensors", "len3.decode.logits", nudge)
    assert main(CHECKPOINT, tmp_path / "short_f32.safetensors") == 1
    printed = capsys.readouterr().out
    assert "FAIL len3.decode.logits: largest 1.00" in printed
    assert "79 of 80 judged tensors" in printed


def test_numerics_refuses_the_released_decode_loop(tmp_path, capsys):
    (tmp_path / "released_decode_f32.safetensors").write_bytes(b"")
    assert main(CHECKPOINT, tmp_path / "released_decode_f32.safetensors") == 2
    assert "released decode loop with its known fault" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("checkpoint/model-00001-of-00002.safetensors", "not an end-to-end golden file"),
        ("checkpoint/config.json", "config.json"),
    ],
)
def test_numerics_refuses_other_files(name, sentence, capsys):
    assert main(CHECKPOINT, V41 / name) == 2
    assert sentence in capsys.readouterr().err
