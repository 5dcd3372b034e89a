"""Indexer scores of candidate blocks on Blackwell: as the dense kernel, on keys gathered by cp.async.

Every query row counts as a request of its own, whose keys are its candidate blocks in order. TMA takes no copies as
short as the scales of a block, so values and scales come by cp.async, as on Hopper. Nothing is known of its speed (see
`indexer_logits.sm100`).
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels import copies
from pallas_kernels.candidate_logits import sm90
from pallas_kernels.candidate_logits.sm90 import make_ragged_schedule, make_schedule  # noqa: F401
from pallas_kernels.indexer_logits import keys as index_keys
from pallas_kernels.indexer_logits import lanes
from pallas_kernels.indexer_logits import sm100 as dense


def candidate_logits(
    q, keys, weights, candidates, *, context_lens, block_table, q_scale=None, rounding=None, schedule=None
):
    """See `pallas_kernels.candidate_logits.candidate_logits`. Width 128; FP8 queries with FP8 keys, bf16 or packed
    queries with MXFP4 keys."""
    batch, rows, heads = q.shape[:3]
    kind, where, (values, words) = index_keys.paged_keys(keys)
    blocks, size = sm90.block_sizes(candidates)
    if 0 in (batch, rows, blocks):
        return jnp.full((batch, rows, blocks * size), -jnp.inf, jnp.float32)
    if schedule is None:
        schedule = make_schedule(candidates, keys, context_lens=context_lens, block_table=block_table, heads=heads)
    flat = lambda array: None if array is None else array.reshape(-1, *array.shape[2:])  # noqa: E731
    q, q_scale, kind = dense.queries_of_kind(flat(q), flat(q_scale), kind)
    layout = (where.page_rows, where.page_words, where.first_word)
    views = (values, words.reshape(-1))
    scores = _score(q, q_scale, views, flat(weights), schedule, kind, blocks, size, layout, rounding is not None)
    return scores.reshape(batch, rows, -1)


def ragged_candidate_logits(
    q, k, weights, candidates, *, row_start, row_end, k_scale=None, q_scale=None, rounding=None, schedule=None
):
    """See `pallas_kernels.candidate_logits.ragged_candidate_logits`. As `candidate_logits`."""
    kind, views = index_keys.packed_keys(k, k_scale)
    blocks, size = sm90.block_sizes(candidates)
    if 0 in (q.shape[0], blocks, k.shape[0]):
        return jnp.full((q.shape[0], blocks * size), -jnp.inf, jnp.float32)
    if schedule is None:
        schedule = make_ragged_schedule(candidates, row_start=row_start, row_end=row_end, heads=q.shape[1])
    if not kind.scaled:
        views = (*views, jnp.ones(k.shape[0], jnp.float32))
    q, q_scale, kind = dense.queries_of_kind(q, q_scale, kind)
    whole = (2**31 - 1, 0, 0)  # one page: a row's word has the row's own number
    return _score(q, q_scale, views, weights, schedule, kind, blocks, size, whole, rounding is not None)


@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8, 9))
def _score(q, q_scale, views, weights, schedule, kind, blocks, size, layout, rounding):
    """q [R, H, D], views: values [rows, row bytes] and words [n], weights [R, H] -> [R, blocks * size]."""
    rows, heads = q.shape[:2]
    sm90.check_schedule(schedule, rows, heads, blocks, size)
    per_tile = dense.KEYS // size
    halves = dense.KEYS // lanes.KEYS

    def load(refs, row, tile, values_smem, words_smem, barrier):
        values_ref, words_ref, places_ref = refs
        places = copies.load_places(places_ref, row * sm90.row_places(blocks) + tile * per_tile)
        for half in range(halves):
            keys = pl.ds(half * lanes.KEYS, lanes.KEYS)
            copies.gather_tile(
                values_smem.at[keys], words_smem.at[keys], values_ref, words_ref, places, half * (per_tile // halves),
                size=size, word_layout=layout, swizzle=kind.swizzle,
            )  # fmt: skip

    visible = schedule.visible[:, None]
    scores = dense.score(
        q[:, None], None if q_scale is None else q_scale[:, None], weights[:, None], jnp.zeros_like(visible), visible,
        kind, (*views, schedule.places), load, None, total=blocks * size, rounding=rounding,
    )  # fmt: skip
    return scores[:, 0]


def unproven(function, args):
    """Why this kernel is not chosen by itself for a call that it carries."""
    return dense.unproven(function, args)
