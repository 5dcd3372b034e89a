"""What each layer of V3.2 is: all have their own latent KV and indexer; the first have a dense feed-forward."""

import dataclasses
from typing import Literal

from dsa_jax.config_v32 import V32Config
from dsa_jax.layer_plan import RopeSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentRole:
    """One layer: its number, its feed-forward, and the rotary table of its attention and its indexer."""

    index: int
    ffn: Literal["dense", "moe"]
    rope: RopeSpec


def latent_plan(config: V32Config) -> tuple[LatentRole, ...]:
    """The roles of the layers, in order. The MTP layer behind them is not run."""
    rope = RopeSpec(config.rope_theta, config.yarn)
    return tuple(
        LatentRole(index=i, ffn="dense" if i < config.first_k_dense_replace else "moe", rope=rope)
        for i in range(config.num_hidden_layers)
    )


def left_out(config: V32Config) -> tuple[tuple[str, str], ...]:
    """(pattern of official tensor names, reason): the MTP layers stand behind the others in a checkpoint."""
    first = config.num_hidden_layers
    return tuple(
        (rf"^layers\.{layer}\.", "the MTP layer: drafting with it is not carried")
        for layer in range(first, first + config.num_nextn_predict_layers)
    )
