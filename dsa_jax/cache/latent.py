"""The caches of V3.2: per layer, latent KV rows and index keys, both one row a token, in the same pages."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dsa_jax import ops
from dsa_jax.config_v32 import V32Config
from dsa_jax.numerics import Numerics
from dsa_jax.pytree import Leaf

PAGE_TOKENS = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentLayer:
    """One layer's rows (PagedRows): latent [c | rotated key], and index keys."""

    latent: Leaf
    index_keys: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """All state of B requests between steps.

    length: tokens held, int32 [B]. block_table: page ids of each request, int32 [B, M]; page i of the table holds tokens
    [64 i, 64 (i + 1)) in every layer. layers: LatentLayer of each layer.
    """

    length: Leaf
    block_table: Leaf
    layers: Leaf

    @property
    def requests(self) -> int:
        """How many requests the cache holds."""
        return self.length.shape[0]


def latent_format(config: V32Config, numerics: Numerics) -> ops.RecordFormat:
    """Latent rows: 656 bytes at widths 512 + 64 in bf16, where a quantised latent fits exactly; float32 otherwise."""
    if numerics.dtype == jnp.bfloat16:
        return ops.V32(config.kv_lora_rank, config.qk_rope_head_dim)
    return ops.Plain(config.kv_lora_rank + config.qk_rope_head_dim, numerics.dtype)


def index_key_format(config: V32Config, numerics: Numerics) -> ops.RecordFormat:
    """Index keys: FP8 with one scale a row, 132 bytes at width 128, in bf16; float32 otherwise."""
    if numerics.dtype == jnp.bfloat16:
        return ops.IndexFP8(config.index_head_dim)
    return ops.Plain(config.index_head_dim, numerics.dtype)


def new_latent_cache(config: V32Config, numerics: Numerics, requests: int, max_tokens: int) -> LatentCache:
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
    pages = -(-max_tokens // PAGE_TOKENS)

    def rows(record: ops.RecordFormat) -> ops.PagedRows:
        return ops.PagedRows.zeros(record, requests * pages, PAGE_TOKENS)

    return LatentCache(
        length=jnp.zeros((requests,), jnp.int32),
        block_table=jnp.arange(requests * pages, dtype=jnp.int32).reshape(requests, pages),
        layers=tuple(
            LatentLayer(rows(latent_format(config, numerics)), rows(index_key_format(config, numerics)))
            for _ in range(config.num_hidden_layers)
        ),
    )


def latent_capacity(cache: LatentCache, config: V32Config) -> int:
    """How many tokens a request of `cache` may hold."""
    return min(cache.block_table.shape[1] * PAGE_TOKENS, config.max_position_embeddings)
