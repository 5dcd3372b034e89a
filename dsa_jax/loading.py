"""A checkpoint directory -> a model ready to run."""

import dataclasses
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
from dsa_jax.layers.engram import HostTable
from dsa_jax.weights import LoadPlan, as_exponents, load, make_plan, mapped

log = logging.getLogger("dsa_jax")

READERS = 4  # parameters read at a time at most: files on a disk or a network answer several requests faster than one


ENGRAM_TABLES = ("device", "host")


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
    engram_tables: str = "device",
    readers: int = READERS,
    progress: bool = True,
) -> LanguageModel:
    """Reads the checkpoint in `directory` (official format) for the numerics mode `mode` ("f32", "f32q", "bf16").

    `implementation` names that of every operation ("reference"); None takes the GPU's kernels where they carry a call.
    mesh: the devices that run the model together (`sharding.make_mesh`); every process reads what its own devices hold.
    engram_tables: "device", by rows on all of them, or "host": they stay in their files, which are mapped into host memory
    and must stay there, and a step fetches the rows that its tokens need. readers: parameters read at a time, where all of
    them together take no more host memory than the largest part. Weights stay as stored: FP8 and packed FP4 with their
    scales, of which float32 powers of two become exponent bytes. All problems of config, tokenizer, tensors and mesh raise a
    ValueError before any allocation.
    """
    wanted = numerics(mode)
    if engram_tables not in ENGRAM_TABLES:
        raise ValueError(f"engram_tables={engram_tables!r} is not known. Allowed: {', '.join(ENGRAM_TABLES)}.")
    config = load_config(directory)
    family = family_of(config)
    model = abstract_model(config)
    buffers = family.buffers(Path(directory), config)
    abstract = abstract_parameters(config)
    if mesh is not None:
        sharding.check(config, {path: x.shape for path, x in abstract.items()}, mesh.shape)
    plan = make_plan(abstract, directory, family.left_out(config), progress)
    for note in plan.notes:
        log.info(note)
    if engram_tables == "host":
        plan = _with_tables_on_host(model, plan)
    arrays = as_exponents(load(plan, progress=progress, mesh=mesh, readers=readers))
    if mesh is None:
        arrays |= {name: jnp.asarray(value) for name, value in buffers.items()}
    else:
        arrays |= sharding.place(buffers, mesh)
    graphdef, state = nnx.split(model)
    state = jax.tree.unflatten(jax.tree.structure(state), [arrays[name] for name in parameter_names(state)])
    return LanguageModel(nnx.merge(graphdef, state), wanted, implementation, mesh)


def _with_tables_on_host(model: nnx.Module, plan: LoadPlan) -> LoadPlan:
    """`plan` without the Engram tables, which `model` has from their files instead."""
    paths = {
        index: f"layers.{index}.engram.embed" for index, layer in enumerate(model.layers) if hasattr(layer, "engram")
    }
    if not paths:
        raise ValueError("engram_tables='host', but this model has no Engram tables. Leave the option out.")
    names = {f"{path}.{kind}" for path in paths.values() for kind in ("weight", "scale")}
    tables = mapped(dataclasses.replace(plan, entries=tuple(e for e in plan.entries if e.path in names)))
    for index, path in paths.items():
        model.layers[index].engram.embed = HostTable(tables[f"{path}.weight"], tables[f"{path}.scale"])
    return dataclasses.replace(plan, entries=tuple(e for e in plan.entries if e.path not in names))
