"""The engine's compiled functions. All take the engine's state, which is donated, and return it.

Shapes are those of a few static buckets, so that after a warm-up nothing compiles. What differs from step to step, which
requests take part and how, is data.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from dsa_jax import ops
from dsa_jax.burst import decode_burst, prefill_chunk
from dsa_jax.cache.requests import copy_pages, put_requests, restore_requests, save_requests, take_requests
from dsa_jax.pytree import Leaf
from dsa_jax.sampling import Sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Terms:
    """How a request decodes, arrays of one row a request: temperature, top_p float32; top_k int32; key uint32 [B, w], the
    data of a PRNG key; stop_ids int32 [B, n], -1 padded; limit int32, the tokens after which it holds no more."""

    temperature: Leaf
    top_k: Leaf
    top_p: Leaf
    key: Leaf
    stop_ids: Leaf
    limit: Leaf

    def sampling(self, is_greedy: bool) -> Sampling:
        """The part that `sample` asks for."""
        return Sampling(self.temperature, self.top_k, self.top_p, jax.random.wrap_key_data(self.key), is_greedy)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Everything on the device that belongs to the engine's B requests: cache, logits [B, V] after the last token of each,
    and terms."""

    cache: Leaf
    logits: Leaf
    terms: Leaf


class Programs:
    """Compiled functions of one model; `lm` is the LanguageModel."""

    def __init__(self, lm: Any):
        def prefill(model, slots, rows, tokens, count, image):
            cache, logits, _ = taken(slots, rows)
            logits, cache = prefill_chunk(model, lm.numerics, cache, logits, tokens, count, image)
            return put(slots, rows, cache, logits)

        def decode(model, slots, rows, active, steps, drafts, is_greedy):
            cache, logits, terms = taken(slots, rows)
            sampling = terms.sampling(is_greedy)
            cache, logits, _, tokens = decode_burst(
                model, lm.numerics, cache, logits, ~active, sampling, terms.stop_ids, terms.limit, steps, drafts
            )
            return put(slots, rows, cache, logits), tokens

        def admit(slots, store, rows, places, table, terms):
            cache = restore_requests(slots.cache, rows, store, places)
            cache = replace(cache, block_table=ops.scatter_rows(cache.block_table, rows, table))
            terms = jax.tree.map(lambda old, new: ops.scatter_rows(old, rows, new), slots.terms, terms)
            return Slots(cache, slots.logits, terms)

        def keep(store, places, slots, rows):
            return save_requests(store, places, slots.cache, rows)

        def copy(slots, source, target):
            return replace(slots, cache=copy_pages(slots.cache, source, target))

        def rewind(slots, length, table):
            length = jnp.minimum(slots.cache.length, length)
            return replace(slots, cache=replace(slots.cache, length=length, block_table=table))

        def counted(name, function, **options):
            def traced(*arguments):
                lm.traces[name] = lm.traces.get(name, 0) + 1
                return function(*arguments)

            return jax.jit(traced, **options)

        self.prefill = lm.compiled("engine.prefill", prefill, donate_argnums=1)
        self.decode = lm.compiled("engine.decode", decode, donate_argnums=1, static_argnames=("steps", "drafts", "is_greedy"))
        self.admit = counted("engine.admit", admit, donate_argnums=0)
        self.keep = counted("engine.keep", keep, donate_argnums=0)
        self.copy = counted("engine.copy", copy, donate_argnums=0)
        self.rewind = counted("engine.rewind", rewind, donate_argnums=0)


def taken(slots: Slots, rows: Int32[Array, " R"] | None) -> tuple[Any, Array, Terms]:
    """Cache, logits and terms of the requests `rows` (None: all). Rows of -1 are requests that take no part."""
    if rows is None:
        return slots.cache, slots.logits, slots.terms
    logits, terms = jax.tree.map(lambda x: ops.gather_rows(x, rows), (slots.logits, slots.terms))
    return take_requests(slots.cache, rows), logits, terms


def put(slots: Slots, rows: Int32[Array, " R"] | None, cache: Any, logits: Array) -> Slots:
    """`slots` with cache and logits of the requests `rows` (None: all) as they are after a step."""
    if rows is None:
        return replace(slots, cache=cache, logits=logits)
    return replace(
        slots, cache=put_requests(slots.cache, rows, cache), logits=ops.scatter_rows(slots.logits, rows, logits)
    )
