"""The mixes of hyper-connections on Hopper and Blackwell: a thread has one row and its matrix in registers, so that nothing is
exchanged and all iterations of all matrices are one launch."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import mosaic
from pallas_kernels.lane_ops import SCALAR, asm, i32, own_thread

LARGEST = 4  # copies: two matrices fit into a thread's registers
THREADS = 128
EACH = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)


@functools.partial(jax.jit, static_argnames=("copies", "iterations", "eps", "norm_eps"))
def split_mixes(values, scale, base, mean_square=None, *, copies, iterations, eps, norm_eps=0.0):
    """See `pallas_kernels.split_mixes.split_mixes`. float32, at most 4 copies."""
    for each in (values, scale, base, *(() if mean_square is None else (mean_square,))):
        if each.dtype != jnp.float32:
            raise NotImplementedError(f"the kernel takes float32, not {each.dtype}.")
    if copies > LARGEST:
        raise NotImplementedError(f"the kernel takes up to {LARGEST} copies, not {copies}.")
    lead, width = values.shape[:-1], values.shape[-1]
    rows = values.size // width
    rowwise = [values.reshape(rows, width)] + ([] if mean_square is None else [mean_square.reshape(rows, 1)])
    held = rows if not mosaic.is_interpreted() else -(-rows // THREADS) * THREADS  # whose references have no end to guard
    shapes = [(held, copies), (held, copies), (held, copies**2)]
    c = copies

    def sums(lines):
        return [functools.reduce(jnp.add, line) for line in lines]

    def by_rows(matrix):
        return [[entry / total for entry in line] for line, total in zip(matrix, (s + eps for s in sums(matrix)))]

    def by_columns(matrix):
        return transposed(by_rows(transposed(matrix)))

    def transposed(matrix):
        return [list(line) for line in zip(*matrix)]

    def softmax(line):
        high = functools.reduce(jnp.maximum, line)
        powers = [jnp.exp(entry - high) for entry in line]
        total = functools.reduce(jnp.add, powers)
        return [power / total + eps for power in powers]

    def sigmoid(x):
        return 1 / (1 + jnp.exp(-x))

    def body(scale_ref, base_ref, values_ref, *refs):
        *mean_ref, pre_ref, post_ref, comb_ref = refs
        first = lax.axis_index("block") * THREADS
        scales = [scale_ref[i] for i in range(3)]
        parts = [0] * c + [1] * c + [2] * c**2
        own = [load(values_ref, first, i) for i in range(width)]
        if mean_ref:
            by = lax.rsqrt(load(*mean_ref, first, 0) + norm_eps)
            own = [x * by for x in own]
        found = [x * scales[part] + base_ref[i] for i, (x, part) in enumerate(zip(own, parts))]
        for i, x in enumerate(found[:c]):
            store(pre_ref, sigmoid(x) + eps, first, i)
        for i, x in enumerate(found[c : 2 * c]):
            store(post_ref, 2 * sigmoid(x), first, i)
        logits = [found[2 * c + c * i : 3 * c + c * i] for i in range(c)]
        start = by_columns([softmax(line) for line in logits])
        matrix = lax.fori_loop(0, iterations - 1, lambda _, matrix: by_columns(by_rows(matrix)), start)
        for i, x in enumerate(entry for line in matrix for entry in line):
            store(comb_ref, x, first, i)

    out = [jnp.zeros(shape, jnp.float32) for shape in shapes]
    if rows:
        out = plgpu.kernel(
            body,
            out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
            grid=(-(-rows // THREADS),),
            grid_names=("block",),
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        )(scale, base, *(jnp.pad(each, ((0, held - rows), (0, 0))) for each in rowwise))
    pre, post, comb = (each[:rows] for each in out)
    return pre.reshape(*lead, c), post.reshape(*lead, c), comb.reshape(*lead, c, c)


def load(ref, first, column: int):
    """Column `column` of rows first .. + 127 of ref (float32 [rows, n], device memory), a row a thread; the last row again
    behind it."""
    rows, width = ref.shape

    def twin(ref, first):
        return ref[pl.ds(first, THREADS), column]

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((THREADS,), jnp.float32, layout=EACH),
        twin=twin,
    )
    def read(_, ref, first):
        f32, row = ir.F32Type.get(), arith.minsi(_row(first), i32(rows - 1))
        at = arith.addi(arith.muli(row, i32(width)), i32(column))
        number = llvm.load(f32, utils.getelementptr(mosaic.global_pointer(ref), [at], f32))
        register = vector.from_elements(ir.VectorType.get((1,), f32), [number])
        layout = EACH.to_mgpu()
        registers = np.array([register], dtype=object).reshape(layout.registers_shape((THREADS,)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return read(ref, first)


def store(ref, x, first, column: int):
    """Writes what `load` reads; nothing behind the last row."""
    rows, width = ref.shape

    def twin(ref, x, first):
        ref[pl.ds(first, THREADS), column] = x

    @mosaic.lane_code(arg_types=(plgpu.RefType(), EACH, SCALAR), twin=twin)
    def write(_, ref, x, first):
        i64, f32, row = ir.IntegerType.get_signless(64), ir.F32Type.get(), _row(first)
        at = arith.addi(arith.muli(row, i32(width)), i32(column))
        to = llvm.ptrtoint(i64, utils.getelementptr(mosaic.global_pointer(ref), [at], f32))
        (register,) = x.registers.flat
        number = vector.extract(register, [], ir.DenseI64ArrayAttr.get([0]))
        text = f"{{ .reg .pred p; setp.lt.u32 p, $2, {rows};\n@p st.global.f32 [$0], $1; }}"
        asm(text, "l,f,r,~{memory}", [to, number, row])

    write(ref, x, first)


def _row(first):
    return arith.addi(mosaic.scalar(first), arith.remui(own_thread(), i32(THREADS)))
