"""What all tests share: type checks of public functions, and golden files."""

import gc
import importlib.util
import json
import lzma
import os
from pathlib import Path

# Before jax makes its CPU client: an interpreted GPU kernel takes a thread of it per warpgroup, and with fewer threads
# (there are as many as cores) it never ends.
os.environ.setdefault("NPROC", "8")
# Tests compile many programs and run each a few times: XLA's LLVM passes take longer than they save.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import jaxtyping
import ml_dtypes
import numpy as np
import pytest

# Shapes and dtypes in annotations are checked in tests only, and only where beartype is installed. The hook has to be
# in place before the packages are imported.
if importlib.util.find_spec("beartype") is not None:
    jaxtyping.install_import_hook(["pallas_kernels", "dsa_jax"], "beartype.beartype")

# Tests compile the same programs in several processes, and again on the next run.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)

MAPPINGS = 40_000
GOLDEN = Path(__file__).parent / "golden"
DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def read_golden(name: str) -> dict[str, np.ndarray]:
    """Tensors of a safetensors file below tests/golden ("v41/ops/gemm"), packed or not, with their stored dtypes."""
    path = GOLDEN / f"{name}.safetensors"
    data = path.read_bytes() if path.exists() else lzma.decompress(path.with_suffix(".safetensors.xz").read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for key, entry in header.items():
        first, last = entry["data_offsets"]
        values = np.frombuffer(data[start + first : start + last], DTYPES[entry["dtype"]])
        tensors[key] = values.reshape(entry["shape"])
    return tensors


@pytest.fixture(scope="session")
def golden():
    """read_golden, for tests that take it as a fixture."""
    return read_golden


@pytest.fixture(autouse=True)
def room_for_programs():
    """Compiled programs are memory mappings, an interpreted kernel some 400 of them. Linux gives a process 65,530, and XLA
    aborts when they are used up: all programs are forgotten before."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def unchecked():
    """Switches the annotation checks off, so that a wrong argument meets the library's own error."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
