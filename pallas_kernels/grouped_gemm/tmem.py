"""The lane code of the Blackwell kernel that Hopper's has not: sums from TMEM to device memory."""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import mosaic
from pallas_kernels.grouped_gemm.lanes import ROWS as HALF
from pallas_kernels.lane_ops import SCALAR, i8_type, i32, own_thread, past

ROWS = 2 * HALF  # of a tcgen05.mma, and of sums
LAYOUT = plgpu.Layout.TCGEN05_TMEM_NATIVE  # a thread has a row


def store(out_ref, sums, row, column):
    """Stores sums [128, R], in LAYOUT, transposed, to rows row .. of out_ref [rows, N] (float32 or bf16, device memory).

    The columns begin at `column`; those of the later 64 sums, where N ends before them, at N - 64: there the sums are
    equal, as the weight's rows were.
    """
    count, width = sums.shape[1], out_ref.shape[1]
    wide = jnp.dtype(out_ref.dtype) == jnp.float32

    def twin(out_ref, sums, row, column):
        for half in range(2):
            columns = pl.ds(jnp.minimum(column + HALF * half, width - HALF), HALF)
            out_ref[pl.ds(row, count), columns] = sums[HALF * half : HALF * (half + 1)].T.astype(out_ref.dtype)

    @mosaic.lane_code(arg_types=(plgpu.RefType(), LAYOUT, SCALAR, SCALAR), twin=twin)
    def write(_, out_ref, sums, row, column):
        i64, size = ir.IntegerType.get_signless(64), 4 if wide else 2
        thread = arith.remui(own_thread(), i32(ROWS))
        first = arith.muli(arith.divui(thread, i32(HALF)), i32(HALF))
        first = arith.minsi(arith.addi(mosaic.scalar(column), first), i32(width - HALF))
        own = arith.addi(first, arith.remui(thread, i32(HALF)))
        at = arith.muli(arith.extui(i64, mosaic.scalar(row)), utils.c(width, i64))
        at = arith.muli(arith.addi(at, arith.extui(i64, own)), utils.c(size, i64))
        pointer = utils.getelementptr(mosaic.global_pointer(out_ref), [at], i8_type())
        for i, pair in enumerate(sums.registers.flat):
            for e in range(2):
                found = vector.extract(pair, [], ir.DenseI64ArrayAttr.get([e]))
                found = found if wide else arith.truncf(ir.BF16Type.get(), found)
                llvm.store(found, past(pointer, (2 * i + e) * width * size), alignment=size)

    write(out_ref, sums, row, column)
