"""The tensors of an official DeepSeek-V3.2 checkpoint, from its config alone: names, stored dtypes, stored shapes.

Names are those of DeepSeek's inference code, which are our parameters'; `file_name` gives those in the files. Source: the
published DeepSeek-V3.2 checkpoint.
"""

import math
import re
from collections.abc import Iterator

from dsa_jax.config_v32 import V32Config
from dsa_jax.layer_plan_v32 import latent_plan
from dsa_jax.weights.official import TensorSpec

_Named = Iterator[tuple[str, TensorSpec]]

# (pattern, replacement), applied in order: the way back from `names.official_name`.
_FILE_NAMES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^head\.", "lm_head."),
        (r"^embed\.", "model.embed_tokens."),
        (r"^(layers|norm)\.", r"model.\1."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.attn\.wq_a\.", ".attn.q_a_proj."),
        (r"\.attn\.q_norm\.", ".attn.q_a_layernorm."),
        (r"\.attn\.wq_b\.", ".attn.q_b_proj."),
        (r"\.attn\.wkv_a\.", ".attn.kv_a_proj_with_mqa."),
        (r"\.attn\.kv_norm\.", ".attn.kv_a_layernorm."),
        (r"\.attn\.wkv_b\.", ".attn.kv_b_proj."),
        (r"\.attn\.wo\.", ".attn.o_proj."),
        (r"\.attn\.", ".self_attn."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
        (r"\.ffn\.", ".mlp."),
        (r"\.scale$", ".weight_scale_inv"),
    )
)


def file_name(name: str) -> str:
    """The name in the official files of the tensor that the inference code calls `name`."""
    for pattern, replacement in _FILE_NAMES:
        name = pattern.sub(replacement, name)
    return name


def official_tensors(config: V32Config) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint, the MTP layers' included, layer by layer."""
    width, vocab = config.hidden_size, config.vocab_size
    tensors = {"embed.weight": TensorSpec("BF16", (vocab, width))}
    for role in latent_plan(config):
        tensors.update(_layer(config, f"layers.{role.index}.", role.ffn == "dense"))
    for stage in range(config.num_nextn_predict_layers):
        prefix = f"layers.{config.num_hidden_layers + stage}."
        tensors.update(_layer(config, prefix, False))
        tensors |= {
            f"{prefix}eh_proj.weight": TensorSpec("BF16", (width, 2 * width)),
            f"{prefix}enorm.weight": TensorSpec("F32", (width,)),
            f"{prefix}hnorm.weight": TensorSpec("F32", (width,)),
            f"{prefix}embed_tokens.weight": TensorSpec("BF16", (vocab, width)),
            f"{prefix}shared_head.norm.weight": TensorSpec("F32", (width,)),
            f"{prefix}shared_head.head.weight": TensorSpec("BF16", (vocab, width)),
        }
    tensors["norm.weight"] = TensorSpec("F32", (width,))
    tensors["head.weight"] = TensorSpec("BF16", (vocab, width))
    return tensors


def _fp8(config: V32Config, name: str, out: int, width: int) -> _Named:
    """An FP8 linear and the float scales of its tiles; edge tiles may be partial."""
    rows, columns = config.weight_block_size
    yield f"{name}.weight", TensorSpec("F8_E4M3", (out, width))
    yield f"{name}.scale", TensorSpec("F32", (math.ceil(out / rows), math.ceil(width / columns)))


def _feed_forward(config: V32Config, prefix: str, inner: int) -> _Named:
    width = config.hidden_size
    for name, out, columns in (("w1", inner, width), ("w2", width, inner), ("w3", inner, width)):
        yield from _fp8(config, prefix + name, out, columns)


def _layer(config: V32Config, prefix: str, dense: bool) -> _Named:
    width, heads, q_latent, latent = config.hidden_size, config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    attention, index = prefix + "attn.", config.index_head_dim
    for name in ("attn_norm", "ffn_norm"):
        yield f"{prefix}{name}.weight", TensorSpec("F32", (width,))
    yield from _fp8(config, attention + "wq_a", q_latent, width)
    yield f"{attention}q_norm.weight", TensorSpec("F32", (q_latent,))
    yield from _fp8(config, attention + "wq_b", heads * (nope + rope), q_latent)
    yield from _fp8(config, attention + "wkv_a", latent + rope, width)
    yield f"{attention}kv_norm.weight", TensorSpec("F32", (latent,))
    yield from _fp8(config, attention + "wkv_b", heads * (nope + value), latent)
    yield from _fp8(config, attention + "wo", width, heads * value)
    yield from _fp8(config, attention + "indexer.wq_b", config.index_n_heads * index, q_latent)
    yield from _fp8(config, attention + "indexer.wk", index, width)
    for name in ("weight", "bias"):
        yield f"{attention}indexer.k_norm.{name}", TensorSpec("F32", (index,))
    yield f"{attention}indexer.weights_proj.weight", TensorSpec("BF16", (config.index_n_heads, width))

    if dense:
        yield from _feed_forward(config, prefix + "ffn.", config.intermediate_size)
        return
    yield f"{prefix}ffn.gate.weight", TensorSpec("BF16", (config.n_routed_experts, width))
    yield f"{prefix}ffn.gate.bias", TensorSpec("F32", (config.n_routed_experts,))
    inner = config.moe_intermediate_size
    yield from _feed_forward(config, prefix + "ffn.shared_experts.", inner * config.n_shared_experts)
    for expert in range(config.n_routed_experts):
        yield from _feed_forward(config, f"{prefix}ffn.experts.{expert}.", inner)
