"""Compiles every kernel for H200 and B200 on a machine without a GPU, and reports what the assembler made of it.

XLA compiles Mosaic GPU kernels for the target of a compile-only topology. That needs the CUDA plugin of jax, ptxas and
nvdisasm (the `test` extra on Linux x86-64), and no driver or GPU.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import tempfile

import jax
from jax.experimental import topologies
from tqdm import tqdm

import pallas_kernels
from pallas_kernels.case import Case

TARGETS = {"h200": "sm90", "b200": "sm100"}  # chip -> kernel family

# What a chip is to XLA: (cores, memory bytes/s, L2 bytes, GHz, memory bytes, compute capability major, name).
_CHIPS = {
    "h200": (132, 4800000000000, 52428800, 1.98, 151397597184, 9, "NVIDIA H200"),
    "b200": (148, 7672320000000, 132644864, 1.965, 191514411008, 10, "NVIDIA B200"),
}
_PACKAGES = ("jax_cuda13_plugin", "nvidia.cu13")
_compiled_first: dict[str, str] = {}
_reports: dict[str, tuple["KernelReport", ...]] = {}  # by lowered program

# Instructions that say how a kernel computes and moves data: tensor cores (Hopper HGMMA/QGMMA, Blackwell UTC*MMA),
# TMA loads, stores and gathers, cp.async, TMEM loads and stores, multicast, and local memory (spills).
_COUNTED = {
    "HGMMA": r"\bHGMMA\b",
    "QGMMA": r"\bQGMMA\b",
    "UTCxMMA": r"\bUTC\w*MMA\b",
    "UTCCP": r"\bUTCCP\b",
    "UTMALDG": r"\bUTMALDG\b",
    "UTMALDG.GATHER4": r"\bUTMALDG\S*GATHER4",
    "UTMALDG.MULTICAST": r"\bUTMALDG\S*MULTICAST",
    "UTMASTG": r"\bUTMASTG\b",
    "UBLKCP": r"\bUBLKCP\b",
    "LDGSTS": r"\bLDGSTS\b",
    "LDGSTS.UR": r"\bLDGSTS\S* \[R\d+\+UR",  # to an address with a part that all threads share
    "LDTM": r"\bLDTM\b",
    "STTM": r"\bSTTM\b",
    "MUFU": r"\bMUFU\b",
    "LDL": r"\bLDL\b",
    "STL": r"\bSTL\b",
}


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """What one kernel of one case became on one chip. Sizes in bytes, `tmem` in columns; counts are of SASS lines."""

    target: str
    section: str
    shape: str
    kernel: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    smem: int
    tmem: int
    instructions: dict[str, int]


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """All kernels of all cases; `unsupported` says which case a family does not carry, and why."""

    kernels: tuple[KernelReport, ...]
    unsupported: tuple[tuple[str, str, str, str], ...]  # target, section, shape, reason

    def json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    def text(self) -> str:
        lines = ["target  registers  spills   smem  tmem  kernel: shape | instructions"]
        for k in self.kernels:
            counts = " ".join(f"{name} {count}" for name, count in k.instructions.items() if count)
            spills = k.spill_stores + k.spill_loads
            lines.append(
                f"{k.target:6}  {k.registers:9}  {spills:6}  {k.smem:5}  {k.tmem:4}  {k.kernel}: "
                f"{k.section}, {k.shape} | {counts}"
            )
        for target, section, shape, why in self.unsupported:
            lines.append(f"{target:6}  not carried: {section}, {shape}: {why}")
        return "\n".join(lines)


def missing() -> str | None:
    """Why nothing can be compiled here, as a sentence, or None if it can."""
    for name in _PACKAGES:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return (
                f"Compiling for a GPU that is not here needs the Python package {name}, which is not installed. It "
                "comes with the test extra on Linux x86-64: pip install 'dsa-jax[test]'."
            )
    return None


def compile_for(target: str, function, *args) -> tuple[KernelReport, ...]:
    """Compiles ``jit(function)(*args)`` for the chip `target` ("h200" or "b200") and reports its Mosaic GPU kernels.

    `args` are arrays or `jax.ShapeDtypeStruct`s (or pytrees of them); only shapes and dtypes matter. A process can
    compile for one chip only, since Mosaic GPU keeps the first one it sees; `compile_report` starts a process for each.
    Raises ValueError for an unknown target, RuntimeError if the compile-only packages are not installed or the process
    has compiled for another chip before.
    """
    _known(target)
    if (reason := missing()) is not None:
        raise RuntimeError(reason)
    if (first := _compiled_first.setdefault("target", target)) != target:
        raise RuntimeError(
            f"This process has compiled for {first!r} and cannot compile for {target!r} too. Use compile_report, which "
            "starts a process for each target, or a new process."
        )
    mesh = topologies.make_mesh(topo=_topology(target), mesh_shape=(1,), axis_names=("device",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated), args)
    with _dumps() as folder:
        lowered = jax.jit(function).lower(*placed)
        text = lowered.as_text()
        if text not in _reports:  # a kernel that was compiled before is taken from a cache and leaves no report
            lowered.compile()
            _reports[text] = tuple(_read(target, path) for path in sorted(folder.glob("*.ptxas")))
    return _reports[text]


def cases(operation: str | None = None) -> tuple[Case, ...]:
    """The named shapes of `operation` (a folder of `pallas_kernels`), or of every operation that has some."""
    names = [m.name for m in pkgutil.iter_modules(pallas_kernels.__path__) if m.ispkg]
    if operation is not None and operation not in names:
        raise ValueError(f"operation={operation!r} is not known. Allowed: {', '.join(names)}.")
    found = []
    for name in names if operation is None else [operation]:
        if importlib.util.find_spec(f"pallas_kernels.{name}.cases") is not None:
            found += importlib.import_module(f"pallas_kernels.{name}.cases").CASES
    return tuple(found)


def load(case: Case, implementation: str):
    """The function of `case` in the module of `implementation` ("reference", "sm90" or "sm100").

    Raises NotImplementedError if the operation has no such module or the module no such function.
    """
    module = f"pallas_kernels.{case.operation}.{implementation}"
    if importlib.util.find_spec(module) is None:
        raise NotImplementedError(f"{case.operation} has no {implementation} kernel.")
    function = getattr(importlib.import_module(module), case.function, None)
    if function is None:
        raise NotImplementedError(f"{case.operation} has no {implementation} kernel for {case.function}.")
    return function


def compile_case(case: Case, target: str) -> tuple[KernelReport, ...]:
    """Compiles the kernel of `case` for `target`. NotImplementedError says why the family does not carry it."""
    function = load(case, TARGETS[target])
    shapes = jax.eval_shape(case.make, jax.random.key(0))
    kernels = compile_for(target, lambda *arrays: case.call(function, *arrays), *shapes)
    return tuple(dataclasses.replace(k, section=case.section, shape=case.shape) for k in kernels)


def compile_report(targets=tuple(TARGETS), operation: str | None = None, progress: bool = False) -> CompileReport:
    """Compiles the standard shapes of every operation (or of one) for `targets`, each target in a process of its own.
    `progress` shows a bar.

    Raises ValueError for an unknown target or operation, RuntimeError if the compile-only packages are not installed or
    a kernel does not compile (with what the compiler said).
    """
    for target in targets:
        _known(target)
    if (reason := missing()) is not None:
        raise RuntimeError(reason)
    shapes = sum(len(_compiled_cases(target, operation)) for target in targets)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    root = str(pathlib.Path(pallas_kernels.__file__).parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    code = "import sys; from pallas_kernels import aot; aot._worker(*sys.argv[1:])"
    with tempfile.TemporaryDirectory() as folder:
        running = []
        done, worker_end = os.pipe()  # a line for every shape that is compiled
        for target in targets:
            out, errors = pathlib.Path(folder, target), pathlib.Path(folder, f"{target}.stderr")
            command = [sys.executable, "-c", code, target, str(out), str(worker_end), *([operation] if operation else [])]
            with errors.open("w") as stderr:
                process = subprocess.Popen(command, env=environment, stderr=stderr, pass_fds=(worker_end,))
            running.append((out, errors, process))
        os.close(worker_end)
        with open(done) as lines:
            for _ in tqdm(lines, total=shapes, desc="compile", unit="shape", disable=not progress):
                pass
        kernels, unsupported = [], []
        for out, errors, process in running:
            if process.wait():
                raise RuntimeError(f"Compiling for {out.name} failed:\n{errors.read_text()}")
            found = json.loads(out.read_text())
            kernels += [KernelReport(**k) for k in found["kernels"]]
            unsupported += [tuple(u) for u in found["unsupported"]]
    return CompileReport(tuple(kernels), tuple(unsupported))


def _compiled_cases(target: str, operation: str | None) -> list[Case]:
    """The shapes that a report for `target` holds."""
    return [case for case in cases(operation) if case.compiled and TARGETS[target] in case.targets]


def _worker(target: str, out: str, done: str, operation: str | None = None) -> None:
    """Body of a process of `compile_report`: writes the report of one target to the file `out`, and a line to the file
    descriptor `done` after every shape."""
    kernels, unsupported = [], []
    for case in _compiled_cases(target, operation):
        try:
            kernels += compile_case(case, target)
        except NotImplementedError as reason:
            unsupported.append((target, case.section, case.shape, str(reason)))
        os.write(int(done), b"\n")
    pathlib.Path(out).write_text(CompileReport(tuple(kernels), tuple(unsupported)).json())


def _known(target: str) -> None:
    if target not in TARGETS:
        raise ValueError(f"target={target!r} is not known. Allowed: {', '.join(TARGETS)}.")


@functools.cache
def _topology(target: str):
    # The plugin's checks look for cuDNN and a driver, which compiling does not need. They run when jax first looks for
    # backends; with JAX_PLATFORMS=cpu jax leaves them out by itself.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    cores, bandwidth, l2, clock, memory, major, name = _CHIPS[target]
    description = f"""
      gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
        shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
        core_count: {cores} fpus_per_core: 128 clock_rate_ghz: {clock} memory_bandwidth: {bandwidth}
        l2_cache_size: {l2} device_memory_size: {memory} device_address_bits: 64
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
        cuda_compute_capability {{ major: {major} feature_extension: ACCELERATED_FEATURES }}
        device_vendor: "NVIDIA Corporation" name: "{name}"
        driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
      }}
      platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}" """
    return topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1")


