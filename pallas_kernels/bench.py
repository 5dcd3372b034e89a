"""Times kernels on the GPU at hand, at their named shapes, against the floor and against XLA; checks them as it goes.

Times are device times of the launched GPU kernels as CUPTI reports them: launch overhead and the gaps between kernels
are outside. `us` is the median with the L2 cache flushed before every run, `us_hot` the median of runs back to back.
"""

import concurrent.futures
import dataclasses
import functools
import json
import logging
import os
import statistics
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from tqdm import tqdm

from pallas_kernels import aot, mosaic, platform
from pallas_kernels.case import Case, floor_us

log = logging.getLogger("pallas_kernels")
_FLUSHED = 64 * 2**20  # float32 values that a flush reads and writes: 256 MiB, four times the largest L2


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured shape. Times in microseconds; `tflops` and `gbs` count the case's own arithmetic and bytes."""

    section: str
    shape: str
    us: float
    us_hot: float
    tflops: float
    gbs: float
    floor_us: float
    err: float
    us_xla: float | None
    implementation: str
    device: str
    jax: str


def run(
    operation: str,
    *,
    shapes: Iterable[str] | None = None,
    implementation: str | None = None,
    iterations: int = 20,
    xla: bool = True,
    report: Callable[[Row], None] | None = None,
    progress: bool = False,
) -> list[Row]:
    """Measures the named shapes of `operation`.

    `shapes` picks some by name; `implementation` is the kernel family (None: that of the GPU at hand); `xla` also times
    the reference; `report` is called with every row as it is done; `progress` shows bars. A shape that the kernel does not
    carry is left out, with a line in the log. Raises ValueError for an unknown operation or shape, RuntimeError without an
    NVIDIA GPU.
    """
    family = implementation or platform.kernel_name()
    if platform.kernel_name() is None:
        raise RuntimeError(f"A benchmark needs an NVIDIA GPU, and this process runs on {jax.default_backend()}.")
    chosen = [case for case in aot.cases(operation) if shapes is None or case.shape in set(shapes)]
    if shapes is not None and (unknown := set(shapes) - {case.shape for case in chosen}):
        raise ValueError(f"{operation} has no shape named {', '.join(sorted(unknown))}.")
    rows, flush, bar = [], _Flush(), functools.partial(tqdm, disable=not progress)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        prepared = [(case, _prepare(case, family, xla, pool)) for case in bar(chosen, desc="trace", unit="shape")]
        programs = [program for _, found in prepared if found is not None for program in found.values()]
        for program in bar(programs, desc="compile", unit="program"):
            concurrent.futures.wait([program])
    # All are compiled now: compiling runs kernels of its own, which would be in the way of what is timed.
    for case, programs in bar(prepared, desc="time", unit="shape"):
        if programs is not None:
            row = _measure(case, family, iterations, programs, flush)
            rows.append(row)
            if report is not None:
                report(row)
    return rows


class _Flush:
    """Empties L2 when called."""

    def __init__(self):
        self.scratch, self.touch = jnp.ones(_FLUSHED, jnp.float32), jax.jit(lambda x: x + 1)

    def __call__(self):
        return self.touch(self.scratch)


def _prepare(case: Case, family: str, xla: bool, pool) -> dict | None:
    """Programs of a case, which `pool` compiles: what makes its arrays, its kernel, check and reference.

    None, with a line in the log, if the family does not carry the case.
    """
    key = jax.random.key(20261129)
    shapes = jax.eval_shape(case.make, key)
    try:
        kernel = jax.jit(lambda *a: case.call(aot.load(case, family), *a)).lower(*shapes)
    except NotImplementedError as reason:
        log.warning("%s, %s: left out: %s", case.section, case.shape, reason)
        return None
    programs = {"make": jax.jit(case.make).lower(key), "kernel": kernel}
    try:
        programs["check"] = jax.jit(case.check).lower(kernel.out_info, *shapes)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):  # it looks at values
        pass
    if xla:
        programs["xla"] = jax.jit(lambda *a: case.call(aot.load(case, "reference"), *a)).lower(*shapes)
    return {name: pool.submit(program.compile) for name, program in programs.items()}


def _measure(case: Case, family: str, iterations: int, programs: dict, flush: Callable) -> Row:
    """Times and checks one case by its `programs`; `flush` empties L2."""
    arrays = programs["make"].result()(jax.random.key(20261129))
    kernel = programs["kernel"].result()
    check = programs["check"].result() if "check" in programs else case.check
    error = float(check(kernel(*arrays), *arrays))
    cold = statistics.median(mosaic.kernel_times(kernel, arrays, iterations, before=flush))
    hot = statistics.median(mosaic.kernel_times(kernel, arrays, iterations))
    plain = None
    if "xla" in programs:
        times = mosaic.kernel_times(programs["xla"].result(), arrays, max(iterations // 10, 2), before=flush)
        plain = statistics.median(times)
    return Row(
        section=case.section,
        shape=case.shape,
        us=cold,
        us_hot=hot,
        tflops=case.flops / cold / 1e6,
        gbs=case.bytes / cold / 1e3,
        floor_us=floor_us(case, family),
        err=error,
        us_xla=plain,
        implementation=family,
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
    )


def table(rows: Iterable[Row]) -> str:
    """The rows as a text table."""
    names = ("cold us", "hot us", "TFLOP/s", "GB/s", "floor us", "XLA us", "err")
    lines = [f"{'shape':44} " + " ".join(f"{name:>10}" for name in names)]
    for r in rows:
        plain = f"{r.us_xla:10.1f}" if r.us_xla is not None else f"{'-':>10}"
        ours = f"{r.us:10.1f} {r.us_hot:10.1f} {r.tflops:10.0f} {r.gbs:10.0f} {r.floor_us:10.1f}"
        lines.append(f"{r.shape:44} {ours} {plain} {r.err:10.1e}")
    return "\n".join(lines)


def to_json(rows: Iterable[Row]) -> str:
    """The rows as a JSON list of objects."""
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=1)


def plot(rows: Iterable[Row], path: str) -> None:
    """Draws cold times over their floors into the image file `path`. Needs matplotlib (the colab extra)."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as missing:
        raise RuntimeError("A plot needs matplotlib: pip install 'dsa-jax[colab]'.") from missing
    rows = list(rows)
    figure, axes = plt.subplots(figsize=(11, 0.3 * len(rows) + 1.5), layout="constrained")
    places = range(len(rows))
    axes.barh(places, [row.us for row in rows], color="tab:blue", label="kernel, L2 cold")
    axes.scatter([row.floor_us for row in rows], places, color="black", marker="|", s=80, label="floor")
    known = [(row.us_xla, place) for row, place in zip(rows, places) if row.us_xla is not None]
    if known:
        axes.scatter(*zip(*known), color="tab:red", marker="x", label="XLA")
    axes.set_yticks(places, [f"{row.section}: {row.shape}" for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.set_xlabel("microseconds")
    axes.set_title(f"{rows[0].device}, jax {rows[0].jax}" if rows else "no rows")
    figure.legend(loc="outside lower right", ncols=3, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
