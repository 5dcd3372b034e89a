"""The same tokens in different ways through a tiny model, and the checks that hold for every family (design rule 4)."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import tolerances

from dsa_jax.sampling import Sampling


def prompt(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 60, n).astype(np.int32)


def with_another(tokens: np.ndarray, place: int) -> np.ndarray:
    """`tokens` with another token at `place`."""
    changed = tokens.copy()
    changed[place] = (changed[place] - 3 + 11) % 57 + 3
    return changed


@dataclass(frozen=True)
class Feeder:
    """Feeds one request. lists: taps that are equal however tokens arrive; values: those that are close; late: those of
    `values` whose first row of all has nothing to stand on. rows: what chunks are padded to, so that one compiled step
    serves all splits; room: tokens that a cache may hold.
    """

    lists: tuple[str, ...]
    values: tuple[str, ...] = ("logits",)
    late: tuple[str, ...] = ()
    rows: int = 64
    room: int = 128

    def __call__(self, lm, tokens: np.ndarray, splits: Sequence[int] = (), rows: int | None = None, cache=None) -> dict:
        """What came out for every token, fed in chunks that end at `splits` and at the end, and the cache after."""
        cache = lm.new_cache(1, self.room) if cache is None else cache
        parts: dict[str, list[np.ndarray]] = {name: [] for name in (*self.values, *self.lists)}
        for part in np.split(tokens, splits):
            padded = np.zeros((1, rows or self.rows), np.int32)
            padded[0, : len(part)] = part
            logits, cache, taps = lm.forward(cache, padded, np.array([len(part)], np.int32))
            for name in parts:
                values = logits if name == "logits" else taps[name]
                parts[name].append(np.asarray(values)[0, : len(part)])
        return {name: np.concatenate(values) for name, values in parts.items()} | {"cache": cache}

    def assert_same(self, ours: dict, wanted: dict, what: str, start: int = 0) -> None:
        """`ours` is what `wanted` is from token `start` on."""
        for name in self.lists:
            assert np.array_equal(ours[name], wanted[name][start:]), f"{what}: {name}"
        for name in self.values:
            first = 1 if name in self.late and start == 0 else 0
            gap = np.abs(ours[name][first:] - wanted[name][start + first :]).max(initial=0)
            assert gap <= tolerances.of("model.arrival.f32"), f"{what}: {name} differ by {gap}"

    def check_every_split(self, lm, n: int = 24) -> None:
        """Two chunks, cut anywhere."""
        tokens = prompt(n)
        whole = self(lm, tokens)
        for split in range(1, n):
            self.assert_same(self(lm, tokens, [split]), whole, f"split at {split}")

    def check_one_by_one(self, lm, n: int) -> None:
        """Token by token."""
        tokens = prompt(n, seed=n)
        self.assert_same(self(lm, tokens, range(1, n), rows=1), self(lm, tokens), f"length {n}, one by one")

    def check_needle(self, lm, layer: str, reach: int) -> None:
        """Chunks of 16, then single tokens: late rows still choose among the first `reach` positions, as in one shot."""
        tokens = prompt(60, seed=7)
        whole = self(lm, tokens)
        self.assert_same(self(lm, tokens, [16, 32, 48, *range(49, 60)]), whole, "chunks of 16, then one by one")
        late = whole[layer][32:]
        assert ((late >= 0) & (late < reach)).any(axis=1).mean() > 0.5

    def check_later_tokens(self, lm, places: Sequence[int], n: int = 24) -> None:
        """A changed token changes nothing before it, and something at it."""
        tokens = prompt(n)
        whole = self(lm, tokens)["logits"]
        for t in places:
            other = self(lm, with_another(tokens, t + 1))["logits"]
            assert np.array_equal(other[: t + 1], whole[: t + 1]), f"token {t + 1} changed"
            assert not np.array_equal(other[t + 1], whole[t + 1])

    def check_decode(self, lm, n: int, calls: int = 5) -> None:
        """4 · `calls` greedy tokens: each is the best token of the one-shot run over what was fed."""
        tokens = prompt(n, seed=100 + n)
        logits, cache = lm.prefill(lm.new_cache(1, self.room), [tokens], chunk=16)
        state, out = (cache, logits, jnp.zeros(1, bool)), []
        for _ in range(calls):
            *state, new = lm.decode(*state, Sampling.of(1), jnp.array([64], jnp.int32), 4)
            out.append(np.asarray(new)[0])
        out = np.concatenate(out)
        whole = self(lm, np.concatenate([tokens, out]).astype(np.int32))
        assert np.array_equal(out, whole["logits"][n - 1 : -1].argmax(-1))

    def check_prefix(self, lm, held) -> None:
        """A request goes on from another's cache after 10 to 13 shared tokens: results and `held(cache)` as if cold."""
        a, b = prompt(24, seed=30), prompt(24, seed=31)
        for shared in (10, 11, 12, 13):
            tokens = np.concatenate([a[:shared], b[shared:]])
            kept = self(lm, a[:shared])["cache"]
            self(lm, a[shared:], cache=jax.tree.map(jnp.copy, kept))  # what the first request does afterwards
            warm, cold = self(lm, tokens[shared:], cache=kept), self(lm, tokens)
            self.assert_same(warm, cold, f"{shared} tokens shared", start=shared)
            for ours, wanted in zip(held(warm["cache"]), held(cold["cache"]), strict=True):
                np.testing.assert_allclose(ours, wanted, atol=tolerances.of("model.arrival.f32"))

    def check_batch(self, lm, lengths: Sequence[int]) -> None:
        """Requests of other lengths, idle ones among them, leave a request as it is alone."""
        prompts = [prompt(n, seed=n) for n in lengths]
        together, cache = lm.prefill(lm.new_cache(len(prompts), self.room), prompts, chunk=16)
        for b, tokens in enumerate(prompts):
            if len(tokens):
                alone, _ = lm.prefill(lm.new_cache(1, self.room), [tokens], chunk=16)
                assert np.abs(np.asarray(together)[b] - np.asarray(alone)[0]).max() <= tolerances.of("model.arrival.f32")
        assert list(np.asarray(cache.length)) == list(lengths)

    def check_chunks_in_bf16(self, lm, n: int, splits: Sequence[int]) -> None:
        """Caches hold quantised records: chunks read back what one shot wrote. Rounding may fall the other way in few rows."""
        tokens = prompt(n)
        whole, split = self(lm, tokens)["logits"], self(lm, tokens, splits)["logits"]
        assert np.linalg.norm(whole - split) / np.linalg.norm(whole) <= tolerances.of("model.arrival.bf16")


def window_layer_ignores_what_is_behind(lm, rows: int, room: int) -> None:
    """Layer 0 of window 8: its output at position 19 depends on token 12, the oldest inside, and on none before."""
    tokens = prompt(20)

    def last_row(place: int) -> np.ndarray:
        padded = np.zeros((1, rows), np.int32)
        padded[0, :20] = with_another(tokens, place)
        _, _, taps = lm.forward(lm.new_cache(1, room), padded, np.array([20], np.int32))
        return np.asarray(taps["layer0.attn_out"])[0, 19]

    assert np.array_equal(last_row(0), last_row(11)) and not np.array_equal(last_row(11), last_row(12))
