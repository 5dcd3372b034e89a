"""The caches of a batch of requests of V4."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dsa_jax import ops
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer's own caches: window, the ring of recent rows (PagedRows, slot = position mod window); compressed and
    index_keys, CompressedCache or None where the layer has none."""

    window: Leaf
    compressed: Leaf
    index_keys: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MTPCache:
    """What the MTP layer knows of the tokens before the last: layer, its LayerCache of one row a token.

    stream: the final stream at the last token, [B, copies, D], which waits for the token after it.
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

    @property
    def requests(self) -> int:
        """How many requests the cache holds."""
        return self.length.shape[0]


def page_tokens(config: V4Config) -> int:
    """Tokens a page holds: at least PAGE_TOKENS, and whole groups of every ratio."""
    unit = math.lcm(1, *(ratio for ratio in config.compress_ratios if ratio))
    return -(-PAGE_TOKENS // unit) * unit


def new_cache(config: V4Config, numerics: Numerics, requests: int, max_tokens: int) -> V4Cache:
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
    pages = -(-max_tokens // page_tokens(config))

    def layer(role: V4LayerRole) -> LayerCache:
        return _layer(config, numerics, role, requests, requests * pages)

    drafts = draft_plan(config)
    stream = jnp.zeros((requests, config.hc_mult, config.hidden_size), numerics.dtype)
    return V4Cache(
        length=jnp.zeros((requests,), jnp.int32),
        block_table=jnp.arange(requests * pages, dtype=jnp.int32).reshape(requests, pages),
        layers=tuple(layer(role) for role in layer_plan(config)),
        mtp=MTPCache(layer(drafts[0]), stream) if drafts and config.dspark is None else None,
        draft_windows=tuple(layer(role).window for role in drafts) if config.dspark is not None else (),
    )


def capacity(cache: V4Cache, config: V4Config) -> int:
    """How many tokens a request of `cache` may hold."""
    return cache.block_table.shape[1] * page_tokens(config)


def _layer(config: V4Config, numerics: Numerics, role: V4LayerRole, requests: int, pages: int) -> LayerCache:
    width = config.head_dim
    kv_rows = numerics.partly_rotated_rows(width, config.qk_rope_head_dim)

    def compressed(rows: CacheRows, width: int) -> CompressedCache:
        shape = (requests, tail_slots(role), (2 if role.overlap else 1) * width)
        return CompressedCache(
            rows=ops.PagedRows.zeros(rows.format, pages, page_tokens(config) // role.ratio),
            tail=CompressorTail(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)),
        )

    index_rows = numerics.index_key_rows(config.index_head_dim)
    return LayerCache(
        window=ops.PagedRows.zeros(kv_rows.format, requests, config.sliding_window),
        compressed=compressed(kv_rows, width) if role.ratio else None,
        index_keys=compressed(index_rows, config.index_head_dim) if role.mode == "indexed" else None,
    )


def tail_slots(role: V4LayerRole) -> int:
    """Recent tokens that a compressor keeps: a group, and the one before it where groups overlap."""
    return (2 if role.overlap else 1) * role.ratio
