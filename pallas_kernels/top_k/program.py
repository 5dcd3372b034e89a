"""The lane program of exact top-k: what every lane of the block (or of the cluster of blocks) that owns a row does.

The row streams through registers once. Scores that reach a floor are kept, key and position, in a shared-memory list.
The floor starts as a guess from a sample of the row. When the list overflows, all but its exact best k are dropped and
the k-th best becomes the floor, so any distribution is handled in one read; only a guess that proves too high (fewer
than k kept at the end) costs a second one. At the end a radix selection over the list finds the k-th best of the row,
and a bitmap of the chosen positions, read off in order, gives the output.

With several blocks per row each block streams a slice and keeps that slice's best; the last selection runs over all
lists together, by histograms that the blocks read from each other's shared memory.

Ties: the list may hold equal scores in any order; positions decide exactly in the selections. Cost: 4 barriers and
about three loops over the list per selection, and one read of the row.
"""

import dataclasses
import math

from pallas_kernels.top_k.lanes import ALL_LANES, Machine, Value

NONE = 0x7FFFFFFF
FLOAT32_MAX = 3.4028234663852886e38
LOWEST_KEY = 0x00800000  # of the lowest finite float32; NaN and -inf have none
SAMPLED_BITS = 27  # the sample's histogram spans this many bits of the key below its maximum: 16 powers of 2

# Words of shared memory that the block agrees through. The first two exist once per selection.
COUNT, FULL, BIN, ABOVE, AMOUNT, HIGH, LOW, TAKEN = 0, 2, 4, 5, 6, 7, 8, 9
WORDS = 12


