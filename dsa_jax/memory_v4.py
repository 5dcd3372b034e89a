"""Bytes of V4's caches, computed from a config alone."""

from dsa_jax.config_v4 import V4Config
from dsa_jax.layer_plan_v4 import draft_plan, layer_plan
from dsa_jax.memory import CacheBytes, check_sizes


def cache_bytes(config: V4Config, context: int, batch: int) -> CacheBytes:
    """The caches of V4 for `batch` requests of `context` tokens. ValueError for sizes that the model does not take.

    A row of window or compressed KV takes its un-rotated values in FP8, the rotated ones in bf16, and a scale byte for
    every 64, padded to 8; an index key of width d takes d/2 + d/32 bytes.
    """
    check_sizes(config, context, batch)
    plain, rotated, index = config.head_dim - config.qk_rope_head_dim, config.qk_rope_head_dim, config.index_head_dim
    row = plain + 2 * rotated + -(-(plain // 64) // 8) * 8
    index_row = index // 2 + index // 32
    plan, drafts = layer_plan(config), draft_plan(config)
    compressed, indexed = [r for r in plan if r.ratio], [r for r in plan if r.mode == "indexed"]

    def tails(roles, width: int) -> int:
        """Float32 values and gates of the open group, and of the one before it where groups overlap."""
        return sum(2 * 4 * r.ratio * width * (4 if r.overlap else 1) for r in roles)

    parts = {
        "window rows": len(plan) * config.sliding_window * row,
        "compressed KV": sum(context // r.ratio for r in compressed) * row,
        "index keys": sum(context // r.ratio for r in indexed) * index_row,
        "open groups": tails(compressed, config.head_dim) + tails(indexed, index),
        "draft window rows": len(drafts) * config.sliding_window * row,
        "draft streams": (len(drafts) if config.dspark is None else 0) * config.hc_mult * config.hidden_size * 2,
    }
    per_token = sum(row / r.ratio for r in compressed) + sum(index_row / r.ratio for r in indexed)
    return CacheBytes(batch, context, per_token, {part: size * batch for part, size in parts.items()})
