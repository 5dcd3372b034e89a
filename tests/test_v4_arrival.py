"""V4: the same tokens, however they arrive: one shot, any chunks, one by one, in a batch (design rule 4)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from reference.dspark import draft as reference_draft
from tiny_v4 import dspark_config, tiny_model

from dsa_jax.sampling import Sampling

ROWS, LONG = 64, 272  # chunks are padded to one of these, so that few compiled steps serve all splits
LISTS = ("layer1.selected",)
VALUES = ("logits", "mtp.logits")  # row i of the MTP layer's stands one position before row i of the step


def prompt(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 60, n).astype(np.int32)


def feed(lm, tokens: np.ndarray, splits: list[int], rows: int = ROWS) -> dict:
    """Logits and selected lists of every token, fed in chunks that end at `splits` and at the end."""
    cache = lm.new_cache(1, 512)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in (*VALUES, *LISTS)}
    for part in np.split(tokens, splits):
        padded = np.zeros((1, rows), np.int32)
        padded[0, : len(part)] = part
        logits, cache, taps = lm.forward(cache, padded, np.array([len(part)], np.int32))
        for name in parts:
            values = logits if name == "logits" else taps[name]
            parts[name].append(np.asarray(values)[0, : len(part)])
    return {name: np.concatenate(values) for name, values in parts.items()} | {"cache": cache}


def assert_same(ours: dict, wanted: dict, what: str) -> None:
    for name in LISTS:
        assert np.array_equal(ours[name], wanted[name]), f"{what}: {name}"
    for name in VALUES:
        first = 1 if name == "mtp.logits" else 0
        gap = np.abs(ours[name][first:] - wanted[name][first:]).max(initial=0)
        assert gap <= tolerances.of("model.arrival.f32"), f"{what}: {name} differ by {gap}"


def test_ac_31_every_split_point_gives_what_one_shot_gives():
    lm, tokens = tiny_model(), prompt(24)
    whole = feed(lm, tokens, [])
    for split in range(1, 24):
        assert_same(feed(lm, tokens, [split]), whole, f"split at {split}")


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 28, 29, 33, 64])
def test_token_by_token_gives_what_one_shot_gives(n):
    """Lengths around groups of 4, the window of 8, and lists of 6 (28 tokens are 7 groups)."""
    lm, tokens = tiny_model(), prompt(n, seed=n)
    assert_same(feed(lm, tokens, list(range(1, n)), rows=1), feed(lm, tokens, []), f"length {n}, one by one")


def test_two_boundaries_of_ratio_128():
    """260 tokens in one shot, in uneven chunks, and token by token from 120 on."""
    lm, tokens = tiny_model(), prompt(260, seed=5)
    whole = feed(lm, tokens, [], rows=LONG)
    assert_same(feed(lm, tokens, [50, 61, 125, 130, 190, 254]), whole, "uneven chunks")
    cache, first = feed(lm, tokens[:120], [60])["cache"], 120
    for t in range(first, 260):
        logits, cache, _ = lm.forward(cache, tokens[None, t : t + 1], np.ones(1, np.int32))
        gap = np.abs(np.asarray(logits)[0, 0] - whole["logits"][t]).max()
        assert gap <= tolerances.of("model.arrival.f32"), f"token {t}"


def test_every_row_of_ratio_128_is_attended_to():
    """A changed first token moves the last logits although it is far outside every window: through layer 2 (ratio 128)."""
    tokens = prompt(200, seed=6)
    changed = tokens.copy()
    changed[0] = (changed[0] - 3 + 11) % 57 + 3

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
        cold = feed(lm, tokens[:n], [], rows=ROWS if n <= ROWS else LONG)["cache"]
        for (name, warm), (_, expected) in zip(rows_and_tails(lm, cache, n), rows_and_tails(lm, cold, n), strict=True):
            np.testing.assert_allclose(warm, expected, atol=tolerances.of("model.arrival.f32"), err_msg=f"{name} at {n}")
            compared += expected.size > 0
    assert compared > 100


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


def test_ac_35_a_later_token_changes_nothing_before_it():
    lm, tokens = tiny_model(), prompt(24)
    whole = feed(lm, tokens, [])
    for t in range(10, 23):
        changed = tokens.copy()
        changed[t + 1] = (changed[t + 1] - 3 + 11) % 57 + 3
        other = feed(lm, changed, [])
        assert np.array_equal(other["logits"][: t + 1], whole["logits"][: t + 1]), f"token {t + 1} changed"
        assert not np.array_equal(other["logits"][t + 1], whole["logits"][t + 1])


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 30])
def test_a_draft_is_what_the_mtp_layer_gives_once_the_token_is_there(n):
    """After n tokens the draft behind token n equals the MTP row of position n - 1 in a run that holds token n."""
    lm, tokens = tiny_model(), prompt(n + 1, seed=20 + n)
    cache = feed(lm, tokens[:n], [n // 2] if n > 1 else [])["cache"]
    drafted = lm.draft(cache, tokens[n:])
    whole = feed(lm, tokens, [])["mtp.logits"][n]
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


def test_a_prefill_in_bf16_does_not_depend_on_its_chunks():
    """bf16 caches are records: chunks read back what one shot wrote. Rounding may fall the other way in few rows."""
    lm, tokens = tiny_model("bf16"), prompt(40)
    whole, split = feed(lm, tokens, []), feed(lm, tokens, [7, 8, 21, 33])
    gap = np.linalg.norm(whole["logits"] - split["logits"]) / np.linalg.norm(whole["logits"])
    assert gap <= tolerances.of("model.arrival.bf16")
