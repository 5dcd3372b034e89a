"""Runs a lane program on the CPU, one NumPy element per lane, and finds races."""

import contextlib

import numpy as np

from pallas_kernels.top_k.lanes import Machine, Value

_KINDS = {"i": np.uint32, "f": np.float32, "b": np.bool_}


class Race(Exception):
    """Two lanes touched a word of shared memory, at least one wrote it, and no barrier lay between."""


class _Shared:
    """The words of one name in every block of the cluster, flat, and who touched them since which barrier."""

    def __init__(self, blocks, words):
        self.words = words
        self.data = np.zeros(blocks * words, np.uint32)
        self.written = np.zeros(blocks * words, bool)
        # Of the last write, read, atomic update and read from another block: barriers of the block and of the cluster
        # passed by then, and the lane (SEVERAL: more than one since that barrier).
        self.last = {what: np.full((3, blocks * words), -1) for what in ("write", "read", "atomic", "remote")}


_SEVERAL = -2
_CONFLICTS = {
    "write": ("write", "read", "atomic", "remote"),
    "read": ("write", "atomic"),
    "atomic": ("write", "read", "remote"),
    "remote": ("write", "atomic"),
}


class Simulator(Machine):
    """Runs all lanes of all blocks of one cluster, with masks for branches. Lanes go in step, but for loops that are
    marked as free, where warps progress at random.

    A barrier that not all lanes reach, a warp operation that part of a warp reaches, a read of a word that nobody
    wrote, an index out of bounds and a race (`Race`) are errors.
    """

    def __init__(self, *, threads, blocks, row, scores, globals_, shared, start=0):
        """`scores` is the row's [L] array inside its whole flat array: (flat float32 array, first element, elements of
        a vector), and its first element is number `start` of the row; `globals_` maps names to (array, width);
        `shared` maps names to word counts."""
        self.threads, self.blocks = threads, blocks
        self._lanes = threads * blocks
        everyone = np.arange(self._lanes, dtype=np.uint32)
        self._mask = np.ones(self._lanes, bool)
        self._block = everyone // threads
        self.tid = Value(self, everyone % threads, "i")
        self.lane, self.warp = self.tid & 31, self.tid >> 5
        self.rank = Value(self, self._block, "i")
        self.row = self.i32(row)
        self._flat, first, self._vector = scores
        self.start = self.i32(start)
        self._base = first - first % self._vector
        self.head = self.i32(first % self._vector)
        self._globals, self._row = globals_, row
        self._shared = {name: _Shared(blocks, words) for name, words in shared.items()}
        self._block_time = np.zeros(self._lanes, np.int64)
        self._cluster_time = 0
        self._random = np.random.default_rng(row)
        self._global_writes: dict[str, set[int]] = {name: set() for name in globals_}

    def check_outputs(self, names):
        """Raises Race unless the program wrote every word of these rows of output."""
        for name in names:
            if missing := set(range(self._globals[name][1])) - self._global_writes[name]:
                raise Race(f"{name} is left unwritten at {sorted(missing)[:4]}.")

    # Values.
    def constant(self, value, kind):
        if kind == "i":
            value = int(value) & 0xFFFFFFFF
        return Value(self, np.full(self._lanes, value, _KINDS[kind]), kind)

    def binary(self, op, a, b):
        x, y = a.raw, b.raw
        with np.errstate(all="ignore"):
            if a.kind == "i" and op in ("sar", "min", "max"):
                x, y = x.view(np.int32), y.view(np.int32)
            match op:
                case "add":
                    out = x + y
                case "sub":
                    out = x - y
                case "mul":
                    out = x * y
                case "and":
                    out = x & y
                case "or":
                    out = x | y
                case "xor":
                    out = x ^ y
                case "shl":
                    out = np.where(y < 32, x << (y & 31), 0)
                case "shr":
                    out = np.where(y < 32, x >> (y & 31), 0)
                case "sar":
                    out = x >> y
                case "div" if a.kind == "f":
                    out = x / y
                case "div":
                    if (y[self._mask] == 0).any():
                        raise ZeroDivisionError("a lane divides by 0.")
                    out = x // np.maximum(y, 1)
                case "min" | "umin":
                    out = np.minimum(x, y)
                case "max" | "umax":
                    out = np.maximum(x, y)
        return Value(self, out.astype(_KINDS[a.kind]) if op != "sar" else out.view(np.uint32), a.kind)

    def compare(self, op, a, b):
        x, y = (a.raw.view(np.int32), b.raw.view(np.int32)) if a.kind == "i" else (a.raw, b.raw)
        return self._compare(op, x, y)

    def unsigned(self, op, a, b):
        return self._compare(op, a.raw, self.i32(b).raw)

    def _compare(self, op, x, y):
        function = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
        return Value(self, (function | {"eq": np.equal, "ne": np.not_equal})[op](x, y), "b")

    def select(self, condition, a, b):
        return Value(self, np.where(condition.raw, a.raw, b.raw), a.kind)

    def to_int(self, condition):
        return Value(self, condition.raw.astype(np.uint32), "i")

    def bits_of(self, value):
        return Value(self, value.raw.view(np.uint32), "i")

    def float_of(self, bits):
        return Value(self, bits.raw.view(np.float32), "f")

    def as_float(self, value):
        return Value(self, value.raw.view(np.int32).astype(np.float32), "f")

    def as_int(self, value):
        with np.errstate(invalid="ignore"):
            return Value(self, value.raw.astype(np.int32).view(np.uint32), "i")

    def square_root(self, value):
        return Value(self, np.sqrt(np.maximum(value.raw, 0)), "f")

    def popcount(self, value):
        return Value(self, np.bitwise_count(value.raw).astype(np.uint32), "i")

    def leading_zeros(self, value):
        _, exponent = np.frexp(value.raw.astype(np.float64))
        return Value(self, (32 - exponent).astype(np.uint32), "i")

    # Warps.
    def _warps(self, raw):
        active = self._mask.reshape(-1, 32)
        if (active.any(1) != active.all(1)).any():
            raise Race("part of a warp reaches a warp operation.")
        return raw.reshape(-1, 32)

    def shuffle(self, kind, value, where):
        lanes = np.arange(32)
        where = self._warps(self.i32(where).raw).astype(np.int64)
        source = {"up": lanes - where, "bfly": lanes ^ where, "idx": where + 0 * lanes}[kind]
        source = np.where((source < 0) | (source > 31), lanes, source)
        moved = np.take_along_axis(self._warps(value.raw), source, 1)
        return Value(self, moved.reshape(-1), value.kind)

    def ballot(self, condition):
        votes = self._warps(condition.raw & self._mask).astype(np.uint32) << np.arange(32, dtype=np.uint32)
        return Value(self, np.repeat(votes.sum(1, dtype=np.uint32), 32), "i")

    def warp_reduce(self, op, value):
        function = {"add": np.add, "umax": np.maximum}[op]
        reduced = function.reduce(self._warps(value.raw), axis=1, dtype=np.uint32)
        return Value(self, np.repeat(reduced, 32), "i")

    # Memory.
    def load_vector(self, index):
        first = self._base + index.raw.astype(np.int64) * self._vector
        out = []
        for e in range(self._vector):
            inside = (first + e >= 0) & (first + e < self._flat.size)
            if (self._mask & ~((first >= 0) & (first < self._flat.size))).any():
                raise IndexError("a vector of scores is loaded from outside the array.")
            values = np.where(inside, self._flat[np.where(inside, first + e, 0)], np.float32(np.nan))
            out.append(Value(self, values, "f"))
        return out

    def prefetch(self, index, amount):
        last = index.raw.astype(np.int64) + amount.raw - 1
        for number in (index.raw.astype(np.int64)[self._mask], last[self._mask]):
            first = self._base + number * self._vector
            if ((first < 0) | (first >= self._flat.size)).any():
                raise IndexError("vectors of scores are fetched from outside the array.")

    def load_global(self, name, index):
        array, width = self._globals[name]
        place = self._row * width + self.i32(index).raw.astype(np.int64)
        return Value(self, array[np.where(self._mask, place, 0)].astype(np.int32).view(np.uint32), "i")

    def store_global(self, name, index, value):
        array, width = self._globals[name]
        index = self.i32(index).raw[self._mask].astype(np.int64)
        if (index >= width).any():
            raise IndexError(f"a store to {name} at {index.max()} leaves the row of {width}.")
        again = self._global_writes[name].intersection(index.tolist())
        if again or len(set(index.tolist())) != index.size:
            raise Race(f"{name} is written twice at {sorted(again)[:4]}.")
        self._global_writes[name].update(index.tolist())
        array[self._row * width + index] = value.raw[self._mask].view(np.int32)

    def _places(self, name, index, rank=None, width=1):
        shared = self._shared[name]
        index = self.i32(index).raw.astype(np.int64)
        if (index[self._mask] + width > shared.words).any():
            raise IndexError(f"index {index[self._mask].max()} of {name} is outside its {shared.words} words.")
        block = self._block if rank is None else self.i32(rank).raw
        return shared, np.where(self._mask, block.astype(np.int64) * shared.words + index, 0)

    def _touch(self, shared, places, what, name):
        """Records an access of the active lanes, after checking it against earlier ones that no barrier separates."""
        lanes = np.flatnonzero(self._mask)
        if not lanes.size:
            return
        places = places[lanes]
        clocks = np.stack([self._block_time[lanes], np.full(lanes.size, self._cluster_time)])
        for other in _CONFLICTS[what]:
            # Barriers of a block order its own lanes; lanes of different blocks are ordered by cluster barriers alone.
            across = "remote" in (what, other)
            known = shared.last[other][:, places]
            if ((known[int(across)] == clocks[int(across)]) & (known[2] != lanes)).any():
                raise Race(f"{name}: a {what} races a {other} at {places[:4]}.")
        order = np.argsort(places, kind="stable")
        repeated = np.zeros(lanes.size, bool)
        same = places[order][1:] == places[order][:-1]
        repeated[order[1:][same]] = repeated[order[:-1][same]] = True
        if what == "write" and repeated.any():
            raise Race(f"{name}: two lanes write one word.")
        if what != "write" and not shared.written[places].all():
            raise Race(f"{name}: a word is read or updated that nobody wrote.")
        known = shared.last[what][:, places]
        others = (known[0] == clocks[0]) & (known[2] != lanes)
        shared.last[what][:, places] = *clocks, np.where(repeated | others, _SEVERAL, lanes)
        if what == "write":
            shared.written[places] = True

    def load(self, name, index):
        return self._load(name, index, None)

    def load_of(self, rank, name, index):
        return self._load(name, index, rank)

    def _load(self, name, index, rank):
        shared, places = self._places(name, index, rank)
        here = self._mask
        away = here & (self._block != places // shared.words)
        for self._mask, what in ((here & ~away, "read"), (away, "remote")):
            self._touch(shared, places, what, name)
        self._mask = here
        return Value(self, shared.data[places], "i")

    def load4(self, name, index):
        return [self._load(name, self.i32(index) + e, None) for e in range(4)]

    def store(self, name, index, value):
        shared, places = self._places(name, index)
        self._touch(shared, places, "write", name)
        shared.data[places[self._mask]] = self.i32(value).raw[self._mask]

    def store4(self, name, index, values):
        for e, value in enumerate(values):
            self.store(name, self.i32(index) + e, value)

    def atomic(self, op, name, index, value):
        shared, places = self._places(name, index)
        self._touch(shared, places, "atomic", name)
        value = self.i32(value).raw
        old = np.zeros(self._lanes, np.uint32)
        # One by one, warps in random order, as the hardware may: any order must give the same result.
        function = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or}[op]
        if np.unique(places[self._mask]).size == self._mask.sum():
            old[self._mask] = shared.data[places[self._mask]]
            shared.data[places[self._mask]] = function(old, value)[self._mask]
        else:
            with np.errstate(over="ignore"):
                lanes = np.flatnonzero(self._mask)
                lanes = lanes[np.argsort(self._random.permutation(self._lanes // 32)[lanes // 32], kind="stable")]
                for i in lanes:
                    old[i] = shared.data[places[i]]
                    shared.data[places[i]] = function(old[i], value[i])
        return Value(self, old, "i")

    def count_reaching(self, floor, values):
        return sum((self.to_int(x >= floor) for x in values), self.i32(0))

    def store_reaching(self, name, slot, capacity, floor, values, positions):
        for x, (position, offset) in zip(values, positions):
            with self.when(x >= floor):
                self.store(name, slot, self.bits_of(x))
                self.store(name, slot + capacity, position + offset)
            slot = slot + self.to_int(x >= floor)

    # Order.
    def barrier(self):
        everyone = self._mask.reshape(self.blocks, self.threads)
        if (everyone.any(1) != everyone.all(1)).any():
            raise Race("part of a block reaches a barrier.")
        self._block_time += self._mask

    def cluster_barrier(self):
        if not self._mask.any():
            return
        if not self._mask.all():
            raise Race("part of a cluster reaches its barrier.")
        self._block_time += 1
        self._cluster_time += 1

    # Control.
    @contextlib.contextmanager
    def when(self, condition):
        outer = self._mask
        self._mask = outer & condition.raw
        yield
        self._mask = outer

    def choose(self, condition, then, otherwise):
        with self.when(condition):
            chosen = then()
        return [self.select(condition, a, b) for a, b in zip(chosen, otherwise)]

    def repeat(self, condition, body, state, *, free=False):
        outer = active = self._mask
        while True:
            self._mask = active
            active = active & condition(*state).raw
            if not active.any():
                break
            self._mask = active
            if free:  # some warps are slower than others
                self._mask = active & np.repeat(self._random.random(self._lanes // 32) < 0.5, 32)
            new = body(*state)
            state = [self.select(Value(self, self._mask, "b"), a, b) for a, b in zip(new, state)]
        self._mask = outer
        return state
