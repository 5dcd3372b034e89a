"""Who computes what: for each layer, whose compressed KV, whose index keys and whose top-k list it uses.

Computed once from the config; layers get their role and never read the config for it again.
"""

import dataclasses
from typing import Literal

from dsa_jax.config import V41Config, YarnConfig
from dsa_jax.config_rules import source_of

Mode = Literal["window", "full", "reindex", "reuse"]


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """The one rotary table of a layer: its base, and YaRN or None. Queries, keys and index rows all use it."""

    theta: float
    yarn: YarnConfig | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRole:
    """What one layer owns and what it takes from others.

    mode: "window" sees the sliding window alone; "full" owns compressor, index keys and indexer queries; "reindex" owns
    indexer queries and reads the keys and KV of `kv_source`; "reuse" takes the top-k list of `index_source` as it is.
    """

    index: int
    ratio: int
    mode: Mode
    kv_source: int | None
    index_source: int | None
    makes_candidates: bool
    uses_candidates: bool
    engram: bool
    draft_tap: bool
    rope: RopeSpec


def layer_plan(config: V41Config) -> tuple[LayerRole, ...]:
    """The roles of the backbone's layers, in order. Source: DeepSeek-V4.1's inference code."""
    return tuple(_role(config, index) for index in range(config.num_hidden_layers))


def draft_plan(config: V41Config) -> tuple[LayerRole, ...]:
    """The roles of the DSpark stages. `index` counts on from the backbone: stage s is num_hidden_layers + s."""
    first = config.num_hidden_layers
    return tuple(
        _window_role(config, index, engram=False, draft_tap=False)
        for index in range(first, first + config.num_nextn_predict_layers)
    )


def _role(config: V41Config, index: int) -> LayerRole:
    ratio = config.compress_ratios[index]
    engram = index in config.engram_layer_ids
    draft_tap = config.num_nextn_predict_layers > 0 and index in config.dspark_target_layer_ids
    if ratio == 0:
        return _window_role(config, index, engram=engram, draft_tap=draft_tap)
    kv_source = source_of(config.kv_source_layer_ids, index)
    index_source = source_of(config.index_source_layer_ids, index)
    candidates = config.candidate_source_layer_id
    mode: Mode = "full" if kv_source == index else "reindex" if index_source == index else "reuse"
    return LayerRole(
        index=index,
        ratio=ratio,
        mode=mode,
        kv_source=kv_source,
        index_source=index_source,
        makes_candidates=index == candidates,
        uses_candidates=index_source == index and 0 <= candidates < index,
        engram=engram,
        draft_tap=draft_tap,
        rope=RopeSpec(config.compress_rope_theta, config.rope_scaling),
    )


def _window_role(config: V41Config, index: int, *, engram: bool, draft_tap: bool) -> LayerRole:
    return LayerRole(
        index=index,
        ratio=0,
        mode="window",
        kv_source=None,
        index_source=None,
        makes_candidates=False,
        uses_candidates=False,
        engram=engram,
        draft_tap=draft_tap,
        rope=RopeSpec(config.rope_theta, None),
    )
