"""DeepSeek-V4's config (Flash and Pro), read from the checkpoint's own config.json, and the rules it must satisfy."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from dsa_jax.config import YarnConfig
from dsa_jax.config_rules import SCORING_FUNCTIONS, Reader, refuse

OVERLAP_RATIO = 4  # the one compression ratio whose groups overlap and whose layers have an indexer

# (section or None, key, allowed values, must be there). Another value would need arithmetic that V4 does not define.
_OPTIONS = (
    (None, "hidden_act", ("silu",), True),
    (None, "topk_method", ("noaux_tc",), False),
    (None, "attention_bias", (False,), False),
    (None, "tie_word_embeddings", (False,), False),
    (None, "num_key_value_heads", (1,), False),
    (None, "expert_dtype", ("fp4",), False),
    ("quantization_config", "quant_method", ("fp8",), True),
    ("quantization_config", "fmt", ("e4m3",), False),
    ("quantization_config", "activation_scheme", ("dynamic",), False),
    ("quantization_config", "scale_fmt", ("ue8m0",), True),
)
_ATTENTION_FACTORS = ("mscale", "mscale_all_dim", "attention_factor")
_POSITIVE = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_lora_rank "
    "o_groups rms_norm_eps max_position_embeddings rope_theta compress_rope_theta n_routed_experts num_experts_per_tok "
    "moe_intermediate_size routed_scaling_factor sliding_window index_n_heads index_head_dim index_topk hc_mult "
    "hc_sinkhorn_iters hc_eps"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class V4Config:
    """DeepSeek-V4's language model. Names, units and meaning are those of the official config.json.

    Widths are in elements, ids and layer numbers 0-based, lengths in tokens. Frozen and hashable.
    Source: the official config.json of DeepSeek-V4-Flash and DeepSeek-V4-Pro.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int  # the last qk_rope_head_dim of it are rotated
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float  # 0: no clamp
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float  # layers of ratio 0, without YaRN
    compress_rope_theta: float  # layers of ratio > 0, with YaRN
    rope_scaling: YarnConfig

    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    scoring_func: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_hash_layers: int

    sliding_window: int
    compress_ratios: tuple[int, ...]  # backbone layers, then the MTP layer
    index_n_heads: int
    index_head_dim: int
    index_topk: int

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float

    num_nextn_predict_layers: int
    bos_token_id: int
    eos_token_id: int
    weight_block_size: tuple[int, ...]

    def __post_init__(self):
        refuse("This V4 config", _problems_of_values(self))

    @property
    def image_token_id(self) -> None:
        """No token stands for an image: V4 reads text."""
        return None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> "V4Config":
        """The config in the parsed config.json `raw`; `where` names it in errors.

        Raises ValueError that lists every missing key, wrong type, unsupported option and inconsistent value.
        """
        quantization = raw.get("quantization_config")
        if not isinstance(quantization, Mapping):
            refuse(where, [f"quantization_config is {'missing' if quantization is None else 'not an object'}"])
        reader = Reader()
        values = {
            field.name: reader.read(raw, field.name, field.type)
            for field in dataclasses.fields(cls)
            if field.name not in ("rope_scaling", "weight_block_size")
        }
        values["rope_scaling"] = reader.read_object(
            raw, "rope_scaling", {f.name: f.type for f in dataclasses.fields(YarnConfig)}, ""
        )
        values["weight_block_size"] = reader.read(
            quantization, "weight_block_size", tuple[int, ...], "quantization_config."
        )
        problems = reader.all_problems() + _unsupported_options(raw)
        if not reader.all_problems():
            values["rope_scaling"] = YarnConfig(**values["rope_scaling"])
            problems += _problems_of_values(types.SimpleNamespace(**values))
        refuse(where, problems)
        return cls(**values)


def _unsupported_options(raw: Mapping[str, Any]) -> list[str]:
    """Options of the parsed config.json `raw` whose value this model does not carry."""
    problems = []
    for section_name, key, allowed, needed in _OPTIONS:
        section = raw if section_name is None else raw[section_name]
        name, listed = key if section_name is None else f"{section_name}.{key}", ", ".join(map(repr, allowed))
        if key not in section:
            if needed:
                problems.append(f"{name} is missing; allowed: {listed}")
        elif section[key] not in allowed or type(section[key]) is not type(allowed[0]):
            problems.append(f"{name} = {section[key]!r} is not supported; allowed: {listed}")
    rope = raw.get("rope_scaling")
    if isinstance(rope, Mapping):
        kind = rope.get("rope_type", rope.get("type"))
        if kind != "yarn":
            problems.append(f"rope_scaling.type = {kind!r} is not supported; allowed: 'yarn'")
        problems += [
            f"rope_scaling.{key} is set, but V4 scales attention by head_dim^-0.5 alone"
            for key in _ATTENTION_FACTORS
            if rope.get(key) is not None
        ]
    if any(key.startswith("dspark_") for key in raw):
        problems.append(
            "the dspark_ keys announce DSpark draft stages, which are carried for V4.1 only; use a revision of the "
            "checkpoint with the one-layer MTP head (num_nextn_predict_layers = 1 without dspark_ keys)"
        )
    return problems


