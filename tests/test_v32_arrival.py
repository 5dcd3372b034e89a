"""V3.2: the same tokens, however they arrive, at lengths around the number of positions chosen (6)."""

import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from arrival import Feeder, prompt
from tiny_v32 import tiny_config, tiny_model

from dsa_jax.decode import ImageSpan
from dsa_jax.layers.latent_attention import LatentAttention

PAGE_TOKENS = 64
LISTS = tuple(f"layer{layer}.selected" for layer in range(3))
feed = Feeder(lists=LISTS, rows=32)
ROWS = feed.rows


def test_ac_31_every_split_point_gives_what_one_shot_gives():
    feed.check_every_split(tiny_model())


@pytest.mark.parametrize("n", [1, 2, 4, 5, 6, 7, 8, 15, 16, 17, 31, 32])
def test_token_by_token_gives_what_one_shot_gives(n):
    feed.check_one_by_one(tiny_model(), n)


def test_ac_30_a_needle_in_the_first_chunk_stays_in_reach():
    """Chunks of 16, then single tokens, against single tokens from the start."""
    lm, tokens = tiny_model(), prompt(60, seed=7)
    whole = feed(lm, tokens, range(1, 60), rows=1)
    feed.assert_same(feed(lm, tokens, [16, 32, 48, *range(49, 60)]), whole, "chunks of 16, then one by one")
    assert (whole["layer1.selected"][32:] < 16).any(axis=1).mean() > 0.5


def test_chunks_across_a_page_boundary_give_what_one_by_one_gives():
    """Chunks of 30 of 70 tokens: the second page begins inside the last chunk."""
    lm, tokens = tiny_model(), prompt(PAGE_TOKENS + 6)
    feed.assert_same(feed(lm, tokens, [30, 60]), feed(lm, tokens, list(range(1, len(tokens))), rows=1), "chunks of 30")


def test_ac_42_dense_and_sparse_meet_where_the_list_begins_to_cut():
    """Lengths k-2 .. k+2 step by step: up to k positions the list is all of them, beyond it is the k best of the scores,
    and up to there a model that never cuts gives the same."""
    lm, dense, tokens = tiny_model(), tiny_model(config=tiny_config(index_topk=32)), prompt(20)
    ours, whole = feed(lm, tokens, list(range(4, 20))), feed(dense, tokens)
    for n in range(4, 9):
        last = ours["layer0.selected"][n - 1]
        assert np.array_equal(last[last >= 0], np.arange(n)) == (n <= 6)
        assert (last >= 0).sum() == min(n, 6)
    gap = np.abs(ours["logits"] - whole["logits"]).max(axis=1)
    assert gap[:6].max() <= tolerances.of("model.arrival.f32")
    assert gap[6:].min() > 100 * tolerances.of("model.arrival.f32")


@pytest.mark.slow
def test_ac_42_the_expanded_form_meets_the_absorbed_one_at_the_cut():
    """Prefills of k-2 .. k+2 tokens at once, in the form that expands keys and values up to k tokens and in the absorbed one
    beyond, against chunks too small to expand anything; then on from there, across the switch."""
    lm, rows = tiny_model(config=tiny_config(num_hidden_layers=2, index_topk=90)), 96
    assert ROWS < LatentAttention(lm.config, lm.plan[0].rope).rows_to_expand <= rows
    tokens, arrive = prompt(3 * ROWS, seed=42), Feeder(lists=LISTS[:2], rows=ROWS)
    small = arrive(lm, tokens, [ROWS, 2 * ROWS])
    for n in range(88, 93):
        arrive.assert_same(arrive(lm, tokens, [n], rows), small, f"{n} tokens, then the rest")


def test_ac_42_beyond_the_cut_early_tokens_stay_in_reach():
    """Every list is the 6 best of its row's scores, and rows far behind the cut still choose among the first 6 tokens."""
    lm, tokens = tiny_model(), prompt(ROWS, seed=200)
    _, _, taps = lm.forward(lm.new_cache(1, 128), tokens[None], np.array([ROWS], np.int32))
    for layer in range(3):
        score, chosen = (np.asarray(taps[f"layer{layer}.{name}"])[0] for name in ("index_score", "selected"))
        for t in range(6, ROWS):
            best = np.sort(np.argsort(-score[t, : t + 1], kind="stable")[:6])
            assert np.array_equal(chosen[t], best)
        assert (chosen[16:] < 6).any(axis=1).mean() > 0.3


@pytest.mark.slow
def test_a_batch_of_different_lengths_equals_each_alone():
    feed.check_batch(tiny_model(), (1, 6, 23, 40))


def test_ac_35_a_later_token_changes_nothing_before_it():
    feed.check_later_tokens(tiny_model(), range(3, 23, 3))


def test_ac_38_a_shared_prefix_brings_its_rows_along():
    def held(cache):
        slots = jnp.arange(24, dtype=jnp.int32)
        return [np.asarray(rows.gather(slots)) for layer in cache.layers for rows in (layer.latent, layer.index_keys)]

    feed.check_prefix(tiny_model(), held)


def test_decode_equals_one_shot():
    """8 greedy tokens across the cut."""
    feed.check_decode(tiny_model(), 4, calls=2)


@pytest.mark.slow
def test_a_prefill_in_bf16_does_not_depend_on_its_chunks():
    feed.check_chunks_in_bf16(tiny_model("bf16"), 32, [7, 8, 21, 30])


def test_what_the_model_does_not_do_is_refused():
    lm = tiny_model()
    with pytest.raises(NotImplementedError, match="DeepseekV32 does not run its draft layer"):
        lm.draft(lm.new_cache(1, 128), np.array([3], np.int32))
    with pytest.raises(ValueError, match="Prompt 0 has image spans, but DeepseekV32 takes text alone"):
        lm.prefill(lm.new_cache(1, 128), [prompt(4)], [[ImageSpan(0, np.zeros((1, 128), np.float32))]])
    with pytest.raises(ValueError, match="longer than the 256 positions"):
        lm.new_cache(1, 257)
    with pytest.raises(ValueError, match="both must be at least 1"):
        lm.new_cache(0, 10)
