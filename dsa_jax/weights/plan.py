"""From headers to a plan: which tensors fill which parameter and how, with every problem said before any allocation."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from dsa_jax.weights import names
from dsa_jax.weights.checkpoint import Checkpoint, scan_checkpoint
from dsa_jax.weights.header import DTYPES, TensorInfo

SHOWN = 20  # problems of one kind that are written out

FLOAT32, UINT8, INT32 = np.dtype(np.float32), np.dtype(np.uint8), np.dtype(np.int32)


def allowed_sources(path: str, wanted: np.dtype) -> dict[str, tuple[np.dtype, str]]:
    """Safetensors dtypes that may fill the parameter `path` of dtype `wanted` -> its final dtype and the conversion.

    uint8 stands for stored bytes: of scales (E8M0 exponents) or of packed FP4 weights. A scale that is stored as F32
    makes the parameter float32: a float is never read as an exponent byte.
    """
    if wanted == UINT8 and path.endswith(".scale"):
        return {"F8_E8M0": (UINT8, "view"), "U8": (UINT8, "same"), "F32": (FLOAT32, "same")}
    if wanted == UINT8:
        return {"I8": (UINT8, "view"), "F4": (UINT8, "view"), "U8": (UINT8, "same")}
    allowed = {kind: (wanted, "same") for kind, dtype in DTYPES.items() if dtype == wanted}
    if wanted == FLOAT32:
        allowed["BF16"] = (FLOAT32, "widen")
    if wanted == INT32:
        allowed["I64"] = (INT32, "narrow")
    return allowed


@dataclasses.dataclass(frozen=True)
class PlanEntry:
    """One parameter: its path, final shape and dtype, the conversion ("same", "widen", "view", "narrow"), and the
    tensors that fill it: one, or one per place of the stacked first axis in order."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    conversion: str
    stacked: bool
    sources: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """What `load` will do, in the order of the files. notes: one line for each kind of tensor that is left out."""

    entries: tuple[PlanEntry, ...]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes read from the files."""
        return sum(source.nbytes for entry in self.entries for source in entry.sources)


def make_plan(
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    directory: str | Path,
    left_out: Sequence[tuple[str, str]] = (),
    progress: bool = False,
) -> LoadPlan:
    """Matches the parameters `abstract` (path -> shape and dtype) with the tensors in `directory`.

    left_out: (pattern of official names, reason) of tensors that this checkpoint's model leaves out, beside those that
    every model leaves out. progress: a bar while headers are read.
    A parameter of dtype uint8 whose path ends in ".scale" becomes float32 where the file has F32 scales: a float scale
    is never read as exponent bytes.
    Raises one ValueError that lists all problems: missing or cut shards, tensors missing, unexpected or twice there,
    wrong shapes and dtypes, disagreement with the index, with the counts and how to complete a download.
    """
    checkpoint = scan_checkpoint(directory, progress)
    problems = _Problems()
    problems.add_all("files", checkpoint.problems)
    if not checkpoint.files:
        problems.refuse(checkpoint)
    found, notes = _by_parameter(checkpoint, left_out, problems)
    unreadable = {names.target(names.official_name(name)).path for name in checkpoint.unreadable}

    entries = []
    for path, wanted in abstract.items():
        sources = found.pop(path, {})
        entry = _entry(path, wanted, sources, path in unreadable, problems)
        if entry is not None:
            entries.append(entry)
    for path, sources in found.items():
        some = next(iter(sources.values()))
        count = "" if len(sources) == 1 else f" and {len(sources) - 1} more of {path}"
        problems.add(
            "unexpected tensors", f"{some.name} in {some.file.name}{count} belongs to no parameter of this model"
        )
    problems.refuse(checkpoint)
    entries.sort(key=lambda entry: (entry.sources[0].file.name, entry.sources[0].offset))
    return LoadPlan(tuple(entries), tuple(notes))


class _Problems:
    """Sentences by kind, in the order of first appearance."""

    def __init__(self):
        self.kinds: dict[str, list[str]] = {}

    def add(self, kind: str, sentence: str) -> None:
        self.kinds.setdefault(kind, []).append(sentence)

    def add_all(self, kind: str, sentences: tuple[str, ...]) -> None:
        for sentence in sentences:
            self.add(kind, sentence)

    def refuse(self, checkpoint: Checkpoint) -> None:
        if not self.kinds:
            return
        lines = [f"{checkpoint.directory} cannot be loaded; nothing was allocated. {checkpoint.counts()}."]
        for kind, sentences in self.kinds.items():
            lines.append(f"{kind} ({len(sentences)}):")
            lines += [f"  - {sentence}" for sentence in sentences[:SHOWN]]
            if len(sentences) > SHOWN:
                lines.append(f"  - and {len(sentences) - SHOWN} more")
        if "files" in self.kinds:
            lines.append(
                "To resume the download: delete the cut or damaged files, then run `hf download REPOSITORY --local-dir "
                f"{checkpoint.directory}`; it fetches only what is not there."
            )
        raise ValueError("\n".join(lines))


def _by_parameter(
    checkpoint: Checkpoint, rules: Sequence[tuple[str, str]], problems: _Problems
) -> tuple[dict[str, dict[int | None, TensorInfo]], list[str]]:
    """Parameter path -> {place on the stacked axis or None: tensor}, and the notes about what is left out."""
    found: dict[str, dict[int | None, TensorInfo]] = {}
    left_out: collections.Counter[str] = collections.Counter()
    left_out_bytes: collections.Counter[str] = collections.Counter()
    for name, tensor in checkpoint.tensors.items():
        official = names.official_name(name)
        reason = names.left_out_reason(official, rules)
        if reason is not None:
            left_out[reason] += 1
            left_out_bytes[reason] += tensor.nbytes
            continue
        target = names.target(official)
        places = found.setdefault(target.path, {})
        if target.expert in places:
            problems.add("duplicates", f"{name} and {places[target.expert].name} are the same tensor, {official}")
        else:
            places[target.expert] = tensor
    notes = [
        f"left out: {count} tensors ({left_out_bytes[reason]:,} bytes), {reason}" for reason, count in left_out.items()
    ]
    return found, notes


def _entry(
    path: str,
    wanted: jax.ShapeDtypeStruct,
    sources: dict[int | None, TensorInfo],
    unreadable: bool,
    problems: _Problems,
) -> PlanEntry | None:
    """The entry of one parameter; None where it has a problem (reported) or its file is not there (reported before)."""
    stacked = bool(sources) and None not in sources
    if stacked:
        places = range(wanted.shape[0]) if wanted.shape else range(0)
        absent = [place for place in places if place not in sources]
        extra = sorted(set(sources) - set(places))
        if absent and not unreadable:
            problems.add(
                "missing tensors", f"{path} has no tensor for {len(absent)} of {len(places)} experts: {_short(absent)}"
            )
        if extra:
            problems.add(
                "unexpected tensors", f"{path} has {len(places)} experts, but the files also hold {_short(extra)}"
            )
        if absent or extra:
            return None
        ordered = tuple(sources[place] for place in places)
        shape = tuple(wanted.shape[1:])
    else:
        if None not in sources:
            if not unreadable:
                problems.add("missing tensors", f"{path} is in no file")
            return None
        if len(sources) > 1:
            problems.add("duplicates", f"{path} is in the files both whole and expert by expert")
            return None
        ordered, shape = (sources[None],), tuple(wanted.shape)

    good = True
    allowed = allowed_sources(path, np.dtype(wanted.dtype))
    kinds = sorted({source.dtype for source in ordered})
    if len(kinds) > 1:
        good = False
        problems.add("wrong dtypes", f"{path} is stored as {' and '.join(kinds)}; its tensors must agree")
    for source in ordered:
        where = f"{source.name} in {source.file.name}"
        if source.dtype not in allowed:
            good = False
            problems.add(
                "wrong dtypes", f"{where} is {source.dtype}; allowed for {path}: {', '.join(allowed) or 'none'}"
            )
        if source.shape != shape:
            good = False
            problems.add("wrong shapes", f"{where} is {list(source.shape)}; needed: {list(shape)}")
    if not good:
        return None
    dtype, conversion = allowed[kinds[0]]
    return PlanEntry(path, tuple(wanted.shape), dtype, conversion, stacked, ordered)


def _short(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return shown if len(values) <= 8 else f"{shown}, ..."
