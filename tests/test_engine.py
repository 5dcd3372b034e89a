"""The engine: every request gets the tokens that it gets alone, whatever comes, goes and waits beside it."""

import collections
import copy
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from engines import (
    BACK, BATCH, CONTEXT, DRAFTS, NO_STOP, PAGE, ROWS, STEPS, answer_alone, assert_greedy, assert_selected, prompt, run,
    small_engine, small_model,
)  # fmt: skip
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_device_model import released_widths
from test_v32_config import RELEASED

from dsa_jax import bench_model, ops
from dsa_jax.cache.requests import arrays_of, copy_pages, take_requests
from dsa_jax.cache.sizes import CacheSizes
from dsa_jax.config_v32 import V32Config
from dsa_jax.decode import ImageSpan, LanguageModel
from dsa_jax.engine import Engine
from dsa_jax.engine.demands import chunk_of_budget
from dsa_jax.families import family_of
from dsa_jax.loading import abstract_model
from dsa_jax.memory import index_score_bytes, prefill_row_bytes
from dsa_jax.numerics import BF16
from dsa_jax.sampling import Sampling
from dsa_jax.step import Step
from pallas_kernels import dispatch, platform
from pallas_kernels.candidate_logits import sm90 as candidate_sm90
from pallas_kernels.indexer_logits import sm90 as indexer_sm90
from pallas_kernels.sparse_decode import planning

PROGRAMS = 400  # examples of the long run


def check_program(family: str, drafts: int, program: list[tuple], **options) -> Engine:
    """Runs operations on an engine with a pool that is too small; checks every answer and every list of selected positions,
    also of requests that were cancelled, and that no page is lost."""
    engine = small_engine(family, drafts, watched=True, **options)
    answers: dict[int, list[int]] = {}  # tokens of the request, prompt included
    prompts: dict[int, int] = {}
    given_places: dict[int, set[int]] = {}  # places of tokens that were put in by a rollback
    most: dict[int, int] = {}
    finished, cancelled = set(), set()

    def step():
        for event in engine.step():
            answers[event.id].extend(event.tokens)
            if event.kind == "finished":
                finished.add(event.id)

    for kind, *values in program:
        live = sorted(set(answers) - finished - cancelled)
        if kind == "add":
            length, seed, new = values
            tokens = prompt(length, seed)
            id = engine.add(tokens, new, stop_ids=NO_STOP)
            answers[id], prompts[id], given_places[id], most[id] = list(tokens), length, set(), new
        elif kind == "step":
            for _ in range(values[0]):
                step()
        elif kind == "cancel" and live:
            id = live[values[0] % len(live)]
            engine.cancel(id)
            cancelled.add(id)
        elif kind == "reorder":
            engine.reorder(values[0])
        elif kind == "rollback" and live:
            id = live[values[0] % len(live)]
            back, then = values[1], prompt(values[2], 9)
            try:
                engine.rollback(id, back, then)
            except ValueError as refused:
                assert f"Request {id}" in str(refused)
                continue
            kept = len(answers[id]) - back
            answers[id] = answers[id][:kept] + then
            given_places[id] = {p for p in given_places[id] if p < kept} | set(range(kept, kept + len(then)))
            assert engine.tokens(id) == answers[id]
    for _ in range(200):
        if engine.is_idle:
            break
        step()
    assert engine.is_idle
    for id in finished:
        assert len(answers[id]) == prompts[id] + most[id]
    for id in answers:
        assert_greedy(family, answers[id], [p for p in range(prompts[id], len(answers[id])) if p not in given_places[id]])
        if id in finished:
            assert set(range(prompts[id], len(answers[id]) - 1)) <= set(engine.selected[id])
        assert_selected(family, answers[id], engine.selected.get(id, {}))
    engine.forget_prefixes()
    assert engine.free_pages == engine.pages
    return engine


programs = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 24), st.integers(0, 2), st.integers(1, 12)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("reorder"), st.permutations(range(BATCH))),
        st.tuples(st.just("rollback"), st.integers(0, 9), st.integers(0, BACK), st.integers(0, 2)),
    ),
    max_size=24,
)
# Names the kinds that a random program may miss: more requests than rows, prefixes of one another, a cancel while
# another waits, rollbacks with and without tokens put in place, and a request added late.
MIXED = [
    ("add", 17, 0, 12), ("add", 5, 1, 9), ("step", 1), ("add", 20, 0, 8), ("add", 3, 2, 12), ("add", 17, 0, 4), ("step", 2),
    ("reorder", [2, 0, 1]), ("rollback", 0, 2, 1), ("cancel", 1), ("step", 1), ("rollback", 1, 1, 0), ("add", 24, 0, 10), ("rollback", 0, 0, 2),
    ("step", 3), ("add", 17, 0, 12), ("rollback", 0, 2, 0), ("step", 1),
]  # fmt: skip


