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