def _problems_of_values(c: Any) -> list[str]:
    """Sentences about values of the config `c` that are out of range or do not fit together."""
    problems = [
        f"{name} = {getattr(c, name)} must be positive" for name in _POSITIVE.split() if getattr(c, name) <= 0
    ]
    problems += [
        f"rope_scaling.{name} = {getattr(c.rope_scaling, name)} must be positive"
        for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
        if getattr(c.rope_scaling, name) <= 0
    ]
    if len(c.weight_block_size) != 2 or any(size <= 0 for size in c.weight_block_size):
        problems.append(f"weight_block_size = {list(c.weight_block_size)} must be two positive numbers")
    return problems or [*_widths(c), *_experts(c), *_layers(c)]


def _widths(c: Any) -> list[str]:
    problems = []
    if c.rope_scaling.beta_fast < c.rope_scaling.beta_slow:
        problems.append(
            f"rope_scaling.beta_fast = {c.rope_scaling.beta_fast} must not be below "
            f"beta_slow = {c.rope_scaling.beta_slow}"
        )
    group = c.weight_block_size[1]
    if group not in (32, 64, 128):
        problems.append(f"weight_block_size = {list(c.weight_block_size)}: tiles of 32, 64 or 128 columns are carried")
    else:  # linear inputs are quantised in groups as wide as a tile
        for name in ("hidden_size", "q_lora_rank", "moe_intermediate_size"):
            if getattr(c, name) % group:
                problems.append(f"{name} = {getattr(c, name)} must be a multiple of {group}, the quantisation group")
        if c.o_groups * c.o_lora_rank % group:
            problems.append(f"o_groups * o_lora_rank = {c.o_groups * c.o_lora_rank} must be a multiple of {group}")
    for name in ("hidden_size", "moe_intermediate_size"):
        if getattr(c, name) % 32:
            problems.append(f"{name} = {getattr(c, name)} must be a multiple of 32, the scale group of FP4 weights")
    for name in ("head_dim", "index_head_dim"):
        if c.qk_rope_head_dim > getattr(c, name):
            problems.append(f"qk_rope_head_dim = {c.qk_rope_head_dim} is wider than {name} = {getattr(c, name)}")
    if c.qk_rope_head_dim % 2:
        problems.append(f"qk_rope_head_dim = {c.qk_rope_head_dim} must be even: values rotate in pairs")
    if c.head_dim <= c.qk_rope_head_dim or (c.head_dim - c.qk_rope_head_dim) % 64:
        problems.append(
            f"head_dim - qk_rope_head_dim = {c.head_dim - c.qk_rope_head_dim} must be a positive multiple of 64, the "
            "quantisation group of cache rows"
        )
    if c.index_head_dim % 32 or c.index_head_dim & (c.index_head_dim - 1):
        problems.append(
            f"index_head_dim = {c.index_head_dim} must be a power of two of at least 32: index rows are rotated by a "
            "Hadamard matrix and quantised in groups of 32"
        )
    if c.num_attention_heads % c.o_groups:
        problems.append(f"o_groups = {c.o_groups} must divide num_attention_heads = {c.num_attention_heads}")
    for name in ("bos_token_id", "eos_token_id"):
        if not 0 <= getattr(c, name) < c.vocab_size:
            problems.append(f"{name} = {getattr(c, name)} is outside the vocabulary of {c.vocab_size}")
    return problems


def _experts(c: Any) -> list[str]:
    problems = []
    if c.scoring_func not in SCORING_FUNCTIONS:
        allowed = ", ".join(map(repr, SCORING_FUNCTIONS))
        problems.append(f"scoring_func = {c.scoring_func!r} is not supported; allowed: {allowed}")
    if c.n_shared_experts != 1:
        problems.append(f"n_shared_experts = {c.n_shared_experts} is not supported; allowed: 1")
    if not c.norm_topk_prob:
        problems.append("norm_topk_prob = false is not supported; V4 normalises the weights of the chosen experts")
    if c.num_experts_per_tok > c.n_routed_experts:
        problems.append(
            f"num_experts_per_tok = {c.num_experts_per_tok} is above n_routed_experts = {c.n_routed_experts}"
        )
    if c.swiglu_limit < 0:
        problems.append(f"swiglu_limit = {c.swiglu_limit} must not be negative (0: no clamp)")
    if not 0 <= c.num_hash_layers <= c.num_hidden_layers:
        problems.append(f"num_hash_layers = {c.num_hash_layers} is outside 0..{c.num_hidden_layers}")
    return problems


def _layers(c: Any) -> list[str]:
    ratios, layers, drafts = c.compress_ratios, c.num_hidden_layers, c.num_nextn_predict_layers
    if drafts not in (0, 1):
        return [f"num_nextn_predict_layers = {drafts} is not supported; allowed: 0, 1"]
    problems = []
    if len(ratios) != layers + drafts:
        problems.append(
            f"compress_ratios has {len(ratios)} entries; {layers} layers and {drafts} MTP layers need {layers + drafts}"
        )
    if any(ratio < 0 for ratio in ratios):
        problems.append(f"compress_ratios = {list(ratios)} has a negative entry; 0 means window only")
    if any(ratios[layers:]):
        problems.append(
            f"compress_ratios ends in {list(ratios[layers:])}; the MTP layer sees the window alone: ratio 0"
        )
    return problems
