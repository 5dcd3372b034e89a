"""A checkpoint directory -> a model ready to run."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax import sharding
from dsa_jax.config import load_config
from dsa_jax.decode import LanguageModel, parameter_names
from dsa_jax.families import family_of
from dsa_jax.numerics import numerics
from dsa_jax.weights import load, make_plan

log = logging.getLogger("dsa_jax")

READERS = 4  # parameters read at a time: files on a disk or a network answer several requests faster than one


def abstract_model(config: Any) -> nnx.Module:
    """The module of `config`'s family with shapes and dtypes in place of arrays. Allocates nothing."""
    return nnx.eval_shape(lambda: family_of(config).model(config))


def abstract_parameters(config: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape and dtype of every parameter that a checkpoint of `config` must fill."""
    params = nnx.state(abstract_model(config), nnx.Param)
    return dict(zip(parameter_names(params), jax.tree.leaves(params), strict=True))


def load_model(
    directory: str | Path,
    mode: str = "bf16",
    *,
    implementation: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    readers: int = READERS,
    progress: bool = True,
) -> LanguageModel:
    """Reads the checkpoint in `directory` (official format) for the numerics mode `mode` ("f32", "f32q", "bf16").

    `implementation` names that of every operation ("reference"); None takes the GPU's kernels where they carry a call.
    mesh: the devices that run the model together (`sharding.make_mesh`); every process reads what its own devices hold.
    readers: parameters read at a time. Weights stay as stored: FP8 and packed FP4 with their scales. All problems of
    config, tokenizer, tensors and mesh raise a ValueError before any allocation.
    """
    wanted = numerics(mode)
    config = load_config(directory)
    family = family_of(config)
    buffers = family.buffers(Path(directory), config)
    abstract = abstract_parameters(config)
    if mesh is not None:
        sharding.check(config, {path: x.shape for path, x in abstract.items()}, mesh.shape)
    plan = make_plan(abstract, directory, family.left_out(config), progress)
    for note in plan.notes:
        log.info(note)
    arrays = load(plan, progress=progress, mesh=mesh, readers=readers)
    if mesh is None:
        arrays |= {name: jnp.asarray(value) for name, value in buffers.items()}
    else:
        arrays |= sharding.place(buffers, mesh)
    graphdef, state = nnx.split(abstract_model(config))
    state = jax.tree.unflatten(jax.tree.structure(state), [arrays[name] for name in parameter_names(state)])
    return LanguageModel(nnx.merge(graphdef, state), wanted, implementation, mesh)
