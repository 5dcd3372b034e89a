"""How a chip's tuned choices become a plan: the sizes of lists and samples that rows of some length need."""

import dataclasses
import math

from pallas_kernels.top_k.program import BEST_OF_BLOCK, MARGIN, Plan, Selection


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """`threads` a block, `blocks` a row, `vectors` of 16 bytes that a thread has in flight, `samples` vectors that a
    thread samples of a long row."""

    threads: int
    blocks: int
    vectors: int
    samples: int

    def __post_init__(self):
        if self.threads not in (128, 256, 512, 1024) or self.blocks not in (1, 2, 4, 8):
            raise ValueError(f"{self}: threads must be 128, 256, 512 or 1024 and blocks 1, 2, 4 or 8.")
        if self.vectors < 1 or self.samples < 0:
            raise ValueError(f"{self}: vectors must be positive and samples not negative.")


def plan(tuning: TuningConfig, length, element_bytes, selections, has_lengths) -> Plan:
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
        length, element_bytes, tuning.threads, tuning.blocks, tuning.vectors, samples, tuple(filled), has_lengths
    )  # fmt: skip


def _guessed(k, elements, sampled):
    """Scores that may reach the guess of `sampled` scores out of `elements`: those that it means to keep, 3 standard
    deviations of how well the sample places it, and 5 % for the width of its bins."""
    expected = k * sampled / elements
    rank = expected + MARGIN * math.sqrt(expected) + MARGIN
    return math.ceil((1.05 + 3 / math.sqrt(rank)) * rank * elements / sampled)
