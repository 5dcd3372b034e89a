"""Bytes: of a checkpoint by part, of the caches for a context, of one device among several.

Computed from a config and tensor sizes alone; nothing is allocated. All numbers are bytes.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsa_jax import ops
from dsa_jax.config import ModelConfig, V41Config
from dsa_jax.config_v32 import V32Config
from dsa_jax.layer_plan import draft_plan, layer_plan
from dsa_jax.layers.moe import stored_tiling, tiling
from dsa_jax.sharding import logical_axes
from dsa_jax.weights import names

LEFT_OUT = "vision (left out)"
DRAFT_LEFT_OUT = "draft (left out)"

# Part of the model by official tensor name; the first pattern that matches decides.
_PARTS = tuple(
    (re.compile(pattern), part)
    for pattern, part in (
        (r"^(vision|aligner)\.", LEFT_OUT),
        (r"^mtp\.", "draft"),
        (r"\.engram\.", "engram"),
        (r"^embed\.|^image_", "embedding"),
        (r"^head\.", "head"),
        (r"\.attn\.compressor\.", "compressor"),
        (r"\.attn\.indexer\.", "indexer"),
        (r"\.ffn\.experts\.", "experts"),
        (r"\.ffn\.shared_experts\.", "shared experts"),
        (r"\.ffn\.gate\.", "router"),
        (r"\.ffn\.w\d\.", "dense feed-forward"),
        (r"\.hc_(attn|ffn)_|^hc_head_", "mHC"),
        (r"\.attn\.", "attention"),
        (r"norm\.weight$", "norms"),
    )
)
OTHER = "other"
SCORE_BYTES = 512 << 20
"""Most bytes of index scores at one time, with the copies that a selection makes of them: what `ops.select` allows itself
with kernels. With references it takes an eighth of that. One row is scored whole, whatever it takes."""
_NUMBER = re.compile(r"\d+")  # layers and experts: names that differ only there are of one kind

# The config's count of whole units of a tensor that several devices divide, by its official name; first match.
_UNITS = tuple(
    (re.compile(pattern), unit)
    for pattern, unit in (
        (r"^mtp\..*\.ffn\.experts\.", "dspark_n_routed_experts"),
        (r"\.ffn\.experts\.", "n_routed_experts"),
        (r"\.indexer\.", "index_n_heads"),
        (r"\.attn\.wo_[ab]\.", "o_groups"),
        (r"\.attn\.", "num_attention_heads"),
        (r"", "vocab_size"),
    )
)
_ENGRAM_TABLE = re.compile(r"^layers\.(\d+)\.engram\.embed\.")


@dataclasses.dataclass(frozen=True)
class CacheBytes:
    """The caches of `batch` requests of `context` tokens each, in the records of the released arithmetic.

    per_token is what one more token adds to one request.
    """

    batch: int
    context: int
    per_token: float
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @staticmethod
    def is_paged(part: str) -> bool:
        """Whether a part lies in pages, which several devices may divide by context."""
        return part in ("compressed KV", "latent KV", "index keys")


def part_of(name: str) -> str:
    """The part of the model that the tensor of official name `name` belongs to."""
    return _part_of_kind(_NUMBER.sub("0", name))


@functools.cache
def _part_of_kind(kind: str) -> str:
    return next((part for pattern, part in _PARTS if pattern.search(kind)), OTHER)


def part_names() -> tuple[str, ...]:
    """All parts in the order of the tables."""
    order = ("embedding", "attention", "compressor", "indexer", "experts", "shared experts", "dense feed-forward", "router")
    return (*order, "mHC", "norms", "engram", "draft", "head", LEFT_OUT, DRAFT_LEFT_OUT, OTHER)


def cache_bytes(config: V41Config, context: int, batch: int) -> CacheBytes:
    """The caches of V4.1 for `batch` requests of `context` tokens. ValueError for sizes that the model does not take.

    Rows of width d: window d + d/32 (MXFP8), compressed d/2 + d/16 (NVFP4), index key d/2 + d/32 (MXFP4).
    """
    check_sizes(config, context, batch)
    width, index = config.head_dim, config.index_head_dim
    window_row, compressed_row, index_row = width + width // 32, width // 2 + width // 16, index // 2 + index // 32
    plan = layer_plan(config)
    ratios = [role.ratio for role in plan if role.mode == "full"]
    rows = sum(context // ratio for ratio in ratios)
    parts = {
        "window rows": len(plan) * config.sliding_window * window_row,
        "compressed KV": rows * compressed_row,
        "index keys": rows * index_row,
        # Keys and gates of a group's tokens until it is complete, float32.
        "open groups": sum(2 * ratio * width * 4 for ratio in ratios if ratio > 1),
        "Engram ids": 4 * (config.engram_max_ngram_size - 1) if config.engram_layer_ids else 0,
        "draft window rows": len(draft_plan(config)) * config.sliding_window * window_row,
    }
    per_token = sum((compressed_row + index_row) / ratio for ratio in ratios)
    return CacheBytes(batch, context, per_token, {part: size * batch for part, size in parts.items()})


def latent_cache_bytes(config: V32Config, context: int, batch: int) -> CacheBytes:
    """The caches of V3.2 for `batch` requests of `context` tokens. ValueError for sizes that the model does not take.

    A latent row takes its FP8 values, 4 bytes for every 128 of them, and the rotated key in bf16; an index key its FP8
    values and 4 bytes.
    """
    check_sizes(config, context, batch)
    latent_row = config.kv_lora_rank + config.kv_lora_rank // 128 * 4 + 2 * config.qk_rope_head_dim
    rows = {"latent KV": latent_row, "index keys": config.index_head_dim + 4}
    layers = config.num_hidden_layers
    parts = {part: layers * size * context * batch for part, size in rows.items()}
    return CacheBytes(batch, context, float(layers * sum(rows.values())), parts)


def check_sizes(config: ModelConfig, context: int, batch: int) -> None:
    """ValueError for a context or batch that a model of this config does not take."""
    if not 1 <= context <= config.max_position_embeddings:
        raise ValueError(
            f"context = {context} is outside 1..{config.max_position_embeddings} (max_position_embeddings)."
        )
    if batch < 1:
        raise ValueError(f"batch = {batch} must be at least 1.")


def weights_per_device(config: Any, sizes: Iterable[tuple[str, int]], devices: Sequence[int]) -> dict[int, int]:
    """Number of devices -> bytes of weights on the fullest of them. sizes: official tensor names and their bytes.

    Experts, heads, vocabulary rows and Engram rows are divided, whole units at a time; the rest is on every device.
    Tensors that are not loaded do not count.
    """
    kinds: collections.Counter[str] = collections.Counter()
    examples: dict[str, str] = {}
    for name, size in sizes:
        kind = name if ".engram." in name else _NUMBER.sub("0", name)
        kinds[kind] += size
        examples.setdefault(kind, name)
    divided: collections.Counter[int] = collections.Counter()
    for kind, size in kinds.items():
        if part_of(kind) != LEFT_OUT:
            divided[_units(config, examples[kind])] += size
    return {count: sum(-(-size * -(-units // count) // units) for units, size in divided.items()) for count in devices}


def _units(config: Any, name: str) -> int:
    """Into how many equal parts a tensor can be divided among devices; 1: it is replicated."""
    table = _ENGRAM_TABLE.match(name)
    if table is not None and int(table[1]) in config.engram_layer_ids:
        return config.engram_num_embeddings[config.engram_layer_ids.index(int(table[1]))]
    if not logical_axes(names.target(name).path):
        return 1
    return next(getattr(config, unit) for pattern, unit in _UNITS if pattern.search(name) and hasattr(config, unit))


def human(size: int | float) -> str:
    """`size` bytes with a binary unit."""
    units = ("B", "KiB", "MiB", "GiB")
    step = 0
    while size >= 1024 and step < len(units) - 1:
        size, step = size / 1024, step + 1
    return f"{size:,.2f} {units[step]}" if step else f"{size:.0f} B"


def index_score_bytes(config: Any, rows: int, context: int) -> int:
    """Bytes of the indexer's float32 scores of `rows` query rows over all that they see of `context` tokens.

    What the whole matrix would take: 4 GiB for 8,192 rows of 131,072 positions. Steps are cut so that it never exists.
    """
    ratio = min((r for r in getattr(config, "compress_ratios", (1,)) if r), default=context + 1)
    return 4 * rows * (context // ratio)


def row_width(config: Any) -> int:
    """Values of a row that attention reads."""
    return getattr(config, "head_dim", None) or config.kv_lora_rank + config.qk_rope_head_dim


def prefill_row_bytes(config: Any, context: int) -> int:
    """About what one query row takes while a step runs: scores with the keys and copies that the selection makes of them,
    the residual stream's copies before and after a layer, queries and outputs of all heads, hidden rows of the experts."""
    stream = 3 * 4 * getattr(config, "hc_mult", 1) * config.hidden_size
    heads = 3 * 4 * config.num_attention_heads * row_width(config)
    experts = 3 * 4 * config.num_experts_per_tok * config.moe_intermediate_size
    return 3 * index_score_bytes(config, 1, context) + stream + heads + experts