def test_a_mixed_program_gives_each_request_what_it_gets_alone():
    check_program("v41", DRAFTS, MIXED)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(programs)
def test_random_programs_give_each_request_what_it_gets_alone(program):
    check_program("v41", DRAFTS, program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "drafts", "options"),
    [
        ("v41", DRAFTS, {}),
        ("v41", 0, {"decode_rows": (1, 2, BATCH), "prefill_shapes": ((1, 16), (BATCH, 4))}),
        ("v41", DRAFTS, {"max_rollback": 0, "steps": 1}),
        ("v41", 0, {"max_rollback": 0, "decode_rows": (1, 2, BATCH), "prefill_shapes": ((1, 16), (BATCH, 4))}),
        ("v4", 0, {}),
        ("v4", 1, {}),
        ("v4", 1, {"max_rollback": 0, "steps": 1}),
        ("v32", 0, {}),
        ("v32", 0, {"max_rollback": 0, "steps": 2}),
    ],
    ids=["v41-drafts", "v41-buckets", "v41-ahead", "v41-buckets-ahead", "v4", "v4-drafts", "v4-ahead", "v32", "v32-ahead"],
)
def test_many_random_programs(family, drafts, options):
    @settings(max_examples=PROGRAMS // 5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(programs)
    def check(program):
        check_program(family, drafts, program, **options)

    engine = check_program(family, drafts, MIXED, **options)
    assert bool(engine.ran_ahead) == (options.get("max_rollback") == 0)
    check()


def test_a_burst_is_under_way_while_prompts_are_processed():
    """Between the chunks of two prompts, which take up a prefix, the next burst is started before the last one is read, and
    chunks and bursts still alternate. Tokens and selected positions are those of each request alone."""
    engine = small_engine(drafts=0, watched=True, max_rollback=0, boundary=8)
    calls, state = [], engine._state
    prefill, decode, finish = state.prefill, state.decode, engine._finish_burst
    state.prefill = lambda *arguments: calls.append("chunk") or prefill(*arguments)
    state.decode = lambda *arguments: calls.append("burst") or decode(*arguments)
    engine._finish_burst = lambda burst: calls.append("read") or finish(burst)
    prompts, new = [prompt(5, 1), prompt(20, 0), prompt(24, 0)], [22, 12, 10]
    answers = {}
    for tokens, most in zip(prompts, new, strict=True):
        answers[engine.add(tokens, most, stop_ids=NO_STOP)] = list(tokens)
        while len(answers) == 1 and engine._ahead is None:
            for event in engine.step():
                answers[event.id] += event.tokens
    calls.clear()
    chunks = 0
    while any(request.state != "decode" for request in engine._requests.values()):
        for event in engine.step():
            answers[event.id] += event.tokens
        assert engine._ahead is not None
        chunks += 1
    assert chunks >= 3 and calls == ["chunk", "burst", "read"] * chunks
    for id, tokens in run(engine).items():
        answers[id] += tokens
    for id, tokens in answers.items():
        assert len(tokens) == len(prompts[id]) + new[id]
        assert_greedy("v41", tokens, range(len(prompts[id]), len(tokens)))
        assert_selected("v41", tokens, engine.selected[id])


@pytest.mark.parametrize("boundary", [10, 11, 12, 13])
def test_ac_38_a_prefix_of_any_length_is_taken_up_with_its_window(boundary):
    """B shares 10 to 13 tokens with A: same answer as cold, same state on the device beside the pages, and A's last page,
    which is not full, is copied before B writes to it."""
    a, b = prompt(20, 3), prompt(boundary, 3) + prompt(9, 4)
    warm, cold = small_engine(boundary=boundary), small_engine(snapshots=0)
    # A's answer is longer than the window, so its own ring is far ahead of the boundary.
    warm.add(a, 14, stop_ids=NO_STOP)
    run(warm)
    rings = []
    for engine in (warm, cold):
        id = engine.add(b, 6, stop_ids=NO_STOP)
        while len(engine.tokens(id)) == len(b):
            engine.step()
        slot = engine._requests[id].slot
        state = take_requests(engine._state.slots.cache, jnp.array([slot], jnp.int32))
        seen = (int(state.length[0]) - 1 - np.arange(7)) % state.windows[0].page_size  # slots of what the next token sees
        rings.append([np.asarray(window.pages)[0][seen] for window in (*state.windows, *state.draft_windows)])
    assert warm.stats.hits == 1 and warm.stats.reused_tokens == boundary and warm.stats.hit_rate > 0.2
    assert warm.stats.copied_pages == 1
    for ours, expected in zip(*rings, strict=True):
        np.testing.assert_allclose(ours, expected, atol=tolerances.of("model.arrival.f32"))
    (ours,), (expected,) = run(warm).values(), run(cold).values()
    assert ours == expected


def test_ac_53_a_request_s_numbers_do_not_depend_on_who_is_beside_it():
    """Alone, and as row 0 and row 2 of a full batch: logits equal to the bit, tokens equal."""
    own = prompt(13, 5)

    def logits_at_end(before, after):
        engine = small_engine(snapshots=0)
        for n in before:
            engine.add(prompt(n, n), 12, stop_ids=NO_STOP)
        id = engine.add(own, 12, stop_ids=NO_STOP)
        for n in after:
            engine.add(prompt(n, n), 12, stop_ids=NO_STOP)
        while len(engine.tokens(id)) < len(own) + STEPS:
            engine.step()
        return np.asarray(engine._state.slots.logits)[len(before)], engine.tokens(id)

    alone, tokens = logits_at_end([], [])
    for before, after in (([], [4, 9]), ([6, 11], [])):
        among, same = logits_at_end(before, after)
        assert same == tokens and np.array_equal(among, alone)


@pytest.mark.parametrize("least", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_ac_73_nothing_compiles_after_the_warm_up(least):
    """Steps of varied requests, greedy and sampled, with hits, copies, cancels and rollbacks: no further trace, and
    nothing is read from the device inside a burst."""
    engine = small_engine()
    Sampling.of(1)  # what the caller compiles himself
    engine.warm_up()
    lm, compiled = engine.model, []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    jax.jit(lambda x: x + least)(0)
    assert compiled  # the listener hears of compilations
    compiled.clear()
    warm, rng, steps, live = dict(lm.traces), np.random.default_rng(0), 0, []
    while steps < least:
        if len(live) < 5:
            sampling = Sampling.of(1, temperature=float(rng.integers(0, 2)), top_k=int(rng.integers(0, 9)), seed=steps)
            live.append(engine.add(prompt(int(rng.integers(1, 25)), int(rng.integers(0, 3))), int(rng.integers(1, 13)), sampling))
        for event in engine.step():
            if event.kind == "finished":
                live.remove(event.id)
        steps += 1
        if live and steps % 7 == 0:
            engine.cancel(live.pop())
        if live and steps % 3 == 0 and len(engine.tokens(live[0])) > 20:
            try:
                engine.rollback(live[0], 1)
            except ValueError:
                pass
    assert not compiled and lm.traces == warm
    assert engine.stats.hits and engine.stats.copied_pages and engine.stats.evicted_prefixes


@pytest.mark.parametrize("is_greedy", [True, False])
@pytest.mark.parametrize("rows", [BATCH, pytest.param(2, marks=pytest.mark.slow)])
def test_ac_73_a_burst_speaks_to_nobody(rows, is_greedy):
    """All steps of a burst are one program, whose only results are the state and the tokens: it calls nothing on the host
    and sends nothing out. (The engine also forbids transfers from the device while it starts one.)"""
    engine = small_engine()
    chosen = None if rows == BATCH else np.arange(rows, dtype=np.int32)
    arguments = (engine.model.leaves, engine._state.slots, chosen, np.ones(rows, bool))
    traced = engine.model.programs.decode.trace(*arguments, steps=STEPS, drafts=DRAFTS, is_greedy=is_greedy)
    assert not traced.jaxpr.effects
    state, tokens = traced.out_info
    assert tokens.shape == (rows, STEPS * (1 + DRAFTS))
    assert jax.tree.map(lambda x: x.shape, state) == jax.tree.map(lambda x: x.shape, engine._state.slots)
    program = traced.lower().as_text()
    assert not [word for word in ("callback", "outfeed", "infeed", "send", "recv") if word in program]


def test_ac_71_arrays_are_donated():
    """No two leaves share a buffer, and a step's old state is gone after it."""
    engine = small_engine()
    old = jax.tree.leaves(engine._state.slots)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in old]
    assert len(set(pointers)) == len(pointers)
    engine.add(prompt(20), 8, stop_ids=NO_STOP)
    engine.step()
    assert all(leaf.is_deleted() for leaf in old)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [None, 2])
