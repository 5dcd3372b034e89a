"""How the weights of a model lie on several devices: one table of rules, and what follows from it.

A model runs on a mesh as one program (`jax.shard_map` under `jax.jit`): a device holds its part of every divided weight
and all of every other one; `ranks` has what layers exchange. Requests are divided over dp, with everything that belongs to
them; pools of caches also over cp (`context`). All else is whole on every device that has the same requests.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dsa_jax.ranks import DIVIDED_OVER, MESH_AXES

# Pattern of a parameter's path -> the logical axis of each of its leading dimensions. The first match decides; a parameter
# that matches none is on every device.
RULES = tuple(
    (re.compile(pattern), axes)
    for pattern, axes in (
        (r"\.engram\.embed\.(weight|scale)$", ("table_rows",)),
        (r"(^|\.)(embed|head|markov_w1|markov_w2)\.weight$", ("vocabulary",)),
        (r"\.experts\.w[123]\.(weight|scale)$", ("experts",)),
        (r"\.indexer\.(wq_b\.(weight|scale)|weights_proj\.weight)$", ("index_heads",)),
        (r"\.attn\.(wq_b|wkv_b|wo_a)\.(weight|scale)$", ("heads",)),
        (r"\.attn\.(wo|wo_b)\.(weight|scale)$", (None, "heads")),
        (r"\.attn\.attn_sink$", ("heads",)),
    )
)
_NUMBER = re.compile(r"\d+")
# Looked up or cut off by row, so that rows of nothing may follow the last one.
FILLED_UP = ("vocabulary", "table_rows")
# The config's counts of what cannot be cut, by logical axis.
UNITS = {
    "heads": ("num_attention_heads", "o_groups"),
    "index_heads": ("index_n_heads",),
    "experts": ("n_routed_experts", "dspark_n_routed_experts"),
}

Bounds = tuple[tuple[int, int], ...]
Read = Callable[[tuple[slice, ...], np.ndarray], None]


def make_mesh(devices: Sequence[jax.Device] | None = None, **sizes: int) -> Mesh:
    """A mesh of `devices` (default: all) with the axes dp, ep, tp and cp of the given sizes, 1 where none is given.

    dp divides the requests of a batch; tp heads and vocabulary; cp the caches by context; ep, and tp and cp with it, divides
    experts and Engram tables, and all four divide experts. Neighbouring devices are of one cp group, those groups of one tp
    group, and so on to dp. ValueError for other axes and where the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    wrong = sorted(set(sizes) - set(MESH_AXES))
    if wrong or any(size < 1 for size in sizes.values()):
        raise ValueError(f"A mesh of {sizes}: its axes are {', '.join(MESH_AXES)}, each of at least 1 device.")
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    if math.prod(shape) != len(devices):
        given = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(
            f"A mesh of {given or 'one device'} has {math.prod(shape)} places for {len(devices)} devices: give sizes that "
            "multiply to their number, or name the devices."
        )
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def logical_axes(path: str) -> tuple[str | None, ...]:
    """The logical axes of the leading dimensions of the parameter `path`; none of it is divided where that is empty."""
    return next((axes for pattern, axes in RULES if pattern.search(path)), ())


def ways(logical: str | None, sizes: Mapping[str, int]) -> int:
    """Into how many parts a mesh of these axis sizes divides a logical axis."""
    return 1 if logical is None else math.prod(sizes.get(axis, 1) for axis in DIVIDED_OVER[logical])


def spec_of(path: str) -> PartitionSpec:
    """The mesh axes of each dimension of the parameter `path`."""
    return PartitionSpec(*(axis and DIVIDED_OVER[axis] for axis in logical_axes(path)))


