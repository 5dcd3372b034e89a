"""What this machine has for the kernels: versions, device, assembler, and whether each kernel runs and computes right."""

import importlib.metadata
import importlib.util
import os
import platform as python_platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

from pallas_kernels import aot, platform
from pallas_kernels.case import Case

LARGEST_ERROR = 2e-2  # relative, of a kernel's result in bf16 or FP8 against its reference; top-k counts what differs
PACKAGES = ("jax", "jaxlib", "flax", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")


@dataclass(frozen=True)
class Finding:
    """One line of the report. ok is None where there is nothing to judge."""

    name: str
    text: str
    ok: bool | None = None

    def line(self) -> str:
        """The line as it is printed."""
        mark = {True: "ok", False: "PROBLEM", None: "-"}[self.ok]
        return f"{mark:8} {self.name:24} {self.text}"


def findings() -> Iterator[Finding]:
    """The environment, then one tiny run of each kernel of the GPU at hand. A failed check never stops the others."""
    yield Finding("python", f"{python_platform.python_version()} on {python_platform.platform()}")
    yield from _packages()
    yield _devices()
    yield _driver()
    yield _assembler()
    family = platform.kernel_name()
    if family is None:
        here = platform.capability()
        what = f"capability {here[0]}.{here[1]}" if here else f"the {jax.default_backend()} backend"
        yield Finding("kernels", f"none for {what}: the references run. Kernels need an H100, H200 (sm90) or B200 (sm100).")
        return
    yield Finding("kernels", f"family {family}, compute capability {'.'.join(map(str, platform.capability()))}", True)
    for case in smallest_cases(family):
        yield run_case(case, family)


def smallest_cases(family: str) -> list[Case]:
    """For every function that has a kernel of `family`, the named shape that moves the fewest bytes."""
    best: dict[tuple[str, str], Case] = {}
    for case in aot.cases():
        key = (case.operation, case.function)
        if family in case.targets and (key not in best or case.bytes < best[key].bytes):
            best[key] = case
    return [best[key] for key in sorted(best)]


def run_case(case: Case, family: str) -> Finding:
    """Runs one shape on the kernel of `family` and compares it with its reference."""
    name = f"{case.operation}.{case.function}" if case.operation != case.function else case.operation
    try:
        arrays = jax.jit(case.make)(jax.random.key(0))
        error = float(case.check(jax.jit(lambda *a: case.call(aot.load(case, family), *a))(*arrays), *arrays))
    except NotImplementedError as reason:
        return Finding(name, f"the reference runs instead: {reason}")
    except Exception as problem:  # whatever the compiler or the driver raises is what the user has to see
        return Finding(name, f"{case.shape}: {type(problem).__name__}: {str(problem).splitlines()[0]}", False)
    return Finding(name, f"{case.shape}: error {error:.1e} against the reference", error <= LARGEST_ERROR)


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            if name in ("jax", "jaxlib", "flax"):
                yield Finding(name, "is not installed: pip install dsa-jax", False)


def _devices() -> Finding:
    try:
        devices = jax.devices()
    except RuntimeError as problem:
        return Finding("devices", f"jax starts no device: {str(problem).splitlines()[0]}", False)
    kinds = sorted({f"{d.device_kind} ({d.platform})" for d in devices})
    plugin = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
    if devices[0].platform == "cpu" and _nvidia_driver() and not plugin:
        return Finding("devices", "an NVIDIA driver is here and jax has no CUDA plugin: pip install 'dsa-jax[cuda13]'", False)
    return Finding("devices", f"{len(devices)} of {', '.join(kinds)}", True)


def _nvidia_driver() -> str | None:
    """Version of the NVIDIA driver's kernel module, or None."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", path.read_text()) if path.is_file() else None
    return found[1] if found else None


def _driver() -> Finding:
    version = _nvidia_driver()
    if version is None:
        return Finding("driver", "no NVIDIA driver on this machine")
    runtime = getattr(jax.devices()[0].client, "platform_version", "?").splitlines()[0]
    return Finding("driver", f"{version}; runtime: {runtime}")


def _assembler() -> Finding:
    """The ptxas that is found first. One of an older CUDA on PATH may be taken in place of the plugin's own."""
    own = importlib.util.find_spec("nvidia")
    folders = [Path(root) for root in (own.submodule_search_locations if own else [])]
    bundled = sorted(str(path) for folder in folders for path in folder.glob("*/bin/ptxas"))
    on_path = shutil.which("ptxas")
    if not bundled and on_path is None:
        needed = platform.kernel_name() is not None
        text = "no ptxas is found: pip install nvidia-cuda-nvcc" + ("" if needed else " (only kernels need it)")
        return Finding("assembler", text, False if needed else None)
    versions = [f"{_ptxas_version(path)} at {_short(path)}" for path in [*bundled, *([on_path] if on_path else [])]]
    return Finding("assembler", "ptxas " + "; ".join(versions), True)


def _short(path: str) -> str:
    return os.path.join("..", *Path(path).parts[-4:])


def _ptxas_version(path: str) -> str:
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as problem:
        return f"(does not start: {type(problem).__name__})"
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found[1] if found else "(unknown version)"