def test_ac_71_no_burst_holds_a_second_pool(rows):
    """The whole state is aliased to the one returned, and a burst's temporaries are small beside it; also where only some
    rows of the batch take part."""
    engine = small_engine(pages=8000)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._state.slots))
    chosen = None if rows is None else np.arange(rows, dtype=np.int32)
    arguments = (engine.model.leaves, engine._state.slots, chosen, np.zeros(BATCH if rows is None else rows, bool))
    lowered = engine.model.programs.decode.lower(*arguments, steps=STEPS, drafts=DRAFTS, is_greedy=True)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size > 2**24
    assert memory.temp_size_in_bytes < 0.1 * size


def test_ac_74_a_burst_of_steps_costs_the_host_one_call():
    """Host time per step, with a generous bound: the loop is compiled, so all steps of a burst are one dispatch."""
    engine = small_engine(snapshots=0)
    for n in (20, 3):
        engine.add(prompt(n), 20, stop_ids=NO_STOP)
    times = []
    while not engine.is_idle:
        before, begun = engine.stats.decode_tokens, time.perf_counter()
        engine.step()
        if engine.stats.decode_tokens > before:
            times.append(time.perf_counter() - begun)
    assert len(times) >= 5 and min(times) / STEPS < 0.05


def test_ac_74_the_host_s_own_work_is_below_2_ms_a_step(monkeypatch):
    """All that the host does for a burst of 32 requests, with a device that answers at once."""
    engine = Engine(small_model(), 32, 400, PAGE, prefill_shapes=((32, 8),), decode_rows=(32,), steps=STEPS)
    tokens = jnp.full((32, STEPS), 5, jnp.int32)
    monkeypatch.setattr(engine._state, "prefill", lambda *arguments: None)
    monkeypatch.setattr(engine._state, "decode", lambda *arguments: tokens)
    for n in range(32):
        engine.add(prompt(4, n), 300, stop_ids=NO_STOP)
    times = []
    for _ in range(30):
        begun = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begun)
    assert engine.stats.decode_tokens == 30 * 32 * STEPS and min(times) / STEPS < 2e-3


