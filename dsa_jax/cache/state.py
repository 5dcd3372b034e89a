"""The caches of a batch of requests."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from dsa_jax import ops
from dsa_jax.cache.sizes import CacheSizes, Pool
from dsa_jax.config import V41Config
from dsa_jax.layer_plan import LayerRole, draft_plan, layer_plan
from dsa_jax.numerics import Numerics
from dsa_jax.pytree import Leaf

PAGE_TOKENS = 128
NO_TOKEN = -1  # an Engram id that cuts n-grams: before the sequence, or an image position


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CompressorTail:
    """Newest tokens of a compressor in a ring, slot = position mod its capacity: float32 [B, capacity, d] each."""

    kv: Leaf
    gate: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SourceCache:
    """What one KV source owns: compressed KV rows and index keys (PagedRows), and the open group (None at ratio 1)."""

    compressed: Leaf
    index_keys: Leaf
    tail: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """All state of B requests between steps.

    length: tokens held, int32 [B]. block_table: page ids of each request, int32 [B, M]; page i of the table holds the
    compressed rows of tokens [i·page_tokens, (i+1)·page_tokens) in every source's pools. windows: per layer, the ring of
    recent window rows (PagedRows), slot = position mod its capacity. sources: SourceCache of each KV source, by layer.
    engram_ids: the newest compressed token ids in a ring, int32 [B, n]. draft_windows: the rings of the draft stages.
    Rings and tails hold what the model looks back at, and as many tokens more as a rollback may take back.
    page_tokens: tokens a page holds (static).
    """

    length: Leaf
    block_table: Leaf
    windows: Leaf
    sources: Leaf
    engram_ids: Leaf
    draft_windows: Leaf
    page_tokens: int = field(metadata={"static": True})

    @property
    def requests(self) -> int:
        """How many requests the cache holds."""
        return self.length.shape[0]

    def map_arrays(self, request: Callable[[Leaf], Leaf], pool: Callable[[Leaf], Leaf]) -> "Cache":
        """The cache with `request` applied to arrays [B, ..] of one row a request, and `pool` to arrays [pages, ..]."""
        sources = {
            layer: SourceCache(*jax.tree.map(pool, (own.compressed, own.index_keys)), jax.tree.map(request, own.tail))
            for layer, own in self.sources.items()
        }
        own = (self.length, self.block_table, self.windows, self.engram_ids, self.draft_windows)
        length, block_table, windows, engram_ids, draft_windows = jax.tree.map(request, own)
        return Cache(length, block_table, windows, sources, engram_ids, draft_windows, self.page_tokens)


def page_unit(config: V41Config) -> int:
    """Tokens that a page holds are a multiple of this: whole groups and whole candidate blocks of every ratio."""
    return math.lcm(*(ratio * config.candidate_block_size for ratio in config.compress_ratios if ratio))


def new_cache(
    config: V41Config, numerics: Numerics, requests: int, max_tokens: int, sizes: CacheSizes = CacheSizes()
) -> Cache:
    """An empty cache for `requests` requests of up to `max_tokens` tokens each.

    ValueError if max_tokens is beyond the config's max_position_embeddings, or for sizes that do not fit.
    """
    pool = sizes.pool(requests, max_tokens, config.max_position_embeddings, page_unit(config), PAGE_TOKENS)
    plan, back = layer_plan(config), sizes.max_rollback
    window = ops.PagedRows.zeros(
        numerics.window_rows(config.head_dim).format, requests, config.sliding_window + back
    )
    return Cache(
        length=jnp.zeros((requests,), jnp.int32),
        block_table=pool.block_table,
        windows=tuple(jax.tree.map(jnp.zeros_like, window) for _ in plan),
        sources={role.index: _source(config, numerics, role, requests, pool, back) for role in plan if role.mode == "full"},
        engram_ids=jnp.full((requests, config.engram_max_ngram_size - 1 + back), NO_TOKEN, jnp.int32),
        draft_windows=tuple(jax.tree.map(jnp.zeros_like, window) for _ in draft_plan(config)),
        page_tokens=pool.page_tokens,
    )


def _source(
    config: V41Config, numerics: Numerics, role: LayerRole, requests: int, pool: Pool, max_rollback: int
) -> SourceCache:
    rows = pool.rows(role.ratio)
    tail = None
    if role.ratio > 1:
        shape = (requests, role.ratio + max_rollback, config.head_dim)
        tail = CompressorTail(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))
    return SourceCache(
        compressed=ops.PagedRows.zeros(numerics.compressed_rows(config.head_dim).format, pool.pages, rows),
        index_keys=ops.PagedRows.zeros(numerics.index_key_rows(config.index_head_dim).format, pool.pages, rows),
        tail=tail,
    )
