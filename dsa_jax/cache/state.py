"""The caches of a batch of requests."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dsa_jax import ops
from dsa_jax.config import V41Config
from dsa_jax.layer_plan import LayerRole, draft_plan, layer_plan
from dsa_jax.numerics import Numerics
from dsa_jax.pytree import Leaf

NO_TOKEN = -1  # an Engram id that cuts n-grams: before the sequence, or an image position


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CompressorTail:
    """Tokens of a group that is not complete, one slot per position mod ratio: float32 [B, ratio, d] each."""

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
    recent window rows (PagedRows), slot = position mod window. sources: SourceCache of each KV source, by layer.
    engram_ids: the newest compressed token ids in a ring, int32 [B, n]. draft_windows: the rings of the draft stages.
    """

    length: Leaf
    block_table: Leaf
    windows: Leaf
    sources: Leaf
    engram_ids: Leaf
    draft_windows: Leaf

    @property
    def requests(self) -> int:
        """How many requests the cache holds."""
        return self.length.shape[0]


def page_tokens(config: V41Config, tokens: int = 128) -> int:
    """Tokens a page holds: at least `tokens`, and whole groups and whole candidate blocks of every ratio."""
    unit = math.lcm(*(ratio * config.candidate_block_size for ratio in config.compress_ratios if ratio))
    return -(-tokens // unit) * unit


def new_cache(config: V41Config, numerics: Numerics, requests: int, max_tokens: int) -> Cache:
    """An empty cache for `requests` requests of up to `max_tokens` tokens each.

    ValueError if max_tokens is beyond the config's max_position_embeddings, or a number is not positive.
    """
    if requests < 1 or max_tokens < 1:
        raise ValueError(f"A cache for {requests} requests of {max_tokens} tokens: both must be at least 1.")
    if max_tokens > config.max_position_embeddings:
        raise ValueError(
            f"A cache of {max_tokens} tokens is longer than the {config.max_position_embeddings} positions that the "
            "checkpoint's config allows (max_position_embeddings). Ask for a shorter one."
        )
    tokens = page_tokens(config)
    pages = -(-max_tokens // tokens)
    plan = layer_plan(config)
    return Cache(
        length=jnp.zeros((requests,), jnp.int32),
        block_table=jnp.arange(requests * pages, dtype=jnp.int32).reshape(requests, pages),
        windows=tuple(_window_ring(config, numerics, requests) for _ in plan),
        sources={
            role.index: _source(config, numerics, role, requests, pages, tokens) for role in plan if role.mode == "full"
        },
        engram_ids=jnp.full((requests, config.engram_max_ngram_size - 1), NO_TOKEN, jnp.int32),
        draft_windows=tuple(_window_ring(config, numerics, requests) for _ in draft_plan(config)),
    )


def capacity(cache: Cache, config: V41Config) -> int:
    """How many tokens a request of `cache` may hold."""
    return cache.block_table.shape[1] * page_tokens(config)


def _window_ring(config: V41Config, numerics: Numerics, requests: int) -> ops.PagedRows:
    return ops.PagedRows.zeros(numerics.window_rows(config.head_dim).format, requests, config.sliding_window)


def _source(
    config: V41Config, numerics: Numerics, role: LayerRole, requests: int, pages: int, tokens: int
) -> SourceCache:
    rows = tokens // role.ratio
    tail = None
    if role.ratio > 1:
        shape = (requests, role.ratio, config.head_dim)
        tail = CompressorTail(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))
    return SourceCache(
        compressed=ops.PagedRows.zeros(numerics.compressed_rows(config.head_dim).format, requests * pages, rows),
        index_keys=ops.PagedRows.zeros(numerics.index_key_rows(config.index_head_dim).format, requests * pages, rows),
        tail=tail,
    )