def test_a_request_draws_the_same_tokens_alone_and_in_a_batch():
    def answer(seeds):
        engine = small_engine(snapshots=0)
        for seed in seeds:
            engine.add(prompt(5, seed), 12, Sampling.of(1, temperature=1.0, top_p=0.9, seed=seed), NO_STOP)
        return run(engine)

    together = answer([7, 8, 9])
    assert [together[0], together[2]] == [answer([7])[0], answer([9])[0]]
    assert together[0] != together[1]


@pytest.mark.slow
def test_sampled_answers_are_the_same_with_and_without_drafts():
    """Drafts are kept only where the model samples them itself, with the noise of their own positions."""
    answers = []
    for drafts in (0, DRAFTS):
        engine = small_engine(drafts=drafts)
        for seed in range(3):
            engine.add(prompt(6 + seed, seed), 12, Sampling.of(1, temperature=0.8, top_p=0.9, seed=seed), NO_STOP)
        answers.append(run(engine))
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_request_with_images_gets_in_a_batch_what_it_gets_alone():
    """Embeddings in place of tokens, over two chunks, beside requests without and with other images: the tokens of the
    request alone, which are the best ones after the whole sequence in one shot; other embeddings give other logits."""
    lm, rng = small_model(), np.random.default_rng(0)
    ids, width = lm.config.image_token_id, lm.config.hidden_size
    spans = [ImageSpan(at, rng.standard_normal((n, width)).astype(np.float32)) for at, n in ((4, 7), (2, 3))]
    prompts = [prompt(14, 1), prompt(9, 2)]
    for tokens, span in zip(prompts, spans, strict=True):
        tokens[span.start : span.start + len(span.embeddings)] = [ids] * len(span.embeddings)

    def serve(requests):
        engine = small_engine()
        engine.warm_up(images=True)
        warm = dict(lm.traces)
        for tokens, images in requests:
            engine.add(tokens, 10, stop_ids=NO_STOP, images=images)
        answers = run(engine)
        assert lm.traces == warm
        return answers

    both = [(prompts[0], [spans[0]]), (prompt(12, 3), []), (prompts[1], [spans[1]])]
    together = serve(both)
    for i, request in enumerate(both):
        (alone,) = serve([request]).values()
        assert together[i] == alone
    for i, span in ((0, spans[0]), (2, spans[1])):
        tokens = both[i][0] + together[i]
        padded = np.zeros((1, ROWS), np.int32)
        padded[0, : len(tokens)] = tokens
        count = np.array([len(tokens)], np.int32)
        logits = [
            np.asarray(lm.forward(lm.new_cache(1, ROWS), padded, count, lm.image_rows([[each]], [0], ROWS))[0])[0]
            for each in (span, ImageSpan(span.start, -span.embeddings))
        ]
        best = logits[0][len(both[i][0]) - 1 : len(tokens) - 1]
        chosen = best[np.arange(10), together[i]]
        assert np.all(best.max(-1) - chosen <= tolerances.of("model.arrival.f32"))
        assert np.abs(logits[0] - logits[1])[: len(tokens)].max() > 0.1


def test_a_stop_id_ends_its_request_alone():
    free = answer_alone("v41", prompt(6, 1), 12)
    engine = small_engine()
    first = engine.add(prompt(6, 1), 12, stop_ids=[free[5]])
    second = engine.add(prompt(4, 2), 12, stop_ids=NO_STOP)
    answers = run(engine)
    assert answers[first] == free[: free.index(free[5]) + 1] and len(answers[second]) == 12


