"""Who computes what in V4: every compressed layer owns its compressor and cache; ratio 4 alone overlaps and selects."""

import dataclasses
from typing import Literal

from dsa_jax.config_v4 import OVERLAP_RATIO, V4Config
from dsa_jax.layer_plan import RopeSpec

Mode = Literal["window", "indexed", "all"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class V4LayerRole:
    """What one layer sees and how it routes.

    mode: "window" sees the sliding window alone; "indexed" adds the compressed rows that its own indexer selects (its
    compressor pools two groups a row); "all" adds every visible compressed row. hash_routed: experts by token id.
    draft_tap: the draft stages read the stream after this layer.
    """

    index: int
    ratio: int
    mode: Mode
    hash_routed: bool
    draft_tap: bool
    rope: RopeSpec

    @property
    def overlap(self) -> bool:
        """Whether a compressed row also pools the group before its own."""
        return self.mode == "indexed"


def layer_plan(config: V4Config) -> tuple[V4LayerRole, ...]:
    """The roles of the backbone's layers, in order. Source: DeepSeek-V4's inference code."""
    return tuple(_role(config, index) for index in range(config.num_hidden_layers))


def draft_plan(config: V4Config) -> tuple[V4LayerRole, ...]:
    """The roles of the MTP layer or the DSpark stages, if there are any. `index` counts on from the backbone."""
    first = config.num_hidden_layers
    return tuple(_role(config, index) for index in range(first, first + config.draft_layers))


def _role(config: V4Config, index: int) -> V4LayerRole:
    ratio = config.compress_ratios[index]
    mode: Mode = "window" if ratio == 0 else "indexed" if ratio == OVERLAP_RATIO else "all"
    plain, compressed = RopeSpec(config.rope_theta, None), RopeSpec(config.compress_rope_theta, config.rope_scaling)
    return V4LayerRole(
        index=index,
        ratio=ratio,
        mode=mode,
        hash_routed=index < config.num_hash_layers,
        draft_tap=config.dspark is not None and index in config.dspark.target_layer_ids,
        rope=compressed if ratio else plain,
    )
