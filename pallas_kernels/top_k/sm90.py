"""Exact top-k on Hopper: the program of `program.py` for the number of multiprocessors that an H200 has."""

import functools

from pallas_kernels.top_k import operation, planning

plan = functools.partial(planning.plan, 132)  # multiprocessors


def top_k(*args, **kwargs):
    return operation.top_k(plan, *args, **kwargs)


def candidate_blocks(*args):
    return operation.candidate_blocks(plan, *args)


def top_k_and_candidate_blocks(*args):
    return operation.top_k_and_candidate_blocks(plan, *args)


def unproven(function, args):
    """Why this kernel is not chosen by itself for a call that it carries, or None."""
    return "the sm90 program was changed after its last run on a GPU, and is simulated and compiled only; name it to run it."
