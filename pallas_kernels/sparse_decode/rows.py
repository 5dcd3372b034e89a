"""How rows of a cache lie in shared memory, and how their copies are started.

A row is staged as its stored bytes, one field behind the other. Rows begin at odd multiples of 16 bytes from each
other, so that eight rows never meet in a bank. Nothing is ever written back as bf16: see `operands`.

Quantised rows are multiplied by 2^-48 on the way (`up` undoes it, on scores and probabilities). That leaves room to
fold 2^120, which makes an FP8 number's bits a bf16 number, into the scale: one product a pair of values. It is exact
for scales from 2^-54 to 2^55. A block with a larger one is read by way of float32 (`scaling.Reading.general`); below,
values may lose bits where they are under 2^-78.
"""

import dataclasses

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import mosaic
from pallas_kernels.records import V32, Model1, Plain, RecordFormat, V41MXFP8, V41NVFP4
from pallas_kernels.lane_ops import SCALAR, asm, either, i32, i32_type, warp_of

BLOCK = 64  # rows that are staged together
DOWN = 48  # quantised rows are read 2^-48 times their value
VALUES = 512
_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


@dataclasses.dataclass(frozen=True)
class Staged:
    """A format's row in shared memory: `quantised` values with scales for every `group`, then bf16 values from `tail`.

    kind: "fp8", "fp4" or "bf16". scale: byte of a row where its scales start. fields: bytes that lie together in a
    page.
    """

    format: RecordFormat
    kind: str
    quantised: int
    group: int
    scale: int
    tail: int
    fields: tuple[int, ...]

    @property
    def stride(self) -> int:
        """Bytes from a row to the next."""
        chunks = -(-sum(self.fields) // 16)
        return 16 * (chunks + 1 - chunks % 2)

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.quantised // self.group if self.quantised else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale."""
        return 4 if isinstance(self.format, V32) else 1

    @property
    def down(self) -> int:
        """Values are read as 2^-down times what they are."""
        return DOWN if self.quantised else 0


def staged(format: RecordFormat) -> Staged:
    """The layout of `format` in shared memory. NotImplementedError for a format that the kernel does not read."""
    if isinstance(format, V32) and format == V32():
        return Staged(format, "fp8", 512, 128, 512, 528, (656,))
    if isinstance(format, Model1) and format == Model1():
        return Staged(format, "fp8", 448, 64, 576, 448, (576, 8))
    if isinstance(format, V41MXFP8) and format.width == 512:
        return Staged(format, "fp8", 512, 32, 512, 0, (528,))
    if isinstance(format, V41NVFP4) and format.width == 512:
        return Staged(format, "fp4", 512, 16, 256, 0, (288,))
    if isinstance(format, Plain) and format.dtype == jnp.bfloat16 and format.width in (512, 576):
        return Staged(format, "bf16", 0, 0, 0, 0, (2 * format.width,))
    raise NotImplementedError(
        "the decode kernels read V32(512, 64), Model1(512, 64), V41MXFP8 and V41NVFP4 of width 512, and plain bf16 "
        f"rows of 512 or 576 values, not {format}."
    )


def by_layout(which, layouts, of, types):
    """Inside lane code: what of(layout) gives, a list of values of these types, for the layout number `which`."""
    if len(set(layouts)) == 1:
        return of(layouts[0])
    first = arith.cmpi(arith.CmpIPredicate.eq, mosaic.scalar(which), i32(0))
    return either(first, lambda: of(layouts[0]), lambda: of(layouts[1]), types)


def copy(raw_ref, bias_ref, pages_ref, places, barriers, slot, layout: Staged, page_size: int, decoded_ref=None):
    """Starts copying the rows at `places` (of `sparse_attention.gather.look_up`) to shared memory, by a warpgroup.

    A field of 16 bytes and more is copied in one piece, on number `slot` of barriers (`copies.CopyBarriers` of
    sparse_attention), whose `arrive` has to follow. raw_ref: uint8 [>= 64 * stride]. pages_ref: the cache's pages in
    device memory. bias_ref: float32 [64], gets 0 where there is a row, and -inf where there is none; such a row is
    filled with zeros. decoded_ref: bf16 [64, width], which stands for raw_ref where the kernel is interpreted.
    """
    format = layout.format
    page_bytes = int(np.prod(pages_ref.shape[1:])) * jnp.dtype(pages_ref.dtype).itemsize

    def twin(_, bias_ref, pages_ref, places, *__):
        places = places.reshape(4, 32)[:, : BLOCK // 4].reshape(BLOCK)

        def add(row, found):
            place = jnp.maximum(lax.dynamic_index_in_dim(places, row, keepdims=False), 0)
            page, at = place // page_size, place % page_size
            if isinstance(format, Plain):
                read = pages_ref[page, at]
            else:
                fields = format.fields(page_size)
                read = jnp.concatenate([pages_ref[page, pl.ds(f.offset + at * f.stride, f.size)] for f in fields])
            return lax.dynamic_update_index_in_dim(found, read, row, 0)

        stored = format.width if isinstance(format, Plain) else format.row_bytes
        found = lax.fori_loop(0, BLOCK, add, jnp.zeros((BLOCK, stored), pages_ref.dtype))
        found = format.decode(found, jnp.bfloat16) * jnp.bfloat16(2.0**-layout.down)
        decoded_ref[...] = jnp.where(places[:, None] >= 0, found, jnp.bfloat16(0))
        bias_ref[...] = jnp.where(places >= 0, 0.0, -jnp.inf)

    @mosaic.lane_code(
        arg_types=(
            *[plgpu.RefType()] * 3, plgpu.Layout.WG_STRIDED((128,), vec_size=1), plgpu.RefType(), SCALAR,
        ),
        twin=twin,
    )  # fmt: skip
    def start(_, raw_ref, bias_ref, pages_ref, places, barriers, slot):
        f32 = ir.F32Type.get()
        row, place, page, within = _own_row(places, pages_ref, page_size, page_bytes)
        nothing = arith.cmpi(arith.CmpIPredicate.slt, place, i32(0))
        bias = arith.select(nothing, utils.c(float("-inf"), f32), utils.c(0.0, f32))
        llvm.store(bias, utils.getelementptr(utils.memref_ptr(bias_ref), [row], f32))
        # The upper half of the lanes have the same rows again.
        own = arith.cmpi(arith.CmpIPredicate.ult, arith.remui(utils.thread_idx(), i32(32)), i32(16))
        there, missing = (arith.extui(i32_type(), x) for x in (_and_not(own, nothing), arith.andi(own, nothing)))
        to = arith.addi(llvm.ptrtoint(i32_type(), utils.memref_ptr(raw_ref)), arith.muli(row, i32(layout.stride)))
        barrier = llvm.ptrtoint(i32_type(), utils.memref_ptr(barriers))
        barrier = arith.addi(barrier, arith.muli(mosaic.scalar(slot), i32(8)))
        staged_at = 0
        for field, size in zip(format.fields(page_size), layout.fields):
            source = _field(page, within, field)
            if size % 16 == 0:
                _expect(there, barrier, size)
                _copy_rows(arith.addi(to, i32(staged_at)), source, there, barrier, size)
            else:
                _copy_eight(to, source, there, staged_at)
            staged_at += size
        _fill_with_zeros(to, missing, layout.stride)

    start(raw_ref, bias_ref, pages_ref, places, barriers.ref, slot)


def _own_row(places, pages_ref, page_size, page_bytes):
    """Row of a block that this thread looked up, its place, and the place's page (its address) and row in it."""
    i64 = ir.IntegerType.get_signless(64)
    place = vector.extract(places.registers.flat[0], [], ir.DenseI64ArrayAttr.get([0]))
    thread = utils.thread_idx()
    row = arith.addi(arith.muli(warp_of(thread), i32(16)), arith.remui(thread, i32(16)))
    number = arith.maxsi(place, i32(0))
    page, within = arith.divui(number, i32(page_size)), arith.remui(number, i32(page_size))
    page = arith.muli(arith.extui(i64, page), utils.c(page_bytes, i64))
    return row, place, arith.addi(llvm.ptrtoint(i64, mosaic.global_pointer(pages_ref)), page), within


def _field(page, within, field):
    """Address of a row's field."""
    at = arith.addi(i32(field.offset), arith.muli(within, i32(field.stride)))
    return arith.addi(page, arith.extui(ir.IntegerType.get_signless(64), at))


def _expect(there, barrier, size):
    text = f"{{ .reg .pred p; setp.ne.s32 p, $0, 0;\n@p mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$1], {size}; }}"
    asm(text, "r,r,~{memory}", [there, barrier])


def _copy_rows(to, source, there, barrier, size):
    """Starts copying `size` bytes from `source` to `to` for each lane, unless `there` is 0.

    The assembler makes a loop over lanes of it: such a copy takes its addresses from registers of the whole warp.
    """
    text = f"{{ .reg .pred p; setp.ne.s32 p, $3, 0;\n@p {_BULK} [$0], [$1], {size}, [$2]; }}"
    asm(text, "r,l,r,r,~{memory}", [to, source, barrier, there])


def _and_not(a, b):
    return arith.andi(a, arith.xori(b, arith.cmpi(arith.CmpIPredicate.eq, i32(0), i32(0))))


def _copy_eight(to, source, there, offset):
    text = f"{{ .reg .pred p; setp.ne.s32 p, $2, 0;\n@p cp.async.ca.shared.global [$0+{offset}], [$1], 8; }}"
    asm(text, "r,l,r,~{memory}", [to, source, there])


def _fill_with_zeros(to, missing, size):
    """Where a row is none: what is left of another would be read as values, and might be NaN."""
    stores = "".join(f"st.shared.v4.b32 [$0+{at}], {{z, z, z, z}};\n" for at in range(0, size, 16))
    text = (
        "{ .reg .pred p; .reg .b32 z; setp.eq.s32 p, $1, 0;\n@p bra done;\nmov.b32 z, 0;\n"
        f"{stores}fence.proxy.async.shared::cta;\ndone: }}"
    )
    asm(text, "r,r,~{memory}", [to, missing])
