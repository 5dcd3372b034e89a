"""Runs code that a kernel writes lane by lane in NumPy: stand-ins for the MLIR builders, all lanes at once.

A value is an array with an element per lane. Memory is bytes; addresses are numbers, as on the GPU. `emulated` puts the
stand-ins into the modules of a kernel, whose functions then run on `Memory` and `Registers` instead of tracing.
"""

import contextlib
import re
import types
from unittest import mock

import ml_dtypes
import numpy as np

from pallas_kernels import mosaic

LANES = 128
BF16 = ml_dtypes.bfloat16
_NUMPY = {
    "i1": np.bool_,
    "i8": np.uint8,
    "i16": np.uint16,
    "i32": np.uint32,
    "i64": np.uint64,
    "f32": np.float32,
    "bf16": BF16,
}


class Memory:
    """Memory that lane code is given as a reference."""

    every: list["Memory"] = []

    def __init__(self, array):
        array = np.asarray(array)
        self.shape, self.dtype = array.shape, array.dtype
        self.bytes = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8).copy()
        self.start = (len(Memory.every) + 1) << 24
        self.type = types.SimpleNamespace(shape=list(self.shape))
        self.type.element_type = _F32Type() if self.dtype == np.float32 else str(self.dtype)
        Memory.every.append(self)

    @property
    def array(self):
        return self.bytes.view(self.dtype).reshape(self.shape)


def _find(addresses):
    memory = Memory.every[(int(addresses.flat[0]) >> 24) - 1]
    return memory, addresses.astype(np.int64) - memory.start


def read(addresses, size):
    """Bytes [lanes, size]."""
    memory, at = _find(addresses)
    assert (at % size == 0).all(), f"an access of {size} bytes is not aligned"
    assert ((at >= 0) & (at + size <= len(memory.bytes))).all(), "an access lies outside of its memory"
    return memory.bytes[at[:, None] + np.arange(size)]


def write(addresses, data, mask=None):
    """Writes bytes [lanes, size] of the lanes in `mask`."""
    mask = np.ones(len(addresses), bool) if mask is None else mask
    if mask.any():
        memory, at = _find(addresses[mask])
        size = data.shape[1]
        assert (at % size == 0).all(), f"an access of {size} bytes is not aligned"
        assert ((at >= 0) & (at + size <= len(memory.bytes))).all(), "an access lies outside of its memory"
        memory.bytes[at[:, None] + np.arange(size)] = data[mask]


class Value:
    """An element per lane of one of the types above, or of a pointer ("ptr")."""

    def __init__(self, data, kind):
        self.data, self.kind = np.asarray(data), kind

    @property
    def type(self):
        return self.kind


class Vector:
    """A short vector: Values of one type. No sequence, so that NumPy keeps it as one object."""

    def __init__(self, elements):
        self.elements = tuple(elements)

    def __iter__(self):
        return iter(self.elements)

    @property
    def type(self):
        return ("vector", len(self.elements), self.elements[0].kind)


class Registers:
    """A register array: object array of Vectors, as mgpu.FragmentedArray has them."""

    def __init__(self, _registers, _layout=None, _is_signed=None, shape=None):
        self.registers, self.shape = _registers, shape


def in_registers(vectors):
    """Registers of an array without a shape."""
    return Registers(np.array(vectors, dtype=object))


def _branch(condition, then, otherwise, types):
    """Lanes may part: then both branches run for all of them, which code without stores allows."""
    if condition.data.all():
        return then()
    return otherwise() if not condition.data.any() else [_select(condition, *x) for x in zip(then(), otherwise())]


def value(number, kind="i32"):
    """The same number for all lanes."""
    if kind.startswith("i"):
        number = int(number) & ((1 << max(int(kind[1:]), 8)) - 1)
    return Value(np.full(LANES, number, _NUMPY[kind]), kind)


def _signed(x):
    return x.data.view({1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[x.data.itemsize])


def _binary(function, signed=False):
    def apply(a, b):
        assert a.kind == b.kind, (a.kind, b.kind)
        with np.errstate(over="ignore"):
            x, y = (_signed(a), _signed(b)) if signed else (a.data, b.data)
            return Value(np.asarray(function(x, y)).astype(x.dtype).view(a.data.dtype), a.kind)

    return apply


def _floats(function):
    def apply(a, b):
        if isinstance(a, Vector):
            return Vector(apply(x, y) for x, y in zip(a, b))
        with np.errstate(all="ignore"):
            result = function(a.data.astype(np.float32), b.data.astype(np.float32))
        return Value(result.astype(a.data.dtype), a.kind)

    return apply


def _compare(predicate, a, b):
    name = predicate.name if hasattr(predicate, "name") else predicate
    x, y = (_signed(a), _signed(b)) if name.startswith("s") else (a.data, b.data)
    plain = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }
    return Value(plain[name if name in ("eq", "ne") else name[1:]](x, y), "i1")


