"""A small language for code that every lane of a thread block runs, and its emitter into Mosaic GPU.

Selection needs what Pallas does not express: shared-memory atomics at computed addresses, ballots, shuffles, scattered
stores. A lane program (`program.py`) is a Python function that is handed a machine and builds the kernel out of its
methods. Two machines run the same program: `Emitter`, which writes MLIR inside a Pallas kernel, and
`simulator.Simulator`, which runs every lane in NumPy, checks that nothing races and nothing is read before it was
written, and is what "interpret_sm90" and "interpret_sm100" run.

Values are 32 bits wide: "i" (integers that wrap; ``<`` and friends compare signed, ``>>`` shifts in zeros), "f"
(float32, comparisons are false for NaN) and "b" (booleans: ``&``, ``|``, ``~``).
"""

import contextlib

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, scf, vector
from jaxlib.mlir.dialects import math as mlir_math

ALL_LANES = 0xFFFFFFFF


class Value:
    """One value per lane. `raw` is the machine's: an MLIR value or a NumPy array."""

    __slots__ = ("machine", "raw", "kind")

    def __init__(self, machine, raw, kind):
        self.machine, self.raw, self.kind = machine, raw, kind

    def _with(self, other):
        if isinstance(other, Value):
            if other.kind != self.kind:
                raise TypeError(f"a value of kind {self.kind!r} meets one of kind {other.kind!r}; convert one of them.")
            return other
        return self.machine.constant(other, self.kind)

    def __add__(self, other):
        return self.machine.binary("add", self, self._with(other))

    def __sub__(self, other):
        return self.machine.binary("sub", self, self._with(other))

    def __mul__(self, other):
        return self.machine.binary("mul", self, self._with(other))

    def __and__(self, other):
        return self.machine.binary("and", self, self._with(other))

    def __or__(self, other):
        return self.machine.binary("or", self, self._with(other))

    def __xor__(self, other):
        return self.machine.binary("xor", self, self._with(other))

    def __lshift__(self, other):
        return self.machine.binary("shl", self, self._with(other))

    def __rshift__(self, other):
        return self.machine.binary("shr", self, self._with(other))

    def __invert__(self):
        return self ^ (True if self.kind == "b" else -1)

    def __lt__(self, other):
        return self.machine.compare("lt", self, self._with(other))

    def __le__(self, other):
        return self.machine.compare("le", self, self._with(other))

    def __gt__(self, other):
        return self.machine.compare("gt", self, self._with(other))

    def __ge__(self, other):
        return self.machine.compare("ge", self, self._with(other))

    def __eq__(self, other):
        return self.machine.compare("eq", self, self._with(other))

    def __ne__(self, other):
        return self.machine.compare("ne", self, self._with(other))

    __hash__ = None


_INTEGER = {
    "add": arith.addi,
    "sub": arith.subi,
    "mul": arith.muli,
    "and": arith.andi,
    "or": arith.ori,
    "xor": arith.xori,
    "shl": arith.shli,
    "shr": arith.shrui,
    "sar": arith.shrsi,
    "div": arith.divui,
    "min": arith.minsi,
    "max": arith.maxsi,
    "umin": arith.minui,
    "umax": arith.maxui,
}
_FLOAT = {"add": arith.addf, "mul": arith.mulf, "div": arith.divf, "max": arith.maximumf}
_SIGNED = {"lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge", "eq": "eq", "ne": "ne"}
_UNSIGNED = {"lt": "ult", "le": "ule", "gt": "ugt", "ge": "uge"}
_ORDERED = {"lt": "OLT", "le": "OLE", "gt": "OGT", "ge": "OGE", "eq": "OEQ", "ne": "UNE"}
_ATOMIC = {"add": "add", "max": "umax", "min": "umin", "or": "_or"}


