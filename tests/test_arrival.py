"""The same tokens, however they arrive: one shot, any chunks, one by one, padded, in a batch (design rule 4)."""

import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from arrival import Feeder, prompt, window_layer_ignores_what_is_behind
from tiny import tiny_config, tiny_model

feed = Feeder(lists=tuple(f"layer{layer}.selected" for layer in range(1, 6)))
ROWS = feed.rows


def test_ac_31_every_split_point_gives_what_one_shot_gives():
    feed.check_every_split(tiny_model())


@pytest.mark.parametrize("n", range(1, 65))
def test_token_by_token_gives_what_one_shot_gives(n):
    """Lengths around every boundary: groups of 2, blocks of 4, window 8, lists of 6, candidates of 12."""
    feed.check_one_by_one(tiny_model(), n)


def test_ac_29_layers_that_reuse_take_the_source_s_list_as_it_is():
    found = feed(tiny_model(), prompt(40))
    for layer, source in ((2, 1), (4, 3)):
        assert np.array_equal(found[f"layer{layer}.selected"], found[f"layer{source}.selected"])


@pytest.mark.slow
def test_the_candidate_filter_bites_where_it_is_tested():
    """At 48 tokens the consumer's list differs from an unrestricted one, so the tests above cover the filter."""
    tokens = prompt(48)
    filtered = feed(tiny_model(), tokens)
    wide = feed(tiny_model(config=tiny_config(candidate_topk_blocks=64)), tokens)
    assert np.array_equal(filtered["layer3.selected"], wide["layer3.selected"])
    assert not np.array_equal(filtered["layer5.selected"], wide["layer5.selected"])


def test_ac_30_a_needle_in_the_first_chunk_stays_in_reach():
    feed.check_needle(tiny_model(), "layer3.selected", 16)


def test_ac_32_a_resumed_prefill_and_a_check_of_drafts_are_the_same_step():
    """After any boundary, 3 tokens at once give what the 3 give one by one and what a cold run gives."""
    lm, tokens = tiny_model(), prompt(30, seed=3)
    whole = feed(lm, tokens)
    for boundary in (1, 2, 3, 7, 8, 9, 15, 16, 17, 27):
        feed.assert_same(feed(lm, tokens, [boundary, boundary + 3]), whole, f"resumed at {boundary}, then 3")


@pytest.mark.slow
@pytest.mark.parametrize("n", range(1, 10))
def test_ac_33_decode_equals_one_shot_over_every_group_boundary(n):
    feed.check_decode(tiny_model(), n)


def test_ac_34_the_compressor_state_is_that_of_a_cold_run():
    """Ratio 2: after n tokens one by one the tail, the compressed rows and the keys are those of one shot."""
    lm, tokens = tiny_model(), prompt(12)
    for n in range(1, 13):
        cold, warm = (feed(lm, tokens[:n], s)["cache"].sources[1] for s in ([], list(range(1, n))))
        slots = jnp.arange(n // 2, dtype=jnp.int32)
        for rows in ("compressed", "index_keys"):
            a, b = (np.asarray(getattr(source, rows).gather(slots, np.float32)) for source in (cold, warm))
            np.testing.assert_allclose(b, a, atol=tolerances.of("model.arrival.f32"))
        if n % 2:
            for a, b in ((cold.tail.kv, warm.tail.kv), (cold.tail.gate, warm.tail.gate)):
                slot = (n - 1) % 2
                np.testing.assert_allclose(b[0, slot], a[0, slot], atol=tolerances.of("model.arrival.f32"))


def test_ac_35_a_later_token_changes_nothing_before_it():
    feed.check_later_tokens(tiny_model(), range(10, 23))


def test_ac_37_a_window_layer_does_not_see_behind_its_window():
    window_layer_ignores_what_is_behind(tiny_model(), ROWS, feed.room)


def test_ac_38_a_shared_prefix_brings_its_window_along():
    def held(cache):
        slots = jnp.arange(8, dtype=jnp.int32)
        return [np.asarray(ring.gather(slots, np.float32)) for ring in (*cache.windows, *cache.draft_windows)]

    feed.check_prefix(tiny_model(), held)


@pytest.mark.slow
def test_ac_42_dense_and_sparse_meet_where_the_list_begins_to_cut():
    """Lengths k-2 .. k+2: up to k positions the list is all of them, and a model with a longer list gives the same."""
    lm, wide = tiny_model(), tiny_model(config=tiny_config(index_topk=9))
    tokens = prompt(20)
    for n in range(4, 9):
        ours, dense = feed(lm, tokens[:n]), feed(wide, tokens[:n])
        last = ours["layer3.selected"][-1]
        assert np.array_equal(last[last >= 0], np.arange(n)) == (n <= 6)
        if n <= 6:
            assert np.abs(ours["logits"] - dense["logits"]).max() <= tolerances.of("model.arrival.f32")


@pytest.mark.slow
def test_ac_06_padding_rows_and_idle_requests_do_not_touch_the_others():
    """Requests without tokens, and rows behind a request's tokens, leave the others' results equal to the bit."""
    lm, tokens = tiny_model(), prompt(20)

    def run(requests):
        cache = lm.new_cache(8, 128)
        padded = np.random.default_rng(1).integers(0, 60, (8, ROWS)).astype(np.int32)
        count = np.zeros(8, np.int32)
        for b in requests:
            padded[b, :20], count[b] = tokens, 20
        logits, cache, _ = lm.forward(cache, padded, count)
        return np.asarray(logits)[:, :20], cache

    alone, _ = run([0])
    among, cache = run([0, 3, 7])
    for b in (0, 3, 7):
        assert np.array_equal(among[b], alone[0])
    assert list(np.asarray(cache.length)) == [20, 0, 0, 20, 0, 0, 0, 20]
    assert np.isfinite(among).all()


def test_a_batch_of_different_lengths_equals_each_alone():
    feed.check_batch(tiny_model(), (1, 9, 23, 40))


@pytest.mark.slow
def test_a_prefill_in_bf16_does_not_depend_on_its_chunks():
    feed.check_chunks_in_bf16(tiny_model("bf16"), 40, [7, 8, 21, 33])
