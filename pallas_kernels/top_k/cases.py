"""Named shapes of exact top-k and candidate blocks. Errors are the share of rows that differ from the exact answer."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case
from pallas_kernels.top_k import reference

SECTION = "Exact top-k"
BLOCKS = 2048  # candidate blocks of DeepSeek-V4.1, of 8 positions each
BLOCK_SIZE = 8


def _make(rows, length, dtype, key):
    return (jax.random.normal(key, (rows, length), jnp.float32).astype(dtype),)


def _make_with_lengths(rows, length, key):
    return *_make(rows, length, jnp.float32, key), jnp.full((rows,), length, jnp.int32)


def _make_with_bounds(rows, length, key):
    start = jnp.arange(rows, dtype=jnp.int32) % length
    return *_make(rows, length, jnp.float32, key), start, jnp.full((rows,), length, jnp.int32)


def _differing(found, expected):
    differs = functools.reduce(jnp.logical_or, [jnp.any(f != e, axis=-1) for f, e in zip(found, expected)])
    return float(jnp.mean(differs))


def _rows(rows, length, k, dtype=jnp.float32, compiled=False):
    name = {"float32": "f32", "bfloat16": "bf16"}[jnp.dtype(dtype).name]
    return Case(
        section=SECTION,
        shape=f"rows{rows} L{length} k{k} {name}",
        operation="top_k",
        function="top_k",
        make=functools.partial(_make, rows, length, dtype),
        call=lambda function, scores: function(scores, k),
        check=lambda output, scores: _differing(output[:1], reference.top_k(scores, k)[:1]),
        flops=0.0,
        bytes=float(rows * (length * jnp.dtype(dtype).itemsize + 4 * k)),
        compiled=compiled,
    )


def _blocks(rows, length, compiled=False):
    width = min(BLOCKS, length // BLOCK_SIZE)
    return Case(
        section="Candidate blocks",
        shape=f"rows{rows} L{length} blocks{width} f32",
        operation="top_k",
        function="candidate_blocks",
        make=functools.partial(_make_with_lengths, rows, length),
        call=lambda function, scores, lengths: (function(scores, lengths, BLOCKS, BLOCK_SIZE),),
        check=lambda output, *arrays: _differing(output, (reference.candidate_blocks(*arrays, BLOCKS, BLOCK_SIZE),)),
        flops=0.0,
        bytes=float(rows * 4 * (length + width)),
        compiled=compiled,
    )


def _ranges(rows, length, k, compiled=False):
    return Case(
        section=SECTION,
        shape=f"rows{rows} L{length} k{k} f32 ranges",
        operation="top_k",
        function="top_k",
        make=functools.partial(_make_with_bounds, rows, length),
        call=lambda function, scores, start, end: function(scores, k, row_start=start, row_end=end),
        check=lambda output, scores, start, end: _differing(
            output[:1], reference.top_k(scores, k, row_start=start, row_end=end)[:1]
        ),
        flops=0.0,
        bytes=float(rows * 4 * (length + k)),
        compiled=compiled,
    )


def _joint(rows, length, k, compiled=False):
    width = min(BLOCKS, length // BLOCK_SIZE)
    return Case(
        section="Top-k and candidate blocks from one read",
        shape=f"rows{rows} L{length} k{k} blocks{width} f32",
        operation="top_k",
        function="top_k_and_candidate_blocks",
        make=functools.partial(_make_with_lengths, rows, length),
        call=lambda function, scores, lengths: function(scores, k, lengths, BLOCKS, BLOCK_SIZE),
        check=lambda output, scores, lengths: _differing(
            output[::2], reference.top_k_and_candidate_blocks(scores, k, lengths, BLOCKS, BLOCK_SIZE)[::2]
        ),
        flops=0.0,
        bytes=float(rows * 4 * (length + k + width)),
        compiled=compiled,
    )


CASES = (
    _rows(1, 8192, 2048),
    _rows(1, 65536, 2048),
    _rows(1, 131072, 2048, compiled=True),
    _rows(1, 131072, 512),
    _rows(1, 1048576, 512),
    _rows(32, 8192, 512),
    _rows(32, 32768, 512),
    _rows(32, 131072, 512, compiled=True),
    _rows(32, 131072, 1024),
    _rows(32, 131072, 2048),
    _rows(32, 1048576, 512),
    _rows(64, 131072, 2048),
    _rows(128, 16384, 512),
    _rows(128, 16384, 512, jnp.bfloat16),
    _rows(128, 32768, 2048),
    _rows(128, 131072, 512),
    _rows(128, 131072, 2048, compiled=True),
    _rows(4096, 8192, 2048),
    _rows(4096, 16384, 512, compiled=True),
    _rows(4096, 16384, 512, jnp.bfloat16, compiled=True),
    _rows(4096, 32768, 2048),
    _rows(2048, 131072, 2048, compiled=True),
    _blocks(32, 131072, compiled=True),
    _blocks(2048, 131072),
    _ranges(4096, 16384, 512, compiled=True),
    _joint(32, 131072, 512, compiled=True),
    _joint(2048, 131072, 512, compiled=True),
)