def placed_shape(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a parameter on such a mesh: rows of tables and vocabulary are filled up to a multiple of the devices."""
    shape = list(shape)
    for dimension, logical in enumerate(logical_axes(path)):
        if logical in FILLED_UP:
            parts = ways(logical, sizes)
            shape[dimension] = -(-shape[dimension] // parts) * parts
    return tuple(shape)


def check(config: Any, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> None:
    """ValueError with a sentence for each thing that a mesh of these axis sizes does not divide. shapes: by path."""
    problems = problems_of(config, shapes, sizes)
    if problems:
        given = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        raise ValueError(f"The model does not fit a mesh of {given}:" + "".join(f"\n  - {p}" for p in problems))


def problems_of(config: Any, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> list[str]:
    """What a mesh of these axis sizes does not divide, in sentences."""
    problems = []
    for logical, names in UNITS.items():
        parts = ways(logical, sizes)
        for name in names:
            count = getattr(config, name, None) or parts
            if count % parts:
                allowed = ", ".join(str(n) for n in range(1, min(count, 64) + 1) if count % n == 0)
                axes = " x ".join(axis for axis in DIVIDED_OVER[logical] if sizes.get(axis, 1) > 1)
                problems.append(f"{axes} = {parts} does not divide {name} = {count}: use {allowed}")
    return problems or _cut_tiles(config, shapes, sizes)


def _cut_tiles(config: Any, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> list[str]:
    """Weights whose tiles of one scale would lie on two devices: a sentence for each kind of layer parameter."""
    kinds: dict[str, str] = {}
    for path, shape in shapes.items():
        if path.removesuffix(".weight") + ".scale" not in shapes or not path.endswith(".weight"):
            continue
        for dimension, logical in enumerate(logical_axes(path)):
            if logical not in ("heads", "index_heads"):
                continue  # experts are whole, and a row of a table has scales of its own
            parts, tile = ways(logical, sizes), config.weight_block_size[dimension]
            if parts > 1 and shape[dimension] % (parts * tile):
                kinds.setdefault(
                    _NUMBER.sub("*", path),
                    f"{path} {list(shape)} in {parts} parts along dimension {dimension} would cut its tiles of {tile}, "
                    "which have one scale each: use a smaller tp",
                )
    return list(kinds.values())


def place(arrays: Mapping[str, jax.Array], mesh: Mesh) -> dict[str, jax.Array]:
    """Path -> the same parameter on the mesh, by the rules."""

    def read(array: jax.Array) -> Read:
        return lambda index, out: np.copyto(out, np.asarray(array)[index])

    return {path: place_one(path, array.shape, array.dtype, read(array), mesh) for path, array in arrays.items()}


def own_parts(path: str, shape: tuple[int, ...], mesh: Mesh) -> dict[Bounds, list[jax.Device]]:
    """The parts of a parameter that lie on this process's devices, as (first, end) of every dimension, and on which."""
    full = placed_shape(path, shape, mesh.shape)
    parts: dict[Bounds, list[jax.Device]] = {}
    for device, index in NamedSharding(mesh, spec_of(path)).addressable_devices_indices_map(full).items():
        bounds = tuple(cut.indices(size)[:2] for cut, size in zip(index, full, strict=True))
        parts.setdefault(bounds, []).append(device)
    return parts


def inside(bounds: Bounds, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """What of a part is in a parameter of this shape, and not rows that fill it up."""
    return tuple(slice(min(first, size), min(end, size)) for (first, end), size in zip(bounds, shape, strict=True))


def elements(bounds: Bounds) -> int:
    """How many elements a part has."""
    return math.prod(end - first for first, end in bounds)


def place_one(
    path: str,
    shape: tuple[int, ...],
    dtype: Any,
    read: Read,
    mesh: Mesh,
    room: Callable[[int], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> jax.Array:
    """One parameter on the mesh. `read(index, out)` writes a part of it into an array, once for each part that this
    process's devices hold; no more than one part is held on the host at a time, within `room(its bytes)`."""

    def part(bounds, devices):  # a function, so that its array is gone before the next part's is made
        index = inside(bounds, shape)
        sizes = tuple(end - first for first, end in bounds)
        held = tuple(cut.stop - cut.start for cut in index)
        host = np.empty(sizes, dtype) if held == sizes else np.zeros(sizes, dtype)
        read(index, host[(*(slice(size) for size in held), ...)])
        # Copies under way would pile up in host memory.
        return jax.block_until_ready([jax.device_put(host, device) for device in devices])

    parts = own_parts(path, shape, mesh)
    buffers = []
    for bounds, devices in parts.items():
        with room(elements(bounds) * np.dtype(dtype).itemsize):
            buffers += part(bounds, devices)
    full = placed_shape(path, shape, mesh.shape)
    return jax.make_array_from_single_device_arrays(full, NamedSharding(mesh, spec_of(path)), buffers, dtype=dtype)


def everywhere(mesh: Mesh) -> NamedSharding:
    """On every device of the mesh, whole."""
    return NamedSharding(mesh, PartitionSpec())


def on_host(x: jax.Array) -> np.ndarray:
    """The value of an array, whole in every process that runs the program; all of them have to ask for it."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def request_spec(mesh: Mesh) -> PartitionSpec:
    """The mesh axes of an array of one row a request."""
    return PartitionSpec(DIVIDED_OVER["requests"]) if mesh.shape["dp"] > 1 else PartitionSpec()


def pool_spec(mesh: Mesh) -> PartitionSpec:
    """The mesh axes of a cache's pool [pages, rows of a page, ..]: pages are of the requests that may use them."""
    if mesh.shape["cp"] == 1:
        return request_spec(mesh)
    return PartitionSpec(DIVIDED_OVER["requests"] if mesh.shape["dp"] > 1 else None, DIVIDED_OVER["context"])


def spmd(function: Callable, mesh: Mesh, names: Sequence[str] | None = None) -> Callable:
    """`function(leaves, ..)` as one program of all devices of the mesh: each calls it with its parts of the leaves, which
    are called `names`, its parts of the pools of caches, and all of every other argument. Results are pools of caches,
    and what every device computes alike. Without `names` there are no leaves.

    On a mesh with dp every array beside the leaves has one row a request, and each device has the rows of its requests;
    block tables count the pages of those alone. Keyword arguments are static: they are bound before tracing.
    """

    def spec(node):
        if not _is_cache(node):
            return request_spec(mesh)
        return node.map_arrays(lambda _: request_spec(mesh), lambda _: pool_spec(mesh))

    def specs(tree):
        return jax.tree.map(spec, tree, is_leaf=_is_cache)

    @functools.wraps(function)
    def wrapped(*arguments, **static):
        if names is None:
            given = specs(arguments)
        else:
            given = ([spec_of(name) for name in names], *specs(arguments[1:]))

        def body(*arguments):
            return _without_pools(function(*arguments, **static))

        # Replication is by construction: what devices hold in parts never leaves a layer without a sum or a join.
        rest, pools = jax.shard_map(
            body, mesh=mesh, in_specs=given, out_specs=(request_spec(mesh), pool_spec(mesh)), check_vma=False
        )(*arguments)
        return _with_pools(rest, pools)

    return wrapped


def _is_cache(node: Any) -> bool:
    return hasattr(node, "map_arrays")


def _without_pools(tree: Any) -> tuple[Any, list[jax.Array]]:
    """`tree` with a single element in place of every pool of its caches, and the pools."""
    pools = []

    def taken_out(node):
        return node.map_arrays(lambda x: x, lambda x: pools.append(x) or jnp.zeros(1))

    rest = jax.tree.map(lambda node: taken_out(node) if _is_cache(node) else node, tree, is_leaf=_is_cache)
    return rest, pools


def _with_pools(tree: Any, pools: Sequence[jax.Array]) -> Any:
    """`tree` with the pools that `_without_pools` took out."""
    waiting = iter(pools)

    def put_back(node):
        return node.map_arrays(lambda x: x, lambda _: next(waiting))

    return jax.tree.map(lambda node: put_back(node) if _is_cache(node) else node, tree, is_leaf=_is_cache)
