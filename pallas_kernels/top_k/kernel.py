"""Runs the lane program of `program.py` on rows: as a Pallas kernel on a GPU, in the simulator when interpreted."""

import concurrent.futures
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels import mosaic
from pallas_kernels.top_k import program
from pallas_kernels.top_k.lanes import Emitter
from pallas_kernels.top_k.simulator import Simulator


def run(scores, lengths, plan: program.Plan, starts=None) -> list:
    """The int32 output rows of `plan`, [rows, width] each, for `scores` [rows, length].

    `lengths` and `starts` int32 [rows] or None: where rows end and begin, both counted from their first score.
    """
    inputs = [scores, *(array for array in (lengths, starts) if array is not None)]
    if mosaic.is_interpreted():
        shapes = [jax.ShapeDtypeStruct((scores.shape[0], width), jnp.int32) for _, width in plan.outputs()]
        thread = _thread_with_subnormals()
        return jax.pure_callback(
            lambda *arrays: thread.submit(_simulate, plan, *arrays).result(), shapes, *inputs, vmap_method="sequential"
        )
    return _compiled(plan, *inputs)


@functools.cache
def _thread_with_subnormals():
    """Threads of XLA flush subnormal numbers to 0, callbacks included; one that started outside of them does not."""
    thread = concurrent.futures.ThreadPoolExecutor(1)
    thread.submit(int).result()
    return thread


def _bounds(plan):
    """Names of the inputs that follow the scores."""
    return ["lengths"] * plan.has_lengths + ["starts"] * plan.has_starts


def _compiled(plan, scores, *bounds):
    rows, length = scores.shape
    outputs = plan.outputs()
    names = [*plan.shared()]

    def body(*refs):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def emit(_, scores_ref, *refs):
            globals_ = {name: (ref, 1) for name, ref in zip(_bounds(plan), refs)}
            refs = refs[len(bounds) :]
            globals_ |= {name: (ref, width) for (name, width), ref in zip(outputs, refs)}
            machine = Emitter(
                threads=plan.threads,
                blocks=plan.blocks,
                block=mgpu_utils.block_idx(),
                scores=scores_ref,
                row_elements=length,
                element_bytes=plan.element_bytes,
                globals_=globals_,
                shared=dict(zip(names, refs[len(outputs) :])),
            )
            program.run(machine, plan)

        emit(*refs)

    cluster = dict(cluster=(plan.blocks,), cluster_names=("block",)) if plan.blocks > 1 else {}
    body.__name__ = "top_k" if len(plan.selections) == 1 else "top_k_candidate_blocks"
    found = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((rows * width,), jnp.int32) for _, width in outputs],
        grid=(rows,),
        grid_names=("row",),
        **cluster,
        num_threads=plan.threads // 128,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((words,), jnp.int32) for words in plan.shared().values()],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(scores, *bounds)
    return [array.reshape(rows, width) for array, (_, width) in zip(found, outputs)]


def _simulate(plan, scores, *bounds):
    scores = np.asarray(scores)
    rows, length = scores.shape
    flat = scores.astype(np.float32).reshape(-1)
    globals_ = {name: (np.zeros(rows * width, np.int32), width) for name, width in plan.outputs()}
    globals_ |= {name: (np.asarray(array), 1) for name, array in zip(_bounds(plan), bounds)}
    for row in range(rows):
        start = int(np.clip(globals_["starts"][0][row], 0, length)) if plan.has_starts else 0
        machine = Simulator(
            threads=plan.threads,
            blocks=plan.blocks,
            row=row,
            scores=(flat, row * length + start, plan.vector),
            start=start,
            globals_=globals_,
            shared=plan.shared(),
        )
        program.run(machine, plan)
        machine.check_outputs([name for name, _ in plan.outputs()])
    return [globals_[name][0].reshape(rows, width) for name, width in plan.outputs()]
