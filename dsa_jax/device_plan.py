"""What of a model lies where on several devices, whether it fits, and which mesh to take. From sizes alone."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsa_jax import sharding
from dsa_jax.engine.demands import DEFAULT_PREFILL_BYTES, chunk_of_budget
from dsa_jax.memory import LEFT_OUT, CacheBytes, expert_bytes, human, part_of, step_bytes
from dsa_jax.ranks import DIVIDED_OVER
from dsa_jax.weights import names
from dsa_jax.weights.official import TensorSpec

_NUMBER = re.compile(r"\d+")
LARGEST_NAMED = 3
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Share:
    """One part of the model on one device: its bytes, and the mesh axes that divide it (words)."""

    part: str
    nbytes: int
    divided: str


@dataclasses.dataclass(frozen=True)
class DevicePlan:
    """A model on `devices` devices of `memory` bytes each: mesh axis -> size, and what each device holds.

    host: bytes of Engram tables that stay in the host's memory, 0 where they are on the devices. problems: why no mesh of so
    many devices carries the model, in sentences; shares are then empty.
    """

    devices: int
    memory: int
    mesh: dict[str, int]
    shares: tuple[Share, ...]
    host: int
    problems: tuple[str, ...]

    @property
    def total(self) -> int:
        """Bytes of one device."""
        return sum(share.nbytes for share in self.shares)

    @property
    def fits(self) -> bool:
        """Whether a mesh carries the model and its devices hold it."""
        return not self.problems and self.total <= self.memory

    def verdict(self) -> str:
        """Whether it fits, in a sentence; if not, the largest parts."""
        if self.problems:
            return f"No mesh of {self.devices} devices carries this model:" + "".join(f"\n  - {p}" for p in self.problems)
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        if self.fits:
            tables = f", Engram tables of {human(self.host)} in host memory (engram_tables=host)" if self.host else ""
            return f"Fits: mesh {axes}{tables}; {human(self.memory - self.total)} of each device are left."
        largest = sorted(self.shares, key=lambda share: -share.nbytes)[:LARGEST_NAMED]
        listed = ", ".join(f"{share.part} {human(share.nbytes)} ({share.divided})" for share in largest)
        return (
            f"Does not fit{', not even with Engram tables in host memory' if self.host else ''}: a device of mesh {axes} would "
            f"hold {human(self.total)} and has {human(self.memory)}. Largest: {listed}. Take more devices, a shorter context "
            "or a smaller batch."
        )

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return dataclasses.asdict(self) | {"total": self.total, "fits": self.fits}


def plan_devices(
    config: Any, tensors: Mapping[str, TensorSpec], cache: CacheBytes, devices: int, memory: int
) -> DevicePlan:
    """The plan for the loaded tensors (official name -> how it is stored), caches of the wanted size, and so many devices
    of `memory` bytes.

    Of the meshes that carry the model it takes the least cp that fits, then the largest tp that divides heads and tiles,
    and leaves the rest of the devices to ep. Where none fits, Engram tables stay in host memory; where that is not enough, it
    is the mesh with the fewest bytes on a device. Beside weights and caches a device needs what a step works in: counted are
    the engine's budget for prefill, or what a decode step takes if that is more, and what the experts of the largest step
    take in bf16 where no kernel multiplies by their stored weights. ValueError for less than one device.
    """
    if devices < 1 or memory < 1:
        raise ValueError(f"{devices} devices of {memory} bytes: both must be at least 1.")
    kinds = _kinds(tensors)
    shapes = {kind.path: kind.shape for kind in kinds}
    meshes, problems = [], []
    for cp, tp in itertools.product(range(1, devices + 1), range(devices, 0, -1)):
        if devices % (cp * tp) == 0:
            sizes = {"ep": devices // (cp * tp), "tp": tp, "cp": cp}
            problems = sharding.problems_of(config, shapes, sizes)
            meshes += [] if problems else [sizes]
    if not meshes:
        return DevicePlan(devices, memory, {}, (), 0, tuple(problems))
    without = [kind for kind in kinds if "table_rows" not in sharding.logical_axes(kind.path)]
    tables = sum(kind.nbytes for kind in kinds) - sum(kind.nbytes for kind in without)
    plans = []
    places = [(kinds, 0), (without, tables)] if tables else [(kinds, 0)]
    for (placed, host), sizes in itertools.product(places, meshes):
        plans.append(DevicePlan(devices, memory, sizes, _shares(config, placed, cache, sizes), host, ()))
        if plans[-1].fits:
            return plans[-1]
    return min(plans, key=lambda plan: plan.total)


def _shares(
    config: Any, kinds: Sequence["_Kind"], cache: CacheBytes, sizes: Mapping[str, int]
) -> tuple[Share, ...]:
    """What one device of a mesh of these axis sizes holds, largest first."""

    def over(logical: Iterable[str]) -> str:
        axes = [axis for name in logical for axis in DIVIDED_OVER[name] if sizes.get(axis, 1) > 1]
        return " x ".join(axes) if axes else "on each"

    weights: collections.Counter[tuple[str, str]] = collections.Counter()
    for kind in kinds:
        placed = sharding.placed_shape(kind.path, kind.shape, sizes)
        logical = [axis for axis in sharding.logical_axes(kind.path) if axis is not None]
        parts = math.prod(sharding.ways(axis, sizes) for axis in logical)
        filled = kind.nbytes * math.prod(placed) // max(math.prod(kind.shape), 1)
        weights[kind.part, over(logical)] += -(-filled // parts)
    shares = [Share(part, size, divided) for (part, divided), size in weights.items()]
    for part, size in cache.parts.items():
        logical = ["context"] if cache.is_paged(part) else []
        parts = math.prod(sharding.ways(axis, sizes) for axis in logical)
        shares.append(Share(f"cache: {part}", -(-size // parts), over(logical)))
    scored = -(-cache.context // sharding.ways("context", sizes))
    decode = step_bytes(config, cache.batch, scored, logits=cache.batch)
    shares.append(Share("work of a step", max(DEFAULT_PREFILL_BYTES, decode), "on each"))
    rows = max(chunk_of_budget(config, scored, DEFAULT_PREFILL_BYTES, cache.batch), cache.batch)
    experts = expert_bytes(config, rows, itemsize=2, stored=False, ways=sharding.ways("experts", sizes))
    shares.append(Share("work of experts", experts, "on each"))
    return tuple(sorted(shares, key=lambda share: -share.nbytes))


@dataclasses.dataclass
class _Kind:
    """Parameters that differ in numbers of layers alone: path and shape of the first, bytes of all."""

    path: str
    part: str
    shape: tuple[int, ...]
    nbytes: int


def _kinds(tensors: Mapping[str, TensorSpec]) -> list[_Kind]:
    # A checkpoint has a hundred thousand names of a hundred kinds: what is asked of a name is asked once of its kind.
    groups: dict[tuple, list[str]] = {}
    for name, spec in tensors.items():
        groups.setdefault((_NUMBER.sub("0", name), spec), []).append(name)
    kinds = []
    for (_, spec), members in groups.items():
        part, target = part_of(members[0]), names.target(members[0])
        if part == LEFT_OUT:
            continue
        shape = spec.shape
        if target.expert is not None:
            layer = members[0].partition(".experts.")[0] + "."
            shape = (sum(name.startswith(layer) for name in members), *shape)
        kinds.append(_Kind(target.path, part, shape, len(members) * spec.nbytes))
    return kinds