# ---------------------------------------------------------------- the pool


def test_requests_that_do_not_fit_wait_and_are_told_why():
    engine = small_engine(snapshots=0)
    ids = [engine.add(prompt(27, n), 10, stop_ids=NO_STOP) for n in range(3)]  # 5 pages each, 12 in all
    events = engine.step()
    kinds = [(e.id, e.kind) for e in events if e.kind in ("started", "queued")]
    assert kinds == [(ids[0], "started"), (ids[1], "started"), (ids[2], "queued")]
    (waits,) = [e.text for e in events if e.kind == "queued"]
    assert waits == f"Request {ids[2]} waits: it needs 5 pages and 2 of 12 are free. It runs when others end."
    engine.cancel(ids[0])
    assert [(e.id, e.kind) for e in engine.step() if e.kind == "started"] == [(ids[2], "started")]
    more = [engine.add(prompt(2), 2) for _ in range(2)]
    (waits,) = [e.text for e in engine.step() if e.kind == "queued"]
    assert waits.startswith(f"Request {more[1] if engine.free_pages else more[0]} waits: ")
    run(engine)
    assert engine.free_pages == engine.pages


@pytest.mark.parametrize(
    ("tokens", "new", "options", "sentence"),
    [
        ([], 4, {}, "The prompt is empty"),
        ([5], 0, {}, "max_new_tokens=0 must be at least 1"),
        ([5] * 30, 20, {}, r"Prompt of 30 tokens with max_new_tokens=20 comes to 50 tokens, and .* max_context=40"),
        ([5] * 30, 10, {"pages": 4}, "needs 6 pages of 8 tokens, and the pool has 4 in all"),
        ([5, 64], 4, {}, "The prompt has the token id 64, outside the vocabulary of 64 tokens"),
        ([5], 4, {"sampling": Sampling.of(2)}, r"The sampling has values of shape \(2,\); give that of one request"),
        ([5], 4, {"stop_ids": range(9)}, "9 stop ids were given; a request may have 8"),
        ([5, 63], 4, {}, "The prompt, place 1: token id 63 has none"),
    ],
)
def test_requests_that_can_never_run_are_refused(tokens, new, options, sentence):
    engine = small_engine(**{k: v for k, v in options.items() if k == "pages"})
    with pytest.raises(ValueError, match=sentence):
        engine.add(tokens, new, options.get("sampling"), options.get("stop_ids"))
    assert engine.is_idle


def test_rollbacks_that_cannot_be_are_refused():
    engine = small_engine()
    id = engine.add(prompt(4), 12, stop_ids=NO_STOP)
    with pytest.raises(ValueError, match=r"Request 0 \(queued\) cannot take back 1 tokens"):
        engine.rollback(id, 1)
    engine.step()
    with pytest.raises(ValueError, match=f"answer of [4-9], and the engine was made with max_rollback={BACK}"):
        engine.rollback(id, BACK + 1)
    with pytest.raises(ValueError, match=r"answer of 12 tokens and ends at 12"):
        engine.rollback(id, 0, [5] * 8)
    with pytest.raises(ValueError, match="token id 99, outside"):
        engine.rollback(id, 1, [99])
    engine.rollback(id, BACK)
    with pytest.raises(ValueError, match="was rolled back before"):
        engine.rollback(id, BACK)
    with pytest.raises(ValueError, match=r"no request 7"):
        engine.rollback(7, 1)


@pytest.mark.slow
def test_a_soak_of_2000_requests_in_a_pool_that_is_too_small():
    """Random lengths, sampled and greedy, shared prefixes, cancels: every answer of a sample is right, who waits is told so,
    and all pages are free at the end."""
    engine, rng = small_engine(), np.random.default_rng(0)
    expected: dict[int, tuple[list[int], int]] = {}
    answers: dict[int, list[int]] = {}
    told, waited, cancelled = set(), set(), set()
    for n in range(2000):
        tokens, new = prompt(int(rng.integers(1, 27)), int(rng.integers(0, 6))), int(rng.integers(1, 13))
        id = engine.add(tokens, new, stop_ids=NO_STOP)
        expected[id], answers[id] = (tokens, new), []
        for event in engine.step():
            answers[event.id].extend(event.tokens)
            if event.kind == "queued":
                told.add(event.id)
        waited |= {id} if engine._requests.get(id) is not None and engine._requests[id].state == "queued" else set()
        if n % 17 == 0 and not engine.is_idle:
            victim = max(engine._requests)
            engine.cancel(victim)
            cancelled.add(victim)
    for id, tokens in run(engine, 5000).items():
        answers[id].extend(tokens)
    assert engine.stats.requests + len(cancelled) >= 2000 and told and engine.stats.hits > 100
    checked = 0
    for id in rng.choice(sorted(set(expected) - cancelled), 300, replace=False).tolist():
        tokens, new = expected[id]
        assert len(answers[id]) == new
        assert_greedy("v41", tokens + answers[id], range(len(tokens), len(tokens) + new))
        checked += 1
    assert checked == 300
    engine.forget_prefixes()
    assert engine.free_pages == engine.pages


