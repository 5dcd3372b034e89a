"""Reading and writing rows by index, where -1 means none.

JAX's own indexing wraps a negative index: ``array[-1]`` is the last row, and ``.at[-1].set(mode="drop")`` writes
it. Every cache and every list of rows in this project is indexed through the functions of this file. Paged caches
are indexed by (page, row), never by a flat number of bytes, which passes 2^31.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped

from pallas_kernels import checks


def gather_rows(array: Shaped[Array, "N *row"], indices: Int32[Array, "*any"]) -> Shaped[Array, "*out"]:
    """Rows ``array[indices]`` [*indices.shape, *row]; zeros where an index is below 0 or at least N."""
    checks.integer("indices", indices)
    n = array.shape[0]
    if n == 0:  # JAX has no gather from an empty axis
        return jnp.zeros((*indices.shape, *array.shape[1:]), array.dtype)
    return array.at[jnp.where(indices < 0, n, indices)].get(mode="fill", fill_value=0)


def scatter_rows(
    array: Shaped[Array, "N *row"], indices: Int32[Array, " M"], rows: Shaped[Array, "M *row"]
) -> Shaped[Array, "N *row"]:
    """`array` with ``rows[i]`` stored at ``indices[i]``; an index below 0 or at least N writes nothing.

    Indices that do write must differ from one another. `rows` is cast to the dtype of `array`.
    """
    checks.integer("indices", indices)
    n = array.shape[0]
    return array.at[jnp.where(indices < 0, n, indices)].set(rows.astype(array.dtype), mode="drop", unique_indices=True)


def add_rows(
    array: Shaped[Array, "N *row"], indices: Int32[Array, "*any"], rows: Shaped[Array, "*all"]
) -> Shaped[Array, "N *row"]:
    """`array` plus ``rows`` [*indices.shape, *row] at `indices`; an index below 0 or at least N adds nothing.

    Rows of the same index are all added, in no fixed order.
    """
    checks.integer("indices", indices)
    n = array.shape[0]
    return array.at[jnp.where(indices < 0, n, indices)].add(rows, mode="drop")


def page_and_row(slots: Int32[Array, "*any"], page_size: int, num_pages: int):
    """Page and row of every slot, and whether it lies in the cache. Page is num_pages where it does not."""
    checks.integer("slots", slots)
    page, row = slots // page_size, slots % page_size
    inside = (slots >= 0) & (page < num_pages)
    return jnp.where(inside, page, num_pages), row, inside


def gather_paged(pages: Shaped[Array, "pages P *row"], slots: Int32[Array, "*any"]) -> Shaped[Array, "*out"]:
    """Rows [*slots.shape, *row] of a paged array; zeros where a slot is below 0 or beyond the last page."""
    page, row, _ = page_and_row(slots, pages.shape[1], pages.shape[0])
    return pages.at[page, row].get(mode="fill", fill_value=0)


def scatter_paged(
    pages: Shaped[Array, "pages P *row"], slots: Int32[Array, " M"], rows: Shaped[Array, "M *row"]
) -> Shaped[Array, "pages P *row"]:
    """`pages` with ``rows[i]`` stored at ``slots[i]``; a slot below 0 or beyond the last page writes nothing.

    Slots that do write must differ from one another. `rows` is cast to the dtype of `pages`.
    """
    page, row, _ = page_and_row(slots, pages.shape[1], pages.shape[0])
    return pages.at[page, row].set(rows.astype(pages.dtype), mode="drop", unique_indices=True)


def gather_bytes(pages: Shaped[Array, "pages stride"], slots: Int32[Array, "*any"], page_size: int, field):
    """One field of every slot's record [*slots.shape, field.size] from pages of bytes; zeros where there is none.

    `field` has offset, stride and size in bytes: row r of a page has it at offset + r * stride.
    """
    page, row, inside = page_and_row(slots, page_size, pages.shape[0])
    starts = jnp.stack([page, field.offset + row * field.stride], axis=-1)
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=(slots.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    found = lax.gather(pages, starts, dimensions, (1, field.size), mode=lax.GatherScatterMode.CLIP)
    return jnp.where(inside[..., None], found, jnp.zeros((), pages.dtype))


def scatter_bytes(
    pages: Shaped[Array, "pages stride"],
    slots: Int32[Array, " M"],
    page_size: int,
    field,
    values: Shaped[Array, "M size"],
):
    """`pages` with one field of every slot's record replaced; the counterpart of gather_bytes."""
    page, row, _ = page_and_row(slots, page_size, pages.shape[0])
    starts = jnp.stack([page, field.offset + row * field.stride], axis=-1)
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    drop = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(pages, starts, values, dimensions, unique_indices=True, mode=drop)
