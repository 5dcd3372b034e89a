"""Sinkhorn's iterations on Hopper and Blackwell: a thread holds one matrix in registers, so that nothing is exchanged and
all iterations of all matrices are one launch."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

LARGEST = 4  # rows and columns: two copies of a matrix fit into a thread's registers
_THREADS = 128


@functools.partial(jax.jit, static_argnames=("iterations", "eps"))
def sinkhorn(logits, *, iterations, eps):
    """See `pallas_kernels.sinkhorn.sinkhorn`. float32, at most 4 x 4."""
    size = logits.shape[-1]
    if logits.dtype != jnp.float32:
        raise NotImplementedError(f"the kernel takes float32, not {logits.dtype}.")
    if size > LARGEST:
        raise NotImplementedError(f"the kernel takes matrices of up to {LARGEST} x {LARGEST}, not {size} x {size}.")
    if logits.size == 0:
        return logits
    entries = logits.reshape(-1, size * size).T
    matrices = entries.shape[1]
    entries = jnp.pad(entries, ((0, 0), (0, -matrices % _THREADS)))

    def sums(lines):
        return [functools.reduce(jnp.add, line) for line in lines]

    def rows(matrix):
        return [[entry / total for entry in line] for line, total in zip(matrix, (s + eps for s in sums(matrix)))]

    def columns(matrix):
        return transposed(rows(transposed(matrix)))

    def transposed(matrix):
        return [list(line) for line in zip(*matrix)]

    def softmax(line):
        high = functools.reduce(jnp.maximum, line)
        powers = [jnp.exp(entry - high) for entry in line]
        total = functools.reduce(jnp.add, powers)
        return [power / total + eps for power in powers]

    def body(in_ref, out_ref):
        lanes = pl.ds(lax.axis_index("block") * _THREADS, _THREADS)
        layout = plgpu.Layout.WG_STRIDED((_THREADS,), vec_size=1)
        places = [[j * size + k for k in range(size)] for j in range(size)]
        logits = [[plgpu.load(in_ref.at[place, lanes], layout=layout) for place in line] for line in places]
        start = columns([softmax(line) for line in logits])
        matrix = lax.fori_loop(0, iterations - 1, lambda _, matrix: columns(rows(matrix)), start)
        for line, found in zip(places, matrix):
            for place, entry in zip(line, found):
                out_ref[place, lanes] = entry

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(entries.shape, jnp.float32),
        grid=(entries.shape[1] // _THREADS,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(entries)
    return out[:, :matrices].T.reshape(logits.shape)
