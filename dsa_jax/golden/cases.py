"""Golden files: what DeepSeek's own code computed, one or several prompts a file.

A file holds the prompt, the positions kept, tensors of the prefill, then of decode steps whose input tokens are given
(teacher forcing), then the draft head after every step.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsa_jax.weights.header import scan_file

MODE_OF_SUFFIX = {"f32": "f32", "f32q": "f32q", "ref": "bf16"}

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One prompt of a golden file. `prefix` stands in front of its tensors' names."""

    prefix: str
    tensors: Tensors

    @property
    def prompt(self) -> np.ndarray:
        return self.tensors["input_ids"].reshape(-1)

    @property
    def fed(self) -> np.ndarray:
        """decode.token_ids: id 0 follows the prompt, id t is fed at step t."""
        return self.tensors["decode.token_ids"].reshape(-1)


def mode_of_file(path: Path) -> str:
    """The numerics mode that the file's name says. ValueError if it says none."""
    suffix = path.stem.rpartition("_")[2]
    if suffix not in MODE_OF_SUFFIX:
        raise ValueError(
            f"{path.name} does not end in one of {', '.join('_' + s for s in MODE_OF_SUFFIX)}, so the mode must be given: "
            "--mode f32, f32q or bf16."
        )
    return MODE_OF_SUFFIX[suffix]


def read_cases(path: Path) -> list[Case]:
    """The prompts of an end-to-end golden file.

    ValueError: not a safetensors file, a file of another kind, or one recorded with the released code's stale index keys.
    """
    if path.stem.startswith("released_decode"):
        raise ValueError(
            f"{path.name} records the released decode loop with its known fault: between two finished groups it scores "
            "ratio-2 layers against another layer's index keys. This project scores every layer against its own keys, so "
            "there is nothing to compare. Use golden_*, short_* or image_* files."
        )
    tensors = {info.name: np.asarray(info.view()) for info in scan_file(path).tensors}
    prefixes = sorted({m[1] for m in (re.match(r"(len\d+\.)", n) for n in tensors) if m}, key=lambda p: int(p[3:-1]))
    cases = [Case(p, {n[len(p) :]: v for n, v in tensors.items() if n.startswith(p)}) for p in prefixes or [""]]
    for case in cases:
        missing = [n for n in ("input_ids", "decode.token_ids") if n not in case.tensors]
        if missing:
            raise ValueError(
                f"{path.name} has no {case.prefix}{missing[0]}: it is not an end-to-end golden file (golden_*, short_*, "
                "image_*)."
            )
    return cases
