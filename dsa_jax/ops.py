"""The one bridge from the models to the kernels."""

from pallas_kernels import (
    Candidates,
    IndexFP8,
    IndexMXFP4,
    Model1,
    PagedRows,
    Plain,
    RecordFormat,
    Selection,
    V32,
    V41MXFP8,
    V41NVFP4,
    dequantize_weight,
    expand_candidates,
    fake_quantize,
    gather_rows,
    paged_indexer_logits,
    positions_to_slots,
    preferred,
    quantize_fp8,
    scatter_rows,
    select,
    sparse_decode,
)

from pallas_kernels.platform import require as _require_device

__all__ = [
    "Candidates",
    "IndexFP8",
    "IndexMXFP4",
    "Model1",
    "PagedRows",
    "Plain",
    "RecordFormat",
    "Selection",
    "V32",
    "V41MXFP8",
    "V41NVFP4",
    "dequantize_weight",
    "expand_candidates",
    "fake_quantize",
    "gather_rows",
    "paged_indexer_logits",
    "positions_to_slots",
    "preferred",
    "quantize_fp8",
    "require",
    "scatter_rows",
    "select",
    "sparse_decode",
]


def require(implementation: str | None) -> None:
    """Raises NotImplementedError where a named implementation cannot run on the device at hand, ValueError for a name that
    is not one. None, which takes what there is, and interpreted kernels run everywhere."""
    with preferred(implementation):
        if implementation is not None and not implementation.startswith("interpret_"):
            _require_device(implementation)
