"""The lane program of exact top-k: what every lane of the block (or of the cluster of blocks) that owns a row does.

The row streams through registers once. Scores that reach a floor are kept, key and position, in a shared-memory list.
The floor starts as a guess from a sample of the row. When the list overflows, all but its exact best k are dropped and
the k-th best becomes the floor, so any distribution is handled in one read; only a guess that proves too high (fewer
than k kept at the end) costs a second one. At the end a radix selection over the list finds the k-th best of the row,
and a bitmap of the chosen positions, read off in order, gives the output.

With several blocks per row (a cluster) each block samples the whole row, so that all start from the same floor, and
streams its own slice; one block then takes over the others' lists from their shared memory and finishes alone (with two
selections, two blocks at the same time).

Ties: the list may hold equal scores in any order; positions decide exactly in the selections.
"""

import dataclasses
import functools
import math

from pallas_kernels.top_k.lanes import Machine, Value

NONE = 0x7FFFFFFF
FLOAT32_MAX = 3.4028234663852886e38
LOWEST_KEY = 0x00800000  # of the lowest finite float32; NaN and -inf have none
MARGIN = 4.0  # standard deviations by which a guess keeps more than the k scores that it expects to
BEST_OF_BLOCK = 1.5  # high scores per block that has any, taken for granted when blocks are guessed from scores
SAMPLED_BITS = 27  # the sample's histogram spans this many bits of the key below its maximum: 16 powers of 2

# Words of shared memory that the block agrees through. All but the last two exist once per selection; LISTED is what
# the other blocks may read while COUNT goes on.
COUNT, FULL, LISTED, BIN, ABOVE, AMOUNT, HIGH, LOW = 0, 2, 4, 6, 8, 10, 12, 13
WORDS = 14
UNROLLED = 4  # entries of a list that a lane reads at once
SHARED_MEMORY = 227 * 1024  # bytes a block may have, on both chips
ALLOCATED = 1024  # bytes that every array of shared memory is rounded up to


