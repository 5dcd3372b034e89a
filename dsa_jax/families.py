"""The model families: what the rest of the library asks of each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from dsa_jax import layer_plan_v32
from dsa_jax.cache import latent, state, state_v4
from dsa_jax.config import V41Config
from dsa_jax.config_v4 import V4Config
from dsa_jax.config_v32 import V32Config
from dsa_jax.layers.engram_hash import EngramTokenMap
from dsa_jax.models.deepseek_v4 import DeepseekV4
from dsa_jax.models.deepseek_v32 import DeepseekV32
from dsa_jax.models.deepseek_v41 import DeepseekV41


@dataclass(frozen=True)
class Family:
    """One family.

    model: its module, made from a config. new_cache(config, numerics, requests, max_tokens, sizes): an empty cache, a
    pytree with `length` int32 [B], `block_table`, `page_tokens`, `requests` and `map_arrays`. page_unit(config): tokens
    that a page holds are a multiple of it.
    buffers(directory, config): arrays that the model needs and the tensors do not hold, by parameter path; ValueError
    where the checkpoint's other files do not give them. left_out(config): (pattern of official tensor names, reason) of
    what a checkpoint of this family holds and the model does not run.
    """

    model: type[nnx.Module]
    new_cache: Callable[..., Any]
    page_unit: Callable[[Any], int]
    buffers: Callable[[Path, Any], dict[str, np.ndarray]]
    left_out: Callable[[Any], tuple[tuple[str, str], ...]] = lambda config: ()


def _v41_buffers(directory: Path, config: V41Config) -> dict[str, np.ndarray]:
    return {"token_map": EngramTokenMap.from_checkpoint(directory, config).ids}


def _no_buffers(directory: Path, config: Any) -> dict[str, np.ndarray]:
    return {}


FAMILIES: dict[type, Family] = {
    V41Config: Family(DeepseekV41, state.new_cache, state.page_unit, _v41_buffers),
    V4Config: Family(DeepseekV4, state_v4.new_cache, state_v4.page_unit, _no_buffers),
    V32Config: Family(
        DeepseekV32, latent.new_latent_cache, latent.page_unit, _no_buffers, layer_plan_v32.left_out
    ),
}


def family_of(config: Any) -> Family:
    """The family whose config this is."""
    return FAMILIES[type(config)]
