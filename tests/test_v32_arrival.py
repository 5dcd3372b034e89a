"""V3.2: the same tokens, however they arrive, at lengths around the number of positions chosen (6)."""

import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from tiny_v32 import tiny_config, tiny_model

from dsa_jax.cache.latent import PAGE_TOKENS
from dsa_jax.decode import ImageSpan
from dsa_jax.layers.latent_attention import LatentAttention
from dsa_jax.sampling import Sampling

ROWS = 32
LISTS = [f"layer{layer}.selected" for layer in range(3)]


def prompt(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 60, n).astype(np.int32)


def feed(lm, tokens: np.ndarray, splits: list[int], rows: int = ROWS) -> dict[str, np.ndarray]:
    """Logits and selected lists of every token, fed in chunks that end at `splits` and at the end."""
    cache = lm.new_cache(1, 128)
    lists = LISTS[: len(lm.plan)]
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ["logits", *lists]}
    for part in np.split(tokens, splits):
        padded = np.zeros((1, rows), np.int32)
        padded[0, : len(part)] = part
        logits, cache, taps = lm.forward(cache, padded, np.array([len(part)], np.int32))
        parts["logits"].append(np.asarray(logits)[0, : len(part)])
        for name in lists:
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


@pytest.mark.parametrize("n", [1, 2, 4, 5, 6, 7, 8, 15, 16, 17, 31, 32])
def test_token_by_token_gives_what_one_shot_gives(n):
    lm, tokens = tiny_model(), prompt(n, seed=n)
    whole = feed(lm, tokens, [])
    assert_same(feed(lm, tokens, list(range(1, n)), rows=1), whole, f"length {n}, one by one")


def test_chunks_across_a_page_boundary_give_what_one_by_one_gives():
    """Chunks of 30 of 70 tokens: the second page begins inside the last chunk."""
    lm, tokens = tiny_model(), prompt(PAGE_TOKENS + 6)
    assert_same(feed(lm, tokens, [30, 60]), feed(lm, tokens, list(range(1, len(tokens))), rows=1), "chunks of 30")


def test_ac_42_dense_and_sparse_meet_where_the_list_begins_to_cut():
    """Lengths k-2 .. k+2 step by step: up to k positions the list is all of them, beyond it is the k best of the scores,
    and up to there a model that never cuts gives the same."""
    lm, dense, tokens = tiny_model(), tiny_model(config=tiny_config(index_topk=32)), prompt(20)
    ours, whole = feed(lm, tokens, list(range(4, 20))), feed(dense, tokens, [])
    for n in range(4, 9):
        last = ours["layer0.selected"][n - 1]
        assert np.array_equal(last[last >= 0], np.arange(n)) == (n <= 6)
        assert (last >= 0).sum() == min(n, 6)
    gap = np.abs(ours["logits"] - whole["logits"]).max(axis=1)
    assert gap[:6].max() <= tolerances.of("model.arrival.f32")
    assert gap[6:].min() > 100 * tolerances.of("model.arrival.f32")


def test_ac_42_the_expanded_form_meets_the_absorbed_one_at_the_cut():
    """Prefills of k-2 .. k+2 tokens at once, in the form that expands keys and values up to k tokens and in the absorbed one
    beyond, against chunks too small to expand anything; then on from there, across the switch."""
    lm, rows = tiny_model(config=tiny_config(num_hidden_layers=2, index_topk=90)), 96
    assert ROWS < LatentAttention(lm.config, lm.plan[0].rope).rows_to_expand <= rows
    tokens = prompt(3 * ROWS, seed=42)
    small = feed(lm, tokens, [ROWS, 2 * ROWS])["logits"]
    for n in range(88, 93):
        ours = feed(lm, tokens, [n], rows)["logits"]
        assert np.abs(ours - small).max() <= tolerances.of("model.arrival.f32"), f"{n} tokens, then the rest"


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


def test_a_batch_of_different_lengths_equals_each_alone():
    lm = tiny_model()
    prompts = [prompt(n, seed=n) for n in (1, 6, 23, 40)]
    together, cache = lm.prefill(lm.new_cache(4, 128), prompts, chunk=16)
    for b, tokens in enumerate(prompts):
        alone, _ = lm.prefill(lm.new_cache(1, 128), [tokens], chunk=16)
        assert np.abs(np.asarray(together)[b] - np.asarray(alone)[0]).max() <= tolerances.of("model.arrival.f32")
    assert list(np.asarray(cache.length)) == [1, 6, 23, 40]


def test_ac_35_a_later_token_changes_nothing_before_it():
    lm, tokens = tiny_model(), prompt(24)
    whole = feed(lm, tokens, [])
    for t in range(3, 23, 3):
        changed = tokens.copy()
        changed[t + 1] = (changed[t + 1] - 3 + 11) % 57 + 3
        other = feed(lm, changed, [])
        assert np.array_equal(other["logits"][: t + 1], whole["logits"][: t + 1]), f"token {t + 1} changed"
        assert not np.array_equal(other["logits"][t + 1], whole["logits"][t + 1])


def test_decode_equals_one_shot():
    """8 greedy tokens across the cut: each is the best token of the one-shot run over what was fed."""
    lm, tokens = tiny_model(), prompt(4, seed=9)
    logits, cache = lm.prefill(lm.new_cache(1, 128), [tokens], chunk=16)
    *_, out = lm.decode(cache, logits, jnp.zeros(1, bool), Sampling.of(1), jnp.array([64], jnp.int32), 8)
    out = np.asarray(out)[0]
    whole = feed(lm, np.concatenate([tokens, out]).astype(np.int32), [])
    assert np.array_equal(out, whole["logits"][3:-1].argmax(-1))


def test_a_prefill_in_bf16_does_not_depend_on_its_chunks():
    """bf16 caches hold FP8 records: chunks read back what one shot wrote. Rounding may fall the other way in few rows."""
    lm, tokens = tiny_model("bf16"), prompt(32)
    whole, split = feed(lm, tokens, []), feed(lm, tokens, [7, 8, 21, 30])
    gap = np.linalg.norm(whole["logits"] - split["logits"]) / np.linalg.norm(whole["logits"])
    assert gap <= tolerances.of("model.arrival.bf16")


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
