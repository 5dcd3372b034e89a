"""DeepSeek-V4's config (Flash and Pro, with either draft head), read from the checkpoint's own config.json, and its rules."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dsa_jax import config_rules as rules
from dsa_jax.config import SharedKVConfig, YarnConfig

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
_DSPARK = "dspark_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """DSpark's draft head: the config's keys that begin with dspark_, under the rest of their names.

    target_layer_ids: the layers after which the stages read the stream.
    """

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class V4Config(SharedKVConfig):
    """DeepSeek-V4's language model.

    With `dspark` the checkpoint drafts by DSpark stages, as many as compress_ratios has entries behind the layers';
    num_nextn_predict_layers then says 1 or that number. Without, by 0 or 1 MTP layers.
    Source: the official config.json of DeepSeek-V4-Flash, DeepSeek-V4-Flash-0731 and DeepSeek-V4-Pro.
    """

    num_hash_layers: int
    dspark: DSparkConfig | None

    def __post_init__(self):
        rules.refuse("This V4 config", _problems_of_values(self))

    @property
    def draft_layers(self) -> int:
        """How many layers or stages draft."""
        return len(self.compress_ratios) - self.num_hidden_layers

    @property
    def image_token_id(self) -> None:
        """No token stands for an image: V4 reads text."""
        return None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> "V4Config":
        """The config in the parsed config.json `raw`; `where` names it in errors.

        Raises ValueError that lists every missing key, wrong type, unsupported option and inconsistent value.
        """
        (quantization,) = rules.sections(raw, ("quantization_config",), where)
        reader = rules.Reader()
        values = reader.read_fields(cls, raw, ("rope_scaling", "weight_block_size", "dspark"))
        values["rope_scaling"] = reader.read_object(raw, "rope_scaling", YarnConfig)
        values["weight_block_size"] = reader.read(
            quantization, "weight_block_size", tuple[int, ...], "quantization_config."
        )
        values["dspark"] = None
        if any(key.startswith(_DSPARK) for key in raw):
            found = {
                field.name: reader.read(raw, _DSPARK + field.name, field.type)
                for field in dataclasses.fields(DSparkConfig)
            }
            values["dspark"] = DSparkConfig(**found) if None not in found.values() else None
        problems = rules.option_problems(raw, _OPTIONS)
        problems += rules.yarn_problems(raw, refused="V4 scales attention by head_dim^-0.5 alone")
        return reader.build(cls, values, where, problems, _problems_of_values)


def _problems_of_values(c: Any) -> list[str]:
    """Sentences about values of the config `c` that are out of range or do not fit together."""
    problems = rules.must_be_positive(c, rules.POSITIVE)
    if len(c.weight_block_size) != 2 or any(size <= 0 for size in c.weight_block_size):
        problems.append(f"weight_block_size = {list(c.weight_block_size)} must be two positive numbers")
    return problems or [
        *rules.model_problems(c), *rules.shared_kv_problems(c), *_widths(c), *_layers(c), *_draft(c)
    ]  # fmt: skip


def _widths(c: Any) -> list[str]:
    problems = []
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
    return problems


def _layers(c: Any) -> list[str]:
    if not 0 <= c.num_hash_layers <= c.num_hidden_layers:
        return [f"num_hash_layers = {c.num_hash_layers} is outside 0..{c.num_hidden_layers}"]
    return []


def _draft(c: Any) -> list[str]:
    drafts = c.num_nextn_predict_layers
    if c.dspark is None:
        if drafts not in (0, 1):
            return [rules.unsupported("num_nextn_predict_layers", drafts, (0, 1))]
        return rules.ratio_problems(c, drafts, "MTP layers")
    stages = len(c.compress_ratios) - c.num_hidden_layers
    if stages < 1:
        return [
            f"compress_ratios has {len(c.compress_ratios)} entries; the dspark_ keys announce draft stages, which need "
            f"entries behind those of the {c.num_hidden_layers} layers"
        ]
    problems = rules.ratio_problems(c, stages, "draft stages")
    if drafts not in (1, stages):
        problems.append(rules.unsupported("num_nextn_predict_layers", drafts, (1, stages)))
    return problems + rules.dspark_problems(c, **dataclasses.asdict(c.dspark))