# ---------------------------------------------------------------- what an engine is made with


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"max_batch": 0}, ValueError, "max_batch=0 must be at least 1"),
        ({"max_context": 0}, ValueError, "max_context=0 must be at least 1"),
        ({"max_context": 65536, "drafts": 3}, ValueError, r"with 3 drafted tokens is longer than the 65536 positions .* at most 65533"),
        ({"page_size": 12}, ValueError, "A page of 12 tokens would cut a compressed group or a candidate block: .* multiple of 8"),
        ({"pages": 0}, ValueError, "A pool of 0 pages holds nothing"),
        ({"pages": 9, "memory_bytes": 9}, ValueError, "both size the pool"),
        ({"memory_bytes": 30_000}, ValueError, r"memory_bytes=30000 \(29.30 KiB\) leaves room for 0 pages .* what a step works in .* needs 5 pages"),
        ({"prefill_bytes": 10}, ValueError, r"prefill_bytes=10 is less than one row's \d+ bytes at 40 tokens"),
        ({"prefill_shapes": ((4, 8),)}, ValueError, r"prefill shape \(4, 8\) must be 1 to 3 requests \(max_batch\)"),
        ({"decode_rows": (1, 2)}, ValueError, r"decode_rows=\[1, 2\] must be positive and end with max_batch=3"),
        ({"steps": 0}, ValueError, "steps=0 must be at least 1"),
        ({"drafts": 4}, ValueError, "drafts=4, but the model drafts 3 tokens at a time"),
        ({"max_rollback": -1}, ValueError, "max_rollback=-1 must be at least 0"),
        ({"snapshots": -1}, ValueError, "snapshots=-1 must be at least 0"),
        ({"boundary": 0}, ValueError, "boundary=0 must be at least 1"),
    ],
)
def test_ac_76_what_cannot_be_met_is_said_when_the_engine_is_made(options, error, sentence):
    with pytest.raises(error, match=sentence):
        Engine(small_model(), **({"max_batch": BATCH, "max_context": CONTEXT, "page_size": PAGE} | options))


def test_ac_76_a_kernel_family_that_is_not_at_hand_is_refused_before_anything_is_allocated(monkeypatch):
    lm = small_model()
    for name, error, sentence in (
        ("sm100", NotImplementedError, "implementation='sm100' needs a GPU of that family"),
        ("sm75", ValueError, "implementation='sm75' .* is not known"),
    ):
        monkeypatch.setattr(lm, "implementation", name)
        with pytest.raises(error, match=sentence):
            Engine(lm, BATCH, CONTEXT, PAGE)
    monkeypatch.setattr(lm, "implementation", None)
    with pytest.raises(NotImplementedError, match="DeepseekV32 does not run its draft layer"):
        Engine(small_model("v32"), BATCH, CONTEXT, drafts=1)


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        ({}, {"page_size": 48}, r"a chunk of 1 x 8 tokens \(prefill_shapes\): the kernel reads pages .* not of 24 rows"),
        ({"num_attention_heads": 4, "o_groups": 4}, {}, "takes multiples of 8 heads from 8 to 128, not 4"),
        ({"index_head_dim": 64}, {}, "the kernel takes queries of width 128, and q has width 64"),
        ({"candidate_block_size": 4, "candidate_topk_blocks": 256}, {}, r"the kernel takes blocks of 8 or 16 positions, not 4\. Change what it names, or load"),
    ],
)
def test_ac_76_what_a_named_kernel_does_not_carry_is_said_when_the_engine_is_made(monkeypatch, changes, options, sentence):
    """The page, heads and widths of a model that Hopper's kernels carry but for one, traced and neither loaded nor compiled;
    without a name the references serve, and the log says so before the first request comes."""
    config = dataclasses.replace(released_widths(), engram_layer_ids=(), engram_num_embeddings=(), **changes)
    monkeypatch.setattr(platform, "kernel_name", lambda: "sm90")
    lm = LanguageModel(abstract_model(config), BF16, "sm90")
    with pytest.raises(NotImplementedError, match=f"implementation='sm90' does not run .*{sentence}"):
        Engine(lm, 2, 256, prefill_shapes=((1, 8),), **options)


