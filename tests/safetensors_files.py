"""Safetensors files made byte by byte for tests: right ones, and every kind of wrong one."""

import json
import math

ITEM = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


def stored_bytes(dtype, shape):
    """Bytes of a tensor of header dtype `dtype` and header shape `shape`."""
    values = math.prod(shape)
    return values // 2 if dtype == "F4" else values * ITEM.get(dtype, 1)


def write_raw(path, tensors, *, size=None, sparse=False):
    """Writes `tensors`: name -> (dtype, header shape, bytes; None stands for a hole). size: cut or pad the file to it.

    Returns the length of the whole file.
    """
    header, end, parts = {"__metadata__": {"format": "pt"}}, 0, []
    for name, (dtype, shape, data) in tensors.items():
        length = stored_bytes(dtype, shape) if data is None else len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + length]}
        parts.append(data)
        end += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for data in parts:
            if data is not None and not sparse:
                file.write(data)
    whole = 8 + len(text) + end
    with path.open("r+b") as file:
        file.truncate(whole if size is None else size)
    return whole


def write_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_sharded(directory, shards, *, index=True):
    """shards: file name -> tensors as in write_raw."""
    for file, tensors in shards.items():
        write_raw(directory / file, tensors)
    if index:
        write_index(directory, {name: file for file, tensors in shards.items() for name in tensors})