def _select(condition, a, b):
    if isinstance(a, Vector):
        return Vector(_select(condition, x, y) for x, y in zip(a, b))
    return Value(np.where(condition.data, a.data, b.data).astype(a.data.dtype), a.kind)


def _truncate(kind, x):
    if isinstance(x, Vector):
        return Vector(_truncate(kind[2] if isinstance(kind, tuple) else kind, v) for v in x)
    return Value(x.data.astype(_NUMPY[kind]), kind)


def _constant(kind, number):
    if isinstance(kind, tuple):
        return Vector(value(number, kind[2]) for _ in range(kind[1]))
    return value(number, kind)


def _signed_wider(kind, x):
    return Value(_signed(x).astype({"i64": np.int64}[kind]).view(_NUMPY[kind]), kind)


def _size(kind):
    if isinstance(kind, tuple):
        return kind[1] * _size(kind[2])
    return np.dtype(_NUMPY[kind]).itemsize


def _from_bytes(data, kind):
    if isinstance(kind, tuple):
        each = _size(kind[2])
        return Vector(_from_bytes(data[:, i * each : (i + 1) * each], kind[2]) for i in range(kind[1]))
    return Value(np.ascontiguousarray(data).view(_NUMPY[kind])[:, 0], kind)


def _to_bytes(x):
    if isinstance(x, Vector):
        return np.concatenate([_to_bytes(v) for v in x], axis=1)
    return np.ascontiguousarray(x.data).view(np.uint8).reshape(LANES, -1)


def _bitcast(kind, x):
    return _from_bytes(_to_bytes(x), kind)


def _element_pointer(pointer, indices, kind):
    (index,) = indices
    index = np.int64(index) if isinstance(index, int) else _signed(index).astype(np.int64)
    return Value(pointer.data.astype(np.int64) + index * _size(kind), "ptr")


def _pointer(ref):
    return Value(np.full(LANES, ref.start, np.int64), "ptr")


def _shuffle(mask, x, other, clamp, kind):
    lane, first = np.arange(LANES) % 32, np.arange(LANES) // 32 * 32
    name = kind.name if hasattr(kind, "name") else kind
    source = {"bfly": lane ^ other.data, "idx": other.data}[name]
    return Value(x.data[first + source.astype(np.int64) % 32], x.kind)


def permute(low, high, selector):
    """prmt without its sign mode."""
    selector = value(selector) if isinstance(selector, int) else selector
    data = np.concatenate([_to_bytes(low), _to_bytes(high)], axis=1)
    nibbles = (selector.data[:, None] >> np.array([0, 4, 8, 12], np.uint32)) & 15
    assert (nibbles < 8).all(), "a selector asks for a sign"
    return _from_bytes(np.take_along_axis(data, nibbles.astype(np.int64), axis=1), "i32")


