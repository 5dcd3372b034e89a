"""Streams a plan's tensors onto the device, each parameter exactly once."""

from collections.abc import Callable

import jax
import numpy as np
from tqdm import tqdm

from dsa_jax.weights.header import TensorInfo
from dsa_jax.weights.plan import LoadPlan, PlanEntry


def load(
    plan: LoadPlan, put: Callable[[np.ndarray], jax.Array] = jax.device_put, progress: bool = True
) -> dict[str, jax.Array]:
    """Reads every parameter of `plan` from its files and places it with `put`. Path -> array.

    Beside what is already placed, no more than one parameter (and one of its tensors) is held at a time. Stored bytes
    are kept as they are, up to the plan's conversions; nothing is dequantised.
    Raises ValueError that names every parameter that would not be written exactly once, every scale of zero bytes (a
    tensor never filled: its 2^-127 would silence the layer), every integer that does not fit in 32 bits, and every
    table of experts that names one which is not there (its tokens would pass no expert).
    """
    problems: list[str] = []
    _refuse(_coverage_problems(plan))
    arrays: dict[str, jax.Array] = {}
    experts = {entry.path: entry.shape[0] for entry in plan.entries if entry.path.endswith(".gate.weight")}
    with tqdm(total=plan.nbytes, unit="B", unit_scale=True, desc="weights", disable=not progress) as bar:
        for entry in plan.entries:
            problems += [problem for source in entry.sources for problem in _value_problems(entry, source)]
            if entry.path.endswith(".gate.tid2eid"):
                problems += _table_problems(entry, experts[entry.path.removesuffix("tid2eid") + "weight"])
            # Once the load has failed, the rest is only checked, so that all problems are said at once.
            if not problems:
                arrays[entry.path] = _place(entry, put)
            bar.update(sum(source.nbytes for source in entry.sources))
    _refuse(problems)
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
    if entry.path.endswith(".scale") and source.nbytes and not source.view().view(np.uint8).any():
        problems.append(f"{where}: all bytes of this scale are zero; it was never filled")
    if entry.conversion == "narrow" and source.nbytes:
        values = source.view()
        low, high = int(values.min()), int(values.max())
        if low < -(2**31) or high >= 2**31:
            problems.append(f"{where}: values from {low} to {high} do not fit in 32 bits")
    return problems


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


def _place(entry: PlanEntry, put: Callable[[np.ndarray], jax.Array]) -> jax.Array:
    """One parameter on the device, from a copy in memory: the mapped files may go away afterwards."""
    host = np.empty(entry.shape, entry.dtype)
    places = host if entry.stacked else host[None]
    for place, source in enumerate(entry.sources):
        view = source.view()
        places[place, ...] = view.view(entry.dtype) if entry.conversion == "view" else view
    array = jax.block_until_ready(put(host))  # else copies under way would pile up in host memory
    if array.shape != host.shape or array.dtype != host.dtype:
        raise ValueError(
            f"put() made {array.dtype}{list(array.shape)} of {entry.path}, which is {host.dtype}{list(host.shape)}. "
            "It must place the array as it is."
        )
    return array
