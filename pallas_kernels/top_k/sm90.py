"""Exact top-k on Hopper. The program is in `program.py`; here is what was measured best on an H200."""

import dataclasses

from pallas_kernels.top_k import operation, planning
from pallas_kernels.top_k.planning import TuningConfig

MULTIPROCESSORS = 132


def tuning(rows, length, element_bytes, plain) -> TuningConfig:
    """Few rows: a cluster of blocks each, so that all multiprocessors read. Many: one small block a row, several of
    them on a multiprocessor, so that some read while others select. `plain`: neither lengths nor candidate blocks."""
    vectors = element_bytes  # 16 scores a thread in flight
    if rows > 2 * MULTIPROCESSORS:
        if length <= 20480:
            return TuningConfig(128, 1, 2 * vectors if element_bytes == 4 else vectors, samples=2)
        if length <= 65536:
            return TuningConfig(256, 1, vectors, samples=2)
        return TuningConfig(512, 1, vectors if plain else vectors // 2, samples=1)  # two blocks at 64 registers
    if length <= 32768 or 2 * rows > MULTIPROCESSORS:
        threads = 1024 if length > 16384 and rows <= MULTIPROCESSORS else 512
        return TuningConfig(threads, 1, vectors, samples=1)
    samples = max(length // 524288, 1)
    if 8 * rows <= 64 and length >= 65536:
        return TuningConfig(1024 if length > 524288 else 512, 8, vectors, samples)
    # Clusters of 4 keep to 64 multiprocessors: not every group of them has room for more. Two blocks on each, and so
    # 128 of them, run at a time where 64 registers a thread are enough.
    if 4 * rows <= 64 or (4 * rows <= MULTIPROCESSORS and plain and length <= 262144):
        return TuningConfig(512, 4, vectors, samples)
    return TuningConfig(1024, 2, 2 * vectors if length > 262144 else vectors, samples)


def plan(rows, length, element_bytes, selections, has_lengths):
    """The kernel's shape for `rows` rows of `length` scores."""
    plain = not has_lengths and len(selections) == 1 and not selections[0].group
    tuned = tuning(rows, length, element_bytes, plain)
    if len(selections) > 1 and tuned.blocks * tuned.threads > 512:
        tuned = dataclasses.replace(tuned, vectors=tuned.vectors // 2)  # 64 registers a thread hold no more
    return planning.plan(tuned, length, element_bytes, selections, has_lengths)


def top_k(scores, k, *, lengths=None, order="position", return_scores=False):
    return operation.top_k(plan, scores, k, lengths=lengths, order=order, return_scores=return_scores)


def candidate_blocks(scores, lengths, topk_blocks, block_size):
    return operation.candidate_blocks(plan, scores, lengths, topk_blocks, block_size)


def top_k_and_candidate_blocks(scores, lengths, k, topk_blocks, block_size):
    """(positions, counts, block ids) of `top_k` and `candidate_blocks`, from one read of the scores."""
    return operation.top_k_and_candidate_blocks(plan, scores, lengths, k, topk_blocks, block_size)


def unproven(function, args):
    """Why this kernel is not chosen by itself for a call that it carries, or None."""
    return "the sm90 program was changed after its last run on a GPU, and is simulated and compiled only; name it to run it."