def assembly(text, operands, result, threads):
    """The instructions that the kernels write as text."""
    if "%tid.x" in text:
        return threads
    if text.startswith("prmt"):
        return permute(*operands)
    if text.startswith(("min.u16x2", "max.u16x2")):
        choose = np.minimum if text.startswith("min") else np.maximum
        return Value(choose(*(x.data.view(np.uint16) for x in operands)).view(np.uint32), "i32")
    if text.startswith("ex2"):
        return Value(np.exp2(operands[0].data), "f32")
    if "cp.async.bulk" in text:
        _bulk(text, operands)
        return None
    if "expect_tx" in text:
        return None
    operands = operands if result is None else [None, *operands]  # as the text counts them
    if found := re.search(r"setp\.(lt|eq|ne)\.[us]32 p, \$(\d), (\d+);", text):
        compare = {"lt": np.less, "eq": np.equal, "ne": np.not_equal}[found[1]]
        guard = compare(operands[int(found[2])].data, int(found[3]))
    if "bra done" in text:
        guard = ~guard
        text = text.replace("st.shared.v4.b32", "@p st.shared.v4.b32")
    if "vote.sync.ballot" in text:
        any_in_warp = guard.reshape(4, 32).any(1).repeat(32)
        return Value(any_in_warp.astype(np.uint32), "i32")
    done = False
    names = (
        r"cp\.async\.\S+|st\.shared\.v4\.b32|stmatrix\S*|red\.shared\.max\.s32|st\.(?:shared|global)\.v2\.f32|"
        r"st\.global\.(?:f32|b16)"
    )
    pattern = rf"(@p )?({names}) \[\$0\+?(\d*)\]([^;]*);"
    for found in re.finditer(pattern, text):
        done = True
        mask = guard if found[1] else np.ones(LANES, bool)
        to = operands[0].data.astype(np.int64) + int(found[3] or 0)
        name = found[2]
        if name.startswith("cp.async"):
            offset, size = re.search(r"\[\$1\+?(\d*)\], (\d+)", found[4]).groups()
            source, size = operands[1].data.astype(np.int64) + int(offset or 0), int(size)
            assert len(np.unique(to[mask])) == mask.sum(), "two lanes copy to one place"
            if mask.any():
                write(to[mask], read(source[mask], size))
        elif name.startswith("st.shared.v4.b32"):
            write(to, np.zeros((LANES, 16), np.uint8), mask)
        elif name.startswith("stmatrix"):
            _store_matrices(to, operands[1:])
        elif name.startswith("red"):
            number = int(re.search(r"\$(\d)", found[4])[1])
            for lane in np.flatnonzero(mask):
                memory, at = _find(to[lane : lane + 1])
                word = memory.bytes[at[0] : at[0] + 4].view(np.int32)
                word[0] = max(word[0], operands[number].data.view(np.int32)[lane])
        elif name.startswith("st.global") and ".v2" not in name:
            write(to, _to_bytes(operands[1]), mask)
        else:
            write(to, np.concatenate([_to_bytes(v) for v in operands[1:3]], axis=1), mask)
    assert done, f"the emulator does not know: {text}"
    return None


def _bulk(text, operands):
    """Pieces of memory copied to shared memory, of each lane for which the last operand is not 0."""
    size = int(re.search(r"\[\$1\], (\d+)", text)[1])
    to, source, there = (operands[i].data.astype(np.int64) for i in (0, 1, 3))
    for lane in np.flatnonzero(there):
        for at in range(0, size, 16):
            write(to[lane : lane + 1] + at, read(source[lane : lane + 1] + at, 16))


def _store_matrices(to, words):
    """stmatrix.m8n8.trans: lane 8 m + r has the address of row r of matrix m; the matrices are written transposed."""
    for warp in range(4):
        for m, word in enumerate(words):
            pairs = word.data[32 * warp : 32 * warp + 32].view(np.uint16).reshape(8, 8)
            for r in range(8):
                lane = 32 * warp + 8 * m + r
                write(to[lane : lane + 1], np.ascontiguousarray(pairs[:, r]).view(np.uint8)[None])


def _lane_code(*, arg_types, return_type=None, twin):
    def wrap(function):
        def call(*args):
            args = [value(a) if isinstance(a, int | np.integer) else a for a in args]
            return function(None, *args)

        return call

    return wrap


