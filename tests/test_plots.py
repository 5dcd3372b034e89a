"""Pictures: what stands where in them, and that the files are written."""

import numpy as np
import pytest

from dsa_jax import plots
from dsa_jax.golden.compare import Row
from pallas_kernels import bench


@pytest.mark.parametrize(
    ("measure", "value", "limit", "ok"),
    [
        ("largest", 1e-4, 2e-4, True),
        ("largest", 3e-4, 2e-4, False),
        ("largest", 0.0, 2e-4, True),
        ("list overlap", 0.9, 0.5, True),
        ("list overlap", 0.4, 0.5, False),
        ("rows differing", 0.0, 0.0, True),
        ("rows differing", 0.1, 0.0, False),
        ("largest", None, None, False),
    ],
)
def test_a_failure_and_nothing_else_is_drawn_right_of_1(measure, value, limit, ok):
    rows = [Row("prefill.layer0.selected", ok, measure, value, limit, ""), Row("decode.logits", None, measure, 1.0, None, "")]
    (marks,) = plots.verdicts(rows, "title").axes[0].collections
    (place,) = np.asarray(marks.get_offsets())
    assert (place[0] > 1) == (not ok) and place[1] == 0


def test_bench_writes_a_picture_beside_the_rows(tmp_path):
    rows = [
        bench.Row(
            section=section, shape="h64 b1", us=10.0, us_hot=9.0, tflops=1.0, gbs=1.0, floor_us=2.0, err=0.0, us_xla=None,
            implementation="sm90", device="NVIDIA H200", jax="0.11.2",
        )
        for section in ("Scores (fp8)", "Scores (mxfp4)")
    ]  # fmt: skip
    bench.plot(rows, str(tmp_path / "rows.png"))
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
