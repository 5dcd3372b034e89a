"""How rows of a cache lie in shared memory, and how the Hopper kernel reads them as operands of a wgmma.

A row is staged as its stored bytes, one field behind the other. Rows begin at odd multiples of 16 bytes from each
other, so that eight rows never meet in a bank. Nothing is ever written back as bf16: a thread reads the bytes that its
registers of an operand stand for and converts them there, once as keys (tokens are rows of the operand) and once as
values (tokens are columns). A dot product's terms and an output's rows may come in any order, so both take the order
in which four neighbouring bytes are nearest to hand: see `key_order` and `value_order`.

Quantised rows are multiplied by 2^-48 on the way (`up` undoes it, on scores and probabilities). That leaves room to
fold 2^120, which makes an FP8 number's bits a bf16 number, into the scale: one product a pair of values. It is exact
for scales from 2^-54 to 2^55; above, values become infinite, and below, they may lose bits where they are under 2^-78.
"""

import dataclasses
import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

from pallas_kernels import mosaic
from pallas_kernels.records import V32, Model1, Plain, RecordFormat, V41MXFP8, V41NVFP4

BLOCK = 64  # rows that are staged together
DOWN = 48  # quantised rows are read 2^-48 times their value
WGMMA = plgpu.Layout.WGMMA
SCALAR = plgpu.Layout.WG_SPLAT(())
HALF_TILE = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))
VALUES = 512
_TO_BF16 = 120  # an E4M3 number's bits, three places from the top of a bf16 number's, are 2^-120 times its value


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


def key_order(x):
    """Values [.., n] (n a multiple of 16) in the order in which a wgmma takes them."""
    return x.reshape(*x.shape[:-1], -1, 4, 2, 2).swapaxes(-1, -2).swapaxes(-2, -3).reshape(x.shape)


def value_order(x):
    """Values [128, ..] in the order of the rows of two wgmmas of 64."""
    return x.reshape(4, 8, 2, 2, -1).transpose(2, 0, 3, 1, 4).reshape(128, -1)


def value_order_back(x):
    """The inverse of `value_order`."""
    return x.reshape(2, 4, 2, 8, -1).transpose(1, 3, 0, 2, 4).reshape(128, -1)


def copy(raw_ref, bias_ref, pages_ref, places, barriers, slot, layout: Staged, page_size: int, decoded_ref=None):
    """Starts copying the rows at `places` (of `sparse_attention.gather.look_up`) to shared memory, by a warpgroup.

    A field of 16 bytes and more is copied in one piece, on number `slot` of barriers (`copies.CopyBarriers` of
    sparse_attention), whose `arrive` has to follow. raw_ref: uint8 [>= 64 * stride]. pages_ref: the cache's pages in
    device memory. bias_ref: float32 [64], gets 0 where there is a row, and -inf where there is none; such a row is
    filled with zeros. decoded_ref: bf16 [64, width], which stands for raw_ref where the kernel is interpreted.
    """
    format, page_bytes = layout.format, _page_bytes(pages_ref)

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
                _copy_rows(arith.addi(to, i32(staged_at)), source, there, barrier, size, layout.stride)
            else:
                _copy_eight(to, source, there, staged_at)
            staged_at += size
        _fill_with_zeros(to, missing, layout.stride)

    start(raw_ref, bias_ref, pages_ref, places, barriers.ref, slot)


def fetch_ahead(pages_ref, places, layout: Staged, page_size: int):
    """Starts bringing the rows at `places`, which are to be copied next, to L2; by a warpgroup."""
    page_bytes = _page_bytes(pages_ref)

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_STRIDED((128,), vec_size=1)), twin=lambda *_: None
    )
    def start(_, pages_ref, places):
        _, place, page, within = _own_row(places, pages_ref, page_size, page_bytes)
        there = arith.extui(i32_type(), arith.cmpi(arith.CmpIPredicate.sge, place, i32(0)))
        for field, size in zip(layout.format.fields(page_size), layout.fields):
            source = _field(page, within, field)
            if size % 16 == 0:
                _fetch_rows(source, there, size)
            else:
                asm("prefetch.global.L2 [$0];", "l", [source])

    start(pages_ref, places)


def _page_bytes(pages_ref):
    return int(np.prod(pages_ref.shape[1:])) * jnp.dtype(pages_ref.dtype).itemsize


def _own_row(places, pages_ref, page_size, page_bytes):
    """Row of a block that this thread looked up, its place, and the place's page (its address) and row in it."""
    i64 = ir.IntegerType.get_signless(64)
    place = vector.extract(places.registers.flat[0], [], ir.DenseI64ArrayAttr.get([0]))
    thread = utils.thread_idx()
    row = arith.addi(arith.muli(_warp(thread), i32(16)), arith.remui(thread, i32(16)))
    number = arith.maxsi(place, i32(0))
    page, within = arith.divui(number, i32(page_size)), arith.remui(number, i32(page_size))
    page = arith.muli(arith.extui(i64, page), utils.c(page_bytes, i64))
    return row, place, arith.addi(llvm.ptrtoint(i64, mosaic.global_pointer(pages_ref)), page), within


