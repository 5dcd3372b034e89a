"""Who attends to which part of which list: the schedule of a decode step, made once and shared by its layers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import platform

BLOCK = 64  # slots that are attended to at once
UNIT = 128  # slots of a unit of parts of a fixed size: two blocks
HEADS = 64  # heads of a thread block at most
# In blocks: what parts of rows cost that are written, read and combined, and what a thread block's next segment costs.
_SPLIT_COST, _SEGMENT_COST = 2, 1


@dataclasses.dataclass(frozen=True)
class Even:
    """Rows of the same number of blocks, each in the same parts: of `size` blocks, or (None) as equal as can be."""

    rows: int
    blocks: int
    parts: int
    size: int | None = None

    def share(self, thread, threads: int):
        """The first segment of a thread block, of so many; that of the next one is where its own end."""
        return thread * (self.rows * self.parts) // threads

    def segment(self, i):
        """Row, first block and end, perhaps beyond the last block, of segment i, a number or an array of them."""
        row, number = i // self.parts, i % self.parts
        if self.size is None:
            return row, number * self.blocks // self.parts, (number + 1) * self.blocks // self.parts
        return row, number * self.size, (number + 1) * self.size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeSchedule:
    """Parts of the rows' lists, dealt out to thread blocks. Rows are the B * N query rows.

    A row's lists one behind the other, each from a block of 64 slots on, are its blocks; a row with nothing has one.
    segments: int32 [G, 4], row (the number of rows where there is no segment), first block, end, and the number of the
    part, or -1 for a row that is whole. first: int32 [threads + 1], the first segment of every thread block. starts:
    int32 [threads, 8], of every thread block its first segment's number, that behind its last, and the first itself
    (and two that fill 32 bytes), so that it is known in one trip to memory. merged: int32 [T, 2], of every row its
    first part and their number, 1 for a row that is whole. parts: the most parts that there can be; most: of one row.
    even: what says all of this without any array, or None where rows or their parts are uneven.
    """

    segments: Any
    first: Any
    starts: Any
    merged: Any
    parts: int = dataclasses.field(metadata={"static": True})
    most: int = dataclasses.field(metadata={"static": True})
    even: Even | None = dataclasses.field(metadata={"static": True})


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
    whatever is expected to end first of whole rows, one part for every thread block, and equal shares.
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
    blocks = xp.maximum(blocks, 1).astype(xp.int32)
    most = max(1, sum(-(-width // BLOCK) for width in widths))
    if split_size is not None:
        return _fixed(xp, blocks, -(-most * BLOCK // split_size), threads, size=split_size // BLOCK)
    if num_splits is not None:
        return _fixed(xp, blocks, num_splits, threads)
    return _shared(xp, blocks, most, threads)


def _fixed(xp, blocks, splits, threads, size=None):
    """Every row in `splits` parts: of `size` blocks, the last ones perhaps missing, or as equal as can be."""
    rows = blocks.shape[0]
    row = np.repeat(np.arange(rows, dtype=np.int32), splits)
    number = np.tile(np.arange(splits, dtype=np.int32), rows)
    of_row = blocks[row]
    if size is None:
        begin, end = number * of_row // splits, (number + 1) * of_row // splits
        there = xp.ones(row.shape, bool)
    else:
        begin, end = xp.minimum(number * size, of_row), xp.minimum((number + 1) * size, of_row)
        there = begin < end
    total = xp.sum(there, dtype=xp.int32)
    share = np.arange(threads + 1, dtype=np.int32)
    first = share * total // threads
    even = Even(rows, int(blocks[0]), splits, size) if xp is np else None  # without lengths, all rows have as many
    return _finish(xp, rows, row, begin, end, there, first, rows * splits if splits > 1 else 0, splits, even)


def _shared(xp, blocks, most, threads):
    """The cheapest of whole rows, one part for every thread block, and equal shares of all blocks end to end."""
    ways = [_whole(xp, blocks, threads), _one_each(xp, blocks, most, threads), _end_to_end(xp, blocks, threads)]
    rows = blocks.shape[0]
    parts = min(max(threads, 2 * (threads - 1)), rows * most) if threads > 1 else 0
    cheapest = xp.argmin(xp.stack([cost for cost, _ in ways]))
    if xp is np:
        way = ways[cheapest][1]
        if cheapest < 2:  # all rows have as many blocks
            return _fixed(np, blocks, max(1, int((way[0] == 0)[way[3]].sum())), threads)
        return _finish(np, rows, *way, parts, most)

    def padded(way):
        row, *others, first = way
        missing = rows + threads - row.shape[0]
        return *[jnp.pad(a, (0, missing)) for a in (row, *others)], jnp.asarray(first)

    chosen = [xp.stack(same)[cheapest] for same in zip(*[padded(way) for _, way in ways])]
    return _finish(jnp, rows, *chosen, parts, most)


def _whole(xp, blocks, threads):
    """Rows dealt out in turn: what it costs; row, begin, end and presence of the segments, and the first of each."""
    rows = blocks.shape[0]
    dealt = np.pad(np.arange(rows), (0, -rows % threads), constant_values=rows).reshape(-1, threads)
    own = xp.concatenate([blocks, xp.zeros(1, blocks.dtype)])[dealt]
    cost = xp.max(xp.sum(own, axis=0)) + (len(dealt) - 1) * _SEGMENT_COST
    row = np.argsort(np.arange(rows) % threads, kind="stable").astype(np.int32)
    counts = np.bincount(np.arange(rows) % threads, minlength=threads)
    first = np.append(0, np.cumsum(counts)).astype(np.int32)
    return cost, (row, 0 * row, blocks[row], np.ones(rows, bool), first)


def _one_each(xp, blocks, most, threads):
    """Rows in as many equal parts as make the longest part short with no more parts than thread blocks."""
    rows = blocks.shape[0]
    sizes = np.arange(1, most + 1, dtype=np.int32)
    parts = xp.sum(-(-blocks[None] // sizes[:, None]), axis=1)  # with parts of at most so many blocks
    size = 1 + xp.sum(parts > threads)
    fits = size <= most
    counts = -(-blocks // xp.minimum(size, most))
    ends = xp.cumsum(counts)
    segment = np.arange(threads, dtype=np.int32)
    row = xp.sum(ends[None] <= segment[:, None], axis=1)
    there, row = segment < ends[-1], xp.minimum(row, rows - 1)
    number, count, of_row = segment - (ends - counts)[row], counts[row], blocks[row]
    begin, end = number * of_row // count, (number + 1) * of_row // count
    cost = xp.where(fits, size + xp.where(size < xp.max(blocks), _SPLIT_COST, 0), np.iinfo(np.int32).max)
    first = xp.minimum(np.arange(threads + 1, dtype=np.int32), ends[-1])
    return cost, (row, begin, end, there, first)


def _end_to_end(xp, blocks, threads):
    """Equal shares of all blocks laid end to end, in which a row may span several and one may have several rows."""
    rows = blocks.shape[0]
    ends = xp.cumsum(blocks)
    total, starts = ends[-1], ends - blocks
    size = -(-total // (2 * threads)) * 2  # blocks are attended to in twos
    cuts = xp.minimum(np.arange(threads + 1, dtype=np.int32) * size, total)
    borders = xp.sort(xp.concatenate([cuts[:-1], starts]))
    following = xp.concatenate([borders[1:], total[None]])
    row = xp.minimum(xp.sum(ends[None] <= borders[:, None], axis=1), rows - 1)
    there = following > borders
    first = xp.sum(there & (borders < cuts[:, None]), axis=1)
    cost = size + _SPLIT_COST + xp.max(first[1:] - first[:-1] - 1) * _SEGMENT_COST
    return cost, (row, borders - starts[row], following - starts[row], there, first)


def _finish(xp, rows, row, begin, end, there, first, parts, most, even=None):
    """The schedule of segments of which those of a row follow one another; segments that are not there go last."""
    order = xp.argsort(~there, kind="stable") if xp is np else jnp.argsort(~there, stable=True)
    row, begin, end, there = (xp.asarray(a)[order] for a in (row, begin, end, there))
    row = xp.where(there, row, rows)
    count = xp.sum(row[None] == np.arange(rows)[:, None], axis=1)
    in_parts = there & (xp.concatenate([count, xp.zeros(1, count.dtype)])[row] > 1)
    part = xp.where(in_parts, xp.cumsum(in_parts) - 1, -1)
    several = xp.where(count > 1, count, 0)
    segments = xp.stack([row, begin, end, part], axis=1).astype(xp.int32)
    first = xp.asarray(first).astype(xp.int32)
    own = segments[xp.minimum(first[:-1], segments.shape[0] - 1)]
    return DecodeSchedule(
        segments,
        first,
        xp.concatenate([first[:-1, None], first[1:, None], own, own[:, :2]], axis=1),
        xp.stack([xp.cumsum(several) - several, count], axis=1).astype(xp.int32),
        int(in_parts.sum()) if xp is np else parts,
        int(count.max()) if xp is np else most,
        even,
    )
