"""On two GPUs with kernels: a model of the released widths, divided by heads or by experts, gives what it gives on one."""

import functools
import re
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharding_cases import on_mesh
from test_device_model import compiled_together, programs_of, released_widths, run

from dsa_jax.bench_model import filled_cache, most_pages, random_model
from dsa_jax.numerics import BF16
from dsa_jax.sampling import Sampling
from dsa_jax.sharding import make_mesh
from dsa_jax.tolerances import TOLERANCES
from pallas_kernels import platform

pytestmark = pytest.mark.skipif(
    platform.kernel_name() is None or jax.device_count() < 2, reason="needs two NVIDIA GPUs that the kernels know"
)

BATCH, CONTEXT, STEPS, RUNS = 32, 16384, 8, 5
COLLECTIVE = re.compile(r"all-reduce|all-gather|reduce-scatter|all-to-all|collective|nccl", re.IGNORECASE)


def burst(lm):
    """Arguments of a burst of decode steps; made anew for each, because a burst uses them up."""
    pages, _ = most_pages(lm, BATCH, CONTEXT + STEPS)
    cache = filled_cache(lm, BATCH, CONTEXT, STEPS, pages)
    logits, done, stop = jnp.zeros((BATCH, lm.config.vocab_size)), np.zeros(BATCH, bool), np.full((BATCH, 1), -1, np.int32)
    return jax.block_until_ready(lm.on_devices((cache, logits, done, Sampling.of(BATCH), stop)))


def times(lm, decode):
    """Microseconds of a decode step by the clock, and of its collectives on the first device as the profiler has them."""
    clock = []
    for _ in range(RUNS + 1):
        arguments = burst(lm)
        begun = time.perf_counter()
        jax.block_until_ready(decode(lm.leaves, *arguments))
        clock.append(1e6 * (time.perf_counter() - begun) / STEPS)
    arguments = burst(lm)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(decode(lm.leaves, *arguments))
        (trace,) = Path(folder).glob("**/*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(trace)).planes)
    first = min((plane for plane in planes if plane.name.startswith("/device:")), key=lambda plane: plane.name)
    streams = [line for line in first.lines if line.name.startswith("Stream")]
    spent = [event.duration_ns for line in streams for event in line.events if COLLECTIVE.search(event.name)]
    return float(np.median(clock[1:])), sum(spent) / 1e3 / STEPS


@functools.cache
def models():
    """The model on one GPU, and divided over two by heads and by experts."""
    one = random_model(released_widths(), BF16)
    return {"one": one} | {axis: on_mesh(one, make_mesh(jax.devices()[:2], **{axis: 2})) for axis in ("tp", "ep")}


@functools.cache
def on_one():
    return run(models()["one"], *programs_of(models()["one"])[0])


@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_two_gpus_agree_with_one(axis):
    lm, wanted = models()[axis], on_one()
    found = run(lm, *programs_of(lm)[0])
    for kind, ours, theirs in zip(("prefill", "decode"), found[::2], wanted[::2], strict=True):
        distance = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        print(f"{axis}=2: logits of {kind}, relative distance {distance:.2e}")
        assert np.isfinite(ours).all() and distance <= TOLERANCES["bf16"].hidden
    for name in (name for name in wanted[1] if name.endswith("selected")):
        pairs = zip(wanted[1][name], found[1][name], strict=True)
        overlap = np.mean([len(np.intersect1d(a, b)) / len(a) for a, b in pairs])
        print(f"{axis}=2: {name}, lists overlap {overlap:.4f}")
        assert overlap >= TOLERANCES["bf16"].lists


def test_collectives_are_a_part_of_a_step():
    """Prints what they take."""
    lowered = [lm._decode.lower(lm.leaves, *burst(lm), steps=STEPS, drafts=0) for lm in models().values()]
    for (name, lm), decode in zip(models().items(), compiled_together(lowered), strict=True):
        step, collectives = times(lm, decode)
        print(f"{name}: a step of {BATCH} requests {step:.0f} us, collectives {collectives:.0f} us")
        assert (collectives == 0) if name == "one" else (0 < collectives < step)
