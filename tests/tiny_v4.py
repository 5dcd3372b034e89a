"""A small V4 with every layer role and random weights, made without files, for tests that run many steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from conftest import GOLDEN
from flax import nnx
from tiny import random_leaf

from dsa_jax.config import load_config
from dsa_jax.config_v4 import DSparkConfig, V4Config
from dsa_jax.decode import LanguageModel, parameter_names
from dsa_jax.models.deepseek_v4 import DeepseekV4
from dsa_jax.numerics import numerics

CHECKPOINT = GOLDEN / "v4" / "checkpoint"


def tiny_config(**changes) -> V4Config:
    """Three layers: window (hash-routed), ratio 4, ratio 128; and the MTP layer. Window 8, 6 positions chosen."""
    values = dict(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=80,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_lora_rank=32,
        o_groups=2,
        n_routed_experts=4,
        moe_intermediate_size=32,
        num_hash_layers=1,
        sliding_window=8,
        compress_ratios=(0, 4, 128, 0),
        index_n_heads=2,
        index_head_dim=32,
        index_topk=6,
        weight_block_size=(32, 32),
    )
    return dataclasses.replace(load_config(CHECKPOINT), **values | changes)


def dspark_config() -> V4Config:
    """Layers of ratio 0 and 4, and two DSpark stages, of 3 drafts, instead of the MTP layer."""
    dspark = DSparkConfig(block_size=3, noise_token_id=1, target_layer_ids=(0, 1), markov_rank=32)
    return tiny_config(num_hidden_layers=2, compress_ratios=(0, 4, 0, 0), dspark=dspark)


def _leaf(name: str, shape: tuple[int, ...], dtype, seed: int) -> np.ndarray:
    kind = name.rpartition(".")[2]
    if kind == "tid2eid":
        rng = np.random.default_rng(seed)
        return np.stack([rng.permutation(4)[: shape[1]] for _ in range(shape[0])]).astype(np.int32)
    values = random_leaf(name, shape, dtype, seed)
    return values * np.float32(shape[-1] ** 0.5) if kind == "ape" else values


def tiny_module(config: V4Config, seed: int = 0) -> DeepseekV4:
    """The module of `config` with random weights."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: DeepseekV4(config)))
    leaves, structure = jax.tree.flatten(state)
    arrays = [
        jnp.asarray(_leaf(name, leaf.shape, np.dtype(leaf.dtype), seed))
        for name, leaf in zip(parameter_names(state), leaves, strict=True)
    ]
    return nnx.merge(graphdef, jax.tree.unflatten(structure, arrays))


@functools.cache
def tiny_model(mode: str = "f32", seed: int = 0, config: V4Config | None = None) -> LanguageModel:
    """The model of `config` (default: tiny_config()) in numerics mode `mode`."""
    return LanguageModel(tiny_module(tiny_config() if config is None else config, seed), numerics(mode))
