"""`dsa-jax numerics` on V4's golden checkpoint."""

import numpy as np
import pytest
from conftest import GOLDEN
from numerics_command import check, files
from tiny_v4 import CHECKPOINT

from dsa_jax.decode import ImageSpan
from dsa_jax.loading import load_model

V4 = GOLDEN / "v4"
JUDGED = {"golden_f32": 35, "golden_f32q": 9, "golden_ref": 11, "short_f32": 32}  # tensors with a verdict in each file


@pytest.mark.parametrize("name", files("short_f32", "golden_f32", "golden_f32q", "golden_ref"))
def test_numerics_agrees_with_every_golden_file(name, tmp_path, capsys):
    judged = check(CHECKPOINT, V4 / f"{name}.safetensors", JUDGED[name], tmp_path, capsys)
    if name in ("golden_f32", "golden_ref"):
        assert "mtp.logits_at_positions" in judged


def test_images_are_refused():
    """V4 reads text; the refusal comes before anything is compiled."""
    lm = load_model(CHECKPOINT, "f32", progress=False)
    image = ImageSpan(0, np.zeros((1, lm.config.hidden_size), np.float32))
    with pytest.raises(ValueError, match="text alone"):
        lm.prefill(lm.new_cache(1, 32), [[5, 6]], [[image]])
