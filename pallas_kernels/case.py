"""What a named shape of an operation is: shared by tests, compile report, benchmark and notebooks."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Case:
    """One named shape of an operation.

    Attributes:
      section: table the shape belongs to, e.g. "Indexer logits, ragged prefill (fp8)".
      shape: name of the shape inside the section.
      operation: folder in `pallas_kernels`, e.g. "indexer_logits".
      function: the function of that operation, e.g. "paged_indexer_logits".
      make: ``make(key) -> tuple`` of the positional arrays (arrays or pytrees of them) of one random call, jit-able.
      call: ``call(function, *arrays)`` calls `function` (public, reference or kernel) on what `make` returned.
      check: ``check(output, *arrays) -> scalar``, relative error of `output` against a higher-precision sample.
      flops: arithmetic the operation needs, by the peak it is held against (`peak`: "fp8", "bf16" or "none").
      bytes: bytes it must move through device memory.
      targets: kernel families that must compile it, out of "sm90" and "sm100".
      compiled: whether the compile report holds it (one per distinct kernel is enough).
    """

    section: str
    shape: str
    operation: str
    function: str
    make: Callable
    call: Callable
    check: Callable
    flops: float
    bytes: float
    peak: str = "none"
    targets: tuple[str, ...] = ("sm90", "sm100")
    compiled: bool = False


# Dense datasheet rates of the chips, per second; memory in bytes per second.
PEAKS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "sm90": MappingProxyType({"bf16": 989e12, "fp8": 1979e12, "memory": 4.8e12}),
        "sm100": MappingProxyType({"bf16": 2250e12, "fp8": 4500e12, "memory": 8.0e12}),
    }
)


def floor_us(case: Case, family: str) -> float:
    """The least time `case` can take on a chip of `family`, microseconds: its arithmetic or its bytes."""
    peaks = PEAKS[family]
    arithmetic = case.flops / peaks[case.peak] if case.peak in peaks else 0.0
    return 1e6 * max(arithmetic, case.bytes / peaks["memory"])
