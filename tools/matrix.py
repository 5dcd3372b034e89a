"""Which kernels take part in which model, found by tracing the models of the released configs."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax.families import family_of
from dsa_jax.config import V41Config
from dsa_jax.config_v4 import V4Config
from dsa_jax.config_v32 import V32Config
from dsa_jax.loading import abstract_model
from dsa_jax.numerics import BF16
from pallas_kernels import dispatch
from pallas_kernels.records import PagedRows

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from official_v4 import official_v4_config  # noqa: E402
from official_v41 import official_config  # noqa: E402
from test_v32_config import RELEASED  # noqa: E402

CHIPS = {"sm90": "Hopper", "sm100": "Blackwell"}
CONFIGS: dict[str, Callable] = {
    "V4.1": lambda: V41Config.from_dict(official_config()),
    "V4": lambda: V4Config.from_dict(official_v4_config("flash")),
    "V3.2": lambda: V32Config.from_dict(RELEASED),
}
# The parts of a step that choose and attend, and products with stored weights; of the rest most is XLA's.
OPERATIONS = ("indexer_logits", "candidate_logits", "top_k", "sparse_attention", "sparse_decode", "grouped_gemm")
WEIGHTS = {"uint8": "FP4 weights", "float8_e4m3fn": "FP8 weights"}
STEPS = {"prefill": (1, 64), "decode": (8, 1)}  # requests, rows of each


def matrix() -> str:
    """A Markdown table: family and step, operation and formats, and what runs on each chip by default."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for name, make in CONFIGS.items():
        for step, (requests, length) in STEPS.items():
            for operation, formats, *chips in _calls(make(), requests, length):
                where = rows.setdefault((operation, formats, *chips), [])
                if f"{name} {step}" not in where:
                    where.append(f"{name} {step}")
    lines = [f"| operation | on | in | {' | '.join(CHIPS.values())} |", "|---|---|---|" + "---|" * len(CHIPS)]
    for (operation, formats, *chips), where in sorted(rows.items()):
        lines.append(f"| `{operation}` | {formats} | {', '.join(where)} | {' | '.join(chips)} |")
    return "\n".join(lines)


def _calls(config, requests: int, length: int) -> set[tuple[str, ...]]:
    """(function, formats, state on each chip) of every call of OPERATIONS in one step of the released model."""
    found, known = set(), {}
    real = dispatch.call

    def recorded(package, function, implementation, *args, **kwargs):
        operation = package.rpartition(".")[2]
        if operation in OPERATIONS and function != "make_schedule":  # of a kernel's own work, not an operation
            shapes = str(jax.tree.map(lambda leaf: getattr(leaf, "shape", leaf), (args, kwargs)))
            if (function, shapes) not in known:  # layers repeat one another
                states = (_state(package, chip, function, args, kwargs) for chip in CHIPS)
                known[function, shapes] = (function, _formats(operation, args), *states)
            found.add(known[function, shapes])
        return real(package, function, implementation, *args, **kwargs)

    family = family_of(config)
    graphdef, state = nnx.split(abstract_model(config))

    def forward(state, tokens, count):
        cache = family.new_cache(config, BF16, requests, 4096)
        model = nnx.merge(graphdef, state)
        return model(cache, tokens, count, BF16)[0]

    dispatch.call = recorded
    try:
        tokens = jax.ShapeDtypeStruct((requests, length), jnp.int32)
        jax.eval_shape(forward, state, tokens, jax.ShapeDtypeStruct((requests,), jnp.int32))
    finally:
        dispatch.call = real
    return found


def _state(package: str, chip: str, function: str, args, kwargs) -> str:
    """What a GPU of this family does with the call: "kernel", "held back", or "reference"."""
    try:
        kernel = dispatch._load(package, chip, function)
        unproven = getattr(importlib.import_module(kernel.__module__), "unproven", None)
        arrays, rest = _split((args, kwargs))
        jax.eval_shape(lambda arrays: _call(kernel, rest, arrays), arrays)
    except NotImplementedError:
        return "reference"
    return "kernel, not run on the chip yet" if unproven is not None and unproven(function, args) else "kernel"


def _split(tree):
    """The arrays of a tree, and the tree with None in their places."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, yes in zip(leaves, is_array, strict=True) if yes]
    return arrays, (structure, is_array, [leaf for leaf, yes in zip(leaves, is_array, strict=True) if not yes])


def _call(kernel, rest, arrays):
    structure, is_array, others = rest
    arrays, others = iter(arrays), iter(others)
    args, kwargs = jax.tree.unflatten(structure, [next(arrays if yes else others) for yes in is_array])
    return kernel(*args, **kwargs)


def _formats(operation: str, args) -> str:
    """The format of the weights in a call, or the record formats of its caches, else the dtype of its first array."""
    if operation == "grouped_gemm":
        return WEIGHTS[str(jax.tree.leaves(args[1])[0].dtype)]  # of a tuple all are alike
    caches = [x for x in jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, PagedRows)) if isinstance(x, PagedRows)]
    if caches:
        return " + ".join(type(cache.format).__name__ for cache in caches)
    return str(next(leaf.dtype for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array)))
