"""What is done with whole requests of a cache of any family: taken out, put back, copied, rolled back."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int32

from dsa_jax import ops
from dsa_jax.pytree import Leaf

Cache = Any  # a cache of any family


def capacity(cache: Cache, max_positions: int) -> int:
    """How many tokens a request of `cache` may hold, in a model of `max_positions` positions."""
    return min(cache.block_table.shape[1] * cache.page_tokens, max_positions)


def take_requests(cache: Cache, rows: Int32[Array, " R"]) -> Cache:
    """A cache of the requests `rows`, on the same pools. -1 gives a request that holds nothing and has page 0 only by name."""
    return cache.map_arrays(lambda x: ops.gather_rows(x, rows), lambda x: x)


def put_requests(cache: Cache, rows: Int32[Array, " R"], part: Cache) -> Cache:
    """`cache` with its requests `rows` replaced by those of `part`, whose pools it takes over; -1 replaces none."""
    kept, pools = arrays_of(cache)
    new, _ = arrays_of(part)
    kept = [ops.scatter_rows(old, rows, fresh) for old, fresh in zip(kept, new, strict=True)]
    return with_arrays(part, kept, arrays_of(part)[1])


def arrays_of(cache: Cache) -> tuple[list[Leaf], list[Leaf]]:
    """(arrays of one row a request, pools), each in the order in which `map_arrays` meets them."""
    requests, pools = [], []
    cache.map_arrays(lambda x: requests.append(x) or x, lambda x: pools.append(x) or x)
    return requests, pools


def with_arrays(cache: Cache, requests: list[Leaf], pools: list[Leaf]) -> Cache:
    """`cache` with these arrays in place of its own, in the order of `arrays_of`."""
    requests, pools = iter(requests), iter(pools)
    return cache.map_arrays(lambda _: next(requests), lambda _: next(pools))


def copy_pages(cache: Cache, source: Int32[Array, " N"], target: Int32[Array, " N"]) -> Cache:
    """`cache` with pages `source` of every pool copied to pages `target`; -1 copies none."""

    def copied(pool: Array) -> Array:
        return ops.scatter_rows(pool, target, ops.gather_rows(pool, source))

    return cache.map_arrays(lambda x: x, copied)


def rolled_back(cache: Cache, tokens: Int32[Array, " B"]) -> Cache:
    """`cache` without the newest `tokens[b]` tokens of each request: at most the max_rollback that it was made with.

    What rings and pages hold of them is never read again: it is written over before its position is seen.
    """
    return replace(cache, length=jnp.maximum(cache.length - tokens, 0))


def snapshots_of(cache: Cache, count: int) -> Cache:
    """A store for the state of `count` requests: everything but the pools. Each place holds an empty request's state.

    `cache` must still be empty.
    """
    return cache.map_arrays(lambda x: jnp.repeat(x[:1], count, axis=0), lambda x: x[:0])


def save_requests(store: Cache, places: Int32[Array, " R"], cache: Cache, rows: Int32[Array, " R"]) -> Cache:
    """`store` with the state of the requests `rows` at `places`; a place of -1 stores nothing."""
    state = cache.map_arrays(lambda x: ops.gather_rows(x, rows), lambda x: x[:0])
    return put_requests(store, places, state)


def restore_requests(cache: Cache, rows: Int32[Array, " R"], store: Cache, places: Int32[Array, " R"]) -> Cache:
    """`cache` with the state stored at `places` as its requests `rows`; a row of -1 is none. Pools are the cache's own."""
    state = store.map_arrays(lambda x: ops.gather_rows(x, places), lambda x: x)
    own = arrays_of(cache)[1]
    return put_requests(cache, rows, with_arrays(state, arrays_of(state)[0], own))


def page_bytes(cache: Cache) -> int:
    """Bytes of one page in all pools together."""
    return sum(pool.size // pool.shape[0] * pool.dtype.itemsize for pool in arrays_of(cache)[1])


def request_bytes(cache: Cache) -> int:
    """Bytes of one request's state besides its pages."""
    return sum(x.size // x.shape[0] * x.dtype.itemsize for x in arrays_of(cache)[0])
