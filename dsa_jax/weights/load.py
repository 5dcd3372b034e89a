"""Streams a plan's tensors onto the devices, each parameter exactly once."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from dsa_jax import sharding
from dsa_jax.weights.header import TensorInfo
from dsa_jax.weights.plan import LoadPlan, PlanEntry

log = logging.getLogger("dsa_jax")

CHECKED = 2**20  # bytes that are looked at together


class Room:
    """Bytes of host memory that readers share: `with room(nbytes):` waits until so many are free, in order of arrival."""

    def __init__(self, nbytes: int):
        self._free = nbytes
        self._next = threading.Lock()  # held by the one that waits, so that small parts do not pass a large one for ever
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def __call__(self, nbytes: int) -> Iterator[None]:
        with self._next, self._changed:
            self._changed.wait_for(lambda: nbytes <= self._free)
            self._free -= nbytes
        try:
            yield
        finally:
            with self._changed:
                self._free += nbytes
                self._changed.notify()


def load(
    plan: LoadPlan,
    put: Callable[[np.ndarray], jax.Array] = jax.device_put,
    progress: bool = True,
    *,
    mesh: Mesh | None = None,
    readers: int = 1,
) -> dict[str, jax.Array]:
    """Reads the parameters of `plan` from their files and places them with `put`, or on `mesh` by the rules of `sharding`.
    Path -> array.

    On a mesh every process reads the parts that its own devices hold and nothing else. Up to `readers` parameters are read
    at a time; beside what is already placed, all together hold no more bytes in host memory than the largest part has
    (without a mesh, the largest parameter). Stored bytes are kept as they are, up to the plan's conversions; nothing is
    dequantised.
    Raises ValueError that names every parameter that would not be written exactly once, every scale of zero bytes (a
    tensor never filled: its 2^-127 would silence the layer), every integer that does not fit in 32 bits, and every
    table of experts that names one which is not there (its tokens would pass no expert); of the tensors that this process
    reads.
    """
    problems: list[str] = []
    _refuse(_coverage_problems(plan))
    arrays: dict[str, jax.Array] = {}
    experts = {entry.path: entry.shape[0] for entry in plan.entries if entry.path.endswith(".gate.weight")}
    room = Room(max((_largest_part(entry, mesh) for entry in plan.entries), default=0))

    def one(entry: PlanEntry) -> jax.Array | None:
        for place in _places(entry, mesh):
            problems.extend(_value_problems(entry, entry.sources[place]))
        if entry.path.endswith(".gate.tid2eid"):
            problems.extend(_table_problems(entry, experts[entry.path.removesuffix("tid2eid") + "weight"]))
        # Once the load has failed, the rest is only checked, so that all problems are said at once.
        return None if problems else _place(entry, put, mesh, room)

    began, sizes = time.monotonic(), [_bytes_read(entry, mesh) for entry in plan.entries]
    with (
        tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="weights", disable=not progress) as bar,
        ThreadPoolExecutor(readers) as pool,
    ):
        for entry, size, array in zip(plan.entries, sizes, pool.map(one, plan.entries), strict=True):
            arrays[entry.path] = array
            bar.update(size)
    _refuse(problems)
    seconds = max(time.monotonic() - began, 1e-9)
    log.info("weights: %.2f GB placed in %.1f s, %.2f GB/s", sum(sizes) / 1e9, seconds, sum(sizes) / 1e9 / seconds)
    return arrays


def mapped(plan: LoadPlan) -> dict[str, np.ndarray]:
    """The parameters of `plan` as views of their files, which have to stay: path -> array. Bytes are read when they are
    looked at. ValueError as of `load`; NotImplementedError for what would have to be converted or stacked."""
    _refuse(_coverage_problems(plan))
    _refuse([problem for entry in plan.entries for source in entry.sources for problem in _value_problems(entry, source)])
    arrays = {}
    for entry in plan.entries:
        if entry.stacked or entry.conversion not in ("same", "view"):
            raise NotImplementedError(
                f"{entry.path} cannot stay in its file: it is stored as {entry.sources[0].dtype} and has to become "
                f"{entry.dtype}. Load it onto the devices."
            )
        arrays[entry.path] = entry.sources[0].view().view(entry.dtype)
    return arrays


def _refuse(problems: list[str]) -> None:
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise ValueError(
            f"The weights cannot be loaded ({len(problems)} problems):{listed}\nDownload the files named again."
        )


def _coverage_problems(plan: LoadPlan) -> list[str]:
    """Parameters that the plan would write twice, not at all, or in part."""
    problems = []
    seen: set[str] = set()
    for entry in plan.entries:
        places = entry.shape[0] if entry.stacked else 1
        if entry.path in seen:
            problems.append(f"{entry.path} would be written twice")
        seen.add(entry.path)
        if len(entry.sources) != places:
            problems.append(f"{entry.path} would be written in part: {len(entry.sources)} tensors for {places} places")
    return problems


def _value_problems(entry: PlanEntry, source: TensorInfo) -> list[str]:
    problems = []
    where = f"{source.name} in {source.file.name}"
    if entry.path.endswith(".scale") and source.nbytes and not _has_bytes(source.view()):
        problems.append(f"{where}: all bytes of this scale are zero; it was never filled")
    if entry.conversion == "narrow" and source.nbytes:
        values = source.view()
        low, high = int(values.min()), int(values.max())
        if low < -(2**31) or high >= 2**31:
            problems.append(f"{where}: values from {low} to {high} do not fit in 32 bits")
    return problems


def _has_bytes(array: np.ndarray) -> bool:
    """Whether not all bytes are zero. Reads no further than the first that is not."""
    flat = array.reshape(-1).view(np.uint8)
    return any(flat[first : first + CHECKED].any() for first in range(0, len(flat), CHECKED))


def _table_problems(entry: PlanEntry, experts: int) -> list[str]:
    """Ids of a token table of experts that are no experts."""
    problems = []
    for source in entry.sources:
        values = source.view()
        if values.size and not 0 <= values.min() <= values.max() < experts:
            problems.append(
                f"{source.name} in {source.file.name}: expert ids from {values.min()} to {values.max()}; the layer has "
                f"experts 0 to {experts - 1}"
            )
    return problems


def _places(entry: PlanEntry, mesh: Mesh | None) -> Iterable[int]:
    """Which of an entry's sources this process reads."""
    if mesh is None or not entry.stacked:
        return range(len(entry.sources))
    parts = sharding.own_parts(entry.path, entry.shape, mesh)
    return sorted({place for (experts, *_) in parts for place in range(*experts)})


