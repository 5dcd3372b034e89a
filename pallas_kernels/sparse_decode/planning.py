"""Who attends to which part of which list: the schedule of a decode step, made once and shared by its layers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import platform

BLOCK = 64  # slots that are attended to at once
UNIT = 128  # slots of a unit of the schedule: two blocks
HEADS = 64  # heads of a thread block at most
_SPLIT_COST = 2  # units that writing, reading and combining the parts of a row costs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeSchedule:
    """Parts of the rows' lists, dealt out to thread blocks. Rows are the B * N query rows.

    A row's lists one behind the other, each from a block of 64 slots on, are its blocks, and two blocks a unit.
    segments: int32 [G, 4], row (the number of rows where there is no segment), first unit, end, and the number of the
    part, or -1 for a row that is whole. first: int32 [threads + 1], the first segment of every thread block. merged:
    int32 [M, 3], row, first part and number of parts of every row in parts; merged_count: how many there are.
    parts: the most parts that there can be.
    """

    segments: Any
    first: Any
    merged: Any
    merged_count: Any
    parts: int = dataclasses.field(metadata={"static": True})


def head_groups(heads: int) -> int:
    """Thread blocks among which the heads of a row are divided: as few as give each as many, a multiple of 8."""
    groups = -(-heads // HEADS)
    while heads % 8 == 0 and heads // 8 % groups:
        groups += 1
    return groups


def list_blocks(widths: tuple[int, ...], lengths) -> list:
    """Blocks of every list: of each row where it has lengths, else a number."""
    blocks = []
    for width, length in zip(widths, lengths):
        if length is None:
            blocks.append(-(-width // BLOCK))
        else:
            blocks.append((jnp.clip(length, 0, width) + BLOCK - 1) // BLOCK)
    return blocks


def make_schedule(widths, lengths, rows: int, heads: int, split_size=None, num_splits=None) -> DecodeSchedule:
    """Cuts the lists of `rows` query rows for the multiprocessors of the GPU.

    widths: width of every list. lengths: how many entries of it count, int32 [rows], or None for all; a schedule
    without any lengths is made while tracing. split_size: parts of so many slots (a multiple of 128), so that a row's
    result does not depend on the others. num_splits: so many parts of every row, some of them empty perhaps. Neither:
    equal shares, or whole rows where those take no longer.
    """
    cores = 2 if platform.is_interpreted() else platform.CORES  # the interpreter runs one thread block after the other
    threads = max(1, cores // head_groups(heads))
    if all(length is None for length in lengths):
        return _made_while_tracing(tuple(widths), tuple(lengths), rows, threads, split_size, num_splits)
    return _made(jnp, widths, lengths, rows, threads, split_size, num_splits)


@functools.lru_cache(maxsize=64)
def _made_while_tracing(*arguments):
    """The schedule of NumPy arrays for given shapes: the same one for every layer that is traced."""
    return _made(np, *arguments)


def _made(xp, widths, lengths, rows, threads, split_size, num_splits):
    blocks = xp.zeros(rows, xp.int32) + sum(list_blocks(widths, lengths))
    units = xp.maximum((blocks + 1) // 2, 1).astype(xp.int32)
    most = max(1, -(-sum(-(-width // BLOCK) for width in widths) // 2))
    if split_size is not None:
        return _fixed(xp, units, -(-most * UNIT // split_size), threads, size=split_size // UNIT)
    if num_splits is not None:
        return _fixed(xp, units, num_splits, threads)
    return _shared(xp, units, most, threads)


def _fixed(xp, units, splits, threads, size=None):
    """Every row in `splits` parts: of `size` units, the last ones perhaps missing, or as equal as can be."""
    rows = units.shape[0]
    row = np.repeat(np.arange(rows, dtype=np.int32), splits)
    number = np.tile(np.arange(splits, dtype=np.int32), rows)
    of_row = units[row]
    if size is None:
        begin, end = number * of_row // splits, (number + 1) * of_row // splits
        there = xp.ones(row.shape, bool)
    else:
        begin, end = xp.minimum(number * size, of_row), xp.minimum((number + 1) * size, of_row)
        there = begin < end
    total = xp.sum(there, dtype=xp.int32)
    share = np.arange(threads + 1, dtype=np.int32)
    return _finish(xp, rows, row, begin, end, there, share * total // threads, rows * splits if splits > 1 else 0)


def _shared(xp, units, most, threads):
    """Equal shares of all units laid end to end; whole rows dealt out in turn where no thread block has more to do."""
    rows = units.shape[0]
    ends = xp.cumsum(units)
    total, starts = ends[-1], ends - units
    share = np.arange(threads + 1, dtype=np.int32)
    cuts = xp.minimum(share * -(-total // threads), total)
    borders = xp.sort(xp.concatenate([cuts[:-1], starts]))
    following = xp.concatenate([borders[1:], total[None]])
    row = xp.sum(ends[None] <= borders[:, None], axis=1)
    base = starts[xp.minimum(row, rows - 1)]
    there = following > borders
    cut = _finish(
        xp, rows, row, borders - base, following - base, there,
        xp.sum(there & (borders < cuts[:, None]), axis=1), min(2 * (threads - 1), rows * most) if threads > 1 else 0,
    )  # fmt: skip

    deal = np.argsort(np.arange(rows) % threads, kind="stable").astype(np.int32)
    dealt = np.pad(deal, (0, -rows % threads), constant_values=rows)
    counts = np.bincount(np.arange(rows) % threads, minlength=threads)
    work = xp.concatenate([units, xp.zeros(threads, units.dtype)])
    padded = np.pad(np.arange(rows), (0, -rows % threads), constant_values=rows).reshape(-1, threads)
    longest = xp.max(xp.sum(work[padded], axis=0))
    no_split = longest <= -(-total // threads) + _SPLIT_COST
    if xp is np and no_split:
        there = np.ones(rows, bool)
        return _finish(np, rows, deal, 0 * deal, units[deal], there, np.append(0, np.cumsum(counts)), 0)
    if xp is np:
        return cut
    missing = cut.segments.shape[0] - rows
    row = np.pad(dealt[:rows], (0, missing), constant_values=rows)
    end = jnp.concatenate([units[deal], jnp.zeros(missing, units.dtype)])
    whole = _finish(jnp, rows, row, 0 * row, end, row < rows, np.append(0, np.cumsum(counts)), cut.parts)
    return jax.tree.map(lambda a, b: jnp.where(no_split, a, b), whole, cut)


def _finish(xp, rows, row, begin, end, there, first, parts):
    """The schedule of segments of which those of a row follow one another; segments that are not there go last."""
    order = xp.argsort(~there, kind="stable") if xp is np else jnp.argsort(~there, stable=True)
    row, begin, end, there = (xp.asarray(a)[order] for a in (row, begin, end, there))
    row = xp.where(there, row, rows)
    count = xp.sum(row[None] == np.arange(rows)[:, None], axis=1)
    in_parts = there & (xp.concatenate([count, xp.zeros(1, count.dtype)])[row] > 1)
    part = xp.where(in_parts, xp.cumsum(in_parts) - 1, -1)
    several = count > 1
    first_part = xp.cumsum(xp.where(several, count, 0)) - count
    merged = xp.stack([xp.arange(rows), first_part, count], axis=1)
    rank = xp.argsort(~several, kind="stable") if xp is np else jnp.argsort(~several, stable=True)
    return DecodeSchedule(
        xp.stack([row, begin, end, part], axis=1).astype(xp.int32),
        xp.asarray(first).astype(xp.int32),
        merged[rank].astype(xp.int32),
        xp.sum(several).astype(xp.int32),
        int(in_parts.sum()) if xp is np else parts,
    )