@pytest.mark.slow
def test_an_engine_traces_its_kernels_once(monkeypatch):
    """What it checks when it is made is what it runs: no program is traced a second time."""
    monkeypatch.setattr(ops, "has_kernels", lambda: True)
    lm = copy.copy(small_model())
    lm.__dict__.pop("programs", None)
    lm.traces = {}
    engine = small_engine(lm=lm, snapshots=0, drafts=0, steps=2)
    assert lm.traces == {"engine.prefill": 1, "engine.decode": 1}
    id = engine.add(prompt(5), 3, stop_ids=NO_STOP)
    assert len(run(engine)[id]) == 3
    assert lm.traces == {"engine.prefill": 1, "engine.decode": 1, "engine.admit": 1}


@pytest.mark.parametrize("family", ["v4", "v32"])
def test_a_model_of_text_has_no_programs_for_images(family):
    with pytest.raises(ValueError, match="takes text alone: leave images out"):
        small_model(family).no_images(1, 8)


def test_ac_47_a_chunk_larger_than_the_budget_names_both():
    with pytest.raises(ValueError, match=r"prefill shape \(3, 64\) has 192 rows, and the budget of prefill bytes allows 16"):
        Engine(small_model(), BATCH, CONTEXT, PAGE, prefill_bytes=100_000, prefill_shapes=((3, 64),))


def test_ac_22_a_page_is_moved_whole_in_every_pool():
    """Page 3 -> 0 with pages of 4 tokens or more: all rows of all kinds arrive, and no other page changes."""
    for family in ("v41", "v4", "v32"):
        lm = small_model(family)
        unit = lm.family.page_unit(lm.config)
        cache = lm.new_cache(2, 8 * unit, CacheSizes(pages=5, page_tokens=unit if unit >= 4 else 4))
        rng = np.random.default_rng(0)
        filled = cache.map_arrays(lambda x: x, lambda x: jnp.asarray(rng.integers(0, 200, x.shape).astype(x.dtype)))
        before = [np.asarray(pool) for pool in arrays_of(filled)[1]]
        moved = copy_pages(filled, jnp.array([3, -1], jnp.int32), jnp.array([0, -1], jnp.int32))
        after = arrays_of(moved)[1]
        assert len(after) >= 2
        for old, new in zip(before, after, strict=True):
            assert np.array_equal(new[0], old[3]) and np.array_equal(new[1:], old[1:])


# ---------------------------------------------------------------- memory and shared work


def test_ac_72_scores_of_a_prefill_are_counted_before_they_are_made():
    """8,192 rows over 131,072 positions would be 4 GiB; the chunk follows from the budget, and shrinks as contexts grow."""
    config = small_model("v32").config
    assert index_score_bytes(config, 8192, 131072) == 4 * 2**30
    chunks = [chunk_of_budget(config, context, 2**30, 1) for context in (1024, 131072, 1048576)]
    assert chunks == sorted(chunks, reverse=True) and chunks[-1] < chunks[0]
    for context, chunk in zip((131072, 1048576), chunks[1:], strict=True):
        assert chunk * prefill_row_bytes(config, context) <= 2**30 < 2 * chunk * prefill_row_bytes(config, context)
        assert prefill_row_bytes(config, context) > 3 * index_score_bytes(config, 1, context)


def test_decoded_rows_of_a_chunk_are_in_its_budget(monkeypatch):
    """Where kernels run, rows that a chunk decodes once, at most 2^18 of them, come out of the prefill's bytes."""
    config, context = small_model("v32").config, 8192
    row, width = prefill_row_bytes(config, context), config.kv_lora_rank + config.qk_rope_head_dim
    assert chunk_of_budget(config, context, 8 * row, 4) == 8
    monkeypatch.setattr(platform, "kernel_name", lambda: "sm90")
    decoded = 2 * width * 4 * context
    with pytest.raises(ValueError, match=f"one row's {row} bytes .* and {decoded} of decoded rows.*at least {row + decoded}"):
        chunk_of_budget(config, context, decoded, 4)
    assert chunk_of_budget(config, context, 8 * row + decoded, 4) == 8
    assert chunk_of_budget(config, context, 8 * row + 2 * width * 2**18, 1000) == 8


