"""Exact top-k on Blackwell: Hopper's program and choices for the number of multiprocessors that a B200 has."""

import functools

from pallas_kernels.top_k import operation, planning

plan = functools.partial(planning.plan, 148)  # multiprocessors


def top_k(*args, **kwargs):
    return operation.top_k(plan, *args, **kwargs)


def candidate_blocks(*args):
    return operation.candidate_blocks(plan, *args)


def top_k_and_candidate_blocks(*args):
    return operation.top_k_and_candidate_blocks(plan, *args)


def unproven(function, args):
    """Why this kernel is not chosen by itself for a call that it carries, or None."""
    return "the sm100 kernel was compiled and simulated, but never run on a GPU; name it to run it."
