"""The same tokens, however they arrive: one shot, any chunks, one by one, padded, in a batch (design rule 4)."""

import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from tiny import tiny_config, tiny_model

from dsa_jax.sampling import Sampling

ROWS = 64  # every chunk is padded to this, so that one compiled step serves all splits
LISTS = [f"layer{layer}.selected" for layer in range(1, 6)]


def prompt(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 60, n).astype(np.int32)


def feed(lm, tokens: np.ndarray, splits: list[int], rows: int = ROWS) -> dict[str, np.ndarray]:
    """Logits and selected lists of every token, fed in chunks that end at `splits` and at the end."""
    cache = lm.new_cache(1, 128)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ["logits", *LISTS]}
    for part in np.split(tokens, splits):
        padded = np.zeros((1, rows), np.int32)
        padded[0, : len(part)] = part
        logits, cache, taps = lm.forward(cache, padded, np.array([len(part)], np.int32))
        parts["logits"].append(np.asarray(logits)[0, : len(part)])
        for name in LISTS:
            parts[name].append(np.asarray(taps[name])[0, : len(part)])
    return {name: np.concatenate(values) for name, values in parts.items()} | {"cache": cache}


def assert_same(ours: dict, wanted: dict, what: str) -> None:
    for name in LISTS:
        assert np.array_equal(ours[name], wanted[name]), f"{what}: {name}"
    gap = np.abs(ours["logits"] - wanted["logits"]).max()
    assert gap <= tolerances.of("model.arrival.f32"), f"{what}: logits differ by {gap}"


def test_ac_31_every_split_point_gives_what_one_shot_gives():
    lm, tokens = tiny_model(), prompt(24)
    whole = feed(lm, tokens, [])
    for split in range(1, 24):
        assert_same(feed(lm, tokens, [split]), whole, f"split at {split}")


@pytest.mark.parametrize("n", range(1, 65))
def test_token_by_token_gives_what_one_shot_gives(n):
    """Lengths around every boundary: groups of 2, blocks of 4, window 8, lists of 6, candidates of 12."""
    lm, tokens = tiny_model(), prompt(n, seed=n)
    whole = feed(lm, tokens, [])
    assert_same(feed(lm, tokens, list(range(1, n)), rows=1), whole, f"length {n}, one by one")


def test_the_candidate_filter_bites_where_it_is_tested():
    """At 48 tokens the consumer's list differs from an unrestricted one, so the tests above cover the filter."""
    tokens = prompt(48)
    filtered = feed(tiny_model(), tokens, [])
    wide = feed(tiny_model(config=tiny_config(candidate_topk_blocks=64)), tokens, [])
    assert np.array_equal(filtered["layer3.selected"], wide["layer3.selected"])
    assert not np.array_equal(filtered["layer5.selected"], wide["layer5.selected"])


def test_ac_30_a_needle_in_the_first_chunk_stays_in_reach():
    """Chunks of 16, then single tokens: position 5 is chosen by the same queries as in one shot, and by late ones."""
    lm, tokens = tiny_model(), prompt(60, seed=7)
    whole = feed(lm, tokens, [])
    assert_same(feed(lm, tokens, [16, 32, 48, *range(49, 60)]), whole, "chunks of 16, then one by one")
    late = whole["layer3.selected"][32:]
    assert (late < 16).any(axis=1).mean() > 0.5 and (late >= 0).all()


def test_ac_32_a_resumed_prefill_and_a_check_of_drafts_are_the_same_step():
    """After any boundary, 3 tokens at once give what the 3 give one by one and what a cold run gives."""
    lm, tokens = tiny_model(), prompt(30, seed=3)
    whole = feed(lm, tokens, [])
    for boundary in (1, 2, 3, 7, 8, 9, 15, 16, 17, 27):
        assert_same(feed(lm, tokens, [boundary, boundary + 3]), whole, f"resumed at {boundary}, then 3")


