"""The part of the Hopper sparse attention kernels that is written lane by lane: gathering listed rows into tiles.

A warpgroup copies 64 rows to shared memory with cp.async, eight threads a row and 16 bytes a thread. Thread `t` looks
up row ``16 * (t // 32) + t % 16`` of a tile, one tile ahead, and the threads of a warp hand each other what they found.
Whoever waits for a tile waits on a barrier on which the copies themselves arrive, so that the copying threads go on to
the next tile at once. Every piece has a twin in plain Pallas for the interpreter.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels import mosaic
from pallas_kernels.copies import address, asm

ROWS = 64  # rows of a tile
BLOCK = 128  # columns of a block of one
_BLOCK_BYTES = 2 * ROWS * BLOCK
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_PLACES = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
_SCALAR = plgpu.Layout.WG_SPLAT(())


def look_up(list_refs, limits, which, base, count):
    """Where the rows of a tile lie, for `gather`: int32 [128], element `t` for thread `t`; -1 for none.

    which: 0 for the rows ``base + r`` themselves, else ``list_refs[which - 1][base + r]`` (flat lists in device
    memory), where a value below 0 or at least ``limits[which - 1]`` is none. Rows from `count` on are none.
    """
    lists = len(list_refs)

    def twin(which, base, count, *refs):
        row = _row(jnp.arange(128, dtype=jnp.int32))
        inside = row < count
        at = jnp.where(inside, base + row, 0)
        found = jnp.where(inside, base + row, -1)
        for i, ref in enumerate(refs):
            # The interpreter takes no arrays of indices: a tile is read in one piece, from where it is inside.
            start = jnp.clip(base, 0, max(ref.shape[0] - ROWS, 0))
            piece = ref[_window(start, ref.shape[0])]
            listed = piece[jnp.clip(at - start, 0, piece.shape[0] - 1)]
            valid = inside & (listed >= 0) & (listed < limits[i])
            found = jnp.where(which == i + 1, jnp.where(valid, listed, -1), found)
        return found

    @mosaic.lane_code(
        arg_types=(_SCALAR, _SCALAR, _SCALAR, *[plgpu.RefType()] * lists),
        return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_PLACES),
        twin=twin,
    )
    def load(_, which, base, count, *refs):
        i32 = ir.IntegerType.get_signless(32)
        which, base, count = (mosaic.scalar(value) for value in (which, base, count))
        row = _row(arith.remui(utils.thread_idx(), _i32(128)), arith)
        inside = _less(row, count)
        own = arith.addi(base, row)
        at = arith.select(inside, own, _i32(0))
        pointer, limit = mosaic.global_pointer(refs[0]), _i32(limits[0])
        if lists == 2:
            second = _equal(which, 2)
            pointer = arith.select(second, mosaic.global_pointer(refs[1]), pointer)
            limit = arith.select(second, _i32(limits[1]), limit)
        plain = _equal(which, 0)
        listed = llvm.load(i32, utils.getelementptr(pointer, [arith.select(plain, _i32(0), at)], i32))
        valid = arith.cmpi(arith.CmpIPredicate.ult, listed, limit)  # as unsigned, what is negative is large
        value = arith.select(plain, own, arith.select(valid, listed, _i32(-1)))
        value = arith.select(inside, value, _i32(-1))
        return mgpu.FragmentedArray(
            _registers=np.array([vector.from_elements(ir.VectorType.get((1,), i32), [value])], dtype=object),
            _layout=_PLACES.to_mgpu(),
            _is_signed=True,
        )

    return load(which, base, count, *list_refs)


def gather(ring_ref, tail_ref, bias_ref, source_refs, which, places, block, *, columns: tuple[int, ...]):
    """Starts copying the rows at `places` (of `look_up`) of ``source_refs[which]`` to a tile, by a warpgroup.

    ring_ref: bf16 [R, 64, 128] with the transforms TILE, of which the tile has the four blocks from `block` on, the
    first behind the last: 128 of the rows' first 512 values each. columns: which of the four are copied. tail_ref:
    bf16 [64, 64] for the values from 512 on, bias_ref: float32 [64] that gets 0 where there is a row and -inf where
    there is none; None to leave them out. source_refs: bf16 rows in device memory. A row that is none becomes zeros.
    """
    blocks = ring_ref.shape[0]
    width = source_refs[0].shape[1]
    optional = [ref for ref in (tail_ref, bias_ref) if ref is not None]

    def twin(ring_ref, which, places, block, *refs):
        given, refs = list(refs[: len(optional)]), refs[len(optional) :]
        bias = given.pop() if bias_ref is not None else None
        tail = given.pop() if tail_ref is not None else None
        places = places.reshape(4, 32)[:, :16].reshape(ROWS)

        def read(ref):
            last = ref.shape[0] - 1
            return lambda: jnp.stack([ref[jnp.clip(places[row], 0, last)] for row in range(ROWS)])

        found = lax.switch(which, [read(ref) for ref in refs])
        found = jnp.where(places[:, None] >= 0, found, 0)
        for b in columns:
            ring_ref[lax.rem(block + b, blocks)] = found[:, BLOCK * b : BLOCK * (b + 1)]
        if tail is not None:
            tail[...] = found[:, 4 * BLOCK :]
        if bias is not None:
            bias[...] = jnp.where(places >= 0, 0.0, -jnp.inf)

    types = [plgpu.RefType(TILE)] * (tail_ref is not None) + [plgpu.RefType()] * (bias_ref is not None)

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(TILE), _SCALAR, _PLACES, _SCALAR, *types, *[plgpu.RefType()] * len(source_refs)),
        twin=twin,
    )
    def copy(_, ring_ref, which, places, block, *refs):
        i64 = ir.IntegerType.get_signless(64)
        f32 = ir.F32Type.get()
        which, block = mosaic.scalar(which), mosaic.scalar(block)
        sources = refs[len(optional) :]
        source = mosaic.global_pointer(sources[0])
        for i, ref in enumerate(sources[1:], 1):
            source = arith.select(_equal(which, i), mosaic.global_pointer(ref), source)
        source = llvm.ptrtoint(i64, source)
        place = vector.extract(places.registers.flat[0], [], ir.DenseI64ArrayAttr.get([0]))
        thread = arith.remui(utils.thread_idx(), _i32(128))
        warp, lane = arith.divui(thread, _i32(32)), arith.remui(thread, _i32(32))
        part, group = arith.remui(lane, _i32(8)), arith.divui(lane, _i32(8))
        if bias_ref is not None:
            bias = arith.select(_less(place, _i32(0)), utils.c(float("-inf"), f32), utils.c(0.0, f32))
            row = arith.addi(arith.muli(warp, _i32(16)), arith.remui(lane, _i32(16)))
            llvm.store(bias, utils.getelementptr(utils.memref_ptr(refs[len(optional) - 1]), [row], f32))
        # Where the first eight of the warp's rows go, in every piece, and how far it is from there to the other eight.
        pieces, warp_from = [], arith.muli(warp, _i32(4096))
        for b in columns:
            if blocks % 4 == 0:  # then a tile's blocks lie together
                first = pieces[0][0] if pieces else arith.addi(address(ring_ref, block, _BLOCK_BYTES), warp_from)
                pieces.append((first, b * _BLOCK_BYTES, 2048, 2 * BLOCK * b, 2))
                continue
            at = arith.addi(block, _i32(b))
            at = arith.subi(at, arith.select(_less(at, _i32(blocks)), _i32(0), _i32(blocks)))
            pieces.append((arith.addi(address(ring_ref, at, _BLOCK_BYTES), warp_from), 0, 2048, 2 * BLOCK * b, 2))
        if tail_ref is not None:
            to = arith.addi(address(refs[0], _i32(0), 1), arith.muli(warp, _i32(2048)))
            pieces.append((to, 0, 1024, 8 * BLOCK, 1))
        from_part = arith.addi(source, arith.extui(i64, arith.muli(part, _i32(16))))
        policy = asm("createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", "=l", [], i64)
        for i in range(4):
            row = arith.addi(group, _i32(4 * i))  # within the warp's 16
            found = nvvm.shfl_sync(_i32(-1), place, row, _i32(31), nvvm.ShflKind.idx)
            size = arith.select(_less(found, _i32(0)), _i32(0), _i32(16))
            begin = arith.muli(arith.extui(i64, arith.maxsi(found, _i32(0))), utils.c(2 * width, i64))
            begin = arith.addi(from_part, begin)
            within = arith.remui(row, _i32(8))
            offset = arith.addi(arith.muli(within, _i32(128)), arith.muli(arith.xori(part, within), _i32(16)))
            for to, further, stride, first, count in pieces:
                lines = "".join(
                    "cp.async.cg.shared.global.L2::cache_hint.L2::256B "
                    f"[$0+{further + i // 2 * stride + 1024 * n}], [$1+{first + 128 * n}], 16, $2, $3;\n"
                    for n in range(count)
                )
                # Not a sum, of which ptxas 13.0 to 13.5 would make the part that is the same in all threads an operand of
                # its own, kept in the registers of the cache policy: an illegal instruction.
                asm(lines, "r,l,r,l,~{memory}", [arith.xori(to, offset), begin, size, policy])

    copy(ring_ref, which, places, block, *optional, *source_refs)


def store_transposed(ref, values):
    """Stores float32 `values` [M, N], as a wgmma leaves them, as bf16 to the first N rows of `ref` [>= N, M].

    ref: shared memory with the transforms TILE.
    """
    columns = ref.shape[1] // 64

    def twin(ref, values):
        ref[slice(0, values.shape[1])] = values.astype(jnp.bfloat16).T

    @mosaic.lane_code(arg_types=(plgpu.RefType(TILE), plgpu.Layout.WGMMA), twin=twin)
    def store(_, ref, values):
        bf16 = ir.BF16Type.get()
        thread = arith.remui(utils.thread_idx(), _i32(128))
        warp, lane = arith.divui(thread, _i32(32)), arith.remui(thread, _i32(32))
        first, pair = arith.divui(lane, _i32(4)), arith.muli(arith.remui(lane, _i32(4)), _i32(2))
        start = arith.addi(address(ref, _i32(0), 1), arith.muli(first, _i32(2)))
        # A register holds two neighbours of row 16 * warp + lane // 4 (or 8 further down) of a tile of 64, at column
        # 8 * block + pair. That is row 8 * block + pair of `ref`, in part 2 * warp (or one more) of 16 bytes.
        for index, register in np.ndenumerate(values.registers):
            tile, block, half = index[0], index[1], index[4]
            part = arith.addi(arith.muli(warp, _i32(2)), _i32(half))
            for k in range(2):
                row = arith.addi(pair, _i32(k))
                swizzled = arith.muli(arith.xori(part, row), _i32(16))
                offset = arith.addi(arith.muli(row, _i32(128)), swizzled)
                offset = arith.addi(offset, _i32(1024 * (columns * block + tile)))
                value = vector.extract(register, [], ir.DenseI64ArrayAttr.get([k]))
                asm(
                    "{ .reg .b16 t; cvt.rn.bf16.f32 t, $1; st.shared::cta.b16 [$0], t; }", "r,f,~{memory}",
                    [arith.addi(start, offset), value],
                )  # fmt: skip

    store(ref, values)


def _window(start, length):
    return jax.experimental.pallas.ds(start, min(ROWS, length))


def _row(thread, ops=None):
    """The row of a tile that a thread looks up."""
    if ops is None:
        return 16 * (thread // 32) + thread % 16
    return arith.addi(arith.muli(arith.divui(thread, _i32(32)), _i32(16)), arith.remui(thread, _i32(16)))


def _i32(value):
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def _less(a, b):
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def _equal(a, value):
    return arith.cmpi(arith.CmpIPredicate.eq, a, _i32(value))
