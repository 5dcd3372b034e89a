"""GPU kernels for DeepSeek sparse attention, each with a plain JAX reference. Pure functions on arrays."""

from pallas_kernels.cache_write import Rotation, quantize_index_queries, write_rows
from pallas_kernels.candidate_logits import (
    Candidates,
    candidate_logits,
    candidate_positions,
    expand_candidates,
    make_candidate_schedule,
    make_ragged_candidate_schedule,
    ragged_candidate_logits,
)
from pallas_kernels.dispatch import preferred
from pallas_kernels.grouped_gemm import grouped_gemm, quantized_matmul
from pallas_kernels.indexer_logits import indexer_logits, make_indexer_schedule, paged_indexer_logits
from pallas_kernels.indexing import gather_paged, gather_rows, scatter_paged, scatter_rows
from pallas_kernels.quantize import (
    by_parity,
    dequantize_fp4,
    dequantize_fp4_by_parity,
    dequantize_fp8,
    dequantize_weight,
    e8m0_to_float32,
    fake_quantize,
    pow2ceil,
    quantize_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
    unpack_fp4,
)
from pallas_kernels.records import (
    IndexFP8,
    IndexMXFP4,
    Model1,
    PagedRows,
    Plain,
    RecordFormat,
    V32,
    V41MXFP8,
    V41NVFP4,
)
from pallas_kernels.select import Selection, make_select_schedule, select
from pallas_kernels.slots import positions_to_slots
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.sparse_decode import DecodeSchedule, combine, make_decode_schedule, sparse_decode
from pallas_kernels.split_mixes import split_mixes
from pallas_kernels.top_k import candidate_blocks, merge_top_k, top_k, top_k_and_candidate_blocks

__all__ = [
    "by_parity",
    "candidate_blocks",
    "candidate_logits",
    "candidate_positions",
    "Candidates",
    "combine",
    "DecodeSchedule",
    "dequantize_fp4",
    "dequantize_fp4_by_parity",
    "dequantize_fp8",
    "dequantize_weight",
    "e8m0_to_float32",
    "expand_candidates",
    "fake_quantize",
    "gather_paged",
    "gather_rows",
    "grouped_gemm",
    "indexer_logits",
    "IndexFP8",
    "IndexMXFP4",
    "make_candidate_schedule",
    "make_decode_schedule",
    "make_indexer_schedule",
    "make_ragged_candidate_schedule",
    "make_select_schedule",
    "merge_top_k",
    "Model1",
    "paged_indexer_logits",
    "PagedRows",
    "Plain",
    "positions_to_slots",
    "pow2ceil",
    "quantize_fp8",
    "quantize_index_queries",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "quantized_matmul",
    "ragged_candidate_logits",
    "RecordFormat",
    "Rotation",
    "scatter_paged",
    "scatter_rows",
    "select",
    "Selection",
    "sparse_attention",
    "sparse_decode",
    "split_mixes",
    "top_k",
    "top_k_and_candidate_blocks",
    "unpack_fp4",
    "V32",
    "V41MXFP8",
    "V41NVFP4",
    "write_rows",
]
