"""What layers do across devices: sums, lookups and joins over the mesh axes that divide their weights.

A model that runs on several devices runs inside `jax.shard_map`, so a layer sees its own device's part of every divided
weight, the requests of its own group of devices (dp), and everything else whole. Outside of it every function here gives
back what it was given: a layer is written once.
"""

import math

import jax
from jax import lax
from jaxtyping import Array, Int32

from dsa_jax import ops

MESH_AXES = ("dp", "ep", "tp", "cp")
"""Names of a mesh's axes: requests, experts, heads, context."""

DIVIDED_OVER = {
    "requests": ("dp",),  # rows of a batch, with their pages of the caches
    "heads": ("tp",),  # attention heads, groups of the output projection, sinks
    "index_heads": ("tp",),
    "vocabulary": ("tp",),
    "experts": ("dp", "ep", "tp", "cp"),  # those on which devices have other tokens first
    "table_rows": ("ep", "tp", "cp"),  # the axes on which every device has the same tokens
    "context": ("cp",),  # compressed rows and index keys of the caches
}
"""Logical axis of a weight or cache -> the mesh axes that divide it. What has no such axis is on every device."""


def axes_of(logical: str) -> tuple[str, ...]:
    """The mesh axes of more than one device that divide `logical` where this is traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in DIVIDED_OVER[logical] if axis in mesh.manual_axes and mesh.shape[axis] > 1)


def parts(logical: str) -> int:
    """Into how many parts `logical` is divided where this is traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in axes_of(logical))


def place(logical: str) -> Int32[Array, ""]:
    """Which of the parts of `logical` this device has. Only where there is more than one."""
    return lax.axis_index(axes_of(logical))


def total(x: Array, logical: str) -> Array:
    """The sum of the x of every device that has the same requests."""
    axes = tuple(axis for axis in axes_of(logical) if axis not in DIVIDED_OVER["requests"])
    return lax.psum(x, axes) if axes else x


def swapped(x: Array, logical: str) -> Array:
    """x [parts, ..] with x[i] sent to the i-th of the devices along `logical`, and what that has for this one in its place."""
    axes = axes_of(logical)
    return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True) if axes else x


def largest(x: Array, logical: str) -> Array:
    """The largest of every device's x."""
    axes = axes_of(logical)
    return lax.pmax(x, axes) if axes else x


def joined(x: Array, logical: str, axis: int) -> Array:
    """Every device's x, one behind the other along `axis`."""
    axes = axes_of(logical)
    return lax.all_gather(x, axes, axis=axis % x.ndim, tiled=True) if axes else x


def own(ids: Int32[Array, "*any"], logical: str, count: int) -> Int32[Array, "*any"]:
    """Ids counted from the first of the `count` that this device holds; below 0 or from `count` on where others hold them."""
    axes = axes_of(logical)
    return ids - lax.axis_index(axes) * count if axes else ids


def lookup(table: Array, ids: Int32[Array, "*any"], logical: str) -> Array:
    """Rows `ids` of a table whose rows are divided. Exact: one device has the row, and the others add zeros."""
    return total(ops.gather_rows(table, own(ids, logical, len(table))), logical)
