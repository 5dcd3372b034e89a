"""DeepSeek-V3.2's config (V3.2-Exp included) and its rules."""

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any

from dsa_jax.config import YarnConfig
from dsa_jax.config_rules import Reader, refuse

# (key, allowed values). Another value would need arithmetic that V3.2 does not define. An absent key is not refused
# here: where it matters, V32Config reads it and reports it as missing.
_OPTIONS = (
    ("hidden_act", ("silu",)),
    ("attention_bias", (False,)),
    ("tie_word_embeddings", (False,)),
    ("moe_layer_freq", (1,)),
    ("n_shared_experts", (1,)),
    ("scoring_func", ("sigmoid",)),
    ("topk_method", ("noaux_tc",)),
    ("norm_topk_prob", (True,)),
)
_QUANTIZATION = (
    ("quant_method", ("fp8",)),
    ("fmt", ("e4m3",)),
    ("activation_scheme", ("dynamic",)),
    ("scale_fmt", ("ue8m0",)),
)
_BLOCK = (128, 128)
_INDEX_WIDTHS = (32, 64, 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class V32Yarn(YarnConfig):
    """`rope_scaling` of a V3.2 config: YaRN's frequency interpolation, and the magnitude that scales attention."""

    mscale: float
    mscale_all_dim: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class V32Config:
    """DeepSeek-V3.2. Names, units and meaning are those of the official config.json.

    Widths are in elements, lengths in tokens. Frozen and hashable. Source: the official config.json of DeepSeek-V3.2.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    first_k_dense_replace: int  # the first layers, with a dense feed-forward of intermediate_size
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: V32Yarn

    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    index_n_heads: int
    index_head_dim: int
    index_topk: int

    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    moe_intermediate_size: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float

    num_nextn_predict_layers: int
    bos_token_id: int
    eos_token_id: int
    weight_block_size: tuple[int, ...]

    def __post_init__(self):
        refuse("This V3.2 config", _problems_of_values(self))

    @property
    def yarn(self) -> V32Yarn | None:
        """YaRN where the model takes more positions than it was first trained for, else None."""
        beyond = self.max_position_embeddings > self.rope_scaling.original_max_position_embeddings
        return self.rope_scaling if beyond else None

    @property
    def attention_scale(self) -> float:
        """What multiplies q·k: (nope + rope width)^-0.5, times the squared magnitude where there is YaRN."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if self.yarn is None:
            return scale
        return scale * (0.1 * self.yarn.mscale * math.log(self.yarn.factor) + 1) ** 2

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> "V32Config":
        """The config in the parsed config.json `raw`; `where` names it in errors.

        Raises ValueError that lists every missing key, wrong type, unsupported option and inconsistent value.
        """
        quantization = raw.get("quantization_config")
        if not isinstance(quantization, Mapping):
            refuse(where, [f"quantization_config is {'missing' if quantization is None else 'not an object'}"])
        reader, values = Reader(), {}
        elsewhere = {"rope_scaling", "weight_block_size"}
        for field in dataclasses.fields(cls):
            if field.name not in elsewhere:
                values[field.name] = reader.read(raw, field.name, field.type)
        kinds = {field.name: field.type for field in dataclasses.fields(V32Yarn)}
        values["rope_scaling"] = reader.read_object(raw, "rope_scaling", kinds, "")
        values["weight_block_size"] = reader.read(
            quantization, "weight_block_size", tuple[int, ...], "quantization_config."
        )
        problems = reader.all_problems() + _unsupported_options(raw, quantization)
        if not reader.all_problems():
            values["rope_scaling"] = V32Yarn(**values["rope_scaling"])
            problems += _problems_of_values(types.SimpleNamespace(**values))
        refuse(where, list(dict.fromkeys(problems)))
        return cls(**values)


def _unsupported_options(raw: Mapping[str, Any], quantization: Mapping[str, Any]) -> list[str]:
    problems = []
    for section, prefix, options in ((raw, "", _OPTIONS), (quantization, "quantization_config.", _QUANTIZATION)):
        for key, allowed in options:
            if key in section and (section[key] not in allowed or type(section[key]) is not type(allowed[0])):
                problems.append(_unsupported(prefix + key, section[key], allowed))
    for key in ("quant_method", "scale_fmt"):
        if key not in quantization:
            problems.append(f"missing, and there is no safe default: quantization_config.{key}")
    rope = raw.get("rope_scaling")
    if isinstance(rope, Mapping) and rope.get("type", rope.get("rope_type")) != "yarn":
        problems.append(_unsupported("rope_scaling.type", rope.get("type", rope.get("rope_type")), ("yarn",)))
    return problems


def _unsupported(name: str, value: Any, allowed: tuple) -> str:
    return f"{name} = {value!r} is not supported; allowed: {', '.join(map(repr, allowed))}"


def _problems_of_values(c: Any) -> list[str]:
    """Sentences about values of the config `c` that are out of range or do not fit together."""
    problems = [
        f"{name} = {getattr(c, name)} must be positive"
        for name in (
            "vocab_size hidden_size num_hidden_layers intermediate_size rms_norm_eps max_position_embeddings rope_theta "
            "num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim index_n_heads "
            "index_head_dim index_topk n_routed_experts num_experts_per_tok n_group topk_group moe_intermediate_size "
            "routed_scaling_factor"
        ).split()
        if getattr(c, name) <= 0
    ]
    for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "mscale"):
        if getattr(c.rope_scaling, name) <= 0:
            problems.append(f"rope_scaling.{name} = {getattr(c.rope_scaling, name)} must be positive")
    if problems:
        return problems
    return [*_options_of_values(c), *_widths(c), *_experts(c)]


