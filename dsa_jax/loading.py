"""A checkpoint directory -> a model ready to run."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax.config import V41Config, load_config
from dsa_jax.decode import LanguageModel, parameter_names
from dsa_jax.layers.engram_hash import EngramTokenMap
from dsa_jax.models.deepseek_v41 import DeepseekV41
from dsa_jax.numerics import numerics
from dsa_jax.weights import load, make_plan

log = logging.getLogger("dsa_jax")


def abstract_parameters(config: V41Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape and dtype of every parameter that a checkpoint of `config` must fill. Allocates nothing."""
    _, params, _ = nnx.split(nnx.eval_shape(lambda: DeepseekV41(config)), nnx.Param, ...)
    return dict(zip(parameter_names(params), jax.tree.leaves(params), strict=True))


def load_model(
    directory: str | Path, mode: str = "bf16", *, implementation: str | None = None, progress: bool = True
) -> LanguageModel:
    """Reads the checkpoint in `directory` (official format) for the numerics mode `mode` ("f32", "f32q", "bf16").

    `implementation` names that of every operation ("reference"); None takes the GPU's kernels where they carry a call.
    Weights stay as stored: FP8 and packed FP4 with their scales. All problems of config, tokenizer and tensors raise a
    ValueError before any allocation.
    """
    wanted = numerics(mode)
    config = load_config(directory)
    token_map = EngramTokenMap.from_checkpoint(directory, config)
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: DeepseekV41(config)), nnx.Param, ...)
    names = parameter_names(params)
    plan = make_plan(dict(zip(names, jax.tree.leaves(params), strict=True)), directory)
    for note in plan.notes:
        log.info(note)
    arrays = load(plan, progress=progress)
    params = jax.tree.unflatten(jax.tree.structure(params), [arrays[name] for name in names])
    model = nnx.merge(graphdef, params, rest)
    model.token_map.set_value(jnp.asarray(token_map.ids))
    return LanguageModel(model, wanted, implementation)