@pytest.mark.parametrize("n", range(1, 10))
def test_ac_33_decode_equals_one_shot_over_every_group_boundary(n):
    """20 greedy tokens from prompts of 1 to 9: each is the best token of the one-shot run over what was fed."""
    lm, tokens = tiny_model(), prompt(n, seed=100 + n)
    logits, cache = lm.prefill(lm.new_cache(1, 64), [tokens])
    state, out = (cache, logits, jnp.zeros(1, bool)), []
    for _ in range(5):
        *state, new = lm.decode(*state, Sampling.of(1), jnp.array([64], jnp.int32), 4)
        out.append(np.asarray(new)[0])
    out = np.concatenate(out)
    whole = feed(lm, np.concatenate([tokens, out]).astype(np.int32), [])
    assert np.array_equal(out, whole["logits"][n - 1 : -1].argmax(-1))


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
    lm, tokens = tiny_model(), prompt(24)
    whole = feed(lm, tokens, [])
    for t in range(10, 23):
        changed = tokens.copy()
        changed[t + 1] = (changed[t + 1] - 3 + 11) % 57 + 3
        other = feed(lm, changed, [])
        assert np.array_equal(other["logits"][: t + 1], whole["logits"][: t + 1]), f"token {t + 1} changed"
        assert not np.array_equal(other["logits"][t + 1], whole["logits"][t + 1])


def test_ac_37_a_window_layer_does_not_see_behind_its_window():
    """Layer 0 has ratio 0: its output at the last position does not depend on a token a window back, and on one inside it does."""
    lm, tokens = tiny_model(), prompt(20)

    def last_row(changed_place):
        changed = tokens.copy()
        changed[changed_place] = (changed[changed_place] - 3 + 11) % 57 + 3
        padded = np.zeros((1, ROWS), np.int32)
        padded[0, :20] = changed
        _, _, taps = lm.forward(lm.new_cache(1, 128), padded, np.array([20], np.int32))
        return np.asarray(taps["layer0.attn_out"])[0, 19]

    assert np.array_equal(last_row(0), last_row(11)), "positions 0 and 11 are outside the window of 19 (12 to 19)"
    assert not np.array_equal(last_row(11), last_row(12))


def test_ac_42_dense_and_sparse_meet_where_the_list_begins_to_cut():
    """Lengths k-2 .. k+2: up to k positions the list is all of them, and a model with a longer list gives the same."""
    lm, wide = tiny_model(), tiny_model(config=tiny_config(index_topk=9))
    tokens = prompt(20)
    for n in range(4, 9):
        ours, dense = feed(lm, tokens[:n], []), feed(wide, tokens[:n], [])
        last = ours["layer3.selected"][-1]
        assert np.array_equal(last[last >= 0], np.arange(n)) == (n <= 6)
        if n <= 6:
            assert np.abs(ours["logits"] - dense["logits"]).max() <= tolerances.of("model.arrival.f32")


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
    lm = tiny_model()
    prompts = [prompt(n, seed=n) for n in (1, 9, 23, 40)]
    together, cache = lm.prefill(lm.new_cache(4, 128), prompts, chunk=16)
    for b, tokens in enumerate(prompts):
        alone, _ = lm.prefill(lm.new_cache(1, 128), [tokens], chunk=16)
        assert np.abs(np.asarray(together)[b] - np.asarray(alone)[0]).max() <= tolerances.of("model.arrival.f32")
    assert list(np.asarray(cache.length)) == [1, 9, 23, 40]


def test_a_prefill_in_bf16_does_not_depend_on_its_chunks():
    """bf16 caches are quantised records: chunks read back what one shot wrote. Rounding may fall the other way in few rows."""
    lm, tokens = tiny_model("bf16"), prompt(40)
    whole, split = feed(lm, tokens, []), feed(lm, tokens, [7, 8, 21, 33])
    gap = np.linalg.norm(whole["logits"] - split["logits"]) / np.linalg.norm(whole["logits"])
    assert gap <= tolerances.of("model.arrival.bf16")
