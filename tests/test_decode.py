"""Sampling, generate and stream, the compiled steps by themselves, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from engines import NO_STOP, prompt, small_model
from jax.extend.core import jaxprs_in_params
from official_v4 import official_v4_config
from official_v41 import official_config
from test_v32_config import RELEASED
from tiny import tiny_config

from dsa_jax import bench_model
from dsa_jax.burst import decode_burst, steps_together
from dsa_jax.cache import new_cache
from dsa_jax.config import V41Config
from dsa_jax.config_v4 import V4Config
from dsa_jax.config_v32 import V32Config
from dsa_jax.decode import ImageSpan, LanguageModel, default_chunk, generate, stream
from dsa_jax.engine.demands import DEFAULT_PREFILL_BYTES, LARGEST_CHUNK
from dsa_jax.loading import abstract_model
from dsa_jax.memory import prefill_row_bytes
from dsa_jax.numerics import BF16, F32
from dsa_jax.sampling import Sampling, kept_tokens, sample
from pallas_kernels import platform

EVERY = 4  # decode steps a call: one number, so that tests share compiled loops


# ---------------------------------------------------------------- sampling


def test_temperature_zero_and_narrow_filters_are_greedy():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)), jnp.float32)
    best = np.asarray(logits).argmax(-1)
    for options in ({}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-6}, {"temperature": 1e-6}):
        drawn = sample(logits, Sampling.of(4, **options), jnp.arange(4, dtype=jnp.int32))
        assert np.array_equal(drawn, best), options


def test_draws_follow_the_softmax_and_the_filters():
    """4000 draws at T = 0.7 with top_p 0.8: the counts fit the renormalised probabilities (chi-square, fixed seed)."""
    n, logits = 4000, np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], np.float32)
    p = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    kept = np.cumsum(p) - p < 0.8
    p = np.where(kept, p, 0) / p[kept].sum()
    drawn = np.asarray(
        sample(jnp.tile(logits, (n, 1)), Sampling.of(n, temperature=0.7, top_p=0.8), jnp.zeros(n, jnp.int32))
    )
    counts = np.bincount(drawn, minlength=6)
    assert counts[~kept].sum() == 0
    assert ((counts[kept] - n * p[kept]) ** 2 / (n * p[kept])).sum() < 13.8  # 0.1 % of honest runs at 2 degrees of freedom


def test_the_kept_tokens_are_the_smallest_set_that_reaches_top_p():
    scaled = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))
    for top_p, top_k, expected in [(0.5, 0, [1]), (0.51, 0, [1, 3]), (0.76, 0, [1, 2, 3]), (1.0, 0, [0, 1, 2, 3]), (1.0, 2, [1, 3])]:
        keep = kept_tokens(scaled, jnp.array([top_k]), jnp.array([top_p]))
        assert np.flatnonzero(keep[0]).tolist() == expected


@pytest.mark.parametrize(
    ("backend", "forms"), [("cpu", [(1, 1.0), (17, 5.0), (257, 0.1), (1000, 1.0)]), ("gpu", [(257, 1.0)])]
)
def test_kept_tokens_are_those_of_a_sort(backend, forms, monkeypatch):
    """Ties, both zeros, tokens that cannot be drawn, one token; against a stable sort with sums in float64. Passes in a loop,
    and written out as for a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rng = np.random.default_rng(0)
    for size, spread in forms:
        scaled = (rng.standard_normal((6, size)) * spread).astype(np.float32)
        scaled[::2] = np.round(scaled[::2] * 2) / 2  # to halves, and to 0 from both sides
        scaled[4, 1::3] = -np.inf
        top_k = np.array([0, 5, 0, 2, 1, size], np.int32)
        top_p = np.array([0.9, 1.0, 0.5, 0.3, 1e-6, 1.0], np.float32)
        kept = np.asarray(kept_tokens(*map(jnp.asarray, (scaled, top_k, top_p))))
        for row, k, p, found in zip(scaled, top_k, top_p, kept, strict=True):
            order = np.argsort(-row, kind="stable")
            mass = np.exp((row - row.max()).astype(np.float64))[order]
            before = (np.cumsum(mass) - mass) / mass.sum()
            first = (np.arange(size) < (k or size)) & ((before < p) | (p == 1))
            assert np.flatnonzero(found).tolist() == sorted(order[first]), (size, spread, k, p)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 must be finite and at least 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.5}, "top_p=1.5 must be above 0 and at most 1"),
        ({"top_k": -2}, "top_k=-2 must be at least 0"),
        ({"temperature": [1.0, 2.0, 3.0]}, "one for each of 2 requests"),
    ],
)
def test_bad_sampling_options_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Sampling.of(2, **options)


# ---------------------------------------------------------------- the loop


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counted:
    """A cache that counts the calls of its model."""

    length: jax.Array
    calls: jax.Array


