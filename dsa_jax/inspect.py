"""What a checkpoint is and what it needs, from its headers and its config alone."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dsa_jax.config import load_config
from dsa_jax.device_plan import GIB, DevicePlan, plan_devices
from dsa_jax.inventory import Inventory, inventory_of
from dsa_jax.memory import DRAFT_LEFT_OUT, CacheBytes, human, part_names, part_of, weights_per_device
from dsa_jax.weights import names
from dsa_jax.weights.checkpoint import Checkpoint, scan_checkpoint
from dsa_jax.weights.official import TensorSpec

DEVICES = (1, 2, 4, 8)
DEVICE_MEMORY = 80 * GIB
SHOWN = 20  # problems that are written out

# Stored dtypes that stand for one another: packed FP4, and scales and small tensors kept in float32.
_INTERCHANGEABLE = {"I8": {"F4", "U8"}, "F8_E8M0": {"F32", "U8"}, "F32": {"BF16"}, "BF16": {"F32"}}


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Everything `inspect_checkpoint` found. Sizes are bytes; problems and differences are sentences.

    found_tensors and found_bytes count the tensors that are wholly there; by_dtype and by_part count all tensors of the
    checkpoint, those of missing shards as the config implies them.
    """

    directory: Path
    config: Any
    inventory: Inventory
    plan: tuple[Any, ...]
    draft: tuple[Any, ...]
    counts: str
    shards: int
    missing_shards: tuple[str, ...]
    tensors: int
    found_tensors: int
    total_bytes: int
    found_bytes: int
    problems: tuple[str, ...]
    by_dtype: dict[str, tuple[int, int]]
    by_part: dict[str, tuple[int, int]]
    context: int
    batch: int
    cache: CacheBytes
    weights_per_device: dict[int, int]
    device_plan: DevicePlan | None

    def lines(self) -> list[str]:
        """The report as text."""
        return [
            f"{self.directory}: {self.inventory.name}, {len(self.plan)} layers, {len(self.draft)} draft stages",
            "",
            "Layer plan",
            *plan_table(self.config),
            "",
            f"Files: {self.counts}; {self.found_bytes:,} of {self.total_bytes:,} bytes",
            *_short(self.problems),
            "",
            "Stored as",
            *_table(("dtype", "tensors", "bytes", ""), _size_rows(self.by_dtype)),
            "",
            "Parts",
            *_table(("part", "tensors", "bytes", ""), _size_rows(self.by_part)),
            "",
            f"Caches for {self.batch} x {self.context:,} tokens ({self.cache.per_token:g} bytes a token)",
            *_table(("cache", "bytes", ""), [(k, f"{v:,}", human(v)) for k, v in self.cache.parts.items()]),
            "",
            "Memory of one device, of several: experts, heads, vocabulary and Engram rows divided, the rest and the "
            "caches on each; weights as stored",
            *_table(("devices", "weights", "caches", "together"), self._device_rows()),
            *self._plan_lines(),
        ]

    def _plan_lines(self) -> list[str]:
        plan = self.device_plan
        if plan is None:
            return []
        rows = [(share.part, human(share.nbytes), share.divided) for share in plan.shares]
        table = _table(("part", "bytes", "divided over"), [*rows, ("together", human(plan.total), "")]) if rows else []
        return ["", f"One of {plan.devices} devices of {human(plan.memory)}", *table, plan.verdict()]

    def _device_rows(self) -> list[tuple[str, ...]]:
        caches = self.cache.total
        return [
            (str(devices), human(weights), human(caches), human(weights + caches))
            for devices, weights in self.weights_per_device.items()
        ]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "directory": str(self.directory),
            "model_type": self.inventory.model_type,
            "layer_plan": [dataclasses.asdict(role) for role in self.plan],
            "draft_plan": [dataclasses.asdict(role) for role in self.draft],
            "shards": self.shards,
            "missing_shards": list(self.missing_shards),
            "tensors": self.tensors,
            "found_tensors": self.found_tensors,
            "total_bytes": self.total_bytes,
            "found_bytes": self.found_bytes,
            "problems": list(self.problems),
            "by_dtype": {k: {"tensors": n, "bytes": size} for k, (n, size) in self.by_dtype.items()},
            "by_part": {k: {"tensors": n, "bytes": size} for k, (n, size) in self.by_part.items()},
            "context": self.context,
            "batch": self.batch,
            "cache": {"per_token": self.cache.per_token, "total": self.cache.total, "parts": dict(self.cache.parts)},
            "devices": {
                str(devices): {"weights": weights, "cache": self.cache.total, "total": weights + self.cache.total}
                for devices, weights in self.weights_per_device.items()
            },
            "device_plan": None if self.device_plan is None else self.device_plan.as_dict(),
        }


def plan_table(config: Any) -> list[str]:
    """What each layer and each draft stage of a model of this config is, as lines of a table."""
    inventory = inventory_of(config)
    plan, stages = inventory.plan(config), inventory.draft(config)
    titles = [f"layer {role.index}" for role in plan] + [f"mtp.{stage}" for stage in range(len(stages))]
    rows = [(title, *inventory.row(config, role)) for title, role in zip(titles, (*plan, *stages), strict=True)]
    return _table(("", *inventory.columns), rows)


