"""What all layers of one step share: where its rows stand, what they see, and where they are written.

A step processes up to S tokens of each of B requests. Request b brings `count[b]` tokens, which follow the
`start[b]` tokens that the cache already holds; rows beyond count are padding (position -1) and see and write nothing.
Prefill, chunked prefill and decode differ in these numbers alone. What layers would otherwise compute each for itself
is computed once: a `Step` by the model, before its layers; a selection and the expanded candidate blocks
(`layers.indexer.Selected`), and the schedules of the scoring kernels, by the first layer that needs them.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from dsa_jax import context, ops
from dsa_jax.pytree import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ring:
    """How the rings of recent rows are used in a step, the same for every layer.

    kept: the ring slot (request · capacity + position mod capacity) that each row is written to, int32 [B, S], or -1.
    seen: int32 [B, S, K], what each row attends to, or -1. Where `in_place`, the rows of the step fit beside all that
    they see: they are written first, and `seen` are slots of the ring after. Otherwise `seen` counts in [ring rows of
    all requests as they were | fresh rows of all requests].
    """

    kept: Leaf
    seen: Leaf
    in_place: bool = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """Rows of one step: start, count int32 [B]; positions int32 [B, S]; block_table int32 [B, M].

    ring: the sliding window's `Ring`; None in a model without one.
    """

    start: Leaf
    count: Leaf
    positions: Leaf
    block_table: Leaf
    ring: Leaf = None

    @classmethod
    def of(
        cls,
        start: Int32[Array, " B"],
        count: Int32[Array, " B"],
        block_table: Int32[Array, "B M"],
        rows: int,
        window: tuple[int, int] | None = None,
    ) -> "Step":
        """The step of `count[b]` tokens after `start[b]`, in `rows` rows a request.

        window: (positions that a row sees through it, rows that a ring holds); None for a model without.
        """
        i = jnp.arange(rows, dtype=jnp.int32)
        step = cls(start, count, jnp.where(i < count[:, None], start[:, None] + i, -1), block_table)
        if window is None:
            return step
        width, capacity = window
        return step.with_ring(step.window(width), width - 1, capacity)

    def with_ring(self, seen: Int32[Array, "B S K"], before: int, capacity: int) -> "Step":
        """The step whose rows see the positions `seen`, at most `before` of them before the step, in rings of `capacity`."""
        in_place = before + self.positions.shape[1] <= capacity
        if in_place:
            request = jnp.arange(len(self.start), dtype=jnp.int32)[:, None, None]
            slots = jnp.where(seen < 0, -1, request * capacity + seen % capacity)
        else:
            slots = self.recent(seen, capacity)
        return replace(self, ring=Ring(self.ring_slots(capacity), slots, in_place))

    @property
    def valid(self) -> Bool[Array, "B S"]:
        """Rows that are tokens, not padding."""
        return self.positions >= 0

    @property
    def end(self) -> Int32[Array, " B"]:
        """Tokens that the cache holds after this step."""
        return self.start + self.count

    def visible(self, ratio: int) -> Int32[Array, "B S"]:
        """How many compressed positions each row sees: those whose group ends at or before it."""
        return (self.positions + 1) // ratio

    def scoring(self, ratio: int, keys: ops.PagedRows, heads: int, candidates: ops.Candidates | None = None) -> Any:
        """The schedule for `ops.select` over compressed positions of `ratio`, or over `candidates` of them: made by the first
        layer that asks, for all layers with keys of that ratio. To be asked for outside of a branch of lax.cond."""
        key = (ratio, heads, candidates is None)
        if key not in self._schedules:
            self._schedules[key] = ops.make_select_schedule(
                context.own_count(self.visible(ratio), keys.page_size), self.block_table, keys, heads, candidates=candidates
            )
        return self._schedules[key]

    @functools.cached_property
    def _schedules(self) -> dict[tuple[int, int, bool], Any]:
        return {}

    def finished_groups(self, ratio: int) -> Int32[Array, "B G"]:
        """The groups of `ratio` tokens that end in this step, ascending, -1 padded. G = ceil(S / ratio)."""
        rows = self.positions.shape[1]
        group = (self.start // ratio)[:, None] + jnp.arange(-(-rows // ratio), dtype=jnp.int32)
        return jnp.where(group < (self.end // ratio)[:, None], group, -1)

    def recent(self, positions: Int32[Array, "B N K"], capacity: int) -> Int32[Array, "B N K"]:
        """Where rows of recent positions stand in [ring rows of all requests | fresh rows of all requests].

        A ring of `capacity` slots a request holds position p in slot p mod capacity, as it was before this step; the
        fresh rows are the [B·S] rows of this step. -1 for positions that are negative or after the last token.
        """
        requests, rows = self.positions.shape
        b = jnp.arange(requests, dtype=jnp.int32)[:, None, None]
        start, end = self.start[:, None, None], self.end[:, None, None]
        old = b * capacity + positions % capacity
        fresh = requests * capacity + b * rows + (positions - start)
        index = jnp.where(positions < start, old, fresh)
        return jnp.where((positions < 0) | (positions >= end), -1, index)

    def ring_slots(self, capacity: int) -> Int32[Array, "B S"]:
        """The ring slot (request · capacity + position mod capacity) that each row is kept in after this step, or -1."""
        requests = self.positions.shape[0]
        kept = self.valid & (self.positions >= self.end[:, None] - capacity)
        slot = jnp.arange(requests, dtype=jnp.int32)[:, None] * capacity + self.positions % capacity
        return jnp.where(kept, slot, -1)

    def window(self, width: int) -> Int32[Array, "B S W"]:
        """The positions that each row sees through a sliding window of `width`, itself included, oldest first."""
        back = jnp.arange(width - 1, -1, -1, dtype=jnp.int32)
        seen = self.positions[..., None] - back
        return jnp.where(self.valid[..., None] & (seen >= 0), seen, -1)


def keep_recent(ring: Array, fresh: Array, step: Step) -> Array:
    """`ring` [B, C, ..] after the step: the rows `fresh` [B, S, ..] of its last C tokens replace what they overwrite."""
    requests, capacity = ring.shape[:2]
    slots = step.ring_slots(capacity).reshape(-1)
    flat = ops.scatter_rows(ring.reshape(requests * capacity, *ring.shape[2:]), slots, flatten_rows(fresh))
    return flat.reshape(ring.shape)


def with_recent(ring: Array, fresh: Array) -> Array:
    """[ring rows | fresh rows], the array that `Step.recent` indexes."""
    return jnp.concatenate([flatten_rows(ring), flatten_rows(fresh)])


def flatten_rows(x: Array) -> Array:
    """[B, S, ..] -> [B·S, ..]"""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