def _bytes_read(entry: PlanEntry, mesh: Mesh | None) -> int:
    """Bytes that this process reads from files for an entry."""
    stored = sum(source.nbytes for source in entry.sources)
    if mesh is None:
        return stored
    held = 0
    for bounds in sharding.own_parts(entry.path, entry.shape, mesh):
        held += math.prod(cut.stop - cut.start for cut in sharding.inside(bounds, entry.shape))
    return stored * held // max(math.prod(entry.shape), 1)


def _largest_part(entry: PlanEntry, mesh: Mesh | None) -> int:
    """Bytes of the largest array that is made of an entry on the host."""
    if mesh is None:
        return entry.nbytes
    parts = sharding.own_parts(entry.path, entry.shape, mesh)
    return max((sharding.elements(bounds) for bounds in parts), default=0) * entry.dtype.itemsize


def _read(entry: PlanEntry, index: tuple[slice, ...], out: np.ndarray) -> None:
    """Writes a part of a parameter into `out`, as a copy: the mapped files may go away afterwards."""

    def copy(source: TensorInfo, index: tuple[slice, ...], out: np.ndarray) -> None:
        view = source.view()[index]
        out[...] = view.view(entry.dtype) if entry.conversion == "view" else view

    if entry.stacked:
        experts, *rest = index
        for row, source in zip(out, entry.sources[experts], strict=True):
            copy(source, tuple(rest), row)
    else:
        copy(entry.sources[0], index, out)


def _place(entry: PlanEntry, put: Callable[[np.ndarray], jax.Array], mesh: Mesh | None, room: Room) -> jax.Array:
    """One parameter on its device or devices."""
    if mesh is not None:
        return sharding.place_one(
            entry.path, entry.shape, entry.dtype, lambda index, out: _read(entry, index, out), mesh, room
        )

    def whole():  # a function, so that the array on the host is gone before its room is another's
        host = np.empty(entry.shape, entry.dtype)
        _read(entry, tuple(slice(size) for size in entry.shape), host)
        return jax.block_until_ready(put(host))  # else copies under way would pile up in host memory

    with room(entry.nbytes):
        array = whole()
    if array.shape != entry.shape or array.dtype != entry.dtype:
        raise ValueError(
            f"put() made {array.dtype}{list(array.shape)} of {entry.path}, which is {entry.dtype}{list(entry.shape)}. "
            "It must place the array as it is."
        )
    return array