class Counting:
    """Stands in for a model: after n tokens the next is n, for every request."""

    def __call__(self, cache, tokens, count, numerics):
        cache = Counted(cache.length + count, cache.calls + 1)
        return jnp.broadcast_to(cache.length[:, None, None], (*tokens.shape, 1)), cache

    def logits(self, h, numerics):
        return jax.nn.one_hot(h[..., 0], 64)


@pytest.mark.parametrize(
    ("steps", "calls"), [(1, 1), (8, 8), (16, 16), (17, 6), (24, 12), (32, 16), (34, 6), (100, 10)]
)
def test_a_burst_ends_behind_the_steps_that_are_started_together(steps, calls):
    """Of two requests, the last to end feeds five tokens. Up to 16 steps are done in any case, of more a divisor at a time:
    17 one by one, 34 in twos."""
    cache = Counted(jnp.array([3, 1], jnp.int32), jnp.int32(0))
    logits = Counting().logits(cache.length[:, None], F32)
    stops, limit = jnp.array([[5], [6]], jnp.int32), jnp.array([60, 60], jnp.int32)
    cache, _, done, tokens = decode_burst(
        Counting(), F32, cache, logits, jnp.zeros(2, bool), Sampling.of(2), stops, limit, steps
    )
    wanted = np.full((2, max(steps, 6)), -1)
    wanted[0, :3], wanted[1, :6] = [3, 4, 5], [1, 2, 3, 4, 5, 6]
    assert np.array_equal(tokens, wanted[:, :steps]) and int(cache.calls) == calls
    assert done.all() == (steps >= 6) and (steps < 6 or cache.length.tolist() == [5, 6])
    assert steps % steps_together(steps) == 0


def decisions(jaxpr) -> list[str]:
    """Branches, and loops of an unknown number of rounds, outside of kernels: what the host of a GPU has to wait for."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("while", "cond"):
            found.append(str(equation.source_info.traceback))
        if equation.primitive.name not in ("pallas_call", "mpmd_map"):
            for inner in jaxprs_in_params(equation.params):
                found += decisions(inner)
    return found


@pytest.mark.parametrize(
    "config",
    [
        lambda: V41Config.from_dict(official_config()),
        lambda: V4Config.from_dict(official_v4_config("flash")),
        lambda: V32Config.from_dict(RELEASED),
    ],
    ids=["v41", "v4", "v32"],
)
def test_inside_a_burst_with_kernels_the_host_decides_nothing(config, monkeypatch):
    """Every role of a layer at released widths, with draws, traced as for an H200."""
    monkeypatch.setattr(platform, "kernel_name", lambda: "sm90")
    config = bench_model.cut(config(), 32)
    lm = LanguageModel(abstract_model(config), BF16)
    cache = jax.eval_shape(lambda: lm.new_cache(2, 4096))
    logits, done = jax.ShapeDtypeStruct((2, config.vocab_size), jnp.float32), jax.ShapeDtypeStruct((2,), bool)
    sampling, stops = jax.eval_shape(lambda: Sampling.of(2, temperature=1.0)), jax.ShapeDtypeStruct((2, 1), jnp.int32)
    traced = lm._decode.trace(lm.leaves, cache, logits, done, sampling, stops, steps=8, drafts=0)
    assert not decisions(traced.jaxpr.jaxpr)


def test_streaming_yields_every_n_tokens_and_the_same_ones():
    lm, prompts = small_model(), [prompt(6, 5), prompt(3, 6)]
    chunks = list(stream(lm, prompts, 10, stop_ids=NO_STOP, every=EVERY))
    assert [[len(row) for row in chunk] for chunk in chunks] == [[4, 4], [4, 4], [2, 2]]
    whole = generate(lm, prompts, 10, stop_ids=NO_STOP, every=EVERY)
    assert [sum((chunk[b] for chunk in chunks), []) for b in range(2)] == whole
    free = [row.index(whole[0][5]) if whole[0][5] in row else len(row) - 1 for row in whole]
    stopped = generate(lm, prompts, 10, stop_ids=[whole[0][5]], every=EVERY)
    assert stopped == [row[: end + 1] for row, end in zip(whole, free, strict=True)]


@pytest.mark.slow
def test_a_full_cache_ends_its_request():
    """Decoding beyond the cache's room stops; nothing wraps around or is lost silently."""
    lm = small_model()
    logits, cache = lm.prefill(lm.new_cache(1, 100), [prompt(124, 1)], chunk=16)
    state = (cache, logits, jnp.zeros(1, bool))
    *state, out = lm.decode(*state, Sampling.of(1), jnp.array(NO_STOP, jnp.int32), EVERY)
    assert int(state[0].length[0]) == 128 and not bool(state[2][0])  # 100 tokens take one page of 128
    *state, more = lm.decode(*state, Sampling.of(1), jnp.array(NO_STOP, jnp.int32), EVERY)
    assert int(state[0].length[0]) == 128 and bool(state[2][0])
    # The logits after token 127 still give a token, which has no place in the cache any more.
    assert (np.asarray(out)[0] >= 0).all() and np.asarray(more)[0, 0] >= 0 and (np.asarray(more)[0, 1:] == -1).all()


