"""The tensors of an official DeepSeek-V4.1 checkpoint, from its config alone: names, stored dtypes, stored shapes.

Used where there are no files to ask: the demo checkpoint, memory plans of checkpoints not (wholly) downloaded.
Source: the published DeepSeek-V4.1-Flash checkpoint.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from dsa_jax.config import SharedKVConfig, V41Config
from dsa_jax.layer_plan import LayerRole, draft_plan, layer_plan
from dsa_jax.weights.header import DTYPES


class TensorSpec(NamedTuple):
    """dtype as in safetensors headers; shape of the stored elements (packed FP4: two values an element)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


Named = Iterator[tuple[str, TensorSpec]]
_VISION_SIZES = ("hidden_size", "intermediate_size", "patch_size", "downsample_ratio", "num_hidden_layers")


def official_tensors(config: V41Config) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint, in the order of the official shards.

    Raises ValueError where there is a vision_config without the sizes of the tower.
    """
    width, vocab = config.hidden_size, config.vocab_size
    tensors: dict[str, TensorSpec] = {}
    if config.vision_config is not None:
        tensors.update(_vision(config))
    tensors["embed.weight"] = TensorSpec("BF16", (vocab, width))
    for name in ("image_start", "image_newline", "image_end"):
        tensors[name] = TensorSpec("BF16", (width,))
    roles = layer_plan(config)
    for role in roles:
        prefix = f"layers.{role.index}."
        tensors.update(_block(config, prefix, config.n_routed_experts))
        tensors.update(_sparse(config, prefix + "attn.", role))
    tensors["head.weight"] = TensorSpec("BF16", (vocab, width))
    tensors["norm.weight"] = TensorSpec("BF16", (width,))
    for stage in range(len(draft_plan(config))):
        tensors.update(_stage(config, stage))
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        tensors.update(_engram(config, f"layers.{layer}.engram.", rows))
    return tensors


def fp8_linear(config: SharedKVConfig, name: str, out: int, width: int) -> Named:
    """An FP8 linear and the scales of its tiles; edge tiles may be partial."""
    rows, columns = config.weight_block_size
    yield f"{name}.weight", TensorSpec("F8_E4M3", (out, width))
    yield f"{name}.scale", TensorSpec("F8_E8M0", (math.ceil(out / rows), math.ceil(width / columns)))


def fp4_linear(name: str, out: int, width: int) -> Named:
    """A packed FP4 linear and its scales, one for 32 columns of a row."""
    yield f"{name}.weight", TensorSpec("I8", (out, width // 2))
    yield f"{name}.scale", TensorSpec("F8_E8M0", (out, width // 32))


def _block(config: V41Config, prefix: str, experts: int) -> Named:
    """What every layer and every draft stage has."""
    yield from attention_block(config, prefix)
    yield f"{prefix}ffn.gate.weight", TensorSpec("BF16", (experts, config.hidden_size))
    yield f"{prefix}ffn.gate.bias", TensorSpec("F32", (experts,))
    yield f"{prefix}ffn.gate.bias_vl", TensorSpec("F32", (experts,))
    yield from expert_linears(config, prefix, experts)


def attention_block(config: SharedKVConfig, prefix: str) -> Named:
    """A layer's norms, hyper-connections and attention without compressor and indexer."""
    width, copies = config.hidden_size, config.hc_mult
    mixes = (2 + copies) * copies
    for part in ("attn", "ffn"):
        yield f"{prefix}{part}_norm.weight", TensorSpec("BF16", (width,))
        yield f"{prefix}hc_{part}_fn", TensorSpec("F32", (mixes, copies * width))
        yield f"{prefix}hc_{part}_base", TensorSpec("F32", (mixes,))
        yield f"{prefix}hc_{part}_scale", TensorSpec("F32", (3,))

    heads, head, latent = config.num_attention_heads, config.head_dim, config.q_lora_rank
    out = config.o_groups * config.o_lora_rank
    attention = prefix + "attn."
    yield f"{attention}attn_sink", TensorSpec("F32", (heads,))
    yield from fp8_linear(config, attention + "wq_a", latent, width)
    yield f"{attention}q_norm.weight", TensorSpec("BF16", (latent,))
    yield from fp8_linear(config, attention + "wq_b", heads * head, latent)
    yield from fp8_linear(config, attention + "wkv", head, width)
    yield f"{attention}kv_norm.weight", TensorSpec("BF16", (head,))
    yield from fp8_linear(config, attention + "wo_a", out, heads * head // config.o_groups)
    yield from fp8_linear(config, attention + "wo_b", width, out)


def expert_linears(config: SharedKVConfig, prefix: str, experts: int) -> Named:
    """The linears of a layer's shared and routed experts."""
    width, inner = config.hidden_size, config.moe_intermediate_size
    shapes = (("w1", inner, width), ("w2", width, inner), ("w3", inner, width))
    for name, rows, columns in shapes:
        yield from fp8_linear(config, f"{prefix}ffn.shared_experts.{name}", rows, columns)
    for expert in range(experts):
        for name, rows, columns in shapes:
            yield from fp4_linear(f"{prefix}ffn.experts.{expert}.{name}", rows, columns)


def _sparse(config: V41Config, prefix: str, role: LayerRole) -> Named:
    """Compressor and indexer of the layers that own them."""
    head, index, width = config.head_dim, config.index_head_dim, config.hidden_size
    if role.mode == "full":
        yield f"{prefix}compressor.wkv.weight", TensorSpec("BF16", (head, width))
        if role.ratio > 1:
            yield f"{prefix}compressor.wgate.weight", TensorSpec("BF16", (head, width))
        yield f"{prefix}compressor.norm.weight", TensorSpec("BF16", (head,))
        yield f"{prefix}indexer.wk.weight", TensorSpec("BF16", (index, head))
        yield f"{prefix}indexer.k_norm.weight", TensorSpec("BF16", (index,))
    if role.mode in ("full", "reindex"):
        yield from fp8_linear(config, prefix + "indexer.wq_b", config.index_n_heads * index, config.q_lora_rank)
        yield f"{prefix}indexer.weights_proj.weight", TensorSpec("BF16", (config.index_n_heads, width))


def _engram(config: V41Config, prefix: str, rows: int) -> Named:
    width, copies, head = config.hidden_size, config.hc_mult, config.engram_head_dim
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads * head
    yield f"{prefix}embed.weight", TensorSpec("F8_E4M3", (rows, head))
    yield f"{prefix}embed.scale", TensorSpec("F8_E8M0", (rows, head // 32))
    yield from fp8_linear(config, prefix + "wkv", (copies + 1) * width, columns)
    yield f"{prefix}q_weight", TensorSpec("BF16", (copies, width))
    yield f"{prefix}k_weight", TensorSpec("BF16", (copies, width))


def _stage(config: V41Config, stage: int) -> Named:
    prefix, width, rank = f"mtp.{stage}.", config.hidden_size, config.dspark_markov_rank
    yield from _block(config, prefix, config.dspark_n_routed_experts)
    if stage == 0:
        yield from fp8_linear(config, prefix + "main_proj", width, len(config.dspark_target_layer_ids) * width)
        yield f"{prefix}main_norm.weight", TensorSpec("BF16", (width,))
    if stage == config.num_nextn_predict_layers - 1:
        yield f"{prefix}norm.weight", TensorSpec("BF16", (width,))
        yield f"{prefix}markov_head.embed.weight", TensorSpec("BF16", (config.vocab_size, rank))
        yield f"{prefix}markov_head.head.weight", TensorSpec("BF16", (config.vocab_size, rank))
        yield f"{prefix}confidence_head.proj.weight", TensorSpec("BF16", (1, width + rank))


def _vision(config: V41Config) -> Named:
    """The vision tower and its aligner; their tensors are recognised by size, never run here."""
    vision = config.vision_config
    missing = [key for key in _VISION_SIZES if type(vision.get(key)) is not int]
    if missing:
        raise ValueError(f"vision_config must give these sizes as integers: {', '.join(missing)}. Check config.json.")
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    patch = 3 * vision["patch_size"] ** 2
    cell = vision["downsample_ratio"] ** 2 * width
    shapes = {"vision.patch_embed.proj.weight": (width, patch), "vision.patch_embed.proj.bias": (width,)}
    for block in range(vision["num_hidden_layers"]):
        prefix = f"vision.blocks.{block}."
        shapes |= {
            f"{prefix}norm1.weight": (width,),
            f"{prefix}attn.wqkv.weight": (3 * width, width),
            f"{prefix}attn.wqkv.bias": (3 * width,),
            f"{prefix}attn.wo.weight": (width, width),
            f"{prefix}attn.wo.bias": (width,),
            f"{prefix}norm2.weight": (width,),
            f"{prefix}mlp.w1.weight": (2 * inner, width),
            f"{prefix}mlp.w2.weight": (width, inner),
        }
    shapes |= {
        "vision.norm.weight": (width,),
        "aligner.w1.weight": (config.hidden_size, cell),
        "aligner.w1.bias": (config.hidden_size,),
        "aligner.w2.weight": (config.hidden_size, config.hidden_size),
        "aligner.w2.bias": (config.hidden_size,),
    }
    for name, shape in shapes.items():
        yield name, TensorSpec("BF16", shape)
