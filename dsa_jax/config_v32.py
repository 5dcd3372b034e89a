"""DeepSeek-V3.2's config (V3.2-Exp included) and its rules."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dsa_jax import config_rules as rules
from dsa_jax.config import ModelConfig, YarnConfig

# (section or None, key, allowed values, must be there). Another value would need arithmetic that V3.2 does not define. Keys
# that V32Config reads are reported as missing there.
_OPTIONS = (
    (None, "hidden_act", ("silu",), False),
    (None, "attention_bias", (False,), False),
    (None, "tie_word_embeddings", (False,), False),
    (None, "moe_layer_freq", (1,), False),
    (None, "n_shared_experts", (1,), False),
    (None, "scoring_func", ("sigmoid",), False),
    (None, "topk_method", ("noaux_tc",), False),
    (None, "norm_topk_prob", (True,), False),
    ("quantization_config", "quant_method", ("fp8",), True),
    ("quantization_config", "fmt", ("e4m3",), False),
    ("quantization_config", "activation_scheme", ("dynamic",), False),
    ("quantization_config", "scale_fmt", ("ue8m0",), True),
)
_BLOCK = (128, 128)
_INDEX_WIDTHS = (32, 64, 128)
_POSITIVE = (
    "vocab_size hidden_size num_hidden_layers intermediate_size rms_norm_eps max_position_embeddings rope_theta "
    "num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim index_n_heads "
    "index_head_dim index_topk n_routed_experts num_experts_per_tok n_group topk_group moe_intermediate_size "
    "routed_scaling_factor"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class V32Yarn(YarnConfig):
    """`rope_scaling` of a V3.2 config: YaRN's frequency interpolation, and the magnitude that scales attention."""

    mscale: float
    mscale_all_dim: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class V32Config(ModelConfig):
    """DeepSeek-V3.2 (V3.2-Exp included). Source: the official config.json of DeepSeek-V3.2."""

    rope_scaling: V32Yarn
    first_k_dense_replace: int  # the first layers, with a dense feed-forward of intermediate_size
    intermediate_size: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    n_group: int
    topk_group: int
    topk_method: str

    def __post_init__(self):
        rules.refuse("This V3.2 config", _problems_of_values(self))

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
        (quantization,) = rules.sections(raw, ("quantization_config",), where)
        reader = rules.Reader()
        values = reader.read_fields(cls, raw, ("rope_scaling", "weight_block_size"))
        values["rope_scaling"] = reader.read_object(raw, "rope_scaling", V32Yarn)
        values["weight_block_size"] = reader.read(
            quantization, "weight_block_size", tuple[int, ...], "quantization_config."
        )
        problems = rules.option_problems(raw, _OPTIONS) + rules.yarn_problems(raw)
        return reader.build(cls, values, where, problems, _problems_of_values)


def _problems_of_values(c: Any) -> list[str]:
    """Sentences about values of the config `c` that are out of range or do not fit together."""
    problems = rules.must_be_positive(c, _POSITIVE)
    if c.rope_scaling.mscale <= 0:
        problems.append(f"rope_scaling.mscale = {c.rope_scaling.mscale} must be positive")
    return problems or [*rules.model_problems(c), *_options_of_values(c), *_widths(c), *_experts(c)]


def _options_of_values(c: Any) -> list[str]:
    given = [(name, getattr(c, name), allowed) for _, name, allowed, _ in _OPTIONS if hasattr(c, name)]
    problems = [rules.unsupported(name, value, allowed) for name, value, allowed in given if value not in allowed]
    yarn = c.rope_scaling
    if yarn.factor < 1:
        problems.append(f"rope_scaling.factor = {yarn.factor} must be at least 1")
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
        problems.append(rules.unsupported("index_head_dim", c.index_head_dim, _INDEX_WIDTHS))
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