@dataclasses.dataclass(frozen=True)
class Selection:
    """One list and what is to be chosen from it: the scores' own top-k (group 0) or blocks of `group` vectors."""

    k: int
    capacity: int  # entries of the list
    group: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel's static shape: rows of `length` elements, `threads` a block, `blocks` a row, `vectors` of 16 bytes that
    a thread has in flight; `samples` vectors that a thread samples (0: no guess)."""

    length: int
    element_bytes: int
    threads: int
    blocks: int
    vectors: int
    samples: int
    selections: tuple[Selection, ...]
    has_lengths: bool

    def __post_init__(self):
        for selection in self.selections:
            appended = 32 * self.vectors * (self.vector if not selection.group else 1)
            if selection.capacity < selection.k + appended:
                raise ValueError(f"{selection} cannot hold {appended} entries of a warp beyond its k best.")
            if selection.group and (self.length % self.vector or selection.group & (selection.group - 1)):
                raise ValueError(f"{selection} needs rows of whole vectors and a power of 2 as its group.")

    @property
    def vector(self) -> int:
        return 16 // self.element_bytes

    @property
    def bins(self) -> int:
        return 4 * self.threads

    @property
    def warps(self) -> int:
        return self.threads // 32

    def shared(self) -> dict[str, int]:
        """Words of shared memory by name."""
        words = {"hist": self.bins * (2 if self.blocks > 1 else 1), "warps": self.warps, "words": WORDS}
        words["stage"] = max(selection.k for selection in self.selections)
        for s, selection in enumerate(self.selections):
            words[f"keys{s}"] = words[f"positions{s}"] = selection.capacity
        return words

    def outputs(self) -> list[tuple[str, int]]:
        """(name, width) of the int32 output rows, in order."""
        found = []
        for s, selection in enumerate(self.selections):
            found += [(f"out{s}", selection.k), (f"count{s}", 1)]
        return found


@dataclasses.dataclass(frozen=True)
class _Floor:
    """Which scores join the list: at least `at` up to position `until`, at least `beyond` after it."""

    at: Value
    beyond: Value
    until: Value

    def list(self):
        return [self.at, self.beyond, self.until]


def run(m: Machine, plan: Plan) -> None:
    """Emits (or simulates) the whole kernel for one row."""
    _Row(m, plan).run()


class _Row:
    def __init__(self, m: Machine, plan: Plan):
        self.m, self.plan = m, plan
        n = m.i32(plan.length)
        if plan.has_lengths:
            n = m.maximum(m.minimum(m.load_global("lengths", 0), plan.length), 0)
        self.n = n
        log = int(math.log2(plan.vector))
        vectors = m.select(n > 0, (n + m.head + (plan.vector - 1)) >> log, m.i32(0))
        self.begin, self.end = m.i32(0), vectors
        if plan.blocks > 1:
            # Slices start on whole 128-byte lines and on whole groups.
            whole = max([8] + [selection.group for selection in plan.selections])
            share = m.divide(vectors + (plan.blocks * whole - 1), plan.blocks * whole) * whole
            self.begin = m.minimum(m.rank * share, vectors)
            self.end = m.minimum(self.begin + share, vectors)
        self.lower_lanes = (m.i32(1) << m.lane) - 1

    def run(self):
        m, plan = self.m, self.plan
        with m.when(m.tid < WORDS):
            m.store("words", m.tid, m.select((m.tid == FULL) | (m.tid == FULL + 1), m.i32(NONE), m.i32(0)))
        for half in range(plan.shared()["hist"] // plan.bins):
            m.store4("hist", m.tid * 4 + half * plan.bins, [0] * 4)
        m.barrier()
        self.fill_lists()
        for s in range(len(plan.selections)):
            self.finish(s)
        if plan.blocks > 1:
            m.cluster_barrier()  # nobody's shared memory goes away while another block reads it

    # Streaming.
    def open_floor(self):
        m = self.m
        lowest = m.constant(-FLOAT32_MAX, "f")
        return _Floor(lowest, lowest, m.i32(NONE))

    def fill_lists(self):
        """Streams the block's slice until every list holds all that can belong to its k best."""
        m, plan = self.m, self.plan
        floors = [self.open_floor() for _ in plan.selections]
        guessed = m.constant(False, "b")
        if plan.samples:
            large = (self.end - self.begin) * plan.vector > plan.selections[0].capacity
            at, *_ = m.choose(large, lambda: [self.guess()], [floors[0].at])
            floors[0] = _Floor(at, at, m.i32(NONE))
            guessed = large
        several = len(plan.selections)

        def turn(running, guessed, j, *state):
            done = list(state[:several])
            floors = [_Floor(*state[i : i + 3]) for i in range(several, len(state), 3)]
            j, done = self.stream(j, done, floors)
            m.barrier()
            again = m.constant(False, "b")
            counts = [m.load("words", COUNT + s) for s in range(len(floors))]
            overflowed = [m.load("words", FULL + s) != NONE for s in range(len(floors))]
            m.barrier()  # every lane has read the words before one changes them
            for s, floor in enumerate(floors):
                raised = m.choose(overflowed[s], lambda s=s: self.shrink(s).list(), floor.list())
                floors[s] = _Floor(*raised)
                again = again | overflowed[s]
            guessed = guessed & ~overflowed[0]
            if plan.samples:
                # The guess was too high: fewer than k reached it. Read again without one.
                retry = guessed & ~again & (counts[0] < plan.selections[0].k)

                def restart():
                    with m.when(m.tid == 0):
                        m.store("words", COUNT, 0)
                    m.barrier()
                    return self.open_floor().list() + [m.i32(0)]

                *reopened, j = m.choose(retry, restart, floors[0].list() + [j])
                floors[0] = _Floor(*reopened)
                for s in range(1, len(floors)):  # the other lists are complete: nothing reaches NaN
                    nothing = m.float_of(m.i32(NONE))
                    at, beyond = (m.select(retry, nothing, x) for x in (floors[s].at, floors[s].beyond))
                    floors[s] = _Floor(at, beyond, floors[s].until)
                guessed, again = guessed & ~retry, again | retry
            return [again, guessed, j, *done, *(x for floor in floors for x in floor.list())]

        start = [m.constant(True, "b"), guessed, m.i32(0), *(m.constant(False, "b") for _ in floors)]
        m.repeat(lambda running, *_: running, turn, start + [x for floor in floors for x in floor.list()])
        del several

    def guess(self):
        """A floor that somewhat more than k scores of the slice should reach, from evenly spread vectors of it."""
        m, plan = self.m, self.plan
        sampled = plan.threads * plan.samples
        vectors = self.end - self.begin
        spread = m.as_float(vectors) * (1.0 / sampled)
        keys = []
        for u in range(plan.samples):
            place = m.as_int(m.as_float(m.tid + u * plan.threads) * spread)
            index = self.begin + m.minimum(place, vectors - 1)
            position = index * plan.vector - m.head
            for e, x in enumerate(m.load_vector(index)):
                inside = (position + e >= 0) & (position + e < self.n) & (x >= -FLOAT32_MAX)
                keys.append(m.select(inside, self.key(x), m.i32(0)))
        high = keys[0]
        for key in keys[1:]:
            high = m.binary("umax", high, key)
        high = m.warp_reduce("umax", high)
        with m.when(m.lane == 0):
            m.atomic("max", "words", HIGH, high)
        m.barrier()
        low = m.binary("umax", m.load("words", HIGH), m.i32(2**SAMPLED_BITS)) - (2**SAMPLED_BITS - 1)
        shift = SAMPLED_BITS - int(math.log2(plan.bins))
        for key in keys:
            with m.when(m.unsigned("ge", key, low)):
                m.atomic("add", "hist", (key - low) >> shift, 1)
        with m.when(m.tid == 0):
            m.store("words", BIN, NONE)
        m.barrier()
        # The k best of the slice should lie among the `expected` best of the sample; 4 to 5 standard deviations more.
        expected = m.constant(float(plan.selections[0].k * sampled), "f")
        expected = m.as_int(m.binary("div", expected, m.as_float(vectors)))
        found, *_ = self.find(expected + (expected >> 2) + 16, m.i32(0), False)
        key = m.binary("umax", low + (found << shift), m.i32(LOWEST_KEY))
        return m.select(found == NONE, m.constant(-FLOAT32_MAX, "f"), self.score(key))

    def stream(self, j, done, floors):
        """Appends what reaches the floors, from vector group `j` of this warp on, until the slice ends or a list is
        full. `done` marks the selections that have had their share of group `j`."""
        m, plan = self.m, self.plan
        stride = plan.threads * plan.vectors
        turns = m.divide(self.end - self.begin + (stride - 1), stride)
        last = self.end - 1
        log = int(math.log2(plan.vector))

        def turn(j, stopped, *done):
            first = self.begin + j * stride + m.tid
            indices = [first + u * plan.threads for u in range(plan.vectors)]
            loaded = [x for index in indices for x in m.load_vector(m.minimum(index, last))]
            starts = [(index << log) - m.head for index in indices]

            def masked():
                nothing = m.constant(-math.inf, "f")
                kept = []
                for i, x in enumerate(loaded):
                    index, position = indices[i >> log], starts[i >> log] + i % plan.vector
                    inside = (index <= last) & (position >= 0) & (position < self.n)
                    kept.append(m.select(inside, x, nothing))
                return kept

            ragged = indices[-1] >= last
            if plan.length % plan.vector:
                ragged = ragged | (first == 0)
            xs = m.choose(ragged, masked, loaded)
            done = list(done)
            for s, selection in enumerate(plan.selections):
                if selection.group:
                    values, positions, owned = self.block_maxima(xs, indices, selection.group)
                else:
                    values, owned = xs, None
                    positions = [starts[i >> log] + i % plan.vector for i in range(len(xs))]
                floor = m.select(positions[0] > floors[s].until, floors[s].beyond, floors[s].at)
                hits = [x >= floor for x in values]
                if owned is not None:
                    hits = [hit & owned for hit in hits]
                if len(done) > 1:
                    hits = [hit & ~done[s] for hit in hits]
                done[s] = done[s] | self.append(s, hits, values, positions)
            complete = done[0]
            for flag in done[1:]:
                complete = complete & flag
            return [j + m.to_int(complete), ~complete, *(flag & ~complete for flag in done)]

        j, _, *done = m.repeat(
            lambda j, stopped, *_: (j < turns) & ~stopped, turn, [j, m.constant(False, "b"), *done]
        )
        return j, done

    def block_maxima(self, xs, indices, group):
        """Maxima of blocks of `group` vectors, their ids, and whether this lane is the one that has them."""
        m, plan = self.m, self.plan
        size = group * plan.vector
        newest = m.arithmetic_shift(self.n - 1, int(math.log2(size)))
        maxima, ids = [], []
        for u, index in enumerate(indices):
            parts = xs[u * plan.vector : (u + 1) * plan.vector]
            best = parts[0]
            for x in parts[1:]:
                best = m.binary("max", best, x)
            distance = 1
            while distance < group:
                best = m.binary("max", best, m.shuffle("bfly", best, distance))
                distance *= 2
            # NaN blocks come first but for the newest, whose +inf is its own.
            largest = m.constant(FLOAT32_MAX, "f")
            best = m.select(best <= largest, best, largest)
            block = index >> int(math.log2(group))
            maxima.append(m.select(block == newest, m.constant(math.inf, "f"), best))
            ids.append(block)
        return maxima, ids, (m.lane & (group - 1)) == 0

    def append(self, s, hits, values, positions):
        """Adds this warp's hits to list `s`. False for the whole warp, and nothing added, if they do not fit."""
        m = self.m
        capacity = self.plan.selections[s].capacity
        mine = m.to_int(hits[0])
        for hit in hits[1:]:
            mine = mine + m.to_int(hit)

        def reserve():
            upto = m.inclusive_scan(mine)
            total = m.shuffle("idx", upto, 31)
            start, *_ = m.choose(
                m.lane == 0, lambda: [m.atomic("add", "words", COUNT + s, total)], [m.i32(0)]
            )
            start = m.shuffle("idx", start, 0)
            fits = start + total <= capacity
            with m.when(~fits & (m.lane == 0)):
                m.atomic("min", "words", FULL + s, start)
            with m.when(fits):
                slot = start + upto - mine
                for hit, value, position in zip(hits, values, positions):
                    with m.when(hit):
                        m.store(f"keys{s}", slot, self.key(value))
                        m.store(f"positions{s}", slot, position)
                    slot = slot + m.to_int(hit)
            return [fits]

        fits, *_ = m.choose(m.ballot(mine > 0) != 0, reserve, [m.constant(True, "b")])
        return fits

    # Selection.
    def key(self, x):
        """Unsigned integer that orders like `x`; -0 becomes +0."""
        bits = self.m.bits_of(x + 0.0)
        return bits ^ (self.m.arithmetic_shift(bits, 31) | 0x80000000)

    def score(self, key):
        m = self.m
        return m.float_of(m.select(key < 0, key ^ 0x80000000, ~key))

    def taken(self, s, i, threshold):
        """(whether entry `i` of list `s` is chosen, its key, its position)."""
        m = self.m
        at, until = threshold
        key, position = m.load(f"keys{s}", i), m.load(f"positions{s}", i)
        return m.unsigned("gt", key, at) | ((key == at) & (position <= until)), key, position

    def shrink(self, s):
        """Drops all of list `s` but its k best, and returns the floor that they set."""
        m, plan = self.m, self.plan
        count = m.load("words", FULL + s)  # what is beyond the first warp that did not fit was never written
        *threshold, _ = self.threshold(s, count, m.i32(plan.selections[s].k), False)
        with m.when(m.tid == 0):
            m.store("words", COUNT + s, 0)
            m.store("words", FULL + s, NONE)
        m.barrier()

        def turn(start):
            i = start + m.tid
            chosen, key, position = self.taken(s, m.minimum(i, count - 1), threshold)
            chosen = chosen & (i < count)
            m.barrier()  # writes go to entries that every lane has read
            votes = m.ballot(chosen)
            slot, *_ = m.choose(
                m.lane == 0,
                lambda: [m.atomic("add", "words", COUNT + s, m.popcount(votes))],
                [m.i32(0)],
            )
            slot = m.shuffle("idx", slot, 0) + m.popcount(votes & self.lower_lanes)
            with m.when(chosen):
                m.store(f"keys{s}", slot, key)
                m.store(f"positions{s}", slot, position)

        m.each(0, count, plan.threads, turn)
        m.barrier()
        at, until = threshold
        return _Floor(self.score(at), self.score(at + 1), until)

    def threshold(self, s, count, need, together):
        """(key, position, half of the histogram that is 0) such that exactly `need` entries of list `s` (of all blocks'
        lists, if `together`) have a higher key, or that key and no higher position. There must be more than `need`."""
        m, plan = self.m, self.plan
        zero = m.i32(0)

        def extremes(i, high, low):
            key = m.load(f"keys{s}", i)
            return [i + plan.threads, m.binary("umax", high, key), m.binary("umax", low, ~key)]

        _, high, low = m.repeat(lambda i, *_: i < count, extremes, [m.tid, zero, zero])
        high, low = m.warp_reduce("umax", high), m.warp_reduce("umax", low)
        with m.when(m.lane == 0):
            m.atomic("max", "words", HIGH, high)
            m.atomic("max", "words", LOW, low)
        self.meet(together)
        high, low = m.load("words", HIGH), m.load("words", LOW)
        if together:
            for r in range(plan.blocks):
                high = m.binary("umax", high, m.load_of(r, "words", HIGH))
                low = m.binary("umax", low, m.load_of(r, "words", LOW))
        low = ~low  # the highest complement is the complement of the lowest

        def turn(running, half, by_position, low, high, need, at):
            width = high - low
            shift = m.maximum(m.i32(32 - int(math.log2(plan.bins))) - m.leading_zeros(width), 0)
            base = half * plan.bins

            def count_one(i):
                key, position = m.load(f"keys{s}", i), m.load(f"positions{s}", i)
                value = m.select(by_position, ~position, key) - low
                with m.when(m.unsigned("le", value, width) & (~by_position | (key == at))):
                    m.atomic("add", "hist", base + (value >> shift), 1)

            m.each(m.tid, count, plan.threads, count_one)
            self.meet(together)
            found, above, amount = self.find(need, half, together)
            need = need - above
            low = low + (found << shift)
            high = low + m.binary("umin", high - low, (m.i32(1) << shift) - 1)
            exact = amount == need
            tied = ~exact & (low == high)  # entries of one key: the lowest positions win
            at = m.select(by_position, at, low)
            low = m.select(tied, m.i32(-plan.length), low)
            high = m.select(tied, m.i32(-1), high)
            return [~exact, half ^ 1 if together else half, by_position | tied, low, high, need, at]

        no = m.constant(False, "b")
        state = m.repeat(
            lambda running, *_: running, turn, [m.constant(True, "b"), zero, no, low, high, need, zero]
        )
        _, half, by_position, low, _, _, at = state
        return at, m.select(by_position, ~low, m.i32(NONE)), half

    def meet(self, together):
        if together:
            self.m.cluster_barrier()
        else:
            self.m.barrier()

    def find(self, need, half, together):
        """(bin that holds the `need`-th entry counted from the highest bin down, entries above that bin, entries in
        it). The histogram is 0 again afterwards; together, the one of the turn before is."""
        m, plan = self.m, self.plan
        mine = (m.i32(plan.threads - 1) - m.tid) * 4
        base = half * plan.bins
        if together:
            amounts = [m.i32(0)] * 4
            for r in range(plan.blocks):
                amounts = [a + b for a, b in zip(amounts, m.load4_of(r, "hist", base + mine))]
        else:
            amounts = m.load4("hist", base + mine)
        above, _ = self.before(amounts[0] + amounts[1] + amounts[2] + amounts[3])
        for e in (3, 2, 1, 0):
            upto = above + amounts[e]
            with m.when((above < need) & (upto >= need)):
                m.store("words", BIN, mine + e)
                m.store("words", ABOVE, above)
                m.store("words", AMOUNT, amounts[e])
            above = upto
        m.store4("hist", mine + ((half ^ 1) * plan.bins if together else base), [0] * 4)
        with m.when(m.tid == 0):
            m.store("words", HIGH, 0)
            m.store("words", LOW, 0)
        m.barrier()
        return m.load("words", BIN), m.load("words", ABOVE), m.load("words", AMOUNT)

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
    def finish(self, s):
        """Chooses the k best of list `s` and writes them by ascending position, then -1, and their count."""
        m, plan = self.m, self.plan
        k = plan.selections[s].k
        group = plan.selections[s].group
        together = plan.blocks > 1
        count = total = m.load("words", COUNT + s)
        if together:
            m.cluster_barrier()
            total = m.i32(0)
            for r in range(plan.blocks):
                total = total + m.load_of(r, "words", COUNT + s)

        def select():
            return list(self.threshold(s, count, m.i32(k), together))

        *threshold, half = m.choose(total > k, select, [m.i32(0), m.i32(NONE), m.i32(0)])
        total = m.minimum(total, k)
        earlier = m.i32(0)
        if together:
            def taken(i, number):
                return [i + plan.threads, number + m.to_int(self.taken(s, i, threshold)[0])]

            _, number = m.repeat(lambda i, _: i < count, taken, [m.tid, m.i32(0)])
            number = m.warp_reduce("add", number)
            with m.when(m.lane == 0):
                m.atomic("add", "words", TAKEN + s, number)
            m.cluster_barrier()
            m.store4("hist", (half ^ 1) * plan.bins + m.tid * 4, [0] * 4)  # read by all blocks before that barrier
            for r in range(plan.blocks):
                earlier = earlier + m.select(m.rank > r, m.load_of(r, "words", TAKEN + s), m.i32(0))
        # A bitmap of the chosen positions, in the half of the histogram that is 0.
        base = half * plan.bins
        log = int(math.log2(group if group else plan.vector))
        first = self.begin >> log if group else (self.begin << log) - m.head
        stop = (self.end + (group - 1)) >> log if group else self.n
        if together and not group:
            stop = m.minimum(stop, (self.end << log) - m.head)
        covered = 32 * plan.bins

        def segment(start, written):
            def mark(i):
                chosen, _, position = self.taken(s, i, threshold)
                bit = position - start
                with m.when(chosen & m.unsigned("lt", bit, m.i32(covered))):
                    m.atomic("or", "hist", base + (bit >> 5), m.i32(1) << (bit & 31))

            m.each(m.tid, count, plan.threads, mark)
            m.barrier()
            words = m.load4("hist", base + m.tid * 4)
            ones = [m.popcount(word) for word in words]
            place, marked = self.before(ones[0] + ones[1] + ones[2] + ones[3])
            place = written + place
            for e, word in enumerate(words):
                offset = start + (m.tid * 4 + e) * 32

                def write(word, place, offset=offset):
                    m.store("stage", place, offset + m.trailing_zeros(word))
                    return [word & (word - 1), place + 1]

                _, place = m.repeat(lambda word, _: word != 0, write, [word, place])
            m.store4("hist", base + m.tid * 4, [0] * 4)
            m.barrier()
            return [start + covered, written + marked]

        _, written = m.repeat(lambda start, _: start < stop, segment, [first, m.i32(0)])
        m.each(m.tid, written, plan.threads, lambda i: m.store_global(f"out{s}", earlier + i, m.load("stage", i)))
        padding = total + m.rank * plan.threads + m.tid
        m.each(padding, m.i32(k), plan.threads * plan.blocks, lambda i: m.store_global(f"out{s}", i, m.i32(-1)))
        with m.when((m.tid == 0) & (m.rank == 0)):
            m.store_global(f"count{s}", 0, total)
