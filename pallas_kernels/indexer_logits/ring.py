"""The pipeline that all Hopper score kernels share: a producer warpgroup, a ring of key tiles, math warpgroups.

A thread block works through segments: a few query rows (or one) against a run of tiles of 64 keys. The ring does not
stop between segments: the producer loads the next segment's queries and keys while the last one is still scored.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.copies import CopyBarriers, copy_barriers
from pallas_kernels.indexer_logits import lanes
from pallas_kernels.indexer_logits.keys import WIDTH


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How the work is cut. Checks itself.

    columns: (query, head) pairs of a wgmma at most. math: math warpgroups. stages: tiles of 64 keys in the ring.
    """

    columns: int
    math: int
    stages: int

    def __post_init__(self):
        if self.columns not in (32, 64, 128, 256):
            raise ValueError(f"columns={self.columns}; the kernel takes 32, 64, 128 or 256.")
        if self.math not in (2, 3, 4):
            raise ValueError(f"math={self.math}; a thread block has 2, 3 or 4 math warpgroups.")
        if self.stages < 2 or self.stages % self.math:
            raise ValueError(f"stages={self.stages}; the ring needs a multiple of math={self.math}, and at least 2.")

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer's and of a math warpgroup's threads: the producer leaves the others what it can."""
        entry = 65536 // (128 * (self.math + 1)) // 8 * 8
        producer = 24 if self.math > 2 else 40
        return producer, min((entry * (self.math + 1) - producer) // self.math // 8 * 8, 232)


class Segment(NamedTuple):
    """Query rows from `first` on (those at and beyond `limit` are left out) against tiles [low, high)."""

    first: Any
    limit: Any
    low: Any
    high: Any
    extra: Any = ()  # what the kernel's own callbacks need beside it


class Segments(NamedTuple):
    """A thread block's segments: how many, ``fetch(i)``, which only loads, and ``resolve(i, fetched)``, a Segment.

    A segment is fetched while the one before it is under way: its numbers come from device memory.
    """

    count: Any
    fetch: Callable
    resolve: Callable

    def walk(self, step, carry):
        """``step(i, segment, carry) -> carry`` over all segments."""

        def one(i, state):
            carry, fetched = state
            following = self.fetch(jnp.minimum(i + 1, jnp.maximum(self.count - 1, 0)))
            return step(i, self.resolve(i, fetched), carry), following

        return lax.fori_loop(0, self.count, one, (carry, self.fetch(jnp.int32(0))))[0]


class Scratch(NamedTuple):
    """Shared memory of a thread block: queries and weights of two segments, the ring, and what tells who may go on."""

    q: Any
    w: Any
    tiles: Any
    full: Any
    empty: Any
    ready: Any
    used: Any


def scratch_types(columns, kind, copies, config) -> list:
    """Of a Scratch; `copies` arrivals make a tile full, or those of a CopyBarriers where it is None."""
    return list(
        Scratch(
            q=plgpu.SMEM((2, columns, WIDTH), kind.query_dtype, transforms=kind.query_tile),
            w=plgpu.SMEM((2, columns), jnp.float32),
            tiles=kind.scratch(config.stages),
            full=(
                copy_barriers(config.stages)
                if copies is None
                else plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages)
            ),
            empty=plgpu.Barrier(num_barriers=config.stages),
            ready=plgpu.Barrier(num_arrivals=2, num_barriers=2),
            used=plgpu.Barrier(num_arrivals=config.math, num_barriers=2),
        )
    )


def produce(segments: Segments, scratch: Scratch, config, load_queries, load_segment):
    """The producer warpgroup. load_queries(segment, q, w, barrier) and load_segment(segment, loaded) -> loaded."""
    plgpu.set_max_registers(config.registers[0], action="decrease")

    def step(i, segment, loaded):
        at = lax.rem(i, 2)

        @pl.when(i >= 2)
        def _():
            plgpu.barrier_wait(scratch.used.at[at])

        load_queries(segment, scratch.q.at[at], scratch.w.at[at], scratch.ready.at[at])
        return load_segment(segment, loaded)

    loaded = segments.walk(step, jnp.int32(0))

    def see(barriers, count, size):
        """Waits for the last arrivals: none is left unseen."""
        wait = lambda i, _: plgpu.barrier_wait(barriers.at[lax.rem(i, size)])  # noqa: E731
        lax.fori_loop(jnp.maximum(count - size, 0), count, wait, None)

    see(scratch.empty, loaded, config.stages)
    see(scratch.used, segments.count, 2)


def load_tiles(load, begin, stop, loaded, scratch: Scratch, config):
    """Loads the tiles [begin, stop) into the ring, after `loaded` others. Returns how many there were then."""

    def step(tile, loaded):
        slot = lax.rem(loaded, config.stages)

        @pl.when(loaded >= config.stages)
        def _():
            plgpu.barrier_wait(scratch.empty.at[slot])

        load(tile, slot)
        return loaded + 1

    return lax.fori_loop(begin, stop, step, jnp.int32(loaded))


def consume(
    segments: Segments, scratch: Scratch, config, wg, kind, out_ref, start_ref, end_ref, *, queries, heads, rounding,
    weight_dtype, compressed=False, after=lambda segment: None,
):  # fmt: skip
    """A math warpgroup: scores its tiles of every segment and stores them; then `after(segment)`.

    start_ref (None: 0) and end_ref: visible ranges of the query rows. weight_dtype: that the float32 weights were made
    from. compressed: as of `lanes.store_scores`.
    """
    plgpu.set_max_registers(config.registers[1], action="increase")

    def step(i, segment, scored):
        first, limit, low, high, _ = segment
        at = lax.rem(i, 2)
        bounds = lanes.load_bounds(start_ref, end_ref, first, limit, queries=queries)
        plgpu.barrier_wait(scratch.ready.at[at])
        weights = plgpu.load(scratch.w.at[at], layout=lanes.PER_COLUMN)
        weights = weights.astype(weight_dtype) if rounding and weight_dtype == jnp.bfloat16 else weights
        mosaic.fence_proxies()

        def store(dots, scale, tile):
            lanes.store_scores(
                out_ref, dots, weights, scale, bounds, first, limit, tile * lanes.KEYS,
                queries=queries, heads=heads, rounding=rounding, compressed=compressed,
            )  # fmt: skip

        _score_tiles(store, scratch, scratch.q.at[at], kind, wg, low, high, scored, config)
        plgpu.barrier_arrive(scratch.used.at[at])
        after(segment)
        return scored + high - low

    segments.walk(step, jnp.int32(0))


def _score_tiles(store, scratch, q_s, kind, wg, begin, stop, scored, config):
    """Warpgroup `wg`'s tiles of [begin, stop), `scored` tiles having gone before: keys x columns, then `store`."""
    skipped = lax.rem(wg + config.math - lax.rem(scored, config.math), config.math)
    count = (stop - begin - skipped + config.math - 1) // config.math
    columns = q_s.shape[0]

    def step(i, _):
        tile = begin + skipped + i * config.math
        number = scored + tile - begin
        slot = lax.rem(number, config.stages)
        if isinstance(scratch.full, CopyBarriers):
            scratch.full.wait(slot, number // config.stages)
            mosaic.fence_proxies()
        else:
            plgpu.barrier_wait(scratch.full.at[slot])
        operand = kind.operand(scratch.tiles, slot)
        if kind.in_registers:
            mosaic.fence_proxies()
            plgpu.barrier_arrive(scratch.empty.at[slot])

        # Nothing may stand between an accumulator and its wgmma: it would cost the instructions that set it to zero.
        def scope(acc):
            plgpu.wgmma(acc, operand, q_s.T)
            dots = plgpu.wgmma_accumulator_load(acc, wait_n=0)
            scale = None
            if not kind.in_registers:
                scale = kind.scale(scratch.tiles, slot)
                if scale is not None:
                    mosaic.fence_proxies()
                plgpu.barrier_arrive(scratch.empty.at[slot])
            store(dots, scale, tile)

        pl.run_scoped(scope, plgpu.ACC((lanes.KEYS, columns), jnp.float32))

    lax.fori_loop(0, count, step, None)