def inspect_checkpoint(
    directory: str | Path,
    context: int = 4096,
    batch: int = 1,
    devices: int | None = None,
    device_memory: int = DEVICE_MEMORY,
    progress: bool = False,
) -> Inspection:
    """Reports on the checkpoint in `directory` for `batch` requests of `context` tokens, and plans where it lies on
    `devices` devices of `device_memory` bytes each, if given. Reads headers only; `progress` shows a bar meanwhile.

    Works where shards are missing or cut, and says which. Raises ValueError for an unusable config.json, context or
    batch.
    """
    config = load_config(directory)
    inventory = inventory_of(config)
    cache = inventory.caches(config, context, batch)
    checkpoint = scan_checkpoint(directory, progress)
    expected = inventory.tensors(config)
    rules = inventory.left_out(config)
    stored, problems = _stored(checkpoint, expected, rules)
    loaded = {name: spec for name, spec in stored.items() if names.left_out_reason(name, rules) is None}
    whole = [tensor for name, tensor in checkpoint.tensors.items() if name not in checkpoint.cut]
    return Inspection(
        directory=Path(directory),
        config=config,
        inventory=inventory,
        plan=tuple(inventory.plan(config)),
        draft=tuple(inventory.draft(config)),
        counts=checkpoint.counts(),
        shards=len(checkpoint.files),
        missing_shards=checkpoint.missing_files,
        tensors=len(stored),
        found_tensors=len(whole),
        total_bytes=sum(spec.nbytes for spec in stored.values()),
        found_bytes=sum(tensor.nbytes for tensor in whole),
        problems=(*checkpoint.problems, *problems),
        by_dtype=_grouped((spec.dtype, spec.nbytes) for spec in stored.values()),
        by_part=_by_part(stored, rules),
        context=context,
        batch=batch,
        cache=cache,
        weights_per_device=weights_per_device(config, ((n, spec.nbytes) for n, spec in loaded.items()), DEVICES),
        device_plan=None if devices is None else plan_devices(config, loaded, cache, devices, device_memory),
    )


def _stored(
    checkpoint: Checkpoint, expected: dict[str, TensorSpec], rules: Sequence[tuple[str, str]]
) -> tuple[dict[str, TensorSpec], list[str]]:
    """Official name -> how it is stored, for what is there and what should be; and where the two differ."""
    stored = dict(expected)
    problems = []
    there = set()
    if checkpoint.indexed:
        there = {names.official_name(name) for name in checkpoint.weight_map if name not in checkpoint.tensors}
    for name, tensor in checkpoint.tensors.items():
        official = names.official_name(name)
        there.add(official)
        found = TensorSpec(tensor.dtype, tensor.shape)
        wanted = expected.get(official)
        if wanted is None:
            if names.left_out_reason(official, rules) is None:
                problems.append(
                    f"{name} ({found.dtype} {list(found.shape)}) belongs to no tensor that the config implies"
                )
        elif found.shape != wanted.shape or not _interchangeable(wanted.dtype, found.dtype):
            problems.append(
                f"{name} is {found.dtype} {list(found.shape)}; the config implies {wanted.dtype} {list(wanted.shape)}"
            )
        stored[official] = found
    if checkpoint.indexed or not checkpoint.missing_files:
        problems += [f"{name} is in no file, though the config implies it" for name in expected if name not in there]
    return stored, problems


def _interchangeable(wanted: str, found: str) -> bool:
    return found == wanted or found in _INTERCHANGEABLE.get(wanted, ())


def _grouped(pairs: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Key -> (how many, their bytes), largest first."""
    counts: collections.Counter[str] = collections.Counter()
    sizes: collections.Counter[str] = collections.Counter()
    for key, size in pairs:
        counts[key] += 1
        sizes[key] += size
    return {key: (counts[key], size) for key, size in sizes.most_common()}


def _by_part(stored: dict[str, TensorSpec], rules: Sequence[tuple[str, str]]) -> dict[str, tuple[int, int]]:
    def part(name: str) -> str:
        return DRAFT_LEFT_OUT if any(re.search(pattern, name) for pattern, _ in rules) else part_of(name)

    grouped = _grouped((part(name), spec.nbytes) for name, spec in stored.items())
    return {part: grouped[part] for part in part_names() if part in grouped}


def _size_rows(sizes: dict[str, tuple[int, int]]) -> list[tuple[str, ...]]:
    return [(key, f"{count:,}", f"{size:,}", human(size)) for key, (count, size) in sizes.items()]


def _table(head: Sequence[str], rows: list[tuple[str, ...]]) -> list[str]:
    """Columns of equal width, indented; the first left-aligned, the others right-aligned."""
    every = [tuple(head), *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(every[0]))]
    return [
        "  "
        + "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in every
    ]


def _short(problems: Sequence[str]) -> list[str]:
    lines = [f"  - {problem}" for problem in problems[:SHOWN]]
    return lines if len(problems) <= SHOWN else [*lines, f"  - and {len(problems) - SHOWN} more"]
