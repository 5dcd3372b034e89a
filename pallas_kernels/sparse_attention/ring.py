"""The ring of gathered tiles that both Hopper kernels of sparse attention read, and the warpgroup that fills it.

A tile is 64 rows, in blocks of 128 columns; the columns behind the first 512 have a place of their own, the tail. Three
tiles are begun at a time. A tile is copied in up to two parts, early and late blocks, as there is room for them: where
shared memory does not hold three tiles, the last blocks take the place of the tile before the last. Warpgroups that use a
tile may free the first half of it ahead of the rest.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.copies import CopyBarriers
from pallas_kernels.sparse_attention import gather as rows

KEYS = rows.ROWS  # of a tile
VALUES = 512
BLOCKS = VALUES // rows.BLOCK  # of a tile
TILES = 3  # begun at a time
BLOCK_BYTES = 2 * KEYS * rows.BLOCK
tile = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=rows.TILE)


FIRST_HALF = (0, 2)  # the blocks of a tile that a kernel frees first, if it frees halves


def scratch(blocks: int, small: int, users: int, *, halves: bool) -> dict[str, Any]:
    """What a kernel allocates for a ring of so many blocks and `users` warpgroups that use a tile, last.

    halves: whether they free the first half of a tile ahead of the rest; takes 11 or 12 blocks.
    small: rows of 64 float32 that the kernel has for itself in "small", behind a bias for the keys of every tile and in
    front of the barriers of the copies. In one piece, as every piece is rounded up and there may be nothing left.
    """
    found = {}
    if mosaic.is_interpreted():
        found["full"] = plgpu.Barrier(num_barriers=2 * TILES if halves or blocks < TILES * BLOCKS else TILES)
    if halves:
        found["half_empty"] = plgpu.Barrier(num_arrivals=users, num_barriers=TILES)
    return found | {
        "ring": tile((blocks, KEYS, rows.BLOCK)),
        "small": plgpu.SMEM((TILES + small + 1, KEYS), jnp.float32),
        "empty": plgpu.Barrier(num_arrivals=users, num_barriers=TILES),
    }


@dataclasses.dataclass(frozen=True)
class Ring:
    """Tiles by their position: the first that a thread block sees is 0. Made inside a kernel.

    refs: by name, of `scratch`, and "tail" [>= 3, 64, 64] if rows have more than 512 columns. sources: rows in device
    memory, queries first. lists: flat lists of rows of the others. lengths: of a row's list, and widths of all.
    """

    refs: dict[str, Any]
    tailed: bool
    sources: Sequence[Any]
    lists: Sequence[Any]
    lengths: Sequence[Any]
    widths: Sequence[int]

    @property
    def blocks(self) -> int:
        return self.refs["ring"].shape[0]

    @property
    def halves(self) -> bool:
        """Whether the first half of a tile is freed ahead of the rest."""
        return "half_empty" in self.refs

    @property
    def short(self) -> int:
        """Blocks of a tile that take the place of the tile before the last, for want of room for three."""
        return TILES * BLOCKS - self.blocks

    @property
    def late(self) -> tuple[int, ...]:
        """Blocks of a tile that are copied, and to be waited for, behind the others."""
        if self.short:
            return tuple(range(BLOCKS - self.short, BLOCKS))
        return tuple(n for n in range(BLOCKS) if n not in FIRST_HALF) if self.halves else ()

    @property
    def early(self) -> tuple[int, ...]:
        return tuple(n for n in range(BLOCKS) if n not in self.late)

    @property
    def _before_early(self) -> tuple[tuple[str, int], ...]:
        """What a tile's early blocks take the place of: the barrier of it, and how many tiles ago that was."""
        if self.short:
            return (("empty", TILES),) if self.halves else ()  # or waited for with the late blocks before
        return (("half_empty" if self.halves else "empty", TILES),)

    @property
    def _before_late(self) -> tuple[tuple[str, int], ...]:
        if self.short:
            return (("half_empty" if self.halves else "empty", TILES - 1),)
        return (("empty", TILES),) if self.halves else ()

    @property
    def full(self):
        small = self.refs["small"]
        words = self.refs["full"] if mosaic.is_interpreted() else small.at[small.shape[0] - 1]
        return CopyBarriers(words, 2 * TILES if self.late else TILES)

    def block(self, position, n):
        """Block n of a tile: [64, 128]."""
        place = lax.rem(position * BLOCKS, self.blocks) + n
        if self.short:
            place = jnp.where(place < self.blocks, place, place - self.blocks)
        return self.refs["ring"].at[place]

    def tail(self, position):
        """A tile's columns from 512 on: [64, 64]."""
        return self.refs["tail"].at[lax.rem(position, TILES)]

    def bias(self, position):
        """Of a tile's keys: 0, or -inf where there is none."""
        return self.refs["small"].at[lax.rem(position, TILES)]

    def wait_early(self, position):
        """Until a tile is there, but for its late blocks."""
        self.full.wait(lax.rem(position, TILES), position // TILES)
        mosaic.fence_proxies()

    def wait_late(self, position):
        """Until a tile's late blocks are there."""
        if self.late:
            self.full.wait(lax.rem(position, TILES) + TILES, position // TILES)
            mosaic.fence_proxies()

    def wait_used(self, position):
        """Until a tile was used; nothing before the first tile."""
        self._wait_free("empty", position)

    def _wait_free(self, name, position):
        @pl.when(position >= 0)
        def _():
            plgpu.barrier_wait(self.refs[name].at[lax.rem(position, TILES)])

    def release_half(self, position):
        """By each warpgroup that uses a tile, if halves are freed: the first half."""
        plgpu.barrier_arrive(self.refs["half_empty"].at[lax.rem(position, TILES)])

    def release(self, position):
        """By each warpgroup that uses a tile: all of it, or the second half."""
        plgpu.barrier_arrive(self.refs["empty"].at[lax.rem(position, TILES)])

    def visible(self, token):
        """Of a row's lists, how many entries are looked at, and how many tiles those are."""
        seen = [jnp.clip(ref[token], 0, width) for ref, width in zip(self.lengths, self.widths)]
        return seen, [(n + KEYS - 1) // KEYS for n in seen]

    def count(self, token):
        """Tiles of a row. One of nothing where its lists are empty."""
        return jnp.maximum(sum(self.visible(token)[1]), 1)

    def gather(self, items, row, *, queries: int):
        """Copies the tiles of `items` query rows, by one warpgroup: ``row(i)`` is that of item i, and its first query.

        queries: how many of the queries' rows go in front, as a tile of their own; 0 for none.
        """

        def item(i, position):
            token, first = row(i)
            seen, tiles = self.visible(token)

            def look_up(tile):
                if len(self.lists) == 1:
                    which, base, left = jnp.int32(1), token * self.widths[0] + tile * KEYS, seen[0] - tile * KEYS
                else:
                    here = tile < tiles[0]
                    start = jnp.where(here, tile, tile - tiles[0]) * KEYS
                    which, base = jnp.where(here, 1, 2), token * jnp.where(here, *self.widths) + start
                    left = jnp.where(here, *seen) - start
                return self._look_up(which, base, left), which

            places, which = look_up(jnp.int32(0))
            if queries:
                own = self._look_up(jnp.int32(0), first, jnp.int32(queries))
                position = self._fill(jnp.int32(0), own, position)

            def tile(j, state):
                places, which, position = state
                following = look_up(j + 1)
                return *following, self._fill(which, places, position)

            return lax.fori_loop(0, self.count(token), tile, (places, which, position))[2]

        position = lax.fori_loop(0, items, item, jnp.int32(0))
        for name, back in self._before_early + self._before_late:  # so that no arrival is left unseen
            seen = jnp.maximum(position - back, 0)
            lax.fori_loop(seen, position, lambda i, _: self._wait_free(name, i), None)

    def _look_up(self, which, base, count):
        return rows.look_up(self.lists, [source.shape[0] for source in self.sources[1:]], which, base, count)

    def _fill(self, which, places, position):
        slot, first = lax.rem(position, TILES), lax.rem(position * BLOCKS, self.blocks)
        ring = self.refs["ring"]
        copy = functools.partial(
            rows.gather, ring, source_refs=self.sources, which=which, places=places, block=first
        )
        for name, back in self._before_early:
            self._wait_free(name, position - back)
        tail = self.tail(position) if self.tailed else None
        copy(tail_ref=tail, bias_ref=self.bias(position), columns=self.early)
        self.full.arrive(slot)
        if self.late:
            for name, back in self._before_late:
                self._wait_free(name, position - back)
            copy(tail_ref=None, bias_ref=None, columns=self.late)
            self.full.arrive(slot + TILES)
        return position + 1


@dataclasses.dataclass(frozen=True)
class Launch:
    """The arguments that both kernels pass on, in one order, and what is static of them."""

    kvs: Sequence[Any]
    lists: Sequence[Any]
    lengths: Sequence[Any]
    sink: Any

    @property
    def arrays(self):
        return (*self.kvs, *[each.reshape(-1) for each in self.lists], *self.lengths, self.sink)

    def ring(self, refs, tailed, q_ref, array_refs) -> tuple[Ring, Any]:
        """The ring of a kernel, and the reference to the sinks, from those to `arrays`."""
        many = len(self.kvs)
        kv, lists, lengths = array_refs[:many], array_refs[many : 2 * many], array_refs[2 * many : 3 * many]
        widths = [each.shape[1] for each in self.lists]
        return Ring(refs, tailed, (q_ref, *kv), lists, lengths, widths), array_refs[-1]


def start(gather: Callable[[], None], others: Callable[[], None], ring: Ring, started, warpgroup: int):
    """Runs `gather` in warpgroup `warpgroup` and `others` in the others, when the copies' barriers are ready."""
    wg = lax.axis_index("wg")

    @pl.when(wg == warpgroup)
    def _():
        ring.full.initialise()

    plgpu.barrier_arrive(started)
    plgpu.barrier_wait(started)
    lax.cond(wg == warpgroup, gather, others)
