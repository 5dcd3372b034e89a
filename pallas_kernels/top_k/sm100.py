"""Exact top-k on Blackwell. The program is in `program.py`; here is Hopper's choice for this chip's size: it compiles, and was
not measured."""

from pallas_kernels.top_k import operation, planning
from pallas_kernels.top_k.planning import TuningConfig

MULTIPROCESSORS = 148


def tuning(rows, length, element_bytes) -> TuningConfig:
    """Few rows: a cluster of blocks each, so that all multiprocessors read. Many: one small block a row, several of
    them on a multiprocessor, so that some read while others select."""
    vectors = 4 if element_bytes == 4 else 2
    if rows > 2 * MULTIPROCESSORS:
        threads = 128 if length <= 20480 else 256 if length <= 65536 else 512
        return TuningConfig(threads, 1, vectors, samples=max(256 // threads, 1))
    blocks = 1
    while blocks < 8 and 2 * blocks * rows <= MULTIPROCESSORS and length >= 16384 * blocks:
        blocks *= 2
    slice_length = length // blocks
    # Clusters of 4 start together only if two of their blocks fit a multiprocessor: 512 threads each.
    large = slice_length > 16384 and (blocks != 4 or slice_length > 65536)
    threads = 1024 if large and rows <= MULTIPROCESSORS else 512
    return TuningConfig(threads, blocks, vectors, samples=max(length // 524288, 1))


def plan(rows, length, element_bytes, selections, has_lengths):
    """The kernel's shape for `rows` rows of `length` scores."""
    return planning.plan(tuning(rows, length, element_bytes), length, element_bytes, selections, has_lengths)


def top_k(scores, k, *, lengths=None, order="position", return_scores=False):
    return operation.top_k(plan, scores, k, lengths=lengths, order=order, return_scores=return_scores)


def candidate_blocks(scores, lengths, topk_blocks, block_size):
    return operation.candidate_blocks(plan, scores, lengths, topk_blocks, block_size)


def top_k_and_candidate_blocks(scores, lengths, k, topk_blocks, block_size):
    """(positions, counts, block ids) of `top_k` and `candidate_blocks`, from one read of the scores."""
    return operation.top_k_and_candidate_blocks(plan, scores, lengths, k, topk_blocks, block_size)
