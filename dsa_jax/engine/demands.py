"""What an engine is made with, checked before anything is allocated, and the sizes that follow from it."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax import ops, sharding
from dsa_jax.cache.requests import page_bytes, request_bytes
from dsa_jax.cache.sizes import CacheSizes
from dsa_jax.engine.programs import Slots
from dsa_jax.engine.request import terms_of
from dsa_jax.layers.moe import Experts
from dsa_jax.memory import expert_bytes, human, index_score_bytes, prefill_row_bytes, row_width, step_bytes

DEFAULT_PREFILL_BYTES = 2 * 2**30
LARGEST_CHUNK = 4096


@dataclass(frozen=True)
class Sizes:
    """Static sizes of an engine: requests at once, tokens of a request, those of its cache, shapes (requests, tokens) of
    its prefill steps, requests of its decode bursts, steps of a burst, and drafted tokens a step."""

    max_batch: int
    max_context: int
    table_tokens: int
    cache: CacheSizes
    prefill_shapes: tuple[tuple[int, int], ...]
    decode_rows: tuple[int, ...]
    steps: int
    drafts: int
    snapshots: int
    boundary: int
    max_rollback: int


def sizes_of(
    lm: Any,
    *,
    max_batch: int,
    max_context: int,
    page_size: int | None,
    pages: int | None,
    memory_bytes: int | None,
    prefill_bytes: int | None,
    prefill_shapes: Sequence[tuple[int, int]] | None,
    decode_rows: Sequence[int] | None,
    steps: int,
    drafts: int,
    max_rollback: int,
    snapshots: int,
    boundary: int | None,
) -> Sizes:
    """The engine's sizes. ValueError or NotImplementedError, one sentence each, for what cannot be met."""
    ops.require(lm.implementation)
    if lm.groups > 1:
        raise ValueError(
            f"An Engine on a mesh of dp={lm.groups}: its pools and snapshots are not divided by requests. Give it a mesh without "
            "dp, and make one Engine for each group of devices."
        )
    for name, value, least in (
        ("max_batch", max_batch, 1), ("max_context", max_context, 1), ("steps", steps, 1), ("drafts", drafts, 0),
        ("max_rollback", max_rollback, 0), ("snapshots", snapshots, 0), ("boundary", 1 if boundary is None else boundary, 1),
    ):  # fmt: skip
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}.")
    drafted = drafted_tokens(lm) if drafts else 0
    if drafts > drafted:
        raise ValueError(f"drafts={drafts}, but the model drafts {drafted} tokens at a time: give 0 to {drafted}.")
    tokens, allowed = max_context + drafts, lm.config.max_position_embeddings
    if tokens > allowed:
        raise ValueError(
            f"max_context={max_context} with {drafts} drafted tokens is longer than the {allowed} positions that the "
            f"checkpoint's config allows (max_position_embeddings). Give at most {allowed - drafts}."
        )
    rollback = drafts + (max_rollback + 1 if max_rollback else 0)
    one = CacheSizes(1, page_size, rollback)
    shape = jax.eval_shape(lambda: lm.new_cache(1, tokens, one))
    # Bytes are those of one device: a page is divided over cp, and so are the scores of a row.
    ways = 1 if lm.mesh is None else lm.mesh.shape["cp"]
    each, page, state = shape.block_table.shape[1], page_bytes(shape) // ways, request_bytes(shape)
    scored = -(-max_context // ways)
    budget = DEFAULT_PREFILL_BYTES if prefill_bytes is None else prefill_bytes
    chunk = chunk_of_budget(lm.config, scored, budget, max_batch)
    if prefill_shapes is None:
        prefill_shapes = {(1, chunk), (max_batch, max(1, chunk // max_batch))}
    for requests, rows in prefill_shapes:
        if not 1 <= requests <= max_batch or not 1 <= rows:
            raise ValueError(
                f"The prefill shape ({requests}, {rows}) must be 1 to {max_batch} requests (max_batch) of at least 1 token."
            )
        if requests * rows > max(chunk, max_batch):
            raise ValueError(
                f"The prefill shape ({requests}, {rows}) has {requests * rows} rows, and the budget of prefill bytes allows "
                f"{chunk}: a row of {max_context} tokens of context takes "
                f"{human(prefill_row_bytes(lm.config, scored))}. Give a larger prefill_bytes or a smaller shape."
            )
    decode_rows = {1, max_batch} if decode_rows is None else set(decode_rows)
    if not decode_rows or min(decode_rows) < 1 or max(decode_rows) != max_batch:
        raise ValueError(
            f"decode_rows={sorted(decode_rows)} must be positive and end with max_batch={max_batch}: every request that "
            "runs takes part in a burst."
        )
    if pages is not None and memory_bytes is not None:
        raise ValueError(f"pages={pages} and memory_bytes={memory_bytes} both size the pool: give one of them.")
    if memory_bytes is not None:
        fixed = (max_batch + 1 + snapshots) * state
        stored = _multiplies_stored(lm)
        work = max(
            _work(lm, stored, scored, max_batch, 1 + drafts, logits=max_batch * (1 + drafts)),
            *(_work(lm, stored, scored, requests, rows, logits=requests) for requests, rows in prefill_shapes),
        )
        pages = (memory_bytes - fixed - work) // page
        if pages < each:
            raise ValueError(
                f"memory_bytes={memory_bytes} ({human(memory_bytes)}) leaves room for {max(pages, 0)} pages beside the state "
                f"of {max_batch} requests and {snapshots} snapshots ({human(fixed)}) and what a step works in ({human(work)}); "
                f"one request of {max_context} tokens needs {each} pages of {human(page)}. Give at least "
                f"{human(fixed + work + each * page)}, or a smaller max_context, max_batch, snapshots or prefill_bytes."
            )
    if pages is None:
        pages = max_batch * each
    return Sizes(
        max_batch=max_batch,
        max_context=max_context,
        table_tokens=tokens,
        cache=CacheSizes(pages, page_size, rollback),
        prefill_shapes=tuple(sorted(prefill_shapes)),
        decode_rows=tuple(sorted(decode_rows)),
        steps=steps,
        drafts=drafts,
        snapshots=snapshots,
        boundary=chunk if boundary is None else boundary,
        max_rollback=max_rollback,
    )


def _work(lm: Any, stored: bool, context: int, requests: int, rows: int, logits: int) -> int:
    """Bytes that a step of `rows` tokens of each of `requests` requests takes while it runs, beside weights and caches; experts
    as memory.expert_bytes counts those of one device, so that the same bytes of a device give as many pages on any mesh."""
    config, queries = lm.config, requests * rows
    experts = expert_bytes(config, queries, lm.numerics.dtype.itemsize, stored)
    return step_bytes(config, queries, context, logits) + experts + _decoded(config, requests, context)


def _multiplies_stored(lm: Any) -> bool:
    """Whether no weight of the routed experts is dequantised into memory."""
    experts = (module for _, module in nnx.iter_graph(lm.model()) if isinstance(module, Experts))
    with ops.preferred(lm.implementation):
        return all(module.multiplies_stored(1, 1, lm.numerics) for module in experts)


def require_kernels(lm: Any, sizes: Sizes) -> None:
    """Traces every chunk and burst of the engine where kernels take part; nothing is compiled or allocated.

    What a kernel that was chosen by name does not carry raises NotImplementedError; what one of the GPU at hand does not
    carry is logged, here and not in the middle of serving. The traces are those that the first steps would make.
    """
    if lm.implementation == "reference" or lm.implementation is None and not ops.has_kernels():
        return
    batch = sizes.max_batch
    cache = jax.eval_shape(lambda: lm.new_cache(batch, sizes.table_tokens, sizes.cache))
    logits = jax.ShapeDtypeStruct((batch, lm.config.vocab_size), jnp.float32)
    placed = None if lm.mesh is None else sharding.everywhere(lm.mesh)  # which mesh, is part of a trace
    slots = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), Slots(cache, logits, terms_of([None] * batch))
    )

    def rows(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    for requests, count in sizes.prefill_shapes:
        with _naming(lm.implementation, f"a chunk of {requests} x {count} tokens (prefill_shapes)"):
            lm.programs.prefill.eval_shape(lm.leaves, slots, rows(requests), rows(requests, count), rows(requests), None)
    for requests in sizes.decode_rows:
        chosen = rows(requests) if requests < batch else None
        active = jax.ShapeDtypeStruct((requests,), jnp.bool_)
        with _naming(lm.implementation, f"a burst of {requests} requests (decode_rows)"):
            # Drawing adds no kernel: what carries the one program carries the other.
            static = {"steps": sizes.steps, "drafts": sizes.drafts, "is_greedy": True}
            lm.programs.decode.eval_shape(lm.leaves, slots, chosen, active, **static)


@contextlib.contextmanager
def _naming(implementation: str | None, what: str) -> Iterator[None]:
    try:
        yield
    except NotImplementedError as reason:
        raise NotImplementedError(
            f"implementation={implementation!r} does not run {what}: {reason} Change what it names, or load the model "
            "with implementation=None, which takes the reference for what a kernel does not carry."
        ) from reason


def drafted_tokens(lm: Any) -> int:
    """How many tokens the model drafts at a time. Raises as `LanguageModel.draft` does for one that does not."""
    lm.require_drafts()
    config = lm.config
    spark = getattr(config, "dspark", None)
    return getattr(config, "dspark_block_size", 1) if spark is None else spark.block_size


def chunk_of_budget(config: Any, context: int, budget: int, requests: int) -> int:
    """The most query rows, a power of two, whose temporaries at `context` tokens of context fit in `budget` bytes.

    They count the indexer's scores of every visible position, which grow with the context, and, whatever the rows, what a
    chunk of up to `requests` requests decodes for all of them. ValueError where not even one row fits.
    """
    row, decoded = prefill_row_bytes(config, context), _decoded(config, requests, context)
    if budget < row + decoded:
        raise ValueError(
            f"prefill_bytes={budget} is less than one row's {row} bytes at {context} tokens of context (indexer scores and "
            f"activations) and {decoded} of decoded rows of the cache. Give at least {row + decoded}."
        )
    return min(1 << ((budget - decoded) // row).bit_length() - 1, LARGEST_CHUNK)


def _decoded(config: Any, requests: int, context: int) -> int:
    """Bytes of the cache's rows that a step of `requests` requests may decode once for all of its query rows."""
    return ops.decoded_bytes(index_score_bytes(config, requests, context) // 4, row_width(config))
