"""The tensors of an official DeepSeek-V4 checkpoint, from its config alone: names, stored dtypes, stored shapes.

Source: the published DeepSeek-V4-Flash, DeepSeek-V4-Flash-0731 and DeepSeek-V4-Pro checkpoints.
"""

from dsa_jax.config_v4 import V4Config
from dsa_jax.layer_plan_v4 import V4LayerRole, draft_plan, layer_plan
from dsa_jax.weights.official import Named, TensorSpec, attention_block, expert_linears, fp8_linear


def official_tensors(config: V4Config) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint, in the order of the official shards."""
    width, vocab = config.hidden_size, config.vocab_size
    tensors: dict[str, TensorSpec] = {"embed.weight": TensorSpec("BF16", (vocab, width))}
    for role in layer_plan(config):
        tensors.update(_layer(config, f"layers.{role.index}.", role))
    tensors["head.weight"] = TensorSpec("BF16", (vocab, width))
    tensors["norm.weight"] = TensorSpec("BF16", (width,))
    tensors.update(_stream_head(config, ""))
    for stage, role in enumerate(draft_plan(config)):
        prefix = f"mtp.{stage}."
        tensors.update(_layer(config, prefix, role))
        tensors.update(_mtp(config, prefix) if config.dspark is None else _stage(config, prefix, stage))
    return tensors


def _mtp(config: V4Config, prefix: str) -> Named:
    """What an MTP layer has beside a layer's tensors."""
    width = config.hidden_size
    for name in ("e_proj", "h_proj"):
        yield from fp8_linear(config, prefix + name, width, width)
    for name in ("enorm", "hnorm", "norm"):
        yield f"{prefix}{name}.weight", TensorSpec("BF16", (width,))
    yield from _stream_head(config, prefix)


def _stage(config: V4Config, prefix: str, stage: int) -> Named:
    """What the first and the last DSpark stage have beside a layer's tensors."""
    width, rank = config.hidden_size, config.dspark.markov_rank
    if stage == 0:
        yield from fp8_linear(config, prefix + "main_proj", width, len(config.dspark.target_layer_ids) * width)
        yield f"{prefix}main_norm.weight", TensorSpec("BF16", (width,))
    if stage == config.draft_layers - 1:
        yield f"{prefix}norm.weight", TensorSpec("BF16", (width,))
        for name in ("markov_w1", "markov_w2"):
            yield f"{prefix}markov_head.{name}.weight", TensorSpec("BF16", (config.vocab_size, rank))
        yield f"{prefix}confidence_head.proj.weight", TensorSpec("BF16", (1, width + rank))
        yield from _stream_head(config, prefix)


def _stream_head(config: V4Config, prefix: str) -> Named:
    copies = config.hc_mult
    yield f"{prefix}hc_head_fn", TensorSpec("F32", (copies, copies * config.hidden_size))
    yield f"{prefix}hc_head_base", TensorSpec("F32", (copies,))
    yield f"{prefix}hc_head_scale", TensorSpec("F32", (1,))


def _layer(config: V4Config, prefix: str, role: V4LayerRole) -> Named:
    head, attention = config.head_dim, prefix + "attn."
    yield from attention_block(config, prefix)
    if role.ratio:
        yield from _compressor(config, attention + "compressor.", role, head)
    if role.mode == "indexed":
        index, index_heads = config.index_head_dim, config.index_n_heads
        yield from fp8_linear(config, attention + "indexer.wq_b", index_heads * index, config.q_lora_rank)
        yield f"{attention}indexer.weights_proj.weight", TensorSpec("BF16", (index_heads, config.hidden_size))
        yield from _compressor(config, attention + "indexer.compressor.", role, index)

    experts = config.n_routed_experts
    yield f"{prefix}ffn.gate.weight", TensorSpec("BF16", (experts, config.hidden_size))
    if role.hash_routed:
        yield f"{prefix}ffn.gate.tid2eid", TensorSpec("I64", (config.vocab_size, config.num_experts_per_tok))
    else:
        yield f"{prefix}ffn.gate.bias", TensorSpec("F32", (experts,))
    yield from expert_linears(config, prefix, experts)


def _compressor(config: V4Config, prefix: str, role: V4LayerRole, head: int) -> Named:
    columns = 2 * head if role.overlap else head
    yield f"{prefix}ape", TensorSpec("F32", (role.ratio, columns))
    yield f"{prefix}wkv.weight", TensorSpec("BF16", (columns, config.hidden_size))
    yield f"{prefix}wgate.weight", TensorSpec("BF16", (columns, config.hidden_size))
    yield f"{prefix}norm.weight", TensorSpec("BF16", (head,))