class Machine:
    """What both machines share, written with their primitives. `threads` per block, `blocks` per cluster."""

    threads: int
    blocks: int

    def constant(self, value, kind):
        raise NotImplementedError

    def binary(self, op, a, b):
        raise NotImplementedError

    def i32(self, value):
        return value if isinstance(value, Value) else self.constant(value, "i")

    def minimum(self, a, b):
        return self.binary("min", self.i32(a), self.i32(b))

    def maximum(self, a, b):
        return self.binary("max", self.i32(a), self.i32(b))

    def divide(self, a, b):
        """Unsigned quotient."""
        return self.binary("div", self.i32(a), self.i32(b))

    def arithmetic_shift(self, a, bits):
        return self.binary("sar", a, self.i32(bits))

    def each(self, start, stop, step, body):
        """``body(i)`` for i = start, start + step, ... below stop."""

        def turn(i):
            body(i)
            return [i + step]

        self.repeat(lambda i: i < stop, turn, [self.i32(start)])

    def inclusive_scan(self, value):
        """Sum of `value` over the lanes of the warp up to and including this one."""
        for distance in (1, 2, 4, 8, 16):
            other = self.shuffle("up", value, distance)
            value = value + self.select(self.lane >= distance, other, self.i32(0))
        return value


class Emitter(Machine):
    """Writes the program into the Mosaic GPU kernel that is being lowered.

    `scores` and the global references are memrefs; `shared` maps names to shared-memory memrefs of int32. With a global
    "starts" the row begins at its start, taken into the row: `start`.
    """

    def __init__(self, *, threads, blocks, block, scores, row_elements, element_bytes, globals_, shared):
        self.threads, self.blocks = threads, blocks
        self._i32 = ir.IntegerType.get_signless(32)
        self._i64 = ir.IntegerType.get_signless(64)
        self._f32 = ir.F32Type.get()
        self._bool = ir.IntegerType.get_signless(1)
        self.tid = self._value(mgpu_utils.thread_idx(), "i")
        self.lane = self.tid & 31
        # Uniform in a warp by construction, so that the compiler can branch on it without masks.
        self.warp = self.shuffle("idx", self.tid >> 5, 0)
        block = self._value(block, "i")
        self.row = self.divide(block, blocks) if blocks > 1 else block
        self.rank = block - self.row * blocks  # blocks of a cluster are neighbours in the grid
        self._element_bytes = element_bytes
        self._row_start = arith.muli(arith.extui(self._i64, self.row.raw), self._wide(row_elements))
        self._globals = {name: (mgpu_utils.memref_ptr(ref), width) for name, (ref, width) in globals_.items()}
        self._shared = {name: mgpu_utils.memref_ptr(ref) for name, ref in shared.items()}
        aligned = row_elements % (16 // element_bytes) == 0
        if "starts" in globals_:
            self.start = self.maximum(self.minimum(self.load_global("starts", 0), row_elements), 0)
            self._row_start = arith.addi(self._row_start, arith.extui(self._i64, self.start.raw))
            aligned = False
        self._scores = self._row_base(scores, aligned, element_bytes)

    # Values.
    def _value(self, raw, kind):
        return Value(self, raw, kind)

    def _type(self, kind):
        return {"i": self._i32, "f": self._f32, "b": self._bool}[kind]

    def _wide(self, value):
        return arith.constant(self._i64, ir.IntegerAttr.get(self._i64, value))

    def constant(self, value, kind):
        type_ = self._type(kind)
        if kind == "f":
            return self._value(arith.constant(type_, ir.FloatAttr.get(type_, float(value))), kind)
        value = int(value)
        if kind == "i" and value >= 2**31:
            value -= 2**32
        return self._value(arith.constant(type_, ir.IntegerAttr.get(type_, value)), kind)

    def binary(self, op, a, b):
        table = _FLOAT if a.kind == "f" else _INTEGER
        return self._value(table[op](a.raw, b.raw), a.kind)

    def compare(self, op, a, b):
        if a.kind == "f":
            return self._value(arith.cmpf(getattr(arith.CmpFPredicate, _ORDERED[op]), a.raw, b.raw), "b")
        return self._value(arith.cmpi(getattr(arith.CmpIPredicate, _SIGNED[op]), a.raw, b.raw), "b")

    def unsigned(self, op, a, b):
        return self._value(arith.cmpi(getattr(arith.CmpIPredicate, _UNSIGNED[op]), a.raw, self.i32(b).raw), "b")

    def select(self, condition, a, b):
        return self._value(arith.select(condition.raw, a.raw, b.raw), a.kind)

    def to_int(self, condition):
        return self._value(arith.extui(self._i32, condition.raw), "i")

    def bits_of(self, value):
        return self._value(arith.bitcast(self._i32, value.raw), "i")

    def float_of(self, bits):
        return self._value(arith.bitcast(self._f32, bits.raw), "f")

    def as_float(self, value):
        return self._value(arith.sitofp(self._f32, value.raw), "f")

    def as_int(self, value):
        return self._value(arith.fptosi(self._i32, value.raw), "i")

    def square_root(self, value):
        """Approximate: machines may differ in the last bits."""
        return self._value(self._asm(self._f32, "sqrt.approx.f32 $0, $1;", "=f,f", value.raw), "f")

    def popcount(self, value):
        return self._value(mlir_math.ctpop(value.raw), "i")

    def leading_zeros(self, value):
        return self._value(mlir_math.ctlz(value.raw), "i")

    # Warps.
    def shuffle(self, kind, value, where):
        clamp = 0 if kind == "up" else 31
        mode = getattr(nvvm.ShflKind, kind)
        raw = value.raw if value.kind == "i" else arith.bitcast(self._i32, value.raw)
        moved = nvvm.shfl_sync(self._mask(), raw, self.i32(where).raw, self.i32(clamp).raw, mode)
        return self._value(moved, "i") if value.kind == "i" else self.float_of(self._value(moved, "i"))

    def ballot(self, condition):
        return self._value(nvvm.vote_sync(self._mask(), condition.raw, nvvm.VoteSyncKind.ballot), "i")

    def warp_reduce(self, op, value):
        kind = {"add": nvvm.ReductionKind.ADD, "umax": nvvm.ReductionKind.UMAX}[op]
        return self._value(nvvm.redux_sync(value.raw, kind, self._mask()), "i")

    def _mask(self):
        return self.constant(ALL_LANES, "i").raw

    # Memory.
    def _row_base(self, ref, aligned, element_bytes):
        """First 16-byte boundary at or before the row's start; `self.head` counts the elements between the two."""
        elements = 16 // element_bytes
        start = arith.trunci(self._i32, self._row_start)
        self.head = self.i32(0) if aligned else self._value(start, "i") & (elements - 1)
        first = arith.subi(self._row_start, arith.extui(self._i64, self.head.raw))
        i8 = ir.IntegerType.get_signless(8)
        return mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [arith.muli(first, self._wide(element_bytes))], i8)

    def load_vector(self, index):
        """The float32 values of the row's 16-byte vector number `index`. bf16 values are widened, which is exact."""
        four = ir.VectorType.get((4,), self._i32)
        offset = arith.shli(arith.extui(self._i64, index.raw), self._wide(4))
        pointer = mgpu_utils.getelementptr(self._scores, [offset], ir.IntegerType.get_signless(8))
        words = llvm.load(four, pointer, alignment=16)
        words = [self._value(self._extract(words, e), "i") for e in range(4)]
        if self._element_bytes == 4:
            return [self.float_of(word) for word in words]
        return [self.float_of(half) for word in words for half in (word << 16, word & 0xFFFF0000)]

    def prefetch(self, index, amount):
        """Asks the L2 cache for `amount` of the row's vectors, from number `index` on."""
        offset = arith.shli(arith.extui(self._i64, index.raw), self._wide(4))
        pointer = mgpu_utils.getelementptr(self._scores, [offset], ir.IntegerType.get_signless(8))
        text = "cp.async.bulk.prefetch.L2.global [$0], $1;"
        address = llvm.ptrtoint(self._i64, pointer)
        self._asm(ir.Type.parse("!llvm.void"), text, "l,r", address, (amount << 4).raw, effects=True)

    def _extract(self, value, element):
        position = ir.DenseI64ArrayAttr.get([element])
        return vector.extract(value, dynamic_position=[], static_position=position)

    def _global_pointer(self, name, index):
        base, width = self._globals[name]
        start = arith.muli(arith.extui(self._i64, self.row.raw), self._wide(width))
        return mgpu_utils.getelementptr(base, [arith.addi(start, arith.extui(self._i64, index.raw))], self._i32)

    def load_global(self, name, index):
        return self._value(llvm.load(self._i32, self._global_pointer(name, self.i32(index))), "i")

    def store_global(self, name, index, value):
        llvm.store(value.raw, self._global_pointer(name, self.i32(index)))

    def _pointer(self, name, index):
        return mgpu_utils.getelementptr(self._shared[name], [self.i32(index).raw], self._i32)

    def load(self, name, index):
        return self._value(llvm.load(self._i32, self._pointer(name, index)), "i")

    def store(self, name, index, value):
        llvm.store(self.i32(value).raw, self._pointer(name, index))

    def load4(self, name, index):
        four = ir.VectorType.get((4,), self._i32)
        words = llvm.load(four, self._pointer(name, index), alignment=16)
        return [self._value(self._extract(words, e), "i") for e in range(4)]

    def load_of(self, rank, name, index):
        return self._value(llvm.load(self._i32, self._remote(rank, name, index)), "i")

    def _remote(self, rank, name, index):
        return mgpu_utils.get_cluster_ptr(self._pointer(name, index), self.i32(rank).raw)

    def store4(self, name, index, values):
        four = ir.VectorType.get((4,), self._i32)
        words = vector.from_elements(four, [self.i32(value).raw for value in values])
        llvm.store(words, self._pointer(name, index), alignment=16)

    def atomic(self, op, name, index, value):
        """Updates a word of shared memory; returns what it held before."""
        kind = getattr(llvm.AtomicBinOp, _ATOMIC[op])
        old = llvm.atomicrmw(kind, self._pointer(name, index), self.i32(value).raw, llvm.AtomicOrdering.monotonic)
        return self._value(old, "i")

    def count_reaching(self, floor, values):
        """How many of this lane's float `values` are at least `floor`."""
        count = self.i32(0)
        for x in values:
            text = "{ .reg .pred p; setp.ge.f32 p, $1, $2; mov.b32 $0, $3; @p add.s32 $0, $0, 1; }"
            count = self._value(self._asm(self._i32, text, "=&r,f,f,r", x.raw, floor.raw, count.raw), "i")
        return count

    def store_reaching(self, name, slot, capacity, floor, values, positions):
        """Stores the `values` that are at least `floor` at `slot`, `slot` + 1, ... of list `name`, and their positions
        (value, constant) `capacity` words behind. By hand, for 5 instructions a value instead of 14."""
        pointer = llvm.ptrtoint(self._i32, self._pointer(name, slot))
        for x, (position, offset) in zip(values, positions):
            text = (
                "{ .reg .pred p; .reg .b32 t; setp.ge.f32 p, $1, $2; mov.b32 $0, $3; @p st.shared.f32 [$3], $1; "
                f"add.s32 t, $4, {offset}; @p st.shared.b32 [$3+{4 * capacity}], t; @p add.s32 $0, $0, 4; }}"
            )
            raw = self._asm(
                self._i32, text, "=&r,f,f,r,r,~{memory}", x.raw, floor.raw, pointer, position.raw, effects=True
            )
            pointer = raw

    def _asm(self, result, text, constraints, *operands, effects=False):
        return llvm.inline_asm(result, list(operands), text, constraints, has_side_effects=effects)

    # Order.
    def barrier(self):
        gpu.barrier()

    def cluster_barrier(self):
        nvvm.cluster_arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)

    # Control. Conditions may differ between lanes, except where a warp or block operation is inside.
    @contextlib.contextmanager
    def when(self, condition):
        branch = scf.IfOp(condition.raw)
        with ir.InsertionPoint(branch.then_block):
            yield
            scf.yield_([])

    def choose(self, condition, then, otherwise):
        """``then()`` where `condition` holds; `otherwise` (a list of values) elsewhere."""
        branch = scf.IfOp(condition.raw, [value.raw.type for value in otherwise], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([value.raw for value in then()])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([value.raw for value in otherwise])
        return [self._value(raw, value.kind) for raw, value in zip(branch.results, otherwise)]

    def repeat(self, condition, body, state, *, free=False):
        """While ``condition(*state)``: ``state = body(*state)``. Returns the last state. `free` loops have no barrier
        inside, and their warps may be at different turns."""
        kinds = [value.kind for value in state]
        types = [value.raw.type for value in state]
        loop = scf.WhileOp(types, [value.raw for value in state])
        before = loop.before.blocks.append(*types)
        after = loop.after.blocks.append(*types)
        with ir.InsertionPoint(before):
            now = [self._value(raw, kind) for raw, kind in zip(before.arguments, kinds)]
            scf.condition(condition(*now).raw, list(before.arguments))
        with ir.InsertionPoint(after):
            now = [self._value(raw, kind) for raw, kind in zip(after.arguments, kinds)]
            scf.yield_([value.raw for value in body(*now)])
        return [self._value(raw, kind) for raw, kind in zip(loop.results, kinds)]
