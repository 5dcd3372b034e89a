"""Attention of V4: one softmax over the window's rows and the layer's own compressed rows, those that its indexer selects
or all that are visible (spec deepseek-v4 section 5)."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from dsa_jax import context, ops
from dsa_jax.cache.state_v4 import CompressedCache, LayerCache
from dsa_jax.config_v4 import V4Config
from dsa_jax.layer_plan_v4 import V4LayerRole
from dsa_jax.layers.attention import tap_scores
from dsa_jax.layers.group_compressor import GroupCompressor
from dsa_jax.layers.rope import Angles, apply_rope
from dsa_jax.layers.rotated_indexer import RotatedIndexer
from dsa_jax.layers.shared_kv import SharedKVAttention
from dsa_jax.numerics import CacheRows, Numerics
from dsa_jax.step import Step, flatten_rows
from dsa_jax.tap import Tap


class HybridAttention(SharedKVAttention):
    """Queries normalised per head; a compressor where the ratio is above 0, an indexer where the role selects."""

    def __init__(self, config: V4Config, role: V4LayerRole):
        super().__init__(config, role.rope, norm_heads=True)
        self.role = role
        if role.ratio:
            self.compressor = GroupCompressor(
                config.hidden_size, self.head_dim, role.ratio, role.overlap, config.rms_norm_eps
            )
        if role.mode == "indexed":
            self.indexer = RotatedIndexer(config, role)

    def rows(self, numerics: Numerics) -> CacheRows:
        """How window and compressed rows are stored."""
        return numerics.partly_rotated_rows(self.head_dim, self.rope_dim)

    def window_rows(self, x: Float[Array, "B S d"], angles: Angles, numerics: Numerics) -> Float[Array, "B S h"]:
        """The rows that `x` adds to the window, as their record's writer takes them."""
        return self.rows(numerics).prepare(self.kv_row(x, angles, numerics))

    def __call__(
        self, x: Float[Array, "B S d"], step: Step, cache: LayerCache, numerics: Numerics, tap: Tap | None = None
    ) -> tuple[Float[Array, "B S d"], LayerCache]:
        """The layer's output, and its caches with this step's rows. A row sees the group that it completes."""
        angles = self.angles(step.positions)
        q_latent, q = self.query(x, angles, numerics)
        rows = self.window_rows(x, angles, numerics)
        if tap is not None:
            tap("window_kv", rows)
        recent, window = self.extend_window(cache.window, rows, step, numerics)
        caches, slots = (recent,), (step.ring.seen,)
        compressed, index_keys = cache.compressed, cache.index_keys
        if self.role.ratio:
            where = (step.block_table, compressed.rows.page_size, step.visible(self.role.ratio))
            compressed = self.extend(compressed, self.compressor, self.compressed_rows, x, step, numerics)
            if self.role.mode == "indexed":
                index_keys = self.extend(index_keys, self.indexer.compressor, self.indexer.keys, x, step, numerics)
                positions = self.select(x, q_latent, angles, index_keys.rows, step, numerics, tap)
                listed = context.listed(positions, *where)
            else:
                listed = context.every_listed(*where)
            caches += (compressed.rows,)
            slots += (listed,)
        y = self.attend(q, caches, slots, step.block_table, angles, numerics, tap)
        return y, LayerCache(window, compressed, index_keys)

    def select(
        self,
        x: Float[Array, "B S d"],
        q_latent: Float[Array, "B S r"],
        angles: Angles,
        keys: ops.PagedRows,
        step: Step,
        numerics: Numerics,
        tap: Tap | None,
    ) -> Int32[Array, "B S K"]:
        """The compressed positions that each row attends to."""
        index_q, weights = self.indexer.query(x, q_latent, angles, numerics)
        positions = self.indexer(index_q, weights, keys, step, numerics)
        if tap is not None:
            tap_scores(tap, index_q, weights, keys, step, self.role.ratio, numerics)
            tap("selected", positions)
        return positions

    def compressed_rows(self, latent: Float[Array, "B G h"], angles: Angles, numerics: Numerics) -> Float[Array, "B G h"]:
        """Compressed rows of the compressor's latents, as their record's writer takes them."""
        return self.rows(numerics).prepare(apply_rope(latent, angles, numerics))

    def join_window(self, ring: ops.PagedRows, rows: Float[Array, "N h"], numerics: Numerics) -> ops.PagedRows:
        """[ring rows | new rows] as one cache of values in the result dtype, which hold what the records hold: new rows
        pass through the record as the ring's did. (Records with their scales at the end of a page cannot be joined as
        bytes.)"""
        old = ring.gather(jnp.arange(ring.num_slots, dtype=jnp.int32), numerics.dtype)
        new = ring.format.decode(ring.format.encode(rows), numerics.dtype)
        return ops.PagedRows(jnp.concatenate([old, new])[:, None], ops.Plain(old.shape[-1], numerics.dtype), 1)

    def extend(
        self,
        cache: CompressedCache,
        compressor: GroupCompressor,
        finish: Callable[[Array, Angles, Numerics], Array],
        x: Float[Array, "B S d"],
        step: Step,
        numerics: Numerics,
    ) -> CompressedCache:
        """Appends the groups that end in this step, rotated at the position of their first token."""
        latent, groups, tail = compressor(x, cache.tail, step, numerics)
        rows = finish(latent, self.angles(groups * self.role.ratio), numerics)
        slots = context.slots(groups[..., None], step.block_table, cache.rows.page_size)
        return CompressedCache(cache.rows.scatter(slots.reshape(-1), flatten_rows(rows)), tail)
