"""The caches of V3.2: per layer, latent KV rows and index keys, both one row a token, in the same pages."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from dsa_jax import ops
from dsa_jax.cache.sizes import CacheSizes
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
    [i·page_tokens, (i+1)·page_tokens) in every layer. layers: LatentLayer of each layer. Every row stays where it is, so
    a rollback takes back any number of tokens. page_tokens is static.
    """

    length: Leaf
    block_table: Leaf
    layers: Leaf
    page_tokens: int = field(metadata={"static": True})

    @property
    def requests(self) -> int:
        """How many requests the cache holds."""
        return self.length.shape[0]

    def map_arrays(self, request: Callable[[Leaf], Leaf], pool: Callable[[Leaf], Leaf]) -> "LatentCache":
        """The cache with `request` applied to arrays [B, ..] of one row a request, and `pool` to arrays [pages, ..]."""
        layers = jax.tree.map(pool, self.layers)
        return LatentCache(request(self.length), request(self.block_table), layers, self.page_tokens)


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


def page_unit(config: V32Config) -> int:
    """Tokens that a page holds are a multiple of this."""
    return 1


def new_latent_cache(
    config: V32Config, numerics: Numerics, requests: int, max_tokens: int, sizes: CacheSizes = CacheSizes()
) -> LatentCache:
    """An empty cache for `requests` requests of up to `max_tokens` tokens each.

    ValueError if max_tokens is beyond the config's max_position_embeddings, or for sizes that do not fit.
    """
    pool = sizes.pool(requests, max_tokens, config.max_position_embeddings, page_unit(config), PAGE_TOKENS)

    def rows(record: ops.RecordFormat) -> ops.PagedRows:
        return ops.PagedRows.zeros(record, pool.pages, pool.rows(1))

    return LatentCache(
        length=jnp.zeros((requests,), jnp.int32),
        block_table=pool.block_table,
        layers=tuple(
            LatentLayer(rows(latent_format(config, numerics)), rows(index_key_format(config, numerics)))
            for _ in range(config.num_hidden_layers)
        ),
        page_tokens=pool.page_tokens,
    )
