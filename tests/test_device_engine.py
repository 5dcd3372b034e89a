"""On a GPU with kernels: requests that the engine serves together get what each gets alone, to the bit."""

import dataclasses
import functools

import numpy as np
import pytest
from test_device_model import released_widths

from dsa_jax.bench_model import random_model
from dsa_jax.engine import Engine
from dsa_jax.numerics import BF16
from pallas_kernels import platform

pytestmark = pytest.mark.skipif(
    platform.kernel_name() is None, reason="needs an NVIDIA GPU that the kernels know; here only the references run"
)

LENGTHS, ANSWER, STEPS, BACK = (700, 90, 1499, 260), 24, 8, 7
LONGEST = LENGTHS.index(max(LENGTHS))


@functools.cache
def model():
    return random_model(released_widths(), BF16)


def prompts_of(vocabulary):
    return [np.random.default_rng(0).integers(0, vocabulary - 1, 2000)[:n].tolist() for n in LENGTHS]


def warm_engine(rolls_back=False):
    """All engines have arrays of the same shapes, so that programs compile once; only what never rolls back runs ahead."""
    engine = Engine(
        model(), 4, 2048, pages=80, prefill_shapes=((2, 256),), decode_rows=(4,), steps=STEPS, max_rollback=BACK,
        snapshots=24, boundary=256,
    )  # fmt: skip
    engine.warm_up()
    if not rolls_back:
        engine.sizes = dataclasses.replace(engine.sizes, max_rollback=0)
    return engine


def test_requests_beside_one_another_get_what_each_gets_alone():
    """Prompts of several chunks and short ones, a prefix that is taken up, and bursts during which nothing is read from the
    device (the engine forbids it), one under way while the last one's tokens are read; one request is cancelled, and one
    comes late. Shapes are the same alone and together, so kernels give the same bits."""
    lm, never = model(), [model().config.vocab_size]
    prompts = prompts_of(*never)

    def serve(chosen, late=None, cancelled=None):
        engine = warm_engine()
        warm, ids = dict(lm.traces), {engine.add(prompts[i], ANSWER, stop_ids=never): i for i in chosen if i != late}
        answers, ran_ahead = {i: [] for i in chosen}, False
        while not engine.is_idle:
            for event in engine.step():
                answers[ids[event.id]].extend(event.tokens)
            ran_ahead |= engine._ahead is not None
            if cancelled is not None and answers[cancelled]:
                engine.cancel(next(id for id, i in ids.items() if i == cancelled))
                ids[engine.add(prompts[late], ANSWER, stop_ids=never)] = late
                cancelled = None
        assert ran_ahead
        again = engine.add(prompts[max(chosen)], ANSWER, stop_ids=never)
        repeated = []
        while not engine.is_idle:
            repeated += [token for event in engine.step() if event.id == again for token in event.tokens]
        assert lm.traces == warm, "something compiled after the warm-up"
        assert engine.stats.hits or len(prompts[max(chosen)]) <= 256
        return answers, repeated

    together, repeated = serve(range(len(prompts)))
    disturbed, _ = serve(range(len(prompts)), late=3, cancelled=1)
    for i in range(len(prompts)):
        alone, _ = serve([i])
        assert len(together[i]) == ANSWER and together[i] == alone[i], f"request {i}"
        assert disturbed[i] == alone[i][: len(disturbed[i])] and (i == 1 or len(disturbed[i]) == ANSWER), f"request {i}"
    assert repeated == together[len(prompts) - 1]


def test_tokens_that_were_taken_back_leave_no_trace():
    """The longest request runs 16 tokens of its answer and takes back 7, the ninth runs again, inside an open group; in the
    second run it is given that ninth token behind 8, and never ran the others. Both go on by the same programs from what
    must be the same state, so they get the same bits, and so does who is beside them."""
    lm, never = model(), [model().config.vocab_size]
    prompts = prompts_of(*never)
    assert (LENGTHS[LONGEST] + STEPS) % 2  # tokens that are kept; the ratio-2 group of the last one is open

    def serve(bursts, back, then):
        engine = warm_engine(rolls_back=True)
        warm, ids = dict(lm.traces), [engine.add(tokens, ANSWER, stop_ids=never) for tokens in prompts]
        answers, rolled_back = {id: [] for id in ids}, False
        while not engine.is_idle:
            for event in engine.step():
                answers[event.id].extend(event.tokens)
            own = answers[ids[LONGEST]]
            if len(own) == bursts * STEPS and not rolled_back:
                engine.rollback(ids[LONGEST], back, then)
                own[len(own) - back :], rolled_back = then, True
        assert rolled_back and lm.traces == warm and all(len(tokens) == ANSWER for tokens in answers.values())
        return [answers[id] for id in ids]

    taken_back = serve(2, BACK, [])
    assert taken_back == serve(1, 0, [taken_back[LONGEST][STEPS]])