def _field(page, within, field):
    """Address of a row's field."""
    at = arith.addi(i32(field.offset), arith.muli(within, i32(field.stride)))
    return arith.addi(page, arith.extui(ir.IntegerType.get_signless(64), at))


def _expect(there, barrier, size):
    text = (
        "{ .reg .pred p; setp.ne.s32 p, $0, 0;\n"
        f"@p mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$1], {size}; }}"
    )
    asm(text, "r,r,~{memory}", [there, barrier])


def _copy_rows(to, source, there, barrier, size, stride):
    """Starts copying `size` bytes from `source` to `to` of each of the lower 16 lanes, unless `there` is 0."""
    first = _from_lane(to, 0)
    copy = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [s], {size}, [$1];"
    for number, words in enumerate(_sources(source, there)):
        _by_one_lane(copy, [arith.addi(first, i32(number * stride)), barrier], words)


def _fetch_rows(source, there, size):
    """Starts bringing `size` bytes from `source` of each of the lower 16 lanes to L2, unless `there` is 0."""
    for words in _sources(source, there):
        _by_one_lane(f"cp.async.bulk.prefetch.L2.global [s], {size};", [], words)


def _sources(source, there):
    """The two words of the address in each of the lower 16 lanes, in all lanes; of 0 where `there` is 0."""
    i64 = ir.IntegerType.get_signless(64)
    source = arith.select(arith.cmpi(arith.CmpIPredicate.ne, there, i32(0)), source, utils.c(0, i64))
    words = arith.trunci(i32_type(), source), arith.trunci(i32_type(), arith.shrui(source, utils.c(32, i64)))
    for lane in range(BLOCK // 4):
        yield [_from_lane(word, lane) for word in words]


def _by_one_lane(instruction, operands, words):
    """An instruction that is given address `s`, made of two words, once for the warp unless that is 0.

    By one lane that is elected, as what the lanes say is the same: left to every lane, it becomes a slow loop.
    """
    low, high = len(operands), len(operands) + 1
    text = (
        f"{{ .reg .pred p, q; .reg .b64 s; mov.b64 s, {{${low}, ${high}}}; setp.ne.s64 q, s, 0;\n"
        f"elect.sync _|p, 0xffffffff; and.pred p, p, q;\n@p {instruction} }}"
    )
    asm(text, ",".join("r" * (len(operands) + 2)) + ",~{memory}", [*operands, *words])


def _from_lane(x, lane):
    return nvvm.shfl_sync(i32(-1), x, i32(lane), i32(31), nvvm.ShflKind.idx)


def _and_not(a, b):
    return arith.andi(a, arith.xori(b, arith.cmpi(arith.CmpIPredicate.eq, i32(0), i32(0))))


def _copy_eight(to, source, there, offset):
    text = (
        "{ .reg .pred p; setp.ne.s32 p, $2, 0;\n"
        f"@p cp.async.ca.shared.global [$0+{offset}], [$1], 8; }}"
    )
    asm(text, "r,l,r,~{memory}", [to, source, there])


def _fill_with_zeros(to, missing, size):
    """Where a row is none: what is left of another would be read as values, and might be NaN."""
    stores = "".join(f"st.shared.v4.b32 [$0+{at}], {{z, z, z, z}};\n" for at in range(0, size, 16))
    text = (
        "{ .reg .pred p; .reg .b32 z; setp.eq.s32 p, $1, 0;\n@p bra done;\nmov.b32 z, 0;\n"
        f"{stores}fence.proxy.async.shared::cta;\ndone: }}"
    )
    asm(text, "r,r,~{memory}", [to, missing])


def prepare(raw_ref, scale_ref, odd_ref, which, layouts: tuple[Staged, ...]):
    """Writes the scales of a block of staged rows as the fragments want them, by a warpgroup.

    scale_ref: bf16 [>= groups * 64], a group's scales for all rows together. odd_ref: int32 [4], of which one is not 0
    where a float32 scale is no power of two that fits; fragments then take the scales from the rows. which: number of
    the layout among `layouts`.
    """

    @mosaic.lane_code(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), SCALAR), twin=lambda *_: None)
    def write(_, raw_ref, scale_ref, odd_ref, which):
        thread = arith.remui(own_thread(), i32(128))
        token, part = arith.remui(thread, i32(BLOCK)), arith.divui(thread, i32(BLOCK))
        raw, to = utils.memref_ptr(raw_ref), utils.memref_ptr(scale_ref)

        def of(layout):
            odd = i32(0)
            share = -(-layout.groups // 2)
            for j in range(share):
                group = arith.addi(arith.muli(part, i32(share)), i32(j))
                group = arith.minsi(group, i32(layout.groups - 1)) if layout.groups % 2 else group
                at = arith.muli(token, i32(layout.stride))
                if layout.format == V32():
                    at = arith.addi(at, arith.addi(i32(layout.scale), arith.muli(group, i32(4))))
                    bits, strange = _scale_of_float(_load(_at(raw, at), 32))
                    odd = arith.ori(odd, strange)
                else:
                    at = arith.addi(at, arith.addi(i32(layout.scale), group))
                    byte = arith.extui(i32_type(), _load(_at(raw, at), 8))
                    bits = _scale_of_e4m3(byte) if layout.kind == "fp4" else _scale_of_e8m0(byte)
                at = arith.addi(arith.muli(group, i32(2 * BLOCK)), arith.muli(token, i32(2)))
                i16 = ir.IntegerType.get_signless(16)
                llvm.store(arith.trunci(i16, bits), utils.getelementptr(to, [at], _i8()))
            return [odd]

        (odd,) = _by_layout(which, layouts, of, [i32_type()]) if any(x.quantised for x in layouts) else [i32(0)]
        if any(layout.format == V32() for layout in layouts):
            text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
            any_odd = asm(text, "=r,r", [odd], i32_type())
            llvm.store(
                any_odd, utils.getelementptr(utils.memref_ptr(odd_ref), [arith.divui(thread, i32(32))], i32_type())
            )

    write(raw_ref, scale_ref, odd_ref, which)


def _scale_of_float(bits):
    """bf16 bits of a float32 scale times 2^(120 - DOWN), and whether it is no power of two or does not fit."""
    field = arith.shrui(bits, i32(23))  # with the sign, which makes it large
    fits = arith.andi(
        arith.cmpi(arith.CmpIPredicate.ule, arith.subi(field, i32(1)), i32(254 - (_TO_BF16 - DOWN) - 1)),
        arith.cmpi(arith.CmpIPredicate.eq, arith.andi(bits, i32(0x7FFFFF)), i32(0)),
    )
    scale = arith.shli(arith.addi(field, i32(_TO_BF16 - DOWN)), i32(7))
    zero = arith.cmpi(arith.CmpIPredicate.eq, bits, i32(0))  # of a row that is none
    return arith.select(zero, i32(0), scale), arith.select(arith.ori(fits, zero), i32(0), i32(1))


def _scale_of_e8m0(byte):
    field = arith.minsi(arith.addi(byte, i32(_TO_BF16 - DOWN)), i32(255))
    scale = arith.shli(field, i32(7))
    nan = arith.cmpi(arith.CmpIPredicate.eq, byte, i32(255))
    return arith.select(nan, i32(0x7FC0), scale)


def _scale_of_e4m3(byte):
    """bf16 bits of an E4M3 scale times 2^-DOWN."""
    f32 = ir.F32Type.get()
    magnitude = llvm.bitcast(f32, arith.shli(arith.andi(byte, i32(0x7F)), i32(20)))
    scaled = llvm.bitcast(i32_type(), arith.mulf(magnitude, utils.c(2.0 ** (_TO_BF16 - DOWN), f32)))
    scale = arith.shrui(scaled, i32(16))
    scale = arith.ori(scale, arith.shli(arith.andi(byte, i32(0x80)), i32(8)))
    nan = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(byte, i32(0x7F)), i32(0x7F))
    return arith.select(nan, i32(0x7FC0), scale)