def _stand_ins(warpgroup):
    new = types.SimpleNamespace
    threads = Value(LANES * warpgroup + np.arange(LANES, dtype=np.uint32), "i32")
    ir = new(
        IntegerType=new(get_signless=lambda n: f"i{n}"),
        F32Type=_F32Type,
        BF16Type=new(get=lambda: "bf16"),
        VectorType=_VectorType,
        IntegerAttr=new(get=lambda kind, number: number),
        FloatAttr=new(get=lambda kind, number: number),
        DenseElementsAttr=new(get_splat=lambda kind, number: number),
        MemRefType=lambda kind: kind,
        DenseI64ArrayAttr=new(get=lambda indices: indices),
        Type=new(parse=lambda text: None),
    )
    predicates = new(**{name: name for name in ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")})
    arith = new(
        CmpIPredicate=predicates,
        constant=_constant,
        addi=_binary(np.add), subi=_binary(np.subtract), muli=_binary(np.multiply),
        divui=_binary(np.floor_divide), remui=_binary(np.remainder),
        andi=_binary(np.bitwise_and), ori=_binary(np.bitwise_or), xori=_binary(np.bitwise_xor),
        shli=_binary(np.left_shift), shrui=_binary(np.right_shift), shrsi=_binary(np.right_shift, signed=True),
        minsi=_binary(np.minimum, signed=True), maxsi=_binary(np.maximum, signed=True),
        addf=_floats(np.add), subf=_floats(np.subtract), mulf=_floats(np.multiply), maximumf=_floats(np.maximum),
        CmpFPredicate=new(OGT="ogt"),
        cmpi=_compare, select=_select, truncf=_truncate, extf=_truncate, bitcast=_bitcast, extsi=_signed_wider,
        cmpf=lambda predicate, a, b: Value({"ogt": np.greater}[predicate](a.data, b.data), "i1"),
        extui=lambda kind, x: Value(x.data.astype(_NUMPY[kind]), kind),
        trunci=lambda kind, x: Value(x.data.astype(_NUMPY[kind]), kind),
    )  # fmt: skip
    llvm = new(
        load=lambda kind, pointer, alignment=None: _from_bytes(read(pointer.data, _size(kind)), kind),
        store=lambda x, pointer, alignment=None: write(pointer.data, _to_bytes(x)),
        bitcast=_bitcast,
        ptrtoint=lambda kind, pointer: Value(pointer.data.astype(_NUMPY[kind]), kind),
        inline_asm=lambda result, operands, text, constraints, **_: assembly(text, operands, result, threads),
        intr_fma=lambda a, b, c: Value((a.data.astype(np.float64) * b.data + c.data).astype(np.float32), "f32"),
    )
    vector = new(
        extract=lambda x, _, indices: x.elements[indices[0] if indices else 0],
        from_elements=lambda kind, elements: Vector(elements),
    )
    utils = new(
        thread_idx=lambda: threads,
        getelementptr=_element_pointer,
        memref_ptr=_pointer,
        c=lambda number, kind: value(number, kind),
        shfl_bfly=lambda x, distance: _shuffle(None, x, value(distance), None, "bfly"),
    )
    nvvm = new(shfl_sync=_shuffle, ShflKind=new(bfly="bfly", idx="idx"))
    math = new(absf=lambda x: Value(np.abs(x.data), x.kind))
    return {"ir": ir, "arith": arith, "llvm": llvm, "vector": vector, "utils": utils, "nvvm": nvvm, "math": math}


class _F32Type:
    @staticmethod
    def get():
        return "f32"


class _VectorType:
    def __init__(self, kind):
        self.shape = (kind[1],)

    @staticmethod
    def get(shape, kind):
        return ("vector", shape[0], kind)


@contextlib.contextmanager
def emulated(*modules, warpgroup=0):
    """The lane code of `modules` runs on the stand-ins, as the warpgroup of this number."""
    Memory.every.clear()
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, stand_in in _stand_ins(warpgroup).items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, stand_in))
            if hasattr(module, "mgpu"):
                stack.enter_context(mock.patch.object(module, "mgpu", types.SimpleNamespace(FragmentedArray=Registers)))
            if hasattr(module, "either"):
                stack.enter_context(mock.patch.object(module, "either", _branch))
        stack.enter_context(mock.patch.object(mosaic, "lane_code", _lane_code))
        stack.enter_context(mock.patch.object(mosaic, "scalar", lambda x: x))
        stack.enter_context(mock.patch.object(mosaic, "global_pointer", _pointer))
        yield


def wgmma_array(registers, shape):
    """The [rows, columns] array that registers in the layout of a wgmma stand for."""
    rows, columns = shape
    found = np.empty(shape, np.float32)
    grid = registers.reshape(rows // 64, columns // 8, 2)
    lane = np.arange(LANES)
    for tile, column, half in np.ndindex(grid.shape):
        register = grid[tile, column, half]
        row = 64 * tile + 16 * (lane // 32) + 8 * half + lane % 32 // 4
        for e in range(2):
            found[row, 8 * column + 2 * (lane % 4) + e] = register.elements[e].data.astype(np.float32)
    return found


def wgmma_registers(array):
    """The inverse of `wgmma_array`, float32."""
    rows, columns = array.shape
    grid = np.empty((rows // 64, columns // 8, 2), object)
    lane = np.arange(LANES)
    for tile, column, half in np.ndindex(grid.shape):
        row = 64 * tile + 16 * (lane // 32) + 8 * half + lane % 32 // 4
        at = [array[row, 8 * column + 2 * (lane % 4) + e].astype(np.float32) for e in range(2)]
        grid[tile, column, half] = Vector(Value(x, "f32") for x in at)
    return Registers(grid, shape=array.shape)