def step_bytes(config: Any, rows: int, context: int, logits: int) -> int:
    """About what a step of `rows` query rows takes while it runs, beside weights, caches and what experts take.

    As `prefill_row_bytes` counts a row, but of scores no more than exist at one time; and `logits` rows of logits, twice
    more for what sampling makes of them.
    """
    scores = 3 * index_score_bytes(config, 1, context)
    others = prefill_row_bytes(config, context) - scores
    return min(rows * scores, max(SCORE_BYTES, scores)) + rows * others + 3 * 4 * logits * config.vocab_size


def expert_bytes(config: Any, rows: int, itemsize: int, stored: bool, ways: int = 1) -> int:
    """Bytes of one layer's routed experts in a step of `rows` query rows, in values of `itemsize` bytes: the rows of all tiles,
    with gate and up or with the result, and, unless they are multiplied by as they are `stored`, dequantised weights.

    ways: among how many devices, all with these rows, experts are divided.
    """
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    pairs, experts = rows * config.num_experts_per_tok, -(-config.n_routed_experts // ways)
    tile, tiles = stored_tiling(rows, pairs, experts, ways) if stored else tiling(rows, pairs, experts)
    held, weight = tiles * tile * (hidden + max(hidden, 2 * inner)) * itemsize, hidden * inner * itemsize
    return held if stored else held + weight * min(tiles, max(1, ops.DEQUANTIZED_BYTES // weight))
