"""V4: the same tokens, however they arrive: one shot, any chunks, one by one, in a batch (design rule 4)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from arrival import Feeder, prompt, window_layer_ignores_what_is_behind, with_another
from reference.dspark import draft as reference_draft
from tiny_v4 import dspark_config, tiny_model

# Row i of the MTP layer's logits stands one position before row i of the step.
feed = Feeder(lists=("layer1.selected",), values=("logits", "mtp.logits"), late=("mtp.logits",), room=512)
ROWS, LONG = feed.rows, 272  # chunks are padded to one of these, so that few compiled steps serve all splits


def test_ac_31_every_split_point_gives_what_one_shot_gives():
    feed.check_every_split(tiny_model())


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 28, 29, 33, 64])
def test_token_by_token_gives_what_one_shot_gives(n):
    """Lengths around groups of 4, the window of 8, and lists of 6 (28 tokens are 7 groups)."""
    feed.check_one_by_one(tiny_model(), n)


def test_ac_30_a_needle_in_the_first_chunk_stays_in_reach():
    feed.check_needle(tiny_model(), "layer1.selected", 4)


def test_ac_42_every_compressed_row_until_the_list_begins_to_cut():
    """Up to 6 groups (27 tokens) a list is all of them; from the 7th on it is the 6 best of the scores."""
    lm, tokens = tiny_model(), prompt(64, seed=42)
    _, _, taps = lm.forward(lm.new_cache(1, feed.room), tokens[None], np.array([64], np.int32))
    scores, chosen = (np.asarray(taps[f"layer1.{name}"])[0] for name in ("index_score", "selected"))
    for t in range(64):
        groups = (t + 1) // 4
        best = np.sort(np.argsort(-scores[t, :groups], kind="stable")[:6])
        assert np.array_equal(chosen[t][chosen[t] >= 0], best) and len(best) == min(groups, 6), f"row {t}"


def test_two_boundaries_of_ratio_128():
    """260 tokens in one shot, in uneven chunks, and token by token from 120 on."""
    lm, tokens = tiny_model(), prompt(260, seed=5)
    whole = feed(lm, tokens, rows=LONG)
    feed.assert_same(feed(lm, tokens, [50, 61, 125, 130, 190, 254]), whole, "uneven chunks")
    cache, first = feed(lm, tokens[:120], [60])["cache"], 120
    for t in range(first, 260):
        logits, cache, _ = lm.forward(cache, tokens[None, t : t + 1], np.ones(1, np.int32))
        gap = np.abs(np.asarray(logits)[0, 0] - whole["logits"][t]).max()
        assert gap <= tolerances.of("model.arrival.f32"), f"token {t}"


def test_every_row_of_ratio_128_is_attended_to():
    """A changed first token moves the last logits although it is far outside every window: through layer 2 (ratio 128)."""
    tokens = prompt(200, seed=6)
    changed = with_another(tokens, 0)

    def compressed_output(lm, tokens, rows):
        padded = np.zeros((1, LONG), np.int32)
        padded[0, : len(tokens)] = tokens
        _, _, taps = lm.forward(lm.new_cache(1, 512), padded, np.array([len(tokens)], np.int32))
        return np.asarray(taps["layer2.attn_out"])[0, rows]

    lm = tiny_model()
    before, after = compressed_output(lm, tokens, slice(8, 200)), compressed_output(lm, changed, slice(8, 200))
    moved = np.abs(before - after).max(-1) > 1e-6
    assert moved[127 - 8 :].all(), "rows from 127 on see the row that pools tokens 0 to 127"


def rows_and_tails(lm, cache, n: int) -> list[tuple[str, np.ndarray]]:
    """Everything the compressors hold after n tokens: finished rows, and the tail's slots that a later row will read."""
    held = []
    for role, layer in zip(lm.plan, cache.layers, strict=True):
        for name in ("compressed", "index_keys"):
            owned = getattr(layer, name)
            if owned is None:
                continue
            slots = jnp.arange(n // role.ratio, dtype=jnp.int32)
            held.append((f"layer{role.index}.{name}", np.asarray(owned.rows.gather(slots, np.float32))))
            capacity = owned.tail.kv.shape[1]
            first = n - n % role.ratio - (role.ratio if role.overlap else 0)
            live = np.arange(max(first, 0), n) % capacity
            held.append((f"layer{role.index}.{name}.kv", np.asarray(owned.tail.kv)[0, live]))
            held.append((f"layer{role.index}.{name}.gate", np.asarray(owned.tail.gate)[0, live]))
    return held


def test_ac_34_the_compressor_state_is_that_of_a_cold_run():
    """Ratio 4 (which pools two groups a row) and ratio 128: after n tokens one by one, the state is that of one shot."""
    lm, tokens = tiny_model(), prompt(260, seed=8)
    cache, compared = lm.new_cache(1, 512), 0
    for n in range(1, 261):
        _, cache, _ = lm.forward(cache, tokens[None, n - 1 : n], np.ones(1, np.int32))
        if n not in (1, 3, 4, 5, 6, 7, 8, 9, 11, 127, 128, 129, 255, 256, 257):
            continue
        cold = feed(lm, tokens[:n], rows=ROWS if n <= ROWS else LONG)["cache"]
        for (name, warm), (_, expected) in zip(rows_and_tails(lm, cache, n), rows_and_tails(lm, cold, n), strict=True):
            np.testing.assert_allclose(warm, expected, atol=tolerances.of("model.arrival.f32"), err_msg=f"{name} at {n}")
            compared += expected.size > 0
    assert compared > 100


@pytest.mark.slow
@pytest.mark.parametrize("n", range(1, 10))
def test_ac_33_decode_equals_one_shot_over_every_group_boundary(n):
    feed.check_decode(tiny_model(), n)


def test_ac_35_a_later_token_changes_nothing_before_it():
    feed.check_later_tokens(tiny_model(), range(10, 23))


def test_ac_37_a_window_layer_does_not_see_behind_its_window():
    window_layer_ignores_what_is_behind(tiny_model(), ROWS, feed.room)


def test_ac_38_a_shared_prefix_brings_its_window_along():
    def held(cache):
        slots = jnp.arange(8, dtype=jnp.int32)
        return [np.asarray(layer.window.gather(slots, np.float32)) for layer in (*cache.layers, cache.mtp.layer)]

    feed.check_prefix(tiny_model(), held)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 30])
