"""The caches of a batch of requests of V4."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from dsa_jax import ops
from dsa_jax.cache.sizes import CacheSizes, Pool
from dsa_jax.cache.state import CompressorTail
from dsa_jax.config_v4 import V4Config
from dsa_jax.layer_plan_v4 import V4LayerRole, draft_plan, layer_plan
from dsa_jax.numerics import CacheRows, Numerics
from dsa_jax.pytree import Leaf

PAGE_TOKENS = 256  # 64 rows at ratio 4, 2 at ratio 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CompressedCache:
    """What one compressor owns: its finished rows (PagedRows), and its recent tokens (CompressorTail).

    The tail holds the open group, and where groups overlap the one before it too: slot = position mod its slots.
    """

    rows: Leaf
    tail: Leaf

    def map_arrays(self, request: Callable[[Leaf], Leaf], pool: Callable[[Leaf], Leaf]) -> "CompressedCache":
        """As `V4Cache.map_arrays`."""
        return CompressedCache(jax.tree.map(pool, self.rows), jax.tree.map(request, self.tail))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer's own caches: window, the ring of recent rows (PagedRows, slot = position mod its capacity); compressed
    and index_keys, CompressedCache or None where the layer has none."""

    window: Leaf
    compressed: Leaf
    index_keys: Leaf

    def map_arrays(self, request: Callable[[Leaf], Leaf], pool: Callable[[Leaf], Leaf]) -> "LayerCache":
        """As `V4Cache.map_arrays`."""
        owned = (None if own is None else own.map_arrays(request, pool) for own in (self.compressed, self.index_keys))
        return LayerCache(jax.tree.map(request, self.window), *owned)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MTPCache:
    """What the MTP layer knows of the tokens before the last: layer, its LayerCache of one row a token.

    stream: the final stream at the newest tokens in a ring, [B, capacity, copies, D]; the last one waits for the token
    after it.
    """

    layer: Leaf
    stream: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class V4Cache:
    """All state of B requests between steps.

    length: tokens held, int32 [B]. block_table: page ids of each request, int32 [B, M]; page i of the table holds the
    compressed rows of tokens [i·page_tokens, (i+1)·page_tokens) in every layer's pools. layers: LayerCache of each
    layer. mtp: MTPCache, or None without an MTP layer. draft_windows: the rings of the DSpark stages, none without.
    """

    length: Leaf
    block_table: Leaf
    layers: Leaf
    mtp: Leaf
    draft_windows: Leaf
    page_tokens: int = field(metadata={"static": True})

    @property
    def requests(self) -> int:
        """How many requests the cache holds."""
        return self.length.shape[0]

    def map_arrays(self, request: Callable[[Leaf], Leaf], pool: Callable[[Leaf], Leaf]) -> "V4Cache":
        """The cache with `request` applied to arrays [B, ..] of one row a request, and `pool` to arrays [pages, ..]."""
        mtp = self.mtp
        if mtp is not None:
            mtp = MTPCache(mtp.layer.map_arrays(request, pool), request(mtp.stream))
        return V4Cache(
            length=request(self.length),
            block_table=request(self.block_table),
            layers=tuple(layer.map_arrays(request, pool) for layer in self.layers),
            mtp=mtp,
            draft_windows=jax.tree.map(request, self.draft_windows),
            page_tokens=self.page_tokens,
        )


def page_unit(config: V4Config) -> int:
    """Tokens that a page holds are a multiple of this: whole groups of every ratio."""
    return math.lcm(1, *(ratio for ratio in config.compress_ratios if ratio))


def new_cache(
    config: V4Config, numerics: Numerics, requests: int, max_tokens: int, sizes: CacheSizes = CacheSizes()
) -> V4Cache:
    """An empty cache for `requests` requests of up to `max_tokens` tokens each.

    ValueError if max_tokens is beyond the config's max_position_embeddings, or for sizes that do not fit.
    """
    pool = sizes.pool(requests, max_tokens, config.max_position_embeddings, page_unit(config), PAGE_TOKENS)

    def layer(role: V4LayerRole) -> LayerCache:
        return _layer(config, numerics, role, requests, pool, sizes.max_rollback)

    drafts = draft_plan(config)
    stream = jnp.zeros((requests, 1 + sizes.max_rollback, config.hc_mult, config.hidden_size), numerics.dtype)
    return V4Cache(
        length=jnp.zeros((requests,), jnp.int32),
        block_table=pool.block_table,
        layers=tuple(layer(role) for role in layer_plan(config)),
        mtp=MTPCache(layer(drafts[0]), stream) if drafts and config.dspark is None else None,
        draft_windows=tuple(layer(role).window for role in drafts) if config.dspark is not None else (),
        page_tokens=pool.page_tokens,
    )


def _layer(
    config: V4Config, numerics: Numerics, role: V4LayerRole, requests: int, pool: Pool, max_rollback: int
) -> LayerCache:
    width = config.head_dim
    kv_rows = numerics.partly_rotated_rows(width, config.qk_rope_head_dim)

    def compressed(rows: CacheRows, width: int) -> CompressedCache:
        shape = (requests, tail_slots(role) + max_rollback, (2 if role.overlap else 1) * width)
        return CompressedCache(
            rows=ops.PagedRows.zeros(rows.format, pool.pages, pool.rows(role.ratio)),
            tail=CompressorTail(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)),
        )

    index_rows = numerics.index_key_rows(config.index_head_dim)
    return LayerCache(
        window=ops.PagedRows.zeros(kv_rows.format, requests, config.sliding_window + max_rollback),
        compressed=compressed(kv_rows, width) if role.ratio else None,
        index_keys=compressed(index_rows, config.index_head_dim) if role.mode == "indexed" else None,
    )


def tail_slots(role: V4LayerRole) -> int:
    """Recent tokens that a compressor looks back at: a group, and the one before it where groups overlap."""
    return (2 if role.overlap else 1) * role.ratio
