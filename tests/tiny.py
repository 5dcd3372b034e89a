"""A small V4.1 with every layer role and random weights, made without files, for tests that run many steps."""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from conftest import GOLDEN
from flax import nnx

from dsa_jax.config import V41Config, load_config
from dsa_jax.decode import LanguageModel, parameter_names
from dsa_jax.layers.engram_hash import engram_primes
from dsa_jax.models.deepseek_v41 import DeepseekV41
from dsa_jax.numerics import numerics

CHECKPOINT = GOLDEN / "v41" / "checkpoint"


def tiny_config(**changes) -> V41Config:
    """Six layers: window, ratio-2 source with Engram, reuse, candidate source with Engram, reuse, consumer; one draft stage.

    Window 8, 6 positions chosen, 3 candidate blocks of 4: the filter bites beyond 12 tokens.
    """
    values = dict(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=2,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_lora_rank=32,
        o_groups=2,
        n_routed_experts=4,
        moe_intermediate_size=32,
        sliding_window=8,
        compress_ratios=(0, 2, 2, 1, 1, 1, 0),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 5),
        index_n_heads=2,
        index_head_dim=32,
        index_topk=6,
        candidate_source_layer_id=3,
        candidate_topk_blocks=3,
        candidate_block_size=4,
        engram_layer_ids=(1, 3),
        engram_compressed_vocab_size=48,
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=(4, 5),
        dspark_markov_rank=32,
        image_token_id=63,
    )
    config = dataclasses.replace(load_config(CHECKPOINT), **values | changes)
    rows = tuple(sum(p for row in primes for p in row) for primes in engram_primes(config))
    return dataclasses.replace(config, engram_num_embeddings=rows)


def random_leaf(name: str, shape: tuple[int, ...], dtype, seed: int) -> np.ndarray:
    """Values that keep activations near 1; the same for a name and a seed."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    kind = name.rpartition(".")[2]
    if name == "token_map":
        return rng.permutation(shape[0]).astype(np.int32) % 48
    if kind == "scale":
        inputs = shape[-1] * 32
        return np.full(shape, 127 - round(np.log2(max(inputs, 1) ** 0.5 * (2.9 if ".experts." in name else 1))), np.uint8)
    if dtype == np.uint8:
        return rng.integers(0, 256, shape, np.uint8)
    if "norm" in name or kind in ("q_weight", "k_weight"):
        return (1 + 0.1 * rng.standard_normal(shape)).astype(dtype)
    values = rng.standard_normal(shape)
    if dtype == ml_dtypes.float8_e4m3fn or name in ("embed.weight", "attn_sink") or kind.startswith("image_"):
        return values.astype(dtype)
    if kind in ("bias", "bias_vl") or kind.endswith("_base"):
        return (0.3 * values).astype(dtype)
    if kind.endswith("_scale"):
        return np.full(shape, 0.5, dtype)
    return (values / shape[-1] ** 0.5).astype(dtype)


def tiny_module(config: V41Config, seed: int = 0) -> DeepseekV41:
    """The module of `config` with random weights."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: DeepseekV41(config)))
    leaves, structure = jax.tree.flatten(state)
    arrays = [
        jnp.asarray(random_leaf(name, leaf.shape, np.dtype(leaf.dtype), seed))
        for name, leaf in zip(parameter_names(state), leaves, strict=True)
    ]
    return nnx.merge(graphdef, jax.tree.unflatten(structure, arrays))


@functools.cache
def tiny_model(mode: str = "f32", seed: int = 0, config: V41Config | None = None) -> LanguageModel:
    """The model of `config` (default: tiny_config()) in numerics mode `mode`."""
    return LanguageModel(tiny_module(tiny_config() if config is None else config, seed), numerics(mode))