@pytest.mark.slow
def test_ac_72_budgets_of_one_two_and_five_chunks_give_the_same():
    answers = []
    row = prefill_row_bytes(small_model().config, CONTEXT)
    for rows, chunks in ((32, 1), (16, 2), (4, 5)):
        engine = Engine(small_model(), 1, CONTEXT, PAGE, prefill_bytes=rows * row, steps=STEPS)
        assert engine.sizes.prefill_shapes == ((1, rows),) and -(-20 // rows) == chunks
        engine.add(prompt(20), 8, stop_ids=NO_STOP)
        for _ in range(chunks):
            assert not engine.stats.decode_tokens
            engine.step()
        assert engine.stats.decode_tokens == STEPS
        tokens = engine.tokens(0)
        answers.append(tokens + run(engine)[0])
    assert answers[0] == answers[1] == answers[2] == prompt(20) + answer_alone("v41", prompt(20), 8)


def test_a_chunk_decodes_the_rows_that_its_requests_can_list(monkeypatch):
    """Of a pool of 40 pages, the pages of the step's table, a shared one and missing ones among them; the result is that of
    sparse_decode in every bit."""
    rng = np.random.default_rng(0)
    pool = ops.PagedRows.zeros(ops.Plain(64, jnp.bfloat16), 40, 4)
    pool = pool.scatter(jnp.arange(160, dtype=jnp.int32), jnp.asarray(rng.standard_normal((160, 64)), jnp.float32))
    ring = ops.PagedRows.zeros(ops.Plain(64, jnp.bfloat16), 2, 3)
    ring = ring.scatter(jnp.arange(6, dtype=jnp.int32), jnp.asarray(rng.standard_normal((6, 64)), jnp.float32))
    table = jnp.array([[31, 7, 2, -1], [31, 39, -1, -1]], jnp.int32)
    positions = jnp.asarray(rng.integers(-2, 14, (2, 5, 30)), jnp.int32)
    slots, _ = ops.positions_to_slots(positions, table, 4)
    assert {31, 7, 2, 39} == set((np.asarray(slots)[np.asarray(slots) >= 0] // 4).tolist())
    seen = jnp.asarray(rng.integers(-1, 6, (2, 5, 3)), jnp.int32)
    q = jnp.asarray(rng.standard_normal((2, 5, 4, 64)), jnp.bfloat16)

    def attend():
        tables = {"block_tables": (None, table)}
        return ops.attend(q, (ring, pool), (seen, slots), sink=jnp.zeros(4), scale=0.1, v_width=32, **tables)

    wanted, decoded = attend(), []
    monkeypatch.setattr(ops._platform, "kernel_name", lambda: "sm90")
    gather = ops.PagedRows.gather
    monkeypatch.setattr(ops.PagedRows, "gather", lambda self, at, *a: decoded.append(at.size) or gather(self, at, *a))
    with ops.preferred("reference"):
        found = attend()
    assert decoded == [6, 32]
    for ours, expected in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_what_the_layers_of_a_step_share_is_computed_once(monkeypatch):
    """One list of window slots, one expansion of candidates, one translation of a source's list into slots."""
    lm, calls = small_model(), collections.Counter()

    def counted(owner, name):
        function = getattr(owner, name)

        def wrapper(*arguments, **options):
            calls[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, wrapper)

    counted(Step, "window")
    counted(Step, "with_ring")
    counted(ops, "expand_candidates")
    counted(ops, "positions_to_slots")
    cache = lm.new_cache(2, 32)
    tokens, count = jnp.zeros((2, 4), jnp.int32), jnp.full((2,), 4, jnp.int32)
    jax.eval_shape(lambda leaves: lm.model(leaves)(cache, tokens, count, lm.numerics)[0], lm.leaves)
    sources, lists = 2, 3  # layers that write compressed rows, layers that select
    assert calls == {"window": 1, "with_ring": 1, "expand_candidates": 1, "positions_to_slots": sources + lists}


@pytest.mark.parametrize("family", ["v41", "v32"])
def test_schedules_of_kernels_are_made_once_a_step(family, monkeypatch):
    """A decode step as a Hopper GPU would trace it: layers of one ratio share the schedule of their scores, consumers that of
    their candidates, and layers of one shape that of their attention, which is made of constants."""
    if family == "v41":
        config = dataclasses.replace(
            released_widths(), num_hidden_layers=6, compress_ratios=(0, 2, 2, 1, 1, 1), kv_source_layer_ids=(1, 2, 3),
            index_source_layer_ids=(1, 2, 3, 4, 5), engram_layer_ids=(), engram_num_embeddings=(),
        )  # fmt: skip
        expected = {"indexer": 2, "candidates": 1, "attention": 2}  # ratios 2 and 1; with and without compressed rows
    else:
        config = dataclasses.replace(bench_model.cut(V32Config.from_dict(RELEASED), 32), num_hidden_layers=3)
        expected = {"indexer": 1, "attention": 1}
    calls = collections.Counter()

    def counted(owner, name, label):
        function = getattr(owner, name)

        def wrapper(*arguments, **options):
            calls[label] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, wrapper)

    monkeypatch.setattr(platform, "kernel_name", lambda: "sm90")
    counted(indexer_sm90, "make_schedule", "indexer")
    counted(candidate_sm90, "make_schedule", "candidates")
    counted(planning, "_made", "attention")
    planning._made_while_tracing.cache_clear()
    graphdef, state = nnx.split(abstract_model(config))

    def step(state, tokens, count):
        cache = family_of(config).new_cache(config, BF16, 4, 8192)
        return nnx.merge(graphdef, state)(cache, tokens, count, BF16)[0]

    jax.eval_shape(step, state, jax.ShapeDtypeStruct((4, 1), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32))
    assert calls == expected
