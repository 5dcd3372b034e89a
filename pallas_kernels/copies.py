"""Copies by cp.async on Hopper and Blackwell: the barriers on which they arrive, and gathering runs of rows into a tile.

Every piece has a twin in plain Pallas for the interpreter.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels import mosaic

_SCALAR = plgpu.Layout.WG_SPLAT(())


class CopyBarriers:
    """`count` barriers that complete when the copies of all threads of a warpgroup have landed.

    ref: of `copy_barriers`, or shared memory (int32) of at least `count` * 8 bytes, or, where a kernel is interpreted, `count`
    Pallas barriers.
    """

    def __init__(self, ref, count: int):
        self.ref, self.count = ref, count

    def initialise(self):
        """By one warpgroup, before a barrier that all pass."""
        if mosaic.is_interpreted():
            return

        @mosaic.lane_code(arg_types=(plgpu.RefType(),), twin=None)
        def initialise(_, words):
            text = "{ .reg .pred p; setp.eq.u32 p, $1, 0; @p mbarrier.init.shared::cta.b64 [$0], 128; }"
            for i in range(self.count):
                thread = arith.remui(utils.thread_idx(), _i32(128))
                asm(text, "r,r", [address(words, _i32(2 * i), 4), thread])

        initialise(self.ref)

    def arrive(self, slot):
        """By all threads of a warpgroup: arrives for each once its copies so far have landed."""

        @mosaic.lane_code(
            arg_types=(plgpu.RefType(), _SCALAR), twin=lambda ref, slot: plgpu.barrier_arrive(ref.at[slot])
        )
        def arrive(_, words, slot):
            at = address(words, arith.muli(mosaic.scalar(slot), _i32(2)), 4)
            asm("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r,~{memory}", [at])

        arrive(self.ref, slot)

    def wait(self, slot, phase):
        """Until the completion number `phase` (counted from 0; its parity counts) of barrier `slot`."""

        @mosaic.lane_code(
            arg_types=(plgpu.RefType(), _SCALAR, _SCALAR), twin=lambda ref, slot, _: plgpu.barrier_wait(ref.at[slot])
        )
        def wait(_, words, slot, phase):
            at = address(words, arith.muli(mosaic.scalar(slot), _i32(2)), 4)
            text = (
                "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra done; bra again; "
                "done: }"
            )
            asm(text, "r,r,~{memory}", [at, arith.andi(mosaic.scalar(phase), _i32(1))])

        wait(self.ref, slot, phase)


def copy_barriers(count: int):
    """Scratch for `count` barriers of a CopyBarriers."""
    return plgpu.Barrier(num_barriers=count) if mosaic.is_interpreted() else plgpu.SMEM((2 * count,), jnp.int32)


PLACES = 32  # places that `load_places` holds
_EACH_WARP = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def load_places(places_ref, at):
    """``places_ref[at : at + 32]`` (int32 in device memory) in every warp of a warpgroup, for `gather_tile`."""

    def twin(places_ref, at):
        return jnp.tile(places_ref[pl.ds(at, PLACES)], 4)

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_EACH_WARP),
        twin=twin,
    )
    def load(_, places_ref, at):
        i32 = ir.IntegerType.get_signless(32)
        lane = arith.remui(utils.thread_idx(), arith.constant(i32, ir.IntegerAttr.get(i32, PLACES)))
        at = arith.addi(mosaic.scalar(at), lane)
        found = llvm.load(i32, utils.getelementptr(mosaic.global_pointer(places_ref), [at], i32))
        register = vector.from_elements(ir.VectorType.get((1,), i32), [found])
        layout = _EACH_WARP.to_mgpu()
        registers = np.array([register], dtype=object).reshape(layout.registers_shape((128,)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return load(places_ref, at)


def gather_tile(
    tile_ref, words_ref, values_ref, source_words_ref, places, offset, *, size: int, word_layout, swizzle: int
):
    """Starts copying 64 rows, in blocks of `size` rows, into one tile, by all of a warpgroup (cp.async).

    tile_ref: [64, n] with rows of 128 or 64 bytes (not tiled; `swizzle` is 128 or 64 as that of its reference, or 0);
    values_ref: device memory [rows, n]. Block i of the tile starts at row ``places[offset + i]``, `places` being an
    array of `load_places`; rows before the first or behind the last are taken as those. words_ref, 4-byte values [64],
    gets the word of every row (None, as source_words_ref: no words). word_layout: (rows a page, words a page, first word
    of a page), of which row r has word ``r // rows * words + first + r % rows`` of source_words_ref. Whoever waits for
    them waits on a CopyBarriers.
    """
    worded = words_ref is not None
    page_rows, page_words, first = word_layout
    blocks, last = 64 // size, values_ref.shape[0] - 1
    row_bytes = values_ref.shape[1] * jnp.dtype(values_ref.dtype).itemsize
    if row_bytes not in (64, 128) or swizzle not in (0, row_bytes):
        raise ValueError(
            f"rows of {row_bytes} bytes, swizzle={swizzle}: rows are of 64 or 128 bytes, the swizzle of as many or 0."
        )

    def twin(tile_ref, values_ref, places, offset, *words):
        for i in range(blocks):
            start = jnp.clip(places[offset + i], 0, last + 1 - size)
            row = jnp.clip(places[offset + i] + jnp.arange(size), 0, last) - start
            to = pl.ds(i * size, size)
            tile_ref[to] = values_ref[pl.ds(start, size)][row]
            if worded:
                at = start // page_rows * page_words + first + start % page_rows
                words[0][to] = words[1][pl.ds(at, size)][row]

    refs = (plgpu.RefType((plgpu.SwizzleTransform(swizzle),) if swizzle else ()), plgpu.RefType())
    types = (*refs, _EACH_WARP, plgpu.Layout.WG_SPLAT(()), *[plgpu.RefType()] * (2 * worded))

    @mosaic.lane_code(arg_types=types, twin=twin)
    def gather(_, tile_ref, values_ref, places, offset, *words):
        i32, i64, i8 = [ir.IntegerType.get_signless(n) for n in (32, 64, 8)]
        constant = lambda value: arith.constant(i32, ir.IntegerAttr.get(i32, value))  # noqa: E731
        wide = lambda value, scale: arith.muli(  # noqa: E731
            arith.extui(i64, value), arith.constant(i64, ir.IntegerAttr.get(i64, scale))
        )
        thread = arith.remui(utils.thread_idx(), constant(128))
        offset = mosaic.scalar(offset)
        (places,) = places.registers.flat
        places = vector.extract(places, [], ir.DenseI64ArrayAttr.get([0]))

        def place(row):
            block = arith.addi(offset, arith.divui(row, constant(size)))
            found = nvvm.shfl_sync(constant(0xFFFFFFFF - 2**32), places, block, constant(31), nvvm.ShflKind.idx)
            source = arith.addi(found, arith.remui(row, constant(size)))
            return arith.minsi(arith.maxsi(source, constant(0)), constant(last))

        # Eight or four threads copy a row, 16 bytes each, to where the swizzle wants them.
        parts = row_bytes // 16
        part, group = arith.remui(thread, constant(parts)), arith.divui(thread, constant(parts))
        turn = arith.remui(arith.divui(group, constant(8 // parts)), constant(parts)) if swizzle else constant(0)
        within = arith.muli(arith.xori(part, turn), constant(16))
        to = utils.memref_ptr(tile_ref)
        rows = [arith.addi(group, constant(128 // parts * i)) for i in range(parts // 2)]
        sources = [place(row) for row in rows]
        if worded:
            word_row = arith.remui(thread, constant(64))
            source = place(word_row)
            page = wide(arith.divui(source, constant(page_rows)), 4 * page_words)
            word = wide(arith.addi(constant(first), arith.remui(source, constant(page_rows))), 4)
            word = arith.addi(page, word)
        for row, source in zip(rows, sources):
            begin = arith.addi(wide(source, row_bytes), arith.extui(i64, arith.muli(part, constant(16))))
            nvvm.cp_async_shared_global(
                utils.getelementptr(to, [arith.addi(arith.muli(row, constant(row_bytes)), within)], i8),
                utils.getelementptr(mosaic.global_pointer(values_ref), [begin], i8),
                16,
                nvvm.LoadCacheModifierKind.CG,
            )
        if worded:  # 64 of 128 threads would do; both halves write the same
            nvvm.cp_async_shared_global(
                utils.getelementptr(utils.memref_ptr(words[0]), [word_row], i32),
                utils.getelementptr(mosaic.global_pointer(words[1]), [word], i8),
                4,
                nvvm.LoadCacheModifierKind.CA,
            )

    gather(tile_ref, values_ref, places, offset, *([words_ref, source_words_ref] if worded else []))


def address(ref, offset, scale):
    """Inside lane code: the 32-bit address in shared memory of element `offset`, of `scale` bytes, behind the start of `ref`."""
    i32 = ir.IntegerType.get_signless(32)
    start = llvm.ptrtoint(i32, utils.memref_ptr(ref))
    return arith.addi(start, arith.muli(offset, _i32(scale)))


def asm(text, constraints, operands, result=None):
    """Inside lane code: inline PTX with side effects."""
    return llvm.inline_asm(result or ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)


def _i32(value):
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))