@dataclasses.dataclass(frozen=True)
class Reading:
    """One way in which the rows of a block are read: by their layout, and `general` where scales are any float32."""

    layout: Staged
    general: bool = False


def readings(layouts: tuple[Staged, ...]) -> tuple[Reading, ...]:
    """The ways in which a kernel reads rows of these layouts, each once."""
    found = []
    for layout in dict.fromkeys(layouts):
        found.append(Reading(layout))
        if layout.format == V32():
            found.append(Reading(layout, general=True))
    return tuple(found)


def reading_of(odd_ref, which, layouts: tuple[Staged, ...]):
    """Number among `readings` for a block of layout number `which`, which `prepare` has seen."""
    ways = readings(layouts)
    number = ways.index(Reading(layouts[0]))
    if len(set(layouts)) > 1:
        number = jnp.where(which == 0, number, ways.index(Reading(layouts[1])))
    if not any(way.general for way in ways):
        return jnp.int32(number)
    odd = _odd_flag(odd_ref)
    if len(set(layouts)) > 1:
        v32 = [layout.format == V32() for layout in layouts].index(True)
        odd = jnp.where(which == v32, odd, 0)
    return number + odd


def _odd_flag(odd_ref):
    """1 where `prepare` found a scale that is no power of two, else 0."""

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR),
        twin=lambda _: jnp.int32(0),
    )
    def flag(_, odd_ref):
        register = np.array(arith.extui(i32_type(), _is_odd(odd_ref)), dtype=object)
        return mgpu.FragmentedArray(_registers=register, _layout=SCALAR.to_mgpu(), _is_signed=True)

    return flag(odd_ref)