def test_a_draft_is_what_the_mtp_layer_gives_once_the_token_is_there(n):
    """After n tokens the draft behind token n equals the MTP row of position n - 1 in a run that holds token n."""
    lm, tokens = tiny_model(), prompt(n + 1, seed=20 + n)
    cache = feed(lm, tokens[:n], [n // 2] if n > 1 else [])["cache"]
    drafted = lm.draft(cache, tokens[n:])
    whole = feed(lm, tokens)["mtp.logits"][n]
    gap = np.abs(np.asarray(drafted.logits)[0, 0] - whole).max()
    assert gap <= tolerances.of("model.arrival.f32")
    assert list(np.asarray(drafted.ids)[0]) == [tokens[n], whole.argmax()] and drafted.confidence is None


@pytest.mark.parametrize("splits", [[], [1], [7, 8, 21]])
def test_dspark_drafts_are_those_of_the_specification(splits):
    """30 tokens, however they arrive, then a block of 3 drafts: ids, logits and confidence of an independent NumPy
    implementation, fed with what the stages read of the backbone. The window of 8 is full."""
    lm, tokens = tiny_model(config=dspark_config()), prompt(30, seed=12)
    cache, read = lm.new_cache(1, 512), []
    for part in np.split(tokens, splits):
        padded = np.zeros((1, ROWS), np.int32)
        padded[0, : len(part)] = part
        _, cache, taps = lm.forward(cache, padded, np.array([len(part)], np.int32))
        read.append(np.asarray(taps["main_hidden"])[0, : len(part)])
        # The stages read the stream behind the layers, as the mean of its copies.
        behind = np.concatenate([np.asarray(taps[f"layer{i}.h"]).mean(2) for i in (0, 1)], axis=-1)
        np.testing.assert_allclose(taps["main_hidden"], behind, atol=tolerances.of("model.arrival.f32"))
    weights = {name: np.asarray(lm.parameter(name)) for name in lm._names if name.startswith(("mtp.", "embed.", "head."))}
    config = dataclasses.asdict(lm.config)
    ids, logits, confidence = reference_draft(config, weights, np.concatenate(read).astype(np.float64), 7, block=3, noise=1)
    drafted = lm.draft(cache, np.array([7], np.int32))
    assert list(np.asarray(drafted.ids)[0]) == list(ids) and drafted.ids.shape == (1, 4)
    assert np.abs(np.asarray(drafted.logits)[0] - logits).max() <= tolerances.of("model.drafts.f32")
    assert np.abs(np.asarray(drafted.confidence)[0] - confidence).max() <= tolerances.of("model.drafts.f32")


@pytest.mark.slow
def test_ac_53_requests_of_a_batch_do_not_touch_each_other():
    """Requests of other lengths, and one without tokens, leave a request's logits and its draft as they are alone."""
    lm = tiny_model()
    prompts = [prompt(n, seed=n) for n in (1, 9, 0, 40)]
    together, cache = lm.prefill(lm.new_cache(4, 128), prompts, chunk=16)
    after = np.array([5, 6, 7, 8], np.int32)
    drafts = lm.draft(cache, after)
    for b, tokens in enumerate(prompts):
        if not len(tokens):
            continue
        alone, single = lm.prefill(lm.new_cache(1, 128), [tokens], chunk=16)
        assert np.abs(np.asarray(together)[b] - np.asarray(alone)[0]).max() <= tolerances.of("model.arrival.f32")
        own = np.asarray(lm.draft(single, after[b : b + 1]).logits)[0]
        assert np.abs(np.asarray(drafts.logits)[b] - own).max() <= tolerances.of("model.arrival.f32")
    assert list(np.asarray(cache.length)) == [1, 9, 0, 40]


@pytest.mark.slow
def test_a_prefill_in_bf16_does_not_depend_on_its_chunks():
    feed.check_chunks_in_bf16(tiny_model("bf16"), 40, [7, 8, 21, 33])
