"""A small V3.2 with random weights, made without files, for tests that run many steps."""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from conftest import GOLDEN
from flax import nnx

from dsa_jax.config import load_config
from dsa_jax.config_v32 import V32Config
from dsa_jax.decode import LanguageModel, parameter_names
from dsa_jax.models.deepseek_v32 import DeepseekV32
from dsa_jax.numerics import numerics

CHECKPOINT = GOLDEN / "v32" / "checkpoint"


def tiny_config(**changes) -> V32Config:
    """Three layers, one of them dense; 6 positions chosen; YaRN from 16 positions on; edge tiles half filled."""
    values = dict(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        num_attention_heads=2,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=6,
        n_routed_experts=8,
        rope_scaling=dataclasses.replace(load_config(CHECKPOINT).rope_scaling, original_max_position_embeddings=16),
    )
    return dataclasses.replace(load_config(CHECKPOINT), **values | changes)


def random_leaf(name: str, shape: tuple[int, ...], dtype, seed: int) -> np.ndarray:
    """Values that keep activations near 1; the same for a name and a seed. Scales are float32, as in official files."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith(".scale"):
        return (2.0 ** rng.integers(-5, -2, shape)).astype(np.float32)
    values = rng.standard_normal(shape)
    if "norm.weight" in name:
        return (1 + 0.1 * values).astype(dtype)
    if dtype == ml_dtypes.float8_e4m3fn or name == "embed.weight":
        return values.astype(dtype)
    if name.endswith(".bias"):
        return (0.3 * values).astype(dtype)
    return (values / shape[-1] ** 0.5).astype(dtype)


def tiny_module(config: V32Config, seed: int = 0) -> DeepseekV32:
    """The module of `config` with random weights."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: DeepseekV32(config)))
    leaves, structure = jax.tree.flatten(state)
    arrays = [
        jnp.asarray(random_leaf(name, leaf.shape, np.dtype(leaf.dtype), seed))
        for name, leaf in zip(parameter_names(state), leaves, strict=True)
    ]
    return nnx.merge(graphdef, jax.tree.unflatten(structure, arrays))


@functools.cache
def tiny_model(mode: str = "f32", seed: int = 0, config: V32Config | None = None) -> LanguageModel:
    """The model of `config` (default: tiny_config()) in numerics mode `mode`."""
    return LanguageModel(tiny_module(tiny_config() if config is None else config, seed), numerics(mode))