def _options_of_values(c: Any) -> list[str]:
    given = [(name, getattr(c, name), allowed) for name, allowed in _OPTIONS if hasattr(c, name)]
    problems = [_unsupported(name, value, allowed) for name, value, allowed in given if value not in allowed]
    yarn = c.rope_scaling
    if yarn.factor < 1:
        problems.append(f"rope_scaling.factor = {yarn.factor} must be at least 1")
    if yarn.beta_fast < yarn.beta_slow:
        problems.append(f"rope_scaling.beta_fast = {yarn.beta_fast} must not be below beta_slow = {yarn.beta_slow}")
    if yarn.mscale != yarn.mscale_all_dim:
        problems.append(
            f"rope_scaling.mscale = {yarn.mscale} and mscale_all_dim = {yarn.mscale_all_dim} differ: the rotation itself "
            "would be scaled, which V3.2 does not do"
        )
    if tuple(c.weight_block_size) != _BLOCK:
        problems.append(
            f"weight_block_size = {list(c.weight_block_size)} is not supported; allowed: {list(_BLOCK)}, the group that "
            "activations are quantised in"
        )
    for name in ("bos_token_id", "eos_token_id"):
        if not 0 <= getattr(c, name) < c.vocab_size:
            problems.append(f"{name} = {getattr(c, name)} is outside the vocabulary of {c.vocab_size}")
    if c.num_nextn_predict_layers < 0:
        problems.append(f"num_nextn_predict_layers = {c.num_nextn_predict_layers} must not be negative")
    return problems


def _widths(c: Any) -> list[str]:
    """Inputs of FP8 linears, and the latent row, are cut into groups of 128; rotations and Hadamard need pairs."""
    problems = []
    grouped = {name: getattr(c, name) for name in ("hidden_size", "q_lora_rank", "kv_lora_rank", "moe_intermediate_size")}
    grouped["num_attention_heads * v_head_dim"] = c.num_attention_heads * c.v_head_dim
    if c.first_k_dense_replace:
        grouped["intermediate_size"] = c.intermediate_size
    for name, value in grouped.items():
        if value % _BLOCK[1]:
            problems.append(f"{name} = {value} must be a multiple of {_BLOCK[1]}, the quantisation group")
    if c.index_head_dim not in _INDEX_WIDTHS:
        problems.append(_unsupported("index_head_dim", c.index_head_dim, _INDEX_WIDTHS))
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > c.index_head_dim:
        problems.append(
            f"qk_rope_head_dim = {c.qk_rope_head_dim} must be even, and not above index_head_dim = {c.index_head_dim}"
        )
    return problems


def _experts(c: Any) -> list[str]:
    if not 0 <= c.first_k_dense_replace <= c.num_hidden_layers:
        return [f"first_k_dense_replace = {c.first_k_dense_replace} is outside 0..{c.num_hidden_layers}"]
    if c.n_routed_experts % c.n_group:
        return [f"n_group = {c.n_group} must divide n_routed_experts = {c.n_routed_experts}"]
    problems, size = [], c.n_routed_experts // c.n_group
    if size < 2 and c.n_group > 1:
        problems.append(f"n_group = {c.n_group} makes groups of {size} expert; a group is scored by its two best")
    if c.topk_group > c.n_group:
        problems.append(f"topk_group = {c.topk_group} is above n_group = {c.n_group}")
    elif c.num_experts_per_tok > c.topk_group * size:
        problems.append(
            f"num_experts_per_tok = {c.num_experts_per_tok} is above the {c.topk_group * size} experts of the topk_group = "
            f"{c.topk_group} groups kept"
        )
    return problems
