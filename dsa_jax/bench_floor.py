"""The least time that the parts of a step can take on a chip, counted from bytes and arithmetic of a model's layers.

Every byte is read or written once at the datasheet's memory rate, every product runs at the datasheet's dense rate of the
format that the kernels compute in (index scores FP8, the rest bf16). Launches, dependences and caches are not counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pallas_kernels import platform
from pallas_kernels.case import PEAKS

PARTS = ("indexer", "selection", "attention", "experts", "rest")


@dataclass(frozen=True)
class Listed:
    """What one layer scores and attends to: `scored` keys a query row of `key_bytes` each, and lists of (rows, bytes of a
    row) that attention reads."""

    scored: int
    key_bytes: int
    attended: tuple[tuple[int, int], ...]


def layers_of(config: Any, plan: tuple[Any, ...], context: int) -> Iterator[Listed]:
    """The lists of every layer at `context` tokens, in the records of the released arithmetic."""
    index = config.index_head_dim
    for role in plan:
        if not hasattr(role, "ratio"):  # every layer scores all tokens and attends to its own latent rows
            latent = config.kv_lora_rank + config.kv_lora_rank // 128 * 4 + 2 * config.qk_rope_head_dim
            yield Listed(context, index + 4, ((min(config.index_topk, context), latent),))
            continue
        width, window = config.head_dim, min(config.sliding_window, context)
        key_bytes = index // 2 + index // 32
        visible = context // role.ratio if role.ratio else 0
        if hasattr(role, "kv_source"):
            own, kept = (window, width + width // 32), (min(config.index_topk, visible), width // 2 + width // 16)
            scored = visible if role.mode in ("full", "reindex") else 0
            if role.uses_candidates:
                scored = min(visible, config.candidate_topk_blocks * config.candidate_block_size)
            yield Listed(scored, key_bytes, (own, kept) if visible else (own,))
        else:
            plain = width - config.qk_rope_head_dim
            row = plain + 2 * config.qk_rope_head_dim + -(-(plain // 64) // 8) * 8
            listed = min(config.index_topk, visible) if role.mode == "indexed" else visible
            lists = ((window, row), (listed, row)) if visible else ((window, row),)
            yield Listed(visible if role.mode == "indexed" else 0, key_bytes, lists)


def floors_us(lm: Any, batch: int, context: int, rows: int) -> dict[str, float] | None:
    """Microseconds of every part of a step of `rows` tokens of each of `batch` requests; None where no chip is known."""
    family = platform.kernel_name()
    if family is None:
        return None
    peaks = PEAKS[family]
    work = work_of(lm, batch, context, rows)
    return {
        part: 1e6 * max(nbytes / peaks["memory"], flops / peaks["fp8" if part == "indexer" else "bf16"])
        for part, (nbytes, flops) in work.items()
    }


def work_of(lm: Any, batch: int, context: int, rows: int) -> dict[str, tuple[int, int]]:
    """(bytes, floating-point operations) of every part of a step."""
    config, queries = lm.config, batch * rows
    work = {part: [0, 0] for part in PARTS}

    def add(part: str, nbytes: int, flops: int) -> None:
        work[part][0] += nbytes
        work[part][1] += flops

    head = getattr(config, "head_dim", None) or config.kv_lora_rank + config.qk_rope_head_dim
    for layer in layers_of(config, lm.plan, context):
        if layer.scored:
            products = queries * layer.scored * config.index_n_heads * config.index_head_dim
            add("indexer", batch * layer.scored * layer.key_bytes + 4 * queries * layer.scored, 2 * products)
            add("selection", 4 * queries * (layer.scored + config.index_topk), 0)
        for listed, row in layer.attended:
            distinct = min(queries * listed, batch * context)  # rows that several queries share are read once
            products = 2 * queries * listed * config.num_attention_heads * head
            add("attention", distinct * row + 4 * queries * listed, 2 * products)
        add("attention", 4 * queries * config.num_attention_heads * head, 0)
    sizes = {name: leaf.nbytes for name, leaf in lm.parameters().items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    moe = sum(any(name.startswith(f"layers.{i}.ffn.experts.") for name in sizes) for i in range(len(lm.plan)))
    hidden, inner, chosen = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok
    touched = min(1.0, queries * chosen / config.n_routed_experts)
    add("experts", int(touched * experts), 6 * moe * queries * chosen * hidden * inner)
    dense = sum(sizes.values()) - experts - sizes["embed.weight"]
    add("rest", dense, 2 * dense * queries)  # weights of one byte a value, most of them FP8
    return {part: (nbytes, flops) for part, (nbytes, flops) in work.items()}
