"""On a GPU with kernels: requests that the engine serves together get what each gets alone, to the bit."""

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

LENGTHS, ANSWER = (700, 90, 1500, 260), 24


def test_requests_beside_one_another_get_what_each_gets_alone():
    """Prompts of several chunks and short ones, a prefix that is taken up, and bursts during which nothing is read from the
    device (the engine forbids it), one under way while the last one's tokens are read; one request is cancelled, and one
    comes late. Shapes are the same alone and together, so kernels give the same bits."""
    lm = random_model(released_widths(), BF16)
    prompts = [np.random.default_rng(0).integers(0, 4000, 2000)[:n].tolist() for n in LENGTHS]

    def serve(chosen, late=None, cancelled=None):
        engine = Engine(
            lm, 4, 2048, pages=80, prefill_shapes=((2, 256),), decode_rows=(4,), steps=8, snapshots=24, boundary=256
        )
        engine.warm_up()
        warm, ids = dict(lm.traces), {engine.add(prompts[i], ANSWER, stop_ids=[4096]): i for i in chosen if i != late}
        answers, ran_ahead = {i: [] for i in chosen}, False
        while not engine.is_idle:
            for event in engine.step():
                answers[ids[event.id]].extend(event.tokens)
            ran_ahead |= engine._ahead is not None
            if cancelled is not None and answers[cancelled]:
                engine.cancel(next(id for id, i in ids.items() if i == cancelled))
                ids[engine.add(prompts[late], ANSWER, stop_ids=[4096])] = late
                cancelled = None
        assert ran_ahead
        again = engine.add(prompts[max(chosen)], ANSWER, stop_ids=[4096])
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
