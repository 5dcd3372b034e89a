"""From logical positions to physical slots, in plain JAX. One gather from the block table."""

import jax
import jax.numpy as jnp

from pallas_kernels import indexing


def positions_to_slots(topk_indices, block_table, page_size, lengths=None):
    page = jnp.where(topk_indices >= 0, topk_indices // page_size, -1)
    valid = (page >= 0) & (page < block_table.shape[1])
    if lengths is not None:
        valid &= topk_indices < lengths[..., None]
    physical = jax.vmap(indexing.gather_rows)(block_table, page)
    highest = (jnp.iinfo(jnp.int32).max - page_size + 1) // page_size  # slots are int32; a page beyond has none
    valid &= (physical >= 0) & (physical <= highest)
    slots = jnp.where(valid, jnp.where(valid, physical, 0) * page_size + topk_indices % page_size, -1)
    return slots, jnp.sum(valid, axis=-1, dtype=jnp.int32)
