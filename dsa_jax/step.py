"""What all layers of one step share: where its rows stand, what they see, and where they are written.

A step processes up to S tokens of each of B requests. Request b brings `count[b]` tokens, which follow the
`start[b]` tokens that the cache already holds; rows beyond count are padding (position -1) and see and write nothing.
Prefill, chunked prefill and decode differ in these numbers alone.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from dsa_jax import ops
from dsa_jax.pytree import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """Rows of one step: start, count int32 [B]; positions int32 [B, S]; block_table int32 [B, M]."""

    start: Leaf
    count: Leaf
    positions: Leaf
    block_table: Leaf

    @classmethod
    def of(cls, start: Int32[Array, " B"], count: Int32[Array, " B"], block_table: Int32[Array, "B M"], rows: int):
        """The step of `count[b]` tokens after `start[b]`, in `rows` rows a request."""
        i = jnp.arange(rows, dtype=jnp.int32)
        return cls(start, count, jnp.where(i < count[:, None], start[:, None] + i, -1), block_table)

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
