"""`dsa-jax numerics` on golden files, with one model for all files of a checkpoint and mode: they share its compiled steps."""

import functools
import json
from unittest import mock

import pytest

from dsa_jax import cli, loading

MODES = {"f32": "f32", "f32q": "f32q", "ref": "bf16"}  # by the end of the file's name

load_once = functools.cache(loading.load_model)


def files(fast: str, *slow: str) -> list:
    """Names of golden files as a test's parameters: the one that every run takes, and the others."""
    return [fast, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


def main(*arguments) -> int:
    """The command's exit status."""
    with mock.patch.object(loading, "load_model", load_once):
        return cli.main(["numerics", *map(str, arguments)])


def check(checkpoint, golden, least: int, tmp_path, capsys) -> set[str]:
    """The command succeeds and judges at least `least` tensors, in f32 all of them. Returns the names of those judged."""
    report = tmp_path / "report.json"
    status = main(checkpoint, golden, "--json", report)
    printed = capsys.readouterr().out
    assert status == 0, printed
    result = json.loads(report.read_text())
    assert result["ok"] and result["mode"] == MODES[golden.stem.rpartition("_")[2]]
    judged = {row["name"] for row in result["tensors"] if row["ok"] is not None}
    assert len(judged) >= least
    if result["mode"] == "f32":
        assert len(judged) == len(result["tensors"])
    return judged