@contextlib.contextmanager
def _dumps():
    """Makes Mosaic GPU write PTX, the assembler's report, SASS and resources of what is compiled into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = dict.fromkeys(("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_SASS"), "1")
        wanted["MOSAIC_GPU_DUMP_TO"] = folder
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        cached = jax.config.jax_enable_compilation_cache
        jax.config.update("jax_enable_compilation_cache", False)  # what comes from a cache leaves no report
        try:
            yield pathlib.Path(folder)
        finally:
            jax.config.update("jax_enable_compilation_cache", cached)
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def _read(target: str, ptxas: pathlib.Path) -> KernelReport:
    report = ptxas.read_text()
    resources = ptxas.with_suffix(".resources.txt").read_text()
    disassembly = "".join(path.read_text() for path in sorted(ptxas.parent.glob(f"{ptxas.stem}.sass*"))[:1])

    def number(pattern: str, text: str) -> int:
        found = re.search(pattern, text)
        return int(found.group(1)) if found else 0

    return KernelReport(
        target=target,
        section="",
        shape="",
        kernel=re.search(r"entry function '(\w+?)(?:_mosaic_gpu_kernel)?'", report).group(1),
        registers=number(r"Used (\d+) registers", report),
        spill_stores=number(r"(\d+) bytes spill stores", report),
        spill_loads=number(r"(\d+) bytes spill loads", report),
        stack=number(r"(\d+) bytes stack frame", report),
        smem=number(r"smem_scratch_bytes=(\d+)", resources),
        tmem=number(r"tmem_scratch_cols=(\d+)", resources) + number(r"tmem_collective_scratch_cols=(\d+)", resources),
        instructions={name: len(re.findall(pattern, disassembly)) for name, pattern in _COUNTED.items()},
    )
