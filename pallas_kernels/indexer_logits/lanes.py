"""The part of the Hopper logits kernels that is written lane by lane, each piece with its twin for the interpreter.

A warpgroup holds 64 keys x (queries x heads) dot products in the layout of a wgmma accumulator: lane `l` of warp `w`
has rows ``16 w + l // 4`` and eight further down, and of every eight columns the two at ``2 * (l % 4)``. The four lanes
of a quad therefore share two keys, and each holds a quarter of the heads. They sum over their heads, then exchange sums
so that each lane ends with the whole sum of other queries and stores those: nothing is computed or stored twice.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from pallas_kernels import mosaic

KEYS = 64  # keys of a tile: rows of a wgmma
WGMMA = plgpu.Layout.WGMMA
PER_KEY = WGMMA.reduce(1)
PER_COLUMN = WGMMA.reduce(0)
SCALAR = plgpu.Layout.WG_SPLAT(())


def bounds_width(queries: int) -> int:
    """Length of the array that `load_bounds` returns."""
    return 8 * max(1, queries // 4)


def load_bounds(start_ref, end_ref, first, limit, *, queries: int):
    """Visible ranges [start, end) of the query rows first .. first + queries - 1, each held by the lane that stores it.

    start_ref, end_ref: int32 [rows] in device memory; start_ref None means 0. Rows at and beyond `limit` are empty.
    Returns an int32 array for `store_scores`.
    """
    groups = max(1, queries // 4)
    width = bounds_width(queries)

    def twin(*args):
        *refs, first, limit = args
        values = []
        for place in range(4 * groups):
            row = first + place % queries
            inside = row < limit
            row = jnp.minimum(row, limit - 1)
            end = jnp.where(inside, refs[-1][row], 0)
            values += [refs[0][row] if len(refs) == 2 else jnp.int32(0), end]
        return jnp.stack(values)

    refs = [ref for ref in (start_ref, end_ref) if ref is not None]

    @mosaic.lane_code(
        arg_types=(*[plgpu.RefType()] * len(refs), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((width,), jnp.int32, layout=PER_COLUMN),
        twin=twin,
    )
    def load(_, *args):
        *refs, first, limit = args
        i32 = ir.IntegerType.get_signless(32)
        first, limit = mosaic.scalar(first), mosaic.scalar(limit)
        quad = arith.remui(utils.thread_idx(), _i32(4))
        registers = []
        for group in range(groups):
            query = arith.addi(quad, _i32(4 * group)) if queries >= 4 else arith.remui(quad, _i32(queries))
            row = arith.addi(first, query)
            inside = arith.cmpi(arith.CmpIPredicate.slt, row, limit)
            row = arith.minsi(row, arith.subi(limit, _i32(1)))
            found = [llvm.load(i32, utils.getelementptr(mosaic.global_pointer(ref), [row], i32)) for ref in refs]
            end = arith.select(inside, found[-1], _i32(0))
            start = found[0] if len(found) == 2 else _i32(0)
            registers.append(vector.from_elements(ir.VectorType.get((2,), i32), [start, end]))
        return mgpu.FragmentedArray(
            _registers=np.array(registers, dtype=object).reshape(PER_COLUMN.to_mgpu().registers_shape((width,))),
            _layout=PER_COLUMN.to_mgpu(),
            _is_signed=True,
        )

    return load(*refs, first, limit)


def store_scores(
    out_ref, dots, weights, scale, bounds, first, limit, column, *, queries: int, heads: int, rounding: bool,
    compressed: bool = False,
):  # fmt: skip
    """Stores scale * sum_h weights * relu(dots) of one tile of 64 keys for `queries` query rows; -inf out of range.

    compressed: columns count from the start of the row's own range, and what is out of range is left out.
    out_ref: float32 or bf16 [rows, columns] in device memory. dots: [64, queries * heads] of a wgmma. weights: float32 or,
    with `rounding`, bf16 [queries * heads]. scale: float32 [64] or None. bounds: of `load_bounds`. first: query row of the
    first query, column: column of the first key; rows from `limit` on and columns outside `out_ref` are left out. `rounding` rounds the dot
    products, their products with the weights and the sums to bf16.
    """
    columns = out_ref.shape[1]
    scaled = scale is not None

    def twin(out_ref, dots, weights, bounds, first, limit, column, *scale):
        products = jnp.maximum(_bf16(dots) if rounding else dots, 0) * weights
        products = _bf16(products) if rounding else products
        position = column + jax.lax.iota(jnp.int32, KEYS)
        for j in range(queries):
            score = jnp.sum(products[:, j * heads : (j + 1) * heads], axis=1)
            score = _bf16(score) if rounding else score
            score = score * scale[0] if scaled else score
            place = j if queries >= 4 else j % queries
            start, end = bounds[2 * place], bounds[2 * place + 1]
            visible = (position >= start) & (position < end)

            def one(key, _):
                at = column + key - start

                @pl.when(visible[key] & (at < columns) & (first + j < limit))
                def _():
                    out_ref[first + j, at] = score[key].astype(out_ref.dtype)

            if compressed:
                jax.lax.fori_loop(0, KEYS, one, None)
                continue

            @pl.when(first + j < limit)
            def _():
                out_ref[first + j, pl.ds(column, KEYS)] = jnp.where(visible, score, -jnp.inf).astype(out_ref.dtype)

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(), WGMMA, PER_COLUMN, PER_COLUMN, SCALAR, SCALAR, SCALAR, *[PER_KEY] * scaled),
        twin=twin,
    )
    def store(_, out_ref, dots, weights, bounds, first, limit, column, *scale):
        f32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(64)
        zero = _f32(0.0)
        thread = arith.remui(utils.thread_idx(), _i32(128))
        quad = arith.remui(thread, _i32(4))
        dots = dots.registers.reshape(queries, heads // 8, 2)  # query, eight heads, upper or lower eight keys
        weights = [w if rounding else _elements(w) for w in weights.registers.flat]

        # The sum over this lane's heads. relu costs a max at half rate on one pipe, or x + |x| = 2 relu(x) at full rate
        # on the other: half of each, in two chains each, so that no pipe and no chain of additions is in the way.
        sums = {}
        for j in range(queries):
            for half in range(2):
                chains = {}
                for c in range(heads // 8):
                    register, w = dots[j, c, half], weights[j * (heads // 8) + c]
                    if rounding:
                        register = _rounded_products(register, w)
                    for e, x in enumerate(_elements(register)):
                        chain = chains.get((c % 2, e))
                        if rounding:
                            chains[c % 2, e] = x if chain is None else arith.addf(chain, x)
                        else:
                            x = arith.addf(x, math.absf(x)) if e else arith.maximumf(x, zero)
                            chains[c % 2, e] = arith.mulf(x, w[e]) if chain is None else llvm.intr_fma(x, w[e], chain)
                once, twice = [
                    arith.addf(chains[0, e], chains[1, e]) if heads > 8 else chains[0, e] for e in range(2)
                ]
                sums[j, half] = arith.addf(once, twice) if rounding else llvm.intr_fma(twice, _f32(0.5), once)

        # Exchange across the quad. In a step two sums meet two lanes: each lane passes on the one it will not store.
        bits = [arith.cmpi(arith.CmpIPredicate.ne, arith.andi(quad, _i32(bit)), _i32(0)) for bit in (1, 2)]
        axes = ["query 1", "query 2"] if queries >= 4 else ["query 1", "half"] if queries == 2 else ["half", None]
        for bit, odd, axis in zip((1, 2), bits, axes):
            if axis is None:
                sums = {k: arith.addf(v, utils.shfl_bfly(v, bit)) for k, v in sums.items()}
                continue
            step = {}
            for (j, half), low in sums.items():
                if (half if axis == "half" else j & bit) != 0:
                    continue
                high = sums[(j, 1) if axis == "half" else (j + bit, half)]
                kept, passed = arith.select(odd, high, low), arith.select(odd, low, high)
                step[j, half] = arith.addf(kept, utils.shfl_bfly(passed, bit))
            sums = step

        # What this lane owns: queries quad, quad + 4, ... or, of few queries, also only one half of the keys.
        first, limit, column = mosaic.scalar(first), mosaic.scalar(limit), mosaic.scalar(column)
        warp, lane = arith.divui(thread, _i32(32)), arith.remui(thread, _i32(32))
        upper = arith.addi(arith.muli(warp, _i32(16)), arith.divui(lane, _i32(4)))
        owned = bits[1] if queries == 2 else bits[0]  # the bit that says which half of the keys, for few queries
        base = mosaic.global_pointer(out_ref)
        scale = [_elements(s)[0] for s in scale[0].registers.flat] if scaled else None
        for (j, half), score in sums.items():
            group = j // 4
            start, end = _elements(bounds.registers.flat[group])
            query = arith.addi(quad, _i32(4 * group)) if queries >= 4 else arith.remui(quad, _i32(queries))
            score = _round(score) if rounding else score
            lower = _i32(8 * half) if queries >= 4 else arith.select(owned, _i32(8), _i32(0))
            key = arith.addi(upper, lower)
            if scaled:
                factor = scale[half] if queries >= 4 else arith.select(owned, scale[1], scale[0])
                score = arith.mulf(score, factor)
            position = arith.addi(column, key)
            row = arith.addi(first, query)
            visible = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, position, start), arith.cmpi(arith.CmpIPredicate.slt, position, end)
            )
            score = arith.select(visible, score, _f32(float("-inf")))
            at = arith.subi(position, start) if compressed else position
            inside = arith.andi(
                arith.cmpi(arith.CmpIPredicate.slt, at, _i32(columns)),
                arith.cmpi(arith.CmpIPredicate.slt, row, limit),
            )
            if compressed:
                inside = arith.andi(inside, visible)
            if queries == 1:
                inside = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.slt, quad, _i32(2)))
            offset = arith.addi(
                arith.muli(arith.extsi(i64, row), arith.constant(i64, ir.IntegerAttr.get(i64, columns))),
                arith.extsi(i64, at),
            )
            score, kind = _as(score, out_ref)
            _store_if(inside, utils.getelementptr(base, [offset], kind), score)

    store(out_ref, dots, weights, bounds, first, limit, column, *([scale] if scaled else []))


def unpack_mxfp4(values_ref, exponents_ref):
    """64 keys of MXFP4 in shared memory as bf16 [64, 128] in registers, for a wgmma; exact.

    values_ref: uint8 [64, 64], two values a byte, low nibble first; exponents_ref: int32 [64], a key's four E8M0 bytes
    in a word, the first group's lowest. Columns are as `unpacked_columns` says: lane c of a quad unpacks group c.
    """

    def twin(values_ref, exponents_ref):
        packed = values_ref[...].astype(jnp.int32)
        nibbles = jnp.stack([packed & 15, packed >> 4], axis=-1)  # [64, 64, 2]
        kind, fraction = (nibbles >> 1) & 3, (nibbles & 1).astype(jnp.float32)
        size = jnp.where(kind == 0, fraction / 2, (1 + fraction / 2) * (1 << jnp.maximum(kind - 1, 0)))
        value = jnp.where(nibbles >= 8, -size, size).reshape(KEYS, 4, 32)
        exponent = ((exponents_ref[...][:, None] >> (8 * jnp.arange(4))) & 255).reshape(KEYS, 4, 1)
        scale = jax.lax.bitcast_convert_type(jnp.maximum(exponent << 23, 1 << 22), jnp.float32)
        value = value * jnp.where(exponent == 255, jnp.nan, scale)
        return unpacked_columns(value.reshape(KEYS, 128)).astype(jnp.bfloat16)

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((KEYS, 128), jnp.bfloat16, layout=WGMMA),
        twin=twin,
    )
    def unpack(_, values_ref, exponents_ref):
        i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        thread = arith.remui(utils.thread_idx(), _i32(128))
        lane = arith.remui(thread, _i32(32))
        upper = arith.addi(arith.muli(arith.divui(thread, _i32(32)), _i32(16)), arith.divui(lane, _i32(4)))
        quad = arith.remui(lane, _i32(4))
        power = llvm.bitcast(pair, _i32(0x7E807E80))  # 2 ** 126, twice
        registers = np.empty((16, 2), dtype=object)
        for half in range(2):
            key = arith.addi(upper, _i32(8 * half))
            at = arith.addi(arith.muli(key, _i32(64)), arith.muli(quad, _i32(16)))
            words = llvm.load(
                ir.VectorType.get((4,), i32), utils.getelementptr(utils.memref_ptr(values_ref), [at], i8), alignment=16
            )
            at = arith.addi(arith.muli(key, _i32(4)), quad)
            exponent = arith.extui(i32, llvm.load(i8, utils.getelementptr(utils.memref_ptr(exponents_ref), [at], i8)))
            # The bits of 2 ** (exponent - 127) in bf16: exponent 0 is subnormal, 255 is NaN.
            scale = arith.maxsi(arith.shli(exponent, _i32(7)), _i32(0x40))
            nan = arith.cmpi(arith.CmpIPredicate.eq, exponent, _i32(255))
            scale = arith.select(nan, _i32(0x7FC0), scale)
            scale = llvm.bitcast(pair, arith.ori(scale, arith.shli(scale, _i32(16))))
            for j, word in enumerate(_elements(words)):
                # Nibbles i and i + 4 at once. A nibble's lower three bits, where bf16 has its lowest exponent bits and
                # its highest mantissa bit, are the value times 2 ** -126, subnormal ones too; its sign goes to the top.
                # One product moves both: the pieces do not meet, and the mask drops what lies between.
                for i in range(4):
                    shifted = arith.shrui(word, _i32(8)) if i >= 2 else word
                    odd = i % 2
                    two = arith.andi(shifted, _i32(0x00F000F0 if odd else 0x000F000F))
                    two = arith.muli(two, _i32((1 << 2) + (1 << 8) if odd else (1 << 6) + (1 << 12)))
                    two = llvm.bitcast(pair, arith.andi(two, _i32(0x81C081C0)))
                    registers[4 * j + i, half] = arith.mulf(arith.mulf(two, power), scale)
        layout = WGMMA.to_mgpu()
        return mgpu.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape((KEYS, 128))), _layout=layout, _is_signed=None
        )

    return unpack(values_ref, exponents_ref)


def unpacked_columns(x):
    """The last axis [128] of `x` in the order of `unpack_mxfp4`: value 32 c + 8 j + 4 e + i at 32 j + 8 i + 2 c + e."""
    parts = x.reshape(*x.shape[:-1], 4, 4, 2, 4)
    return jnp.moveaxis(parts, (-3, -1, -4, -2), (-4, -3, -2, -1)).reshape(x.shape)


def turn_words(words_ref, turned_ref):
    """Words of 128 rows, int32 [128] in shared memory, as block-scaled products want them: row 32 a + b at 4 b + a."""

    def twin(words_ref, turned_ref):
        turned_ref[...] = words_ref[...].reshape(4, 32).T.reshape(128)

    @mosaic.lane_code(arg_types=(plgpu.RefType(), plgpu.RefType()), twin=twin)
    def turn(_, words_ref, turned_ref):
        i32 = ir.IntegerType.get_signless(32)
        row = arith.remui(utils.thread_idx(), _i32(128))
        word = llvm.load(i32, utils.getelementptr(utils.memref_ptr(words_ref), [row], i32))
        to = arith.addi(arith.muli(arith.remui(row, _i32(32)), _i32(4)), arith.divui(row, _i32(32)))
        llvm.store(word, utils.getelementptr(utils.memref_ptr(turned_ref), [to], i32))

    turn(words_ref, turned_ref)


def fill(out_ref, row, begin, end):
    """Stores -inf to the columns [begin, end) of row `row` of `out_ref`, by one warpgroup. Not to a row outside."""
    rows, columns = out_ref.shape

    def twin(out_ref, row, begin, end):
        def one(column, _):
            out_ref[row, column] = -jnp.inf

        @pl.when(row < rows)
        def _():
            jax.lax.fori_loop(begin, jnp.maximum(jnp.minimum(end, columns), begin), one, None)

    @mosaic.lane_code(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR), twin=twin)
    def store(_, out_ref, row, begin, end):
        i64 = ir.IntegerType.get_signless(64)
        row, begin, end = mosaic.scalar(row), mosaic.scalar(begin), mosaic.scalar(end)
        inside = arith.cmpi(arith.CmpIPredicate.slt, row, _i32(rows))
        end = arith.select(inside, arith.minsi(end, _i32(columns)), _i32(0))
        nothing, kind = _as(_f32(float("-inf")), out_ref)
        start = arith.addi(begin, arith.remui(utils.thread_idx(), _i32(128)))
        offset = arith.muli(arith.extsi(i64, row), arith.constant(i64, ir.IntegerAttr.get(i64, columns)))
        base = utils.getelementptr(mosaic.global_pointer(out_ref), [offset], kind)

        @utils.fori(arith.maxsi(arith.ceildivsi(arith.subi(end, begin), _i32(128)), _i32(0)), ())
        def _(i, _carry):
            column = arith.addi(start, arith.muli(i, _i32(128)))
            inside = arith.cmpi(arith.CmpIPredicate.slt, column, end)
            _store_if(inside, utils.getelementptr(base, [column], kind), nothing)
            return ()

    store(out_ref, row, begin, end)


def _bf16(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _i32(value):
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value - 2**32 if value >= 2**31 else value))


def _elements(register):
    """The elements of a register that holds a short vector."""
    count = ir.VectorType(register.type).shape[0]
    return [vector.extract(register, [], ir.DenseI64ArrayAttr.get([i])) for i in range(count)]


def _f32(value):
    f32 = ir.F32Type.get()
    return arith.constant(f32, ir.FloatAttr.get(f32, value))


def _round(x):
    """A float32 rounded to bf16 precision."""
    return arith.extf(ir.F32Type.get(), arith.truncf(ir.BF16Type.get(), x))


def _rounded_products(dots, weights):
    """Of two dot products: rounded to bf16, the positive part, times a weight, rounded again; as float32.

    Two at a time, which one instruction converts. With bf16 weights one instruction multiplies and rounds both, as exact
    products rounded once.
    """
    half, single = (ir.VectorType.get((2,), kind.get()) for kind in (ir.BF16Type, ir.F32Type))
    zero = ir.DenseElementsAttr.get_splat(half, ir.FloatAttr.get(ir.BF16Type.get(), 0.0))
    dots = arith.maximumf(arith.truncf(half, dots), arith.constant(half, zero))
    if weights.type == half:
        return arith.extf(single, arith.mulf(dots, weights))
    return arith.extf(single, arith.truncf(half, arith.mulf(arith.extf(single, dots), weights)))


def _as(x, ref):
    """A float32 as what memory `ref` holds (float32, or bf16 as 16 bits), and its type."""
    if isinstance(ir.MemRefType(ref.type).element_type, ir.F32Type):
        return x, ir.F32Type.get()
    i16 = ir.IntegerType.get_signless(16)
    return arith.bitcast(i16, arith.truncf(ir.BF16Type.get(), x)), i16


def _store_if(condition, pointer, value):
    """A store of a float32 or of 16 bits under a predicate: no branch, so lanes stay together."""
    i32 = ir.IntegerType.get_signless(32)
    kind, register = ("f32", "f") if isinstance(value.type, ir.F32Type) else ("b16", "h")
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [pointer, value, arith.extui(i32, condition)],
        f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.{kind} [$0], $1; }}",
        f"l,{register},r",
        has_side_effects=True,
    )
