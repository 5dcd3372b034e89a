"""`dsa-jax numerics` on V4's golden checkpoint."""

import json

import numpy as np
import pytest
from conftest import GOLDEN
from tiny_v4 import CHECKPOINT

from dsa_jax.cli import main
from dsa_jax.decode import ImageSpan
from dsa_jax.loading import load_model

V4 = GOLDEN / "v4"
JUDGED = {"golden_f32": 35, "golden_f32q": 9, "golden_ref": 11, "short_f32": 32}  # tensors with a verdict in each file


@pytest.mark.parametrize("name", ["golden_f32", "golden_f32q", "golden_ref", "short_f32"])
def test_numerics_agrees_with_every_golden_file(name, tmp_path, capsys):
    report = tmp_path / "report.json"
    status = main(["numerics", str(CHECKPOINT), str(V4 / f"{name}.safetensors"), "--json", str(report)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    result = json.loads(report.read_text())
    assert result["ok"] and result["mode"] == {"f32": "f32", "f32q": "f32q", "ref": "bf16"}[name.rpartition("_")[2]]
    judged = {row["name"] for row in result["tensors"] if row["ok"] is not None}
    assert len(judged) >= JUDGED[name]
    if result["mode"] == "f32":
        assert len(judged) == len(result["tensors"])
    if name in ("golden_f32", "golden_ref"):
        assert "mtp.logits_at_positions" in judged


def test_images_are_refused():
    """V4 reads text; the refusal comes before anything is compiled."""
    lm = load_model(CHECKPOINT, "f32", progress=False)
    image = ImageSpan(0, np.zeros((1, lm.config.hidden_size), np.float32))
    with pytest.raises(ValueError, match="text alone"):
        lm.prefill(lm.new_cache(1, 32), [[5, 6]], [[image]])
