"""Named shapes of the scores of candidate blocks: V4.1's 2048 blocks of 8."""

import jax
import jax.numpy as jnp

from pallas_kernels.candidate_logits import expand_candidates, sm90
from pallas_kernels.case import Case
from pallas_kernels.indexer_logits.cases import (
    WIDTH,
    decoded,
    exact_scores,
    random_mxfp4_pages,
    random_packed,
    random_pages,
    random_queries,
    relative_error,
    sample,
)

def _section(form, mxfp4):
    return f"Candidate logits, {form} ({'mxfp4' if mxfp4 else 'fp8'})"


def _blocks(key, rows, count, of):
    """`count` different block ids of `of` for every row."""
    return jnp.argsort(jax.random.uniform(key, (rows, of)), axis=-1)[:, :count].astype(jnp.int32)


def _paged(heads, batch, context, count=2048, size=8, page_size=64, compiled=False, mxfp4=False):
    pages = context // page_size

    def make(key):
        a, b, c, d, e = jax.random.split(key, 5)
        table = jax.random.permutation(d, batch * pages).reshape(batch, pages).astype(jnp.int32)
        lengths = jnp.full((batch, 1), context, jnp.int32)
        keys = (random_mxfp4_pages if mxfp4 else random_pages)(b, batch * pages, page_size)
        candidates = expand_candidates(_blocks(e, batch, count, context // size)[:, None], lengths, size)
        weights = jax.random.normal(c, (batch, 1, heads))
        schedule = sm90.make_schedule(candidates, keys, context_lens=lengths, block_table=table, heads=heads)
        return random_queries(a, (batch, 1, heads), mxfp4), keys, weights, candidates, lengths, table, schedule

    def call(function, q, keys, weights, candidates, lengths, table, schedule):
        return function(
            q, keys, weights, candidates, context_lens=lengths, block_table=table, schedule=schedule
        )

    def check(found, q, keys, weights, candidates, lengths, table, schedule):
        at = sample(8, batch)
        column = jnp.arange(count * size)
        position = candidates.blocks[at, 0][:, column // size] * size + column % size
        slots = jnp.take_along_axis(table[at], position // page_size, axis=1) * page_size + position % page_size
        wanted = exact_scores(q[at, 0], keys.gather(slots), weights[at, 0])
        return relative_error(found[at, 0], wanted, position < lengths[at])

    columns = batch * count * size
    q_bytes, row_bytes = (2 * WIDTH, 68) if mxfp4 else (WIDTH, WIDTH + 4)
    return Case(
        section=_section("paged decode", mxfp4), shape=f"h{heads} b{batch} ctx{context} {count}x{size} float32",
        operation="candidate_logits", function="candidate_logits", make=make, call=call, check=check,
        flops=2.0 * columns * heads * WIDTH, bytes=batch * heads * (q_bytes + 4) + columns * (row_bytes + 4.0),
        peak="bf16" if mxfp4 else "fp8", compiled=compiled,
    )  # fmt: skip


def _ragged(heads, rows, keys, count=2048, size=8, compiled=False, mxfp4=False):
    """Rows come in runs of 64 that share their blocks, as neighbouring tokens do."""

    def make(key):
        a, b, c, e = jax.random.split(key, 4)
        end = keys - rows + 1 + jnp.arange(rows, dtype=jnp.int32)
        start = jnp.zeros(rows, jnp.int32)
        ids = jnp.repeat(_blocks(e, -(-rows // 64), count, keys // size), 64, axis=0)[:rows]
        candidates = expand_candidates(ids, end, size)
        weights = jax.random.normal(c, (rows, heads))
        schedule = sm90.make_ragged_schedule(candidates, row_start=start, row_end=end, heads=heads)
        q, (k, scale) = random_queries(a, (rows, heads), mxfp4), random_packed(b, keys, mxfp4)
        return q, k, weights, candidates, start, end, scale, schedule

    def call(function, q, k, weights, candidates, start, end, scale, schedule):
        return function(
            q, k, weights, candidates, row_start=start, row_end=end, k_scale=scale, schedule=schedule
        )

    def check(found, q, k, weights, candidates, start, end, scale, schedule):
        at = sample(12, rows)
        column = jnp.arange(count * size)
        block = candidates.blocks[at][:, column // size]
        position = jnp.where(block >= 0, block * size + column % size, keys)
        inside = jnp.minimum(position, keys - 1)
        wanted = exact_scores(q[at], decoded(k, scale)[inside], weights[at])
        return relative_error(found[at], wanted, position < end[at, None])

    columns = rows * count * size
    q_bytes, row_bytes = (2 * WIDTH, 68) if mxfp4 else (WIDTH, WIDTH + 4)
    return Case(
        section=_section("ragged prefill", mxfp4), shape=f"h{heads} sq{rows} skv{keys} {count}x{size} float32",
        operation="candidate_logits", function="ragged_candidate_logits", make=make, call=call, check=check,
        flops=2.0 * columns * heads * WIDTH, bytes=rows * heads * (q_bytes + 4) + keys * row_bytes + columns * 4.0,
        peak="bf16" if mxfp4 else "fp8", compiled=compiled,
    )  # fmt: skip


CASES = (
    *[_paged(32, batch, 131072, compiled=batch == 32) for batch in (1, 32, 128)],
    _paged(32, 32, 131072, count=1024, size=16, compiled=True),
    _paged(64, 32, 131072, compiled=True),
    _ragged(32, 4096, 131072, compiled=True),
    *[_paged(32, batch, 131072, compiled=batch == 32, mxfp4=True) for batch in (1, 32, 128)],
    _ragged(32, 4096, 131072, compiled=True, mxfp4=True),
)
