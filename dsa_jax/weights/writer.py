"""Writes checkpoint files: safetensors, with the dtypes that the format's own library refuses, and the index."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dsa_jax.weights.checkpoint import INDEX
from dsa_jax.weights.header import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "F4"}
_ALIGNMENT = 8


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes `tensors` (name -> array of a dtype that safetensors has) to `path`.

    Wider elements come first, so that every tensor lies at a multiple of its element's size.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        array = tensors[name]
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(np.ascontiguousarray(tensors[name]).tobytes())


def write_checkpoint(
    directory: Path, tensors: Mapping[str, np.ndarray], shards: int, metadata: Mapping[str, str]
) -> None:
    """Writes `tensors` in their order as `shards` files of about equal size, and their index with `metadata`."""
    total = sum(array.nbytes for array in tensors.values())
    files: list[dict[str, np.ndarray]] = [{} for _ in range(shards)]
    written = 0
    for name, array in tensors.items():
        files[min(written * shards // total, shards - 1)][name] = array
        written += array.nbytes
    weight_map = {}
    for number, file in enumerate(files, 1):
        title = f"model-{number:05d}-of-{shards:05d}.safetensors"
        write_file(directory / title, file)
        weight_map |= dict.fromkeys(file, title)
    index = {"metadata": {"total_size": total, **metadata}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