@dataclasses.dataclass(frozen=True)
class Selection:
    """One list and what is to be chosen from it: the scores' own top-k (group 0) or blocks of `group` vectors."""

    k: int
    capacity: int  # entries of the list
    group: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel's static shape: rows of `length` elements, `threads` a block, `blocks` a row, `vectors` of 16 bytes that
    a thread has in flight; `samples` vectors that a thread samples (0: no guess). With `has_starts` positions count
    from a start of the row's own, and its length from 0. `prefetch`: vectors at the start of a block's slice that the
    L2 cache fetches while the sample is looked at."""

    length: int
    element_bytes: int
    threads: int
    blocks: int
    vectors: int
    samples: int
    selections: tuple[Selection, ...]
    has_lengths: bool
    has_starts: bool = False
    prefetch: int = 0

    def __post_init__(self):
        if self.blocks - 1 > self.warps:
            raise ValueError(f"{self.warps} warps cannot read the lists of {self.blocks - 1} other blocks at once.")
        for selection in self.selections:
            appended = 32 * self.vectors * (self.vector if not selection.group else 1)
            if selection.capacity < selection.k + appended:
                raise ValueError(f"{selection} cannot hold {appended} entries of a warp beyond its k best.")
            if selection.group and (self.unaligned or selection.group & (selection.group - 1)):
                raise ValueError(f"{selection} needs rows of whole vectors and a power of 2 as its group.")

    @property
    def vector(self) -> int:
        return 16 // self.element_bytes

    @property
    def unaligned(self) -> bool:
        """Whether a row may start inside a vector."""
        return self.has_starts or self.length % self.vector != 0

    @property
    def bins(self) -> int:
        return 4 * self.threads

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def quads(self) -> int:
        """16-byte words of the bitmap that a thread reads, a power of 2: enough for the row, or what there is room for
        (then the row is written in parts)."""
        quads = 1 << (-(-self.length // (32 * self.bins)) - 1).bit_length()
        while quads > 1 and self._bytes(quads) > SHARED_MEMORY:
            quads //= 2
        return quads

    def _bytes(self, quads):
        words = [self.bins * quads, self.bins * quads, *self._fixed().values()]
        return sum(-(-4 * number // ALLOCATED) * ALLOCATED for number in words)

    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self._bytes(self.quads)

    def _fixed(self) -> dict[str, int]:
        words = {"warps": self.warps, "words": WORDS, "stage": max(selection.k for selection in self.selections)}
        return words | {f"list{s}": 2 * selection.capacity for s, selection in enumerate(self.selections)}

    def shared(self) -> dict[str, int]:
        """Words of shared memory by name. The histogram is also the bitmap, "lower" the marks below each of its words;
        a list is its scores, then its positions."""
        return {"hist": self.bins * self.quads, "lower": self.bins * self.quads} | self._fixed()

    def outputs(self) -> list[tuple[str, int]]:
        """(name, width) of the int32 output rows, in order."""
        found = []
        for s, selection in enumerate(self.selections):
            found += [(f"out{s}", selection.k), (f"count{s}", 1)]
        return found


@dataclasses.dataclass(frozen=True)
class _Floor:
    """Which scores join the list: at least `at` up to position `until`, at least `beyond` after it. `high` is the key
    of the highest score of a sample, 0 without one."""

    at: Value
    beyond: Value
    until: Value
    high: Value

    def list(self):
        return [self.at, self.beyond, self.until, self.high]


def run(m: Machine, plan: Plan) -> None:
    """Emits (or simulates) the whole kernel for one row."""
    _Row(m, plan).run()


class _Row:
    def __init__(self, m: Machine, plan: Plan):
        self.m, self.plan = m, plan
        n = m.i32(plan.length)
        if plan.has_lengths:
            end = m.minimum(m.load_global("lengths", 0), plan.length)
            n = m.maximum(end - m.start if plan.has_starts else end, 0)
        self.n = n
        log = _log2(plan.vector)
        self.vectors = m.select(n > 0, (n + m.head + (plan.vector - 1)) >> log, m.i32(0))
        self.begin, self.end = m.i32(0), self.vectors
        if plan.blocks > 1:
            # Slices start on whole 128-byte lines and on whole groups.
            whole = max([8] + [selection.group for selection in plan.selections])
            share = m.divide(self.vectors + (plan.blocks * whole - 1), plan.blocks * whole) * whole
            self.begin = m.minimum(m.rank * share, self.vectors)
            self.end = m.minimum(self.begin + share, self.vectors)

    def run(self):
        m, plan = self.m, self.plan
        if plan.prefetch:
            amount = m.minimum(self.end - self.begin, plan.prefetch)
            with m.when((m.tid == 0) & (amount > 0)):
                m.prefetch(self.begin, amount)
        with m.when(m.tid < WORDS):
            m.store("words", m.tid, m.select((m.tid == FULL) | (m.tid == FULL + 1), m.i32(NONE), m.i32(0)))
        for quad in range(plan.quads):
            m.store4("hist", m.tid * 4 + quad * plan.bins, [0] * 4)
        m.barrier()
        floors = self.fill_lists()
        if plan.blocks == 1:
            self.finish(floors)
        else:
            for s, floor in floors.items():  # each by a block of its own
                with m.when(m.rank == s):
                    self.finish({s: self.take_over(s, floor)})
            m.cluster_barrier()  # no block's shared memory goes away while another reads it

    # Streaming.
    def open_floor(self):
        m = self.m
        lowest = m.constant(-FLOAT32_MAX, "f")
        return _Floor(lowest, lowest, m.i32(NONE), m.i32(0))

    def fill_lists(self):
        """Streams the block's slice until every list holds all that can belong to the row's k best."""
        m, plan = self.m, self.plan
        names = range(len(plan.selections))
        floors = {s: self.open_floor() for s in names}
        if not plan.samples:
            floors = self.fill(floors, self.slice_source())
            self.publish()
            return floors
        # A guess is worth its time where it keeps much from the lists.
        guessed = {}
        for s, selection in enumerate(plan.selections):
            if selection.group:
                guessed[s] = self.vectors > 2 * selection.k * selection.group
            else:
                guessed[s] = self.vectors * plan.vector > selection.capacity
        wanted = functools.reduce(lambda a, b: a | b, guessed.values())
        *ats, high = m.choose(wanted, self.guess, [*(floor.at for floor in floors.values()), floors[0].high])
        for s, floor in floors.items():
            at = m.select(guessed[s], ats[s], floor.at)
            floors[s] = _Floor(at, at, floor.until, m.select(guessed[s], high, floor.high))

        def attempt(running, first, *state):
            complete, floors = state[: len(names)], _floors(names, state[len(names) :])
            filled = floors
            if len(names) > 1:  # a list that is complete takes nothing in a second reading: nothing reaches NaN
                nothing = m.float_of(m.i32(NONE))
                filled = {
                    s: _Floor(*(m.select(complete[s], nothing, x) for x in (floor.at, floor.beyond)), *floor.list()[2:])
                    for s, floor in floors.items()
                }
            filled = self.fill(filled, self.slice_source())
            self.publish()
            missing, again = {}, m.constant(False, "b")
            for s in names:
                total = m.load("words", LISTED + s)
                if plan.blocks > 1:
                    total = _sum([m.load_of(rank, "words", LISTED + s) for rank in range(plan.blocks)])
                # Fewer than k reached the guess: read again without one.
                missing[s] = guessed[s] & first & (total < plan.selections[s].k)
                again = again | missing[s]
                if len(names) > 1:
                    kept = (m.select(complete[s], a, b) for a, b in zip(floors[s].list(), filled[s].list()))
                    filled[s] = _Floor(*kept)

            def restart():
                self.meet()  # every lane has read the counts
                for s in names:
                    with m.when((m.tid == 0) & missing[s]):
                        m.store("words", COUNT + s, 0)
                m.barrier()
                opened = self.open_floor().list()
                return [m.select(missing[s], a, b) for s in names for a, b in zip(opened, filled[s].list())]

            complete = [again & ~missing[s] for s in names]
            return [again, m.constant(False, "b"), *complete, *m.choose(again, restart, _flat(filled))]

        no, yes = m.constant(False, "b"), m.constant(True, "b")
        state = m.repeat(lambda running, *_: running, attempt, [yes, yes, *[no] * len(names), *_flat(floors)])
        return _floors(names, state[2 + len(names) :])

    def publish(self):
        """Makes the lists' lengths known to all blocks of the row."""
        m = self.m
        with m.when(m.tid == 0):
            for s in range(len(self.plan.selections)):
                m.store("words", LISTED + s, m.load("words", COUNT + s))
        self.meet()

    def meet(self):
        (self.m.cluster_barrier if self.plan.blocks > 1 else self.m.barrier)()

    def guess(self):
        """[floors that somewhat more than k scores, or blocks, of the row should reach, ..., key of the highest score
        seen], from evenly spread vectors of the row."""
        m, plan = self.m, self.plan
        sampled = plan.threads * plan.samples
        # Pieces of 64 bytes, what the memory reads at once.
        spread = m.as_float(self.vectors >> 2) * (4.0 / sampled)
        keys = []
        for u in range(plan.samples):
            piece = m.as_int(m.as_float((m.tid + u * plan.threads) >> 2) * spread)
            index = m.minimum(piece * 4 + (m.tid & 3), self.vectors - 1)
            position = index * plan.vector - m.head
            for e, x in enumerate(m.load_vector(index)):
                inside = x >= -FLOAT32_MAX
                if plan.has_lengths or plan.unaligned:
                    inside = inside & (position + e >= 0) & (position + e < self.n)
                keys.append(m.select(inside, self.key(x), m.i32(0)))
        high = keys[0]
        for key in keys[1:]:
            high = m.binary("umax", high, key)
        high = m.warp_reduce("umax", high)
        with m.when(m.lane == 0):
            m.atomic("max", "words", HIGH, high)
        with m.when(m.tid < len(plan.selections)):
            m.store("words", m.tid + BIN, NONE)
        m.barrier()
        high = m.load("words", HIGH)
        low = m.binary("umax", high, m.i32(2**SAMPLED_BITS)) - (2**SAMPLED_BITS - 1)
        shift = SAMPLED_BITS - _log2(plan.bins)
        for key in keys:
            with m.when(m.unsigned("ge", key, low)):
                m.atomic("add", "hist", (key - low) >> shift, 1)
        m.barrier()
        ranks = []
        for selection in plan.selections:
            wanted = selection.k * (BEST_OF_BLOCK if selection.group else 1.0)
            expected = m.binary("div", m.constant(wanted * sampled, "f"), m.as_float(self.vectors))
            ranks.append(m.as_int(expected + m.square_root(expected) * MARGIN + MARGIN))
        ats = []
        for found, *_ in self.find(*ranks):
            key = m.binary("umax", low + (found << shift), m.i32(LOWEST_KEY))
            known = found != NONE
            ats.append(m.select(known, self.score(key), m.constant(-FLOAT32_MAX, "f")))
            high = m.select(known, high, m.i32(0))
        return [*ats, high]

    def fill(self, floors, source):
        """Appends all of `source` that reaches the floors to the lists; returns the floors, which may have risen.

        `floors` maps numbers of selections to their floors. `source` is (number of groups, group): ``group(j)`` loads
        group number j and gives, for every selection, this lane's scores in it, their positions as (value, constant to
        add), and the lowest of them.
        """
        m = self.m
        names = [*floors]

        def turn(running, j, *state):
            done, now = list(state[: len(names)]), _floors(names, state[len(names) :])
            j, done = self.stream(j, done, now, source)
            m.barrier()
            again = m.constant(False, "b")
            overflowed = {s: m.load("words", FULL + s) != NONE for s in names}
            m.barrier()  # every lane has read the words before one changes them
            for s, floor in now.items():
                raised = m.choose(overflowed[s], lambda s=s, floor=floor: self.shrink(s, floor).list(), floor.list())
                now[s] = _Floor(*raised)
                again = again | overflowed[s]
            return [again, j, *done, *_flat(now)]

        no, yes = m.constant(False, "b"), m.constant(True, "b")
        state = m.repeat(lambda running, *_: running, turn, [yes, m.i32(0), *[no] * len(names), *_flat(floors)])
        return _floors(names, state[2 + len(names) :])

    def stream(self, j, done, floors, source):
        """Appends groups of `source` from number `j` on, until they end or a list is full. Warps go their own ways.
        `done` marks the selections that have had their share of group `j`."""
        m = self.m
        groups, group = source
        several = len(done)

        def turn(j, stopped, *done):
            done, used = list(done), group(j)
            for d, (s, floor) in enumerate(floors.items()):
                values, positions, lowest = used[s]
                at = m.select(lowest > floor.until, floor.beyond, floor.at)
                if several > 1:
                    at = m.select(done[d], m.float_of(m.i32(NONE)), at)
                done[d] = done[d] | self.append(s, at, values, positions)
            complete = done[0]
            for flag in done[1:]:
                complete = complete & flag
            return [j + m.to_int(complete), ~complete, *(flag & ~complete for flag in done)]

        start = [j, m.constant(False, "b"), *done]
        j, _, *done = m.repeat(lambda j, stopped, *_: (j < groups) & ~stopped, turn, start, free=True)
        return j, done

    def slice_source(self):
        """The block's slice of the row, for `fill`."""
        m, plan = self.m, self.plan
        stride = plan.threads * plan.vectors
        last = self.end - 1
        log = _log2(plan.vector)
        newest = {s.group: self.newest_block(s.group) for s in plan.selections if s.group}

        def group(j):
            first = self.begin + j * stride + m.tid
            indices = [first + u * plan.threads for u in range(plan.vectors)]
            loaded = [x for index in indices for x in m.load_vector(m.minimum(index, last))]
            starts = [(index << log) - m.head for index in indices]
            positions = [(starts[i >> log], i % plan.vector) for i in range(len(loaded))]

            def masked():
                nothing = m.constant(-math.inf, "f")
                kept = []
                for i, (x, (start, offset)) in enumerate(zip(loaded, positions)):
                    position = start + offset
                    inside = (indices[i >> log] <= last) & (position >= 0) & (position < self.n)
                    kept.append(m.select(inside, x, nothing))
                return kept

            ragged = indices[-1] >= last
            if plan.unaligned:
                ragged = ragged | (first == 0)
            xs = m.choose(ragged, masked, loaded)
            return [
                self.block_maxima(xs, indices, selection.group, newest[selection.group])
                if selection.group
                else (xs, positions, starts[0])
                for selection in plan.selections
            ]

        return m.divide(self.end - self.begin + (stride - 1), stride), group

    def newest_block(self, group):
        """The row's newest block of `group` vectors if it lies in the slice, else -1: lanes beyond the end of another
        slice come upon it too, and would list it twice."""
        m = self.m
        newest = m.arithmetic_shift(self.n - 1, _log2(group * self.plan.vector))
        first = newest * group
        return m.select((first >= self.begin) & (first < self.end), newest, m.i32(-1))

    def block_maxima(self, xs, indices, group, newest):
        """Maxima of blocks of `group` vectors, and their ids. NaN in the lanes that do not own one."""
        m, plan = self.m, self.plan
        owned = (m.lane & (group - 1)) == 0
        largest, nothing = m.constant(FLOAT32_MAX, "f"), m.float_of(m.i32(NONE))
        maxima, ids = [], []
        for u, index in enumerate(indices):
            parts = xs[u * plan.vector : (u + 1) * plan.vector]
            best = parts[0]
            for x in parts[1:]:
                best = m.binary("max", best, x)
            for step in range(_log2(group)):
                best = m.binary("max", best, m.shuffle("bfly", best, 1 << step))
            # NaN blocks come first but for the newest, whose +inf is its own.
            best = m.select(best <= largest, best, largest)
            block = index >> _log2(group)
            best = m.select(block == newest, m.constant(math.inf, "f"), best)
            maxima.append(m.select(owned, best, nothing))
            ids.append((block, 0))
        return maxima, ids, ids[0][0]

    def append(self, s, floor, values, positions):
        """Adds this warp's values that reach `floor` to list `s`. False for the whole warp, and nothing added, if they
        do not fit."""
        m = self.m
        capacity = self.plan.selections[s].capacity
        mine = m.count_reaching(floor, values)

        def reserve():
            upto = m.inclusive_scan(mine)
            total = m.shuffle("idx", upto, 31)
            start, *_ = m.choose(m.lane == 0, lambda: [m.atomic("add", "words", COUNT + s, total)], [m.i32(0)])
            start = m.shuffle("idx", start, 0)
            fits = start + total <= capacity
            with m.when(~fits & (m.lane == 0)):
                m.atomic("min", "words", FULL + s, start)
            with m.when(fits):
                m.store_reaching(f"list{s}", start + upto - mine, capacity, floor, values, positions)
            return [fits]

        fits, *_ = m.choose(m.ballot(mine > 0) != 0, reserve, [m.constant(True, "b")])
        return fits

    def take_over(self, s, floor):
        """Adds the other blocks' lists to list `s` of block `s`; every list is read by some of the warps."""
        m, plan = self.m, self.plan
        capacity = plan.selections[s].capacity
        others = plan.blocks - 1
        share = plan.warps // others  # warps of a list
        helper = m.divide(m.warp, others)
        rank = m.warp - helper * others
        rank = rank + m.to_int(rank >= s)
        listed = m.select(helper < share, m.load_of(rank, "words", LISTED + s), m.i32(0))
        unrolled = plan.vectors

        def group(j):
            values, positions = [], []
            for u in range(unrolled):
                i = ((j * share + helper) * unrolled + u) * 32 + m.lane
                bits, position = m.choose(
                    i < listed,
                    lambda i=i: [m.load_of(rank, f"list{s}", i), m.load_of(rank, f"list{s}", i + capacity)],
                    [m.i32(NONE), m.i32(NONE)],  # a NaN
                )
                values.append(m.float_of(bits))
                positions.append(position)
            lowest = functools.reduce(m.minimum, positions)  # lists are in any order
            used = [None] * len(plan.selections)
            used[s] = values, [(position, 0) for position in positions], lowest
            return used

        turns = m.divide(listed + (32 * unrolled * share - 1), 32 * unrolled * share)
        return self.fill({s: floor}, (turns, group))[s]

    # Selection.
    def key(self, x):
        """Unsigned integer that orders like `x`; -0 becomes +0."""
        bits = self.m.bits_of(x + 0.0)
        return bits ^ (self.m.arithmetic_shift(bits, 31) | 0x80000000)

    def score(self, key):
        m = self.m
        return m.float_of(m.select(key < 0, key ^ 0x80000000, ~key))

    def entry(self, s, i):
        """(key, position, bits of the score) of entry `i` of list `s`."""
        m = self.m
        bits = m.load(f"list{s}", i)
        return self.key(m.float_of(bits)), m.load(f"list{s}", i + self.plan.selections[s].capacity), bits

    def for_entries(self, s, count, body, state=()):
        """``state = body(inside, entry, *state)`` for this lane's entries of list `s`; `inside` is false beyond its
        end. Several at a time, so that their loads overlap."""
        m, plan = self.m, self.plan

        def turn(i, *state):
            places = [i + u * plan.threads for u in range(UNROLLED)]
            entries = [self.entry(s, m.minimum(place, count - 1)) for place in places]
            for place, entry in zip(places, entries):
                state = body(place < count, entry, *state) or ()
            return [i + UNROLLED * plan.threads, *state]

        _, *state = m.repeat(lambda i, *_: i < count, turn, [m.tid, *state])
        return state

    def taken(self, entry, threshold):
        """Whether the list's `entry` is chosen."""
        (key, position, _), (at, until) = entry, threshold
        return self.m.unsigned("gt", key, at) | ((key == at) & (position <= until))

    def shrink(self, s, floor):
        """Drops all of list `s` but its k best, and returns the floor that they set."""
        m, plan = self.m, self.plan
        count = m.load("words", FULL + s)  # what is beyond the first warp that did not fit was never written
        threshold = self.threshold(s, count, floor)
        with m.when(m.tid == 0):
            m.store("words", COUNT + s, 0)
            m.store("words", FULL + s, NONE)
        m.barrier()

        def turn(start):
            i = start + m.tid
            entry = self.entry(s, m.minimum(i, count - 1))
            chosen = self.taken(entry, threshold) & (i < count)
            m.barrier()  # writes go to entries that every lane has read
            votes = m.ballot(chosen)
            number = m.popcount(votes)
            slot, *_ = m.choose(m.lane == 0, lambda: [m.atomic("add", "words", COUNT + s, number)], [m.i32(0)])
            slot = m.shuffle("idx", slot, 0) + m.popcount(votes & ((m.i32(1) << m.lane) - 1))
            with m.when(chosen):
                m.store(f"list{s}", slot, entry[2])
                m.store(f"list{s}", slot + plan.selections[s].capacity, entry[1])

        m.each(0, count, plan.threads, turn)
        m.barrier()
        at, until = threshold
        return _Floor(self.score(at), self.score(at + 1), until, floor.high)

    def threshold(self, s, count, floor):
        """(key, position) such that exactly k entries of list `s` have a higher key, or that key and no higher
        position. The list must have more than k."""
        m, plan = self.m, self.plan
        zero = m.i32(0)

        def extremes():
            def one(_, entry, high, low):  # beyond the end comes the last entry, which changes nothing
                return [m.binary("umax", high, entry[0]), m.binary("umax", low, ~entry[0])]

            high, low = self.for_entries(s, count, one, [zero, zero])
            high, low = m.warp_reduce("umax", high), m.warp_reduce("umax", low)
            with m.when(m.lane == 0):
                m.atomic("max", "words", HIGH, high)
                m.atomic("max", "words", LOW, low)
            m.barrier()
            return [m.load("words", HIGH), ~m.load("words", LOW)]

        # A sample's highest score bounds most scores: those above it count as in the highest bin.
        sampled = floor.high != 0
        high, low = m.choose(~sampled, extremes, [floor.high, self.key(floor.at)])
        high = m.binary("umax", high, low)

        def turn(running, topless, by_position, low, high, need, at):
            width = high - low
            shift = m.maximum(m.i32(32 - _log2(plan.bins)) - m.leading_zeros(width), 0)

            def count_one(present, entry):
                key, position, _ = entry
                value = m.select(by_position, ~position, key) - low
                inside = m.unsigned("le", value, width)
                counted = (inside & (~by_position | (key == at))) | topless
                with m.when(counted & present):
                    m.atomic("add", "hist", m.select(inside, value >> shift, m.i32(plan.bins - 1)), 1)

            self.for_entries(s, count, count_one)
            m.barrier()
            (found, above, amount), *_ = self.find(need)
            need = need - above
            beyond = topless & (found == plan.bins - 1)
            start = low + (found << shift)
            # The last bin of a topless turn holds what its range ends with and all beyond.
            start = m.select(beyond & m.unsigned("gt", start - low, width), high + 1, start)
            size = m.binary("umin", high - start, (m.i32(1) << shift) - 1)
            low, high = start, m.select(beyond, m.i32(-1), start + size)
            exact = amount == need
            tied = ~exact & (low == high)  # entries of one key: the lowest positions win
            at = m.select(by_position, at, low)
            low = m.select(tied, m.i32(-plan.length), low)
            high = m.select(tied, m.i32(-1), high)
            return [~exact, m.constant(False, "b"), by_position | tied, low, high, need, at]

        no, yes = m.constant(False, "b"), m.constant(True, "b")
        start = [yes, sampled, no, low, high, m.i32(plan.selections[s].k), zero]
        _, _, by_position, low, _, _, at = m.repeat(lambda running, *_: running, turn, start)
        return at, m.select(by_position, ~low, m.i32(NONE))

    def find(self, *needs):
        """For every `need` (bin that holds the `need`-th entry counted from the highest bin down, entries above that
        bin, entries in it). The histogram and the extremes are 0 again afterwards."""
        m, plan = self.m, self.plan
        mine = (m.i32(plan.threads - 1) - m.tid) * 4
        amounts = m.load4("hist", mine)
        above, _ = self.before(_sum(amounts))
        for e in (3, 2, 1, 0):
            upto = above + amounts[e]
            for i, need in enumerate(needs):
                with m.when((above < need) & (upto >= need)):
                    m.store("words", BIN + i, mine + e)
                    m.store("words", ABOVE + i, above)
                    m.store("words", AMOUNT + i, amounts[e])
            above = upto
        m.store4("hist", mine, [0] * 4)
        with m.when(m.tid == 0):
            m.store("words", HIGH, 0)
            m.store("words", LOW, 0)
        m.barrier()
        return [tuple(m.load("words", word + i) for word in (BIN, ABOVE, AMOUNT)) for i in range(len(needs))]

    def before(self, value):
        """(sum of `value` over the lower lanes of the block, over all of them). Has one barrier."""
        m, plan = self.m, self.plan
        upto = m.inclusive_scan(value)
        with m.when(m.lane == 31):
            m.store("warps", m.warp, upto)
        m.barrier()
        warps = m.load("warps", m.minimum(m.lane, plan.warps - 1))
        warps = m.select(m.lane < plan.warps, warps, m.i32(0))
        sums = m.inclusive_scan(warps)
        earlier = m.shuffle("idx", sums - warps, m.warp)
        return earlier + upto - value, m.shuffle("idx", sums, 31)

    # Output.
    def finish(self, floors):
        """Chooses the k best of every list and writes them by ascending position, then -1, and their count."""
        m, plan = self.m, self.plan
        for s, floor in floors.items():
            selection = plan.selections[s]
            k = selection.k
            count = m.load("words", COUNT + s)
            threshold = m.choose(count > k, lambda: list(self.threshold(s, count, floor)), [m.i32(0), m.i32(NONE)])
            stop = (self.vectors + (selection.group - 1)) >> _log2(selection.group) if selection.group else self.n
            self.write(s, count, threshold, stop)
            total = m.minimum(count, k)
            m.each(m.tid, total, plan.threads, lambda i: m.store_global(f"out{s}", i, m.load("stage", i)))
            m.each(total + m.tid, m.i32(k), plan.threads, lambda i: m.store_global(f"out{s}", i, m.i32(-1)))
            with m.when(m.tid == 0):
                m.store_global(f"count{s}", 0, total)
            if s + 1 < len(floors):
                m.barrier()  # the stage is written again

    def write(self, s, count, threshold, stop):
        """Puts the chosen positions of list `s`, all below `stop`, into the stage in order.

        They are marked in a bitmap; the number of marks below a position is its place. Every lane counts the marks of
        `quads` consecutive 16-byte words, which lie permuted so that the lanes of a warp read from different banks.
        """
        m, plan = self.m, self.plan
        covered = 32 * plan.bins * plan.quads
        several = plan.length > covered

        def where(quad):
            return (quad ^ ((quad >> _log2(plan.quads)) & (plan.quads - 1))) * 4

        def chosen(start, present, entry):
            bit = entry[1] - start
            marked = present & self.taken(entry, threshold)
            marked = marked & m.unsigned("lt", bit, m.i32(covered)) if several else marked
            return marked, where(bit >> 7) + ((bit >> 5) & 3), bit

        def part(start, written):
            def mark(*entry):
                marked, word, bit = chosen(start, *entry)
                with m.when(marked):
                    m.atomic("or", "hist", word, m.i32(1) << (bit & 31))

            self.for_entries(s, count, mark)
            m.barrier()
            first = m.tid * plan.quads
            marks = [[m.popcount(word) for word in m.load4("hist", where(first + q))] for q in range(plan.quads)]
            lower, all_marks = self.before(_sum([number for quad in marks for number in quad]))
            lower = lower + written
            for q, numbers in enumerate(marks):
                sums = [lower]
                for number in numbers:
                    sums.append(sums[-1] + number)
                m.store4("lower", where(first + q), sums[:4])
                lower = sums[4]
            m.barrier()

            def put(*entry):
                marked, word, bit = chosen(start, *entry)
                with m.when(marked):
                    below = m.load("hist", word) & ((m.i32(1) << (bit & 31)) - 1)
                    m.store("stage", m.load("lower", word) + m.popcount(below), start + bit)

            self.for_entries(s, count, put)
            m.barrier()
            if several or s + 1 < len(plan.selections):
                for q in range(plan.quads):
                    m.store4("hist", m.tid * 4 + q * plan.bins, [0] * 4)
                m.barrier()
            return [start + covered, written + all_marks]

        m.repeat(lambda start, _: start < stop, part, [m.i32(0), m.i32(0)])


def _sum(values):
    return functools.reduce(lambda a, b: a + b, values)


def _log2(value):
    return value.bit_length() - 1


def _flat(floors):
    return [x for floor in floors.values() for x in floor.list()]


def _floors(names, state):
    return {name: _Floor(*state[4 * i : 4 * i + 4]) for i, name in enumerate(names)}
