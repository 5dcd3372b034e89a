"""Safetensors files by their headers: what is in a file and where, without reading a tensor.

Our own reader, because the format's library refuses FP8, E8M0 and FP4 tensors for NumPy. What is wrong with a file is
returned as sentences, so that all files' problems can be said at once.
Source: the safetensors format (8-byte little-endian header length, JSON header, data).
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

# Safetensors dtype -> what NumPy sees. F4 has no entry of its own there: two values share a byte.
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F4": np.dtype(np.uint8),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of one file. dtype is the header's string, offset counts bytes from the start of the file.

    shape is that of the stored elements, logical_shape that of the values: they differ in the last axis where two FP4
    values share a byte, which is so for F4 (its header gives the logical shape) and for DeepSeek's I8 (the stored one).
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    logical_shape: tuple[int, ...]
    offset: int
    nbytes: int

    def view(self) -> np.ndarray:
        """The tensor as a read-only array [shape] over the mapped file; the mapping lives as long as the array."""
        dtype = DTYPES[self.dtype]
        if self.nbytes == 0:
            return np.empty(self.shape, dtype)
        mapped = np.memmap(self.file, np.uint8, "r", offset=self.offset, shape=(self.nbytes,))
        return mapped.view(np.ndarray).view(dtype).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class FileHeader:
    """The tensors that a file's header describes, in file order, those of them that the file ends before (cut), and
    what is wrong with the file."""

    path: Path
    tensors: tuple[TensorInfo, ...] = ()
    cut: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()


def scan_file(path: Path) -> FileHeader:
    """Reads the header of the safetensors file `path`. Never raises for what the file holds."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                return FileHeader(path, problems=(_cut_header(path, size, length),))
            if length > LARGEST_HEADER:
                sentence = f"{path.name} announces a header of {length} bytes; safetensors allows {LARGEST_HEADER}"
                return FileHeader(path, problems=(sentence + ". It is not a safetensors file.",))
            text = file.read(length)
    except OSError as error:
        return FileHeader(path, problems=(f"{path.name} cannot be read: {error}",))
    try:
        header = json.loads(text, object_pairs_hook=_Pairs)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        return FileHeader(path, problems=(f"{path.name} has a header that is not JSON ({error}). It is damaged.",))
    if not isinstance(header, _Pairs):
        return FileHeader(path, problems=(f"{path.name} has a header that is no JSON object. It is damaged.",))

    tensors, problems = [], []
    start = 8 + length
    seen = set()
    for name, entry in header.pairs:
        if name == "__metadata__":
            continue
        if name in seen:
            problems.append(f"{path.name} describes {name} twice")
            continue
        seen.add(name)
        found = _tensor(path, name, entry, start)
        if isinstance(found, TensorInfo):
            tensors.append(found)
        else:
            problems.append(found)
    tensors.sort(key=lambda tensor: tensor.offset)
    cut = frozenset(tensor.name for tensor in tensors if tensor.offset + tensor.nbytes > size)
    problems += _layout_problems(path, tensors, len(cut), start, size)
    return FileHeader(path, tuple(tensors), cut, tuple(problems))


class _Pairs:
    """A JSON object with repeated keys kept: json's dict would silently take the last."""

    def __init__(self, pairs: list[tuple[str, Any]]):
        self.pairs = pairs


def _cut_header(path: Path, size: int, length: int) -> str:
    if size < 8:
        return f"{path.name} holds {size} bytes, not even a header's length. It is cut or empty."
    return (
        f"{path.name} holds {size} bytes, but its header alone takes {8 + length}. It is cut, or no safetensors file."
    )


def _tensor(path: Path, name: str, entry: Any, start: int) -> TensorInfo | str:
    """The tensor that a header entry describes, or the sentence that says why it describes none."""
    fields = dict(entry.pairs) if isinstance(entry, _Pairs) else {}
    dtype, shape, span = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (isinstance(dtype, str) and _is_sizes(shape) and _is_sizes(span) and len(span) == 2 and span[0] <= span[1]):
        return (
            f"{path.name}: the header entry of {name} is damaged (dtype {dtype!r}, shape {shape!r}, offsets {span!r})"
        )
    if dtype not in DTYPES:
        return f"{path.name}: {name} has dtype {dtype}, which is not known. Allowed: {', '.join(DTYPES)}."
    logical = stored = tuple(shape)
    if dtype == "F4":
        if not shape or shape[-1] % 2:
            rule = "the last axis must be even, two values share a byte"
            return f"{path.name}: {name} has dtype F4 and shape {shape}; {rule}"
        stored = (*logical[:-1], logical[-1] // 2)
    elif dtype == "I8" and shape:
        logical = (*stored[:-1], stored[-1] * 2)
    nbytes = math.prod(stored) * DTYPES[dtype].itemsize
    if nbytes != span[1] - span[0]:
        return (
            f"{path.name}: {name} ({dtype} {shape}) takes {nbytes} bytes, but its header gives it {span[1] - span[0]}"
        )
    return TensorInfo(name, path, dtype, stored, logical, start + span[0], nbytes)


def _is_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _layout_problems(path: Path, tensors: list[TensorInfo], cut: int, start: int, size: int) -> list[str]:
    """Overlaps, and bytes that are missing at the end of the file or too many. `tensors` by offset."""
    problems = []
    end = start
    before = None
    for tensor in tensors:
        if tensor.offset < end and tensor.nbytes:
            problems.append(f"{path.name}: {tensor.name} overlaps {before.name}. The header is damaged.")
        if tensor.offset + tensor.nbytes >= end:
            end, before = tensor.offset + tensor.nbytes, tensor
    if size < end:
        problems.append(f"{path.name} is cut: {end - size} of {end} bytes are missing ({cut} tensors not whole)")
    elif size > end and tensors:
        problems.append(f"{path.name} holds {size - end} bytes more than its header describes. It is damaged.")
    return problems