def test_bf16_caches_are_the_records_of_the_formats():
    """890 bytes a token and 528 a window row at the released widths: no cache row is held wider than its record."""
    config = tiny_config(head_dim=512, index_head_dim=128, qk_rope_head_dim=64)
    cache = jax.eval_shape(lambda: new_cache(config, BF16, 1, 1280))
    source = cache.sources[1]
    tokens = 1280
    assert source.compressed.pages.size == tokens // 2 * 288 and source.index_keys.pages.size == tokens // 2 * 68
    assert cache.sources[3].compressed.pages.size == tokens * 288
    assert cache.windows[0].pages.size == 8 * 528
    wide = jax.eval_shape(lambda: new_cache(config, F32, 1, 1280))
    assert wide.sources[3].compressed.pages.dtype == jnp.float32


# ---------------------------------------------------------------- images


def image_prompt(lm, n: int = 30, start: int = 9, length: int = 7):
    rng = np.random.default_rng(0)
    tokens = prompt(n)
    tokens[start : start + length] = [lm.config.image_token_id] * length
    return tokens, [ImageSpan(start, rng.standard_normal((length, lm.config.hidden_size)).astype(np.float32))]


@pytest.mark.slow
def test_an_image_span_may_lie_across_chunks():
    lm = small_model()
    tokens, spans = image_prompt(lm)
    whole, _ = lm.prefill(lm.new_cache(1, 64), [tokens], [spans], chunk=32)
    split, _ = lm.prefill(lm.new_cache(1, 64), [tokens], [spans], chunk=16)
    assert np.abs(np.asarray(whole) - np.asarray(split)).max() <= tolerances.of("model.arrival.f32")


# ---------------------------------------------------------------- refusals


def test_ac_47_a_prompt_longer_than_the_cache_names_both_limits():
    lm = small_model()
    with pytest.raises(ValueError, match="Prompt 0 has 200 tokens after 0 .* room for 128"):
        lm.prefill(lm.new_cache(1, 100), [prompt(200)])


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        ([5, 64], "token id 64, outside the vocabulary of 64 tokens"),
        ([-1], "token id -1, outside the vocabulary"),
        ([5, 63], "token id 63 has none. Places with the image token id 63"),
    ],
)
def test_bad_tokens_are_refused(tokens, sentence):
    lm = small_model()
    cache = lm.new_cache(1, 64)
    with pytest.raises(ValueError, match=sentence):
        lm.prefill(cache, [tokens])
    assert not cache.length.is_deleted(), "a refused prompt must lose nothing"


def test_bad_image_spans_are_refused():
    lm = small_model()
    tokens, spans = image_prompt(lm)
    cache = lm.new_cache(1, 64)
    for wrong, sentence in (
        ([ImageSpan(28, spans[0].embeddings)], "spans must lie inside the 30 tokens"),
        ([ImageSpan(9, spans[0].embeddings[:, :5])], r"expected \[n, 64\]"),
        ([ImageSpan(8, spans[0].embeddings)], "place 8: token id .* has embeddings"),
        (spans * 2, "not overlap"),
    ):
        with pytest.raises(ValueError, match=sentence):
            lm.prefill(cache, [tokens], [wrong])


def test_wrong_counts_and_sizes_are_refused():
    lm = small_model()
    with pytest.raises(ValueError, match="2 prompts and 2 image lists for a cache of 1 requests"):
        lm.prefill(lm.new_cache(1, 64), [prompt(3), prompt(3)])
    with pytest.raises(ValueError, match="longer than the 65536 positions"):
        lm.new_cache(1, 65537)
    with pytest.raises(ValueError, match="both must be at least 1"):
        lm.new_cache(0, 10)
    with pytest.raises(ValueError, match=r"Prompts \[1\] are empty"):
        generate(lm, [prompt(2), []], 4)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        generate(lm, [prompt(2)], 0)
    with pytest.raises(ValueError, match="chunk=0"):
        lm.prefill(lm.new_cache(1, 64), [prompt(3)], chunk=0)


@pytest.mark.parametrize("context", [64, 2**20])
def test_a_chunk_is_as_long_as_prompts_unless_its_temporaries_are_too_large(context):
    """In `DEFAULT_PREFILL_BYTES`, which the longer context exhausts; requests share them."""
    lm = small_model()
    row = prefill_row_bytes(lm.config, context)
    for requests in (1, 3):
        chunks = [default_chunk(lm, longest, context, requests) for longest in (1, 17, 1000, 10**6)]
        assert chunks[:2] == [16, 32] and chunks == sorted(chunks)
        assert requests * chunks[-1] * row <= DEFAULT_PREFILL_BYTES and chunks[-1] * requests <= LARGEST_CHUNK
    assert (default_chunk(lm, 10**6, context, 1) < LARGEST_CHUNK) == (context > 64)
