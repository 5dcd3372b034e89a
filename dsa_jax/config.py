"""Configs of the supported families, read from the checkpoint's own config.json.

The checkpoint's values win: a key that changes a result and is absent is an error, never a default. Everything that
is wrong with a config is said in one ValueError.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsa_jax import config_rules


class FrozenMapping(Mapping[str, Any]):
    """A read-only, hashable mapping of JSON values (lists become tuples): lets a config be a static jit argument."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = {key: _freeze(value) for key, value in values.items()}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __eq__(self, other: object) -> bool:
        return self._values == other._values if isinstance(other, FrozenMapping) else NotImplemented

    def __repr__(self) -> str:
        return f"FrozenMapping({self._values!r})"


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenMapping(value)
    if isinstance(value, list | tuple):
        return tuple(_freeze(item) for item in value)
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """`rope_scaling` of a config: YaRN's frequency interpolation. V4.1 has no attention factor (mscale) beside it."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every family's config gives. Names, units and meaning are those of the official config.json.

    Widths are in elements, ids and layer numbers 0-based, lengths in tokens. Frozen and hashable.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    qk_rope_head_dim: int
    q_lora_rank: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: YarnConfig

    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    scoring_func: str
    norm_topk_prob: bool
    routed_scaling_factor: float

    index_n_heads: int
    index_head_dim: int
    index_topk: int

    num_nextn_predict_layers: int
    bos_token_id: int
    eos_token_id: int
    weight_block_size: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedKVConfig(ModelConfig):
    """The families whose heads share one row a token as key and value: windows, compressed rows, hyper-connections.

    `rope_theta` is for layers of ratio 0, without YaRN.
    """

    head_dim: int  # the last qk_rope_head_dim of it are rotated
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float  # 0: no clamp
    compress_rope_theta: float  # layers of ratio > 0, with YaRN
    sliding_window: int
    compress_ratios: tuple[int, ...]  # backbone layers, then what drafts
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class V41Config(SharedKVConfig):
    """DeepSeek-V4.1's language model: `text_config` of the official config.json, and what stands outside of it.

    Source: the official config.json and inference config of DeepSeek-V4.1-Flash.
    """

    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int  # -1: no layer makes candidates
    candidate_topk_blocks: int
    candidate_block_size: int

    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int

    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int

    image_token_id: int
    pad_token_id: int | None
    vision_config: FrozenMapping | None

    def __post_init__(self):
        config_rules.refuse("This V4.1 config", config_rules.problems_of_values(self))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> "V41Config":
        """The config in the parsed config.json `raw`; `where` names it in errors.

        Raises ValueError that lists every missing key, wrong type, unsupported option and inconsistent value.
        """
        text, quantization = config_rules.sections(raw, ("text_config", "quantization_config"), where)
        reader = config_rules.Reader()
        outer = {"bos_token_id", "eos_token_id", "image_token_id"}
        elsewhere = {"rope_scaling", "weight_block_size", "pad_token_id", "vision_config"}
        values = reader.read_fields(cls, text, outer | elsewhere, "text_config.")
        values |= {name: reader.read(raw, name, int) for name in sorted(outer)}
        values["rope_scaling"] = reader.read_object(text, "rope_scaling", YarnConfig, "text_config.")
        values["weight_block_size"] = reader.read(
            quantization, "weight_block_size", tuple[int, ...], "quantization_config."
        )
        values["pad_token_id"] = reader.read(raw, "pad_token_id", int) if raw.get("pad_token_id") is not None else None
        vision = raw.get("vision_config")
        if vision is not None and not isinstance(vision, Mapping):
            reader.problems.append("vision_config is not an object")
        values["vision_config"] = FrozenMapping(vision) if isinstance(vision, Mapping) else None
        return reader.build(cls, values, where, config_rules.unsupported_options(raw), config_rules.problems_of_values)


def _families() -> dict[str, Any]:
    """model_type -> config class. The other families' files take what they share from this one."""
    from dsa_jax.config_v4 import V4Config
    from dsa_jax.config_v32 import V32Config

    return {"deepseek_v41": V41Config, "deepseek_v4": V4Config, "deepseek_v32": V32Config}


def load_config(directory: str | Path) -> Any:
    """The config of the checkpoint in `directory`, by the exact `model_type` of its config.json.

    Raises ValueError: no config.json, not JSON, an unknown model_type, or what the `from_dict` of its family's config finds.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no config.json. Give the folder of a checkpoint in the official format.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}). Download it again.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, not an object. Download it again.")
    model_type, families = raw.get("model_type"), _families()
    if model_type not in families:
        raise ValueError(f"{path}: model_type {model_type!r} is not known. Allowed: {', '.join(map(repr, families))}.")
    return families[model_type].from_dict(raw, str(path))