def _words(count):
    """The layout of `count` 32-bit words of every thread, and what packs them for other lane code and unpacks them."""
    layout = plgpu.Layout.WG_STRIDED((128 * count,), vec_size=1)

    def pack(words):
        one = ir.VectorType.get((1,), i32_type())
        words = [arith.extui(i32_type(), word) if _narrow(word) else word for word in words]
        words += [i32(0)] * (count - len(words))
        registers = np.array([vector.from_elements(one, [word]) for word in words], dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)

    def unpack(array):
        return [vector.extract(r, [], ir.DenseI64ArrayAttr.get([0])) for r in array.registers.reshape(-1)]

    return layout, pack, unpack


def _narrow(word):
    return word.type != i32_type()


def _key_place(thread):
    """A lane's number in its quad, and its two tokens."""
    first = arith.addi(arith.muli(_warp(thread), i32(16)), _group(thread))
    return _quad(thread), [arith.addi(first, i32(8 * half)) for half in range(2)]


def load_keys(raw_ref, scale_ref, chunk: int, reading: Reading, decoded_ref=None):
    """The stored words of values 64 * chunk .. + 63 of a block, for `key_fragment`; loaded a fragment ahead.

    int32 [128 * n], n to a thread: of its two tokens first the scales, then the values. Interpreted: the fragment.
    """
    layout = reading.layout
    plain = 64 * chunk >= layout.quantised
    scales = 0 if plain else max(1, 64 // layout.group)
    count = 16 if plain else 8 + 2 * scales
    carried, pack, _ = _words(count)

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((128 * count,), jnp.int32, layout=carried),
        twin=lambda *_: key_order(decoded_ref[:, pl.ds(64 * chunk, 64)]),
    )
    def load(_, raw_ref, scale_ref):
        raw, table = utils.memref_ptr(raw_ref), utils.memref_ptr(scale_ref)
        quad, tokens = _key_place(own_thread() if plain else utils.thread_idx())
        bases = [_at(raw, arith.muli(token, i32(layout.stride))) for token in tokens]
        found = []
        if plain:
            start = layout.tail + 2 * (64 * chunk - layout.quantised)
            for base in bases:
                own = _at(base, arith.muli(quad, i32(8)))
                for step in range(4):
                    found += _load_two(_past(own, start + 32 * step))
            return pack(found)
        for token, base in zip(tokens, bases):
            if reading.general:
                found.append(_load(_past(base, layout.scale + 64 * chunk // layout.group * 4), 32))
                continue
            own = _at(table, arith.muli(token, i32(2)))
            first = 64 * chunk // layout.group
            found += [_load(_past(own, 2 * BLOCK * (first + i)), 16) for i in range(scales)]
        narrow = layout.kind == "fp4"
        for base in bases:
            own = _at(base, arith.muli(quad, i32(2 if narrow else 4)))
            for step in range(4):
                found.append(_load(_past(own, (64 * chunk + 16 * step) // (2 if narrow else 1)), 16 if narrow else 32))
        return pack(found)

    return load(raw_ref, scale_ref)


def key_fragment(words, chunk: int, reading: Reading):
    """Values 64 * chunk .. + 63 of all 64 rows of a block as bf16 [64, 64], the left operand of a wgmma.

    words: of `load_keys`. A NaN code would be read as 480: its row gets a NaN, with which all its scores are.
    """
    layout = reading.layout
    plain = 64 * chunk >= layout.quantised
    scales = 0 if plain else max(1, 64 // layout.group)
    count = 16 if plain else 8 + 2 * scales
    carried, _, unpack = _words(count)

    @mosaic.lane_code(
        arg_types=(carried,),
        return_type=plgpu.ShapeDtypeStruct((BLOCK, 64), jnp.bfloat16, layout=WGMMA),
        twin=lambda words: words,
    )
    def convert(_, words):
        words = unpack(words)
        registers = np.empty((8, 2), dtype=object)
        for half in range(2):
            magnitudes = []
            if plain:
                own = words[8 * half : 8 * half + 8]
            else:
                own = words[2 * scales + 4 * half : 2 * scales + 4 * half + 4]
                factors = words[scales * half : scales * half + scales]
                if reading.general:
                    factors = [llvm.bitcast(ir.F32Type.get(), factors[0])]
                else:
                    factors = [_twice(f) for f in factors]
            for step in range(4):
                if plain:
                    pairs = [permute(own[2 * step], own[2 * step + 1], selector) for selector in (0x5410, 0x7632)]
                    pairs = [_down(pair, layout.down) for pair in pairs]
                elif layout.kind == "fp4":
                    factor = factors[step * scales // 4]
                    pairs = [_times(pair, factor) for pair in _fp4_pairs(own[step], across=False)]
                elif reading.general:
                    pairs = [_times_floats(p, factors[0], factors[0]) for p in _fp8_pairs(own[step], magnitudes)]
                else:
                    factor = factors[step * scales // 4]
                    pairs = [_times(pair, factor) for pair in _fp8_pairs(own[step], magnitudes)]
                registers[2 * step, half], registers[2 * step + 1, half] = pairs
            if magnitudes:
                bits = llvm.bitcast(i32_type(), registers[0, half])
                bits = arith.select(_has_nan_code(magnitudes), i32(0x7FFF7FFF), bits)
                registers[0, half] = llvm.bitcast(_pair(), bits)
        return fragment(registers, (BLOCK, 64))

    return convert(words)


def _value_place(thread, part, half):
    """First value of the warp, of this lane from there, and the lane's first token."""
    first = arith.addi(arith.muli(part, i32(128)), arith.muli(_warp(thread), i32(32)))
    token = arith.addi(arith.muli(_quad(thread), i32(2)), i32(32 * half))
    return first, arith.muli(_group(thread), i32(4)), token


def _value_words(reading: Reading):
    """Words of a fragment of values: whether all, some or none are bf16, and how many words those are."""
    layout = reading.layout
    if not layout.quantised:
        return 16
    if layout.quantised < VALUES:
        return 16
    return 16 if reading.general else 12


def load_values(raw_ref, scale_ref, part, half: int, reading: Reading, decoded_ref=None, may_be_tail=True):
    """The stored words of values 128 * part .. + 127 of rows 32 * half .. + 31 of a block, for `value_fragment`.

    part: int32 scalar, the same for all threads. may_be_tail: whether it may be the last part.
    """
    layout, count = reading.layout, _value_words(reading)
    carried, pack, _ = _words(count)

    def twin(raw_ref, scale_ref, part):
        return value_order(decoded_ref[pl.ds(32 * half, 32), pl.ds(128 * part, 128)].T)

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((128 * count,), jnp.int32, layout=carried),
        twin=twin,
    )
    def load(_, raw_ref, scale_ref, part):
        raw, table = utils.memref_ptr(raw_ref), utils.memref_ptr(scale_ref)
        part = mosaic.scalar(part)
        offsets = [(16 * step + 8 * later) for step in range(2) for later in range(2)]

        def bf16():
            first, four, token = _value_place(own_thread(), part, half)  # rarely needed: not worth registers
            start = arith.muli(arith.addi(arith.subi(first, i32(layout.quantised)), four), i32(2))
            own = _at(raw, arith.addi(arith.addi(arith.muli(token, i32(layout.stride)), start), i32(layout.tail)))
            return [w for n in offsets for i in range(2) for w in _load_two(_past(own, (n + i) * layout.stride))]

        def quantised():
            first, four, token = _value_place(utils.thread_idx(), part, half)
            row = _at(raw, arith.muli(token, i32(layout.stride)))
            if reading.general:
                own = _at(row, arith.muli(arith.divui(first, i32(layout.group)), i32(4)))
                at = [layout.scale + (n + i) * layout.stride for n in offsets for i in range(2)]
                found = [_load(_past(own, a), 32) for a in at]
            else:
                number = arith.divui(first, i32(layout.group))
                if layout.group < 32:
                    number = arith.addi(number, arith.divui(four, i32(layout.group)))
                at = arith.addi(arith.muli(number, i32(2 * BLOCK)), arith.muli(token, i32(2)))
                found = [_load(_past(_at(table, at), 2 * n), 32) for n in offsets]
            narrow = layout.kind == "fp4"
            value = arith.addi(first, four)
            own = _at(row, arith.divui(value, i32(2)) if narrow else value)
            bits = 16 if narrow else 32
            found += [_load(_past(own, (n + i) * layout.stride), bits) for n in offsets for i in range(2)]
            found = [arith.extui(i32_type(), word) if _narrow(word) else word for word in found]
            return found + [i32(0)] * (count - len(found))

        if not layout.quantised:
            return pack(bf16())
        if layout.quantised < VALUES and may_be_tail:
            return pack(_if(_in_tail(part, layout), bf16, quantised, [i32_type()] * count))
        return pack(quantised())

    return load(raw_ref, scale_ref, part)


def value_fragment(words, part, half: int, reading: Reading, may_be_tail=True):
    """Values 128 * part .. + 127 of rows 32 * half .. + 31 of a block, as bf16 [128, 32], rows in `value_order`.

    words, part, may_be_tail: those of `load_values`.
    """
    layout, count = reading.layout, _value_words(reading)
    carried, _, unpack = _words(count)

    @mosaic.lane_code(
        arg_types=(carried, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((128, 32), jnp.bfloat16, layout=WGMMA),
        twin=lambda words, _: words,
    )
    def convert(_, words, part):
        words = unpack(words)
        part = mosaic.scalar(part)

        def bf16():
            found = []
            for n in range(4):
                both = zip(words[4 * n : 4 * n + 2], words[4 * n + 2 : 4 * n + 4])
                pairs = [permute(*two, selector) for two in both for selector in (0x5410, 0x7632)]
                found.append([_down(pair, layout.down) for pair in pairs])
            return _value_registers(found)

        def quantised():
            scales = 8 if reading.general else 4
            found = []
            for n in range(4):
                a, b = words[scales + 2 * n : scales + 2 * n + 2]
                if layout.kind == "fp4":
                    pairs = _fp4_pairs(permute(a, b, 0x5410), across=True)
                else:
                    pairs = [pair for selector in (0x5410, 0x7632) for pair in _fp8_pairs(permute(a, b, selector))]
                if reading.general:
                    factors = [llvm.bitcast(ir.F32Type.get(), w) for w in words[2 * n : 2 * n + 2]]
                    found.append([_times_floats(pair, *factors) for pair in pairs])
                else:
                    found.append([_times(pair, words[n]) for pair in pairs])
            return _value_registers(found)

        if not layout.quantised:
            registers = bf16()
        elif layout.quantised < VALUES and may_be_tail:
            registers = _if(_in_tail(part, layout), bf16, quantised, [_pair()] * 16)
        else:
            registers = quantised()
        return fragment(np.array(registers, dtype=object).reshape(2, 4, 2), (128, 32))

    return convert(words, part)


def _in_tail(part, layout):
    """Whether the values of a warp are among the bf16 ones."""
    first = _value_place(utils.thread_idx(), part, 0)[0]
    return arith.cmpi(arith.CmpIPredicate.sge, first, i32(layout.quantised))


def _value_registers(found):
    """Registers of [128, 32] in order (64 rows, eight columns, half of the rows).

    found: of every eight tokens, pairs of two tokens for four values.
    """
    registers = np.empty((2, 4, 2), dtype=object)
    for column, pairs in enumerate(found):
        for value, pair in enumerate(pairs):
            registers[value // 2, column, value % 2] = pair
    return list(registers.flat)


def unpack(raw_ref, scale_ref, odd_ref, which, tile_ref, first: int, layouts: tuple[Staged, ...], decoded_ref=None):
    """Values first .. of all 64 rows of a block as bf16 to tile_ref [64, 64 or 128] (HALF_TILE), by a warpgroup.

    For tensor cores that take no left operand from registers. The values are in their own order.
    """
    columns = tile_ref.shape[1]

    def twin(_, scale_ref, odd_ref, which, tile_ref):
        tile_ref[...] = decoded_ref[:, pl.ds(first, columns)]

    @mosaic.lane_code(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), SCALAR, plgpu.RefType(HALF_TILE)), twin=twin
    )
    def write(_, raw_ref, scale_ref, odd_ref, which, tile_ref):
        raw, scales, to = (utils.memref_ptr(ref) for ref in (raw_ref, scale_ref, tile_ref))
        four = ir.VectorType.get((4,), i32_type())
        pieces = columns // 16
        thread = arith.remui(own_thread(), i32(128))
        for k in range(BLOCK * pieces // 128):
            piece = arith.addi(thread, i32(128 * k))
            row, column = arith.divui(piece, i32(pieces)), arith.muli(arith.remui(piece, i32(pieces)), i32(16))

            def of(layout, row=row, column=column):
                base = arith.muli(row, i32(layout.stride))
                value = arith.addi(column, i32(first))

                def bf16():
                    at = arith.muli(arith.subi(value, i32(layout.quantised)), i32(2))
                    at = arith.addi(arith.addi(base, at), i32(layout.tail))
                    words = _load_four(_at(raw, at)) + _load_four(_at(raw, arith.addi(at, i32(16))))
                    return [llvm.bitcast(i32_type(), _down(word, layout.down)) for word in words]

                def quantised(convert):
                    magnitudes = []
                    if layout.kind == "fp4":
                        packed = _load_two(_at(raw, arith.addi(base, arith.divui(value, i32(2)))))
                        fours = [
                            word if not half else arith.shrui(word, i32(16)) for word in packed for half in range(2)
                        ]
                        pairs = [_fp4_pairs(f, across=False) for f in fours]
                    else:
                        pairs = [_fp8_pairs(word, magnitudes) for word in _load_four(_at(raw, arith.addi(base, value)))]
                    words = []
                    for two in pairs:
                        a, b = (llvm.bitcast(i32_type(), convert(pair)) for pair in two)
                        words += [permute(a, b, 0x5410), permute(a, b, 0x7632)]
                    if magnitudes:
                        words[0] = arith.select(_has_nan_code(magnitudes), i32(0x7FFF7FFF), words[0])
                    return words

                def exact():
                    group = arith.minsi(arith.divui(value, i32(layout.group)), i32(layout.groups - 1))
                    at = arith.addi(arith.muli(group, i32(2 * BLOCK)), arith.muli(row, i32(2)))
                    factor = _twice(_load(_at(scales, at), 16))
                    return quantised(lambda pair: _times(pair, factor))

                def general():
                    at = arith.addi(base, arith.muli(arith.divui(value, i32(layout.group)), i32(4)))
                    factor = llvm.bitcast(ir.F32Type.get(), _load(_at(raw, arith.addi(at, i32(layout.scale))), 32))
                    return quantised(lambda pair: _times_floats(pair, factor, factor))

                if first >= layout.quantised:
                    return bf16()
                if layout.format == V32():
                    return _if(_is_odd(odd_ref), general, exact, [i32_type()] * 8)
                if first + columns > layout.quantised:
                    tail = arith.cmpi(arith.CmpIPredicate.sge, value, i32(layout.quantised))
                    return _if(tail, bf16, exact, [i32_type()] * 8)
                return exact()

            words = _by_layout(which, layouts, of, [i32_type()] * 8)
            within = arith.remui(row, i32(8))
            at = arith.addi(
                arith.muli(arith.divui(row, i32(8)), i32(columns // 32 * 512)),
                arith.addi(arith.muli(arith.divui(column, i32(32)), i32(512)), arith.muli(within, i32(64))),
            )
            for part in range(2):
                chunk = arith.addi(arith.divui(arith.remui(column, i32(32)), i32(8)), i32(part))
                chunk = arith.xori(chunk, arith.divui(within, i32(2)))  # the 64-byte swizzle
                place = arith.addi(at, arith.muli(chunk, i32(16)))
                vectors = vector.from_elements(four, words[4 * part : 4 * part + 4])
                llvm.store(vectors, utils.getelementptr(to, [place], _i8()), alignment=16)

    write(raw_ref, scale_ref, odd_ref, which, tile_ref)


def _fp8_pairs(word, magnitudes=None):
    """Four FP8 numbers as 2^-120 times bf16 numbers: the first and third as a pair, then the second and fourth.

    Appends their magnitudes, for `_has_nan_code`.
    """
    sign, rest = i32(0x80008000), i32(0x07F007F0)
    low, high = arith.andi(arith.shli(word, i32(4)), rest), arith.andi(arith.shrui(word, i32(4)), rest)
    if magnitudes is not None:
        magnitudes += [low, high]
    low = arith.ori(arith.andi(arith.shli(word, i32(8)), sign), low)
    high = arith.ori(arith.andi(word, sign), high)
    return [llvm.bitcast(_pair(), low), llvm.bitcast(_pair(), high)]


def _has_nan_code(magnitudes):
    """Whether one of the magnitudes of `_fp8_pairs` is that of NaN, which is the largest there is."""
    most = magnitudes[0]
    for each in magnitudes[1:]:
        most = llvm.inline_asm(i32_type(), [most, each], "max.u16x2 $0, $1, $2;", "=r,r,r")
    above = arith.andi(arith.addi(most, i32(0x00100010)), i32(0x08000800))
    return arith.cmpi(arith.CmpIPredicate.ne, above, i32(0))


def _fp4_pairs(word, across: bool):
    """FP4 numbers as pairs of bf16 numbers.

    Not across: four in the lower 16 bits, the first and third as a pair, then the second and fourth. Across: four in
    the lower 16 bits and four in the upper, as four pairs of a lower and an upper one.
    """
    if not across:
        return [llvm.bitcast(_pair(), bits) for bits in _fp4_lookup(word, ((0x6240, 12, 20), (0x7351, 8, 16)))]
    every_second = i32(0x0F0F0F0F)
    found = []
    for nibbles in (arith.andi(word, every_second), arith.andi(arith.shrui(word, i32(4)), every_second)):
        nibbles = arith.ori(nibbles, arith.shrui(nibbles, i32(12)))  # the lower's and the upper's next to each other
        found.append([llvm.bitcast(_pair(), b) for b in _fp4_lookup(nibbles, ((0x5140, 12, 24), (0x7362, 4, 16)))])
    return [found[0][0], found[1][0], found[0][1], found[1][1]]


def _fp4_lookup(four, pairs):
    chosen = arith.andi(four, i32(0x7777))
    # Bytes of the bf16 of 0, 0.5, 1, 1.5, 2, 3, 4, 6, picked by the values' lower three bits.
    high = permute(i32(0x3F3F3F00), i32(0x40404040), chosen)
    low = permute(i32(0xC0800000), i32(0xC0804000), chosen)
    found = []
    for selector, first, second in pairs:
        bits = permute(low, high, selector)
        bits = arith.ori(bits, arith.andi(arith.shli(four, i32(first)), i32(0x8000)))
        found.append(arith.ori(bits, arith.andi(arith.shli(four, i32(second)), i32(0x80000000))))
    return found


def _down(bits, down):
    pair = llvm.bitcast(_pair(), bits)
    return _times(pair, i32((127 - down) << 7 | (127 - down) << 23)) if down else pair


def _times(pair, factor):
    return arith.mulf(pair, llvm.bitcast(_pair(), factor))


def _times_floats(pair, first, second):
    """A pair of `_fp8_pairs` times float32 factors, rounded to bf16, times 2^-DOWN."""
    f32, bits = ir.F32Type.get(), llvm.bitcast(i32_type(), pair)
    lift = utils.c(2.0**_TO_BF16, f32)
    values = [arith.shli(bits, i32(16)), arith.andi(bits, i32(0xFFFF0000))]
    values = [arith.mulf(arith.mulf(llvm.bitcast(f32, v), lift), s) for v, s in zip(values, (first, second))]
    rounded = [arith.truncf(ir.BF16Type.get(), v) for v in values]
    return _down(llvm.bitcast(i32_type(), vector.from_elements(_pair(), rounded)), DOWN)


def _is_odd(odd_ref):
    odd = i32(0)
    for warp in range(4):
        odd = arith.ori(odd, _load(_past(utils.memref_ptr(odd_ref), 4 * warp), 32))
    return arith.cmpi(arith.CmpIPredicate.ne, odd, i32(0))


def _by_layout(which, layouts, of, types):
    """What of(layout) gives, for the layout number `which`."""
    if len(set(layouts)) == 1:
        return of(layouts[0])
    first = arith.cmpi(arith.CmpIPredicate.eq, mosaic.scalar(which), i32(0))
    return _if(first, lambda: of(layouts[0]), lambda: of(layouts[1]), types)


def _if(condition, then, otherwise, types):
    branch = scf.IfOp(condition, types, has_else=True)
    for block, make in ((branch.then_block, then), (branch.else_block, otherwise)):
        with ir.InsertionPoint(block):
            scf.yield_(make())
    return list(branch.results)


def fragment(registers, shape):
    """Registers as an array in the layout of a wgmma."""
    layout = WGMMA.to_mgpu()
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None
    )


def own_thread():
    """This thread's number, read anew: what is computed from it is not kept in registers until the next use."""
    return asm("mov.u32 $0, %tid.x;", "=r", [], i32_type())


def fresh_zero():
    """0 as a scalar that the compiler does not know: what is derived from it is computed where it is used."""

    @mosaic.lane_code(
        arg_types=(), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR), twin=lambda: jnp.int32(0)
    )
    def zero(_):
        register = np.array(asm("mov.u32 $0, 0;", "=r", [], i32_type()), dtype=object)
        return mgpu.FragmentedArray(_registers=register, _layout=SCALAR.to_mgpu(), _is_signed=True)

    return zero()


def _pair():
    return ir.VectorType.get((2,), ir.BF16Type.get())


def _warp(thread):
    return arith.divui(arith.remui(thread, i32(128)), i32(32))


def _group(thread):
    return arith.divui(arith.remui(thread, i32(32)), i32(4))


def _quad(thread):
    return arith.remui(thread, i32(4))


def _at(pointer, offset):
    return utils.getelementptr(pointer, [offset], _i8())


def _past(pointer, offset: int):
    """A constant offset in a step of its own, which ends up in the instruction and in no register."""
    return utils.getelementptr(pointer, [offset], _i8())


def _load(pointer, bits):
    return llvm.load(ir.IntegerType.get_signless(bits), pointer)


def _load_two(pointer):
    words = llvm.load(ir.VectorType.get((2,), i32_type()), pointer, alignment=8)
    return [vector.extract(words, [], ir.DenseI64ArrayAttr.get([i])) for i in range(2)]


def _load_four(pointer):
    words = llvm.load(ir.VectorType.get((4,), i32_type()), pointer, alignment=16)
    return [vector.extract(words, [], ir.DenseI64ArrayAttr.get([i])) for i in range(4)]


def _twice(word):
    word = arith.extui(i32_type(), word) if _narrow(word) else word
    return permute(word, word, 0x1010)


def _i8():
    return ir.IntegerType.get_signless(8)


def i32_type():
    return ir.IntegerType.get_signless(32)


def i32(value):
    """A constant of 32 bits."""
    return arith.constant(i32_type(), ir.IntegerAttr.get(i32_type(), value - 2**32 if value >= 2**31 else value))


def permute(low, high, selector):
    """prmt: four bytes of the eight in `low` and `high`, one for each of the lower four nibbles of `selector`."""
    selector = i32(selector) if isinstance(selector, int) else selector
    return llvm.inline_asm(i32_type(), [low, high, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")


def asm(text, constraints, operands, result=None):
    """Inline PTX with side effects."""
    return llvm.inline_asm(result or ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)
