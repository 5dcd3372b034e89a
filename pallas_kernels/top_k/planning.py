"""How a chip's tuned choices become a plan: the sizes of lists and samples that rows of some length need."""

import dataclasses
import math

from pallas_kernels.top_k.program import BEST_OF_BLOCK, MARGIN, Plan, Selection


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """`threads` a block, `blocks` a row, `vectors` of 16 bytes that a thread has in flight, `samples` vectors that a
    thread samples of a long row, `prefetch` vectors that the L2 cache fetches meanwhile."""

    threads: int
    blocks: int
    vectors: int
    samples: int
    prefetch: int = 0

    def __post_init__(self):
        if self.threads not in (128, 256, 512, 1024) or not 1 <= self.blocks <= 8:
            raise ValueError(f"{self}: threads must be 128, 256, 512 or 1024 and blocks 1 to 8.")
        if self.vectors < 1 or self.samples < 0:
            raise ValueError(f"{self}: vectors must be positive and samples not negative.")


def tuning(multiprocessors, rows, length, element_bytes, selections, has_lengths) -> TuningConfig:
    """What was measured best on an H200, as a rule for chips with any number of multiprocessors.

    Few rows: a cluster of blocks each, so that all multiprocessors read. Many: one small block a row, several of them
    on a multiprocessor, so that some read while others select.
    """
    joint, grouped = len(selections) > 1, any(selection.group for selection in selections)
    vectors = element_bytes  # 16 scores a thread in flight
    if rows > 2 * multiprocessors:
        if joint:
            return TuningConfig(256, 1, 2 * vectors, samples=2)
        if length <= 20480:
            return TuningConfig(128, 1, 2 * vectors if element_bytes == 4 else vectors, samples=2)
        if length <= 65536:
            return TuningConfig(256, 1, vectors, samples=2)
        # Two blocks at 64 registers: bounds leave room for fewer vectors.
        return TuningConfig(512, 1, vectors if grouped or not has_lengths else vectors // 2, samples=1)
    # Where the memory can send all that is read at once.
    prefetch = rows * length <= 2**18 and not grouped
    most = 3 * vectors // 4 if joint else vectors  # what 64 registers a thread hold
    if length <= 32768 or 2 * rows > multiprocessors:
        if length > 16384 and rows <= multiprocessors:
            return TuningConfig(1024, 1, vectors // 2 if joint else vectors, samples=1)
        return TuningConfig(512, 1, vectors, samples=1, prefetch=length // 4 if prefetch else 0)
    samples = max(length // 524288, 1)
    if 8 * rows <= 64 and length >= 65536:
        if length > 524288:
            return TuningConfig(1024, 8, most, samples)
        vectors = 2 * vectors if length >= 131072 else vectors
        return TuningConfig(512, 8, vectors, samples, prefetch=length // 32 if prefetch else 0)
    if 4 * rows <= 64:
        return TuningConfig(512, 4, vectors, samples)
    # The multiprocessors of a cluster are neighbours, and the groups of neighbours are of different sizes: of 132, 39
    # clusters of 3 run at a time, and only 30 of 4.
    blocks = 3 if 3 * rows <= 0.85 * multiprocessors else 2
    vectors = 2 * vectors if length > 262144 and not has_lengths else most
    return TuningConfig(1024, blocks, vectors, samples, prefetch=8192 if joint else 0)


def plan(multiprocessors, rows, length, element_bytes, selections, has_lengths, has_starts=False) -> Plan:
    """The kernel's shape for `rows` rows of `length` scores; the selections' capacities are set here."""
    tuned = tuning(multiprocessors, rows, length, element_bytes, selections, has_lengths)
    return tuned_plan(tuned, length, element_bytes, selections, has_lengths, has_starts)


def tuned_plan(tuning: TuningConfig, length, element_bytes, selections, has_lengths, has_starts=False) -> Plan:
    """The plan of `tuning`; the selections' capacities are set here."""
    vector = 16 // element_bytes
    filled, samples = [], tuning.samples
    for selection in selections:
        elements = -(-length // (vector * selection.group)) if selection.group else length
        warp = 32 * tuning.vectors * (1 if selection.group else vector)
        share = -(-elements // tuning.blocks)
        if selection.group:
            # A short row's blocks have no guess and may fill the list several times.
            guessed = _guessed(BEST_OF_BLOCK * selection.k, length, tuning.threads * max(samples, 1) * vector)
            capacity = min(elements, guessed, 5 * selection.k // 2)
        elif elements <= 2 * selection.k or not samples:
            capacity, samples = share, 0  # nearly all is chosen: keep everything
        else:
            capacity = _guessed(selection.k, elements, tuning.threads * samples * vector)
        capacity = max(capacity, selection.k + warp)
        filled.append(Selection(selection.k, -(-capacity // 4) * 4, selection.group))
    return Plan(
        length, element_bytes, tuning.threads, tuning.blocks, tuning.vectors, samples, tuple(filled), has_lengths,
        has_starts, tuning.prefetch if samples else 0,
    )  # fmt: skip


def _guessed(k, elements, sampled):
    """Scores that may reach the guess of `sampled` scores out of `elements`: those that it means to keep, 3 standard
    deviations of how well the sample places it, and 5 % for the width of its bins."""
    expected = k * sampled / elements
    rank = expected + MARGIN * math.sqrt(expected) + MARGIN
    return math.ceil((1.05 + 3 / math.sqrt(rank)) * rank * elements / sampled)
