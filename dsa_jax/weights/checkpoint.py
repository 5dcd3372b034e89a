"""A checkpoint's folder: its index, its files and their headers, and where these disagree."""

import collections
import dataclasses
import json
import re
from pathlib import Path

from tqdm import tqdm

from dsa_jax.weights.header import TensorInfo, scan_file

INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"^(.*)-(\d+)-of-(\d{1,6})\.safetensors$")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a folder holds. Nothing of a tensor has been read.

    tensors: every tensor that a readable header describes, by its name in the file; cut: those that are not whole.
    weight_map: tensor name -> file name, of the index, or of the headers where there is none (indexed = False).
    files / missing_files: the shards that belong to the checkpoint, by name; problems: sentences.
    """

    directory: Path
    tensors: dict[str, TensorInfo]
    cut: frozenset[str]
    weight_map: dict[str, str]
    indexed: bool
    files: tuple[str, ...]
    missing_files: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def unreadable(self) -> frozenset[str]:
        """Tensors of the index whose shard is missing or has no readable header."""
        described = {tensor.file.name for tensor in self.tensors.values()}
        return frozenset(name for name, file in self.weight_map.items() if file not in described)

    def counts(self) -> str:
        """Found and expected shards and tensors, in words."""
        shards = f"{len(self.files) - len(self.missing_files)} of {len(self.files)} shards found"
        whole = self.tensors.keys() - self.cut
        if not self.indexed:
            return f"{shards}, with {len(whole)} whole tensors (no {INDEX} says how many there should be)"
        return f"{shards}, {len(whole & self.weight_map.keys())} of {len(self.weight_map)} tensors whole"


def scan_checkpoint(directory: str | Path, progress: bool = False) -> Checkpoint:
    """Reads the index and all headers in `directory`; `progress` shows a bar once that has taken two seconds. Raises
    ValueError only where that is no folder."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a folder. Give the folder of a checkpoint in the official format.")
    present = sorted(path.name for path in directory.glob("*.safetensors"))
    problems: list[str] = []
    weight_map = _read_index(directory / INDEX, problems)
    if weight_map is None and not present:
        problems.append(f"there is neither {INDEX} nor a .safetensors file")

    files = sorted(set(weight_map.values())) if weight_map is not None else _numbered(present)
    missing = [name for name in files if not (directory / name).is_file()]
    placed = collections.defaultdict(set)
    for tensor, file in (weight_map or {}).items():
        placed[file].add(tensor)
    for name in missing:
        count = f" (with {len(placed[name])} tensors)" if placed else ""
        problems.append(f"{name} is missing{count}")

    tensors: dict[str, TensorInfo] = {}
    cut: set[str] = set()
    for name in tqdm(files, desc="headers", unit="shard", delay=2, disable=not progress):
        if name in missing:
            continue
        header = scan_file(directory / name)
        problems += header.problems
        cut |= header.cut
        for tensor in header.tensors:
            other = tensors.get(tensor.name)
            if other is not None:
                problems.append(f"{tensor.name} is in two files: {other.file.name} and {name}")
                continue
            tensors[tensor.name] = tensor
        if weight_map is not None and header.tensors:
            problems += _against_index(name, {tensor.name for tensor in header.tensors}, placed[name], weight_map)
    indexed = weight_map is not None
    if weight_map is None:
        weight_map = {name: tensor.file.name for name, tensor in tensors.items()}
    return Checkpoint(
        directory, tensors, frozenset(cut), weight_map, indexed, tuple(files), tuple(missing), tuple(problems)
    )


def _read_index(path: Path, problems: list[str]) -> dict[str, str] | None:
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        problems.append(f"{path.name} is damaged ({type(error).__name__}: {error}). Download it again.")
        return None
    good = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    if not good or any(Path(file).name != file for file in set(weight_map.values())):
        problems.append(f"{path.name} is damaged: weight_map must map tensor names to file names. Download it again.")
        return None
    return weight_map


def _numbered(present: list[str]) -> list[str]:
    """The shards that the numbering of the files `present` promises, where there is no index."""
    for name in present:
        found = _SHARD.match(name)
        if found is not None:
            stem, width, last = found[1], len(found[2]), int(found[3])
            return [f"{stem}-{shard:0{width}d}-of-{found[3]}.safetensors" for shard in range(1, last + 1)]
    return present


def _against_index(file: str, held: set[str], placed: set[str], weight_map: dict[str, str]) -> list[str]:
    """Where the tensors that `file` holds are not those that the index places there."""
    problems = []
    for name in sorted(held - placed):
        if name in weight_map:
            problems.append(f"{file} holds {name}, which {INDEX} places in {weight_map[name]}")
        else:
            problems.append(f"{file} holds {name}, which {INDEX} does not know")
    problems += [
        f"{INDEX} places {name} in {file}, whose header does not describe it" for name in sorted(placed - held)
    ]
    return problems
