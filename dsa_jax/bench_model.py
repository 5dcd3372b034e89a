"""Times whole steps of a model of real widths with random weights: by part, against a floor, against XLA's references.

A model is cut to as many layers as show every role; widths, heads, formats and lists stay those of the config. Step times
are wall-clock times of the compiled step, greedy, in bursts that follow each other. Parts are the device times of its
operations as the profiler reports them, by the name of the operation that each belongs to; they come from a second
compilation without CUDA graphs, whose kernels a profile cannot tell apart.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from dsa_jax import ops
from dsa_jax.bench_floor import PARTS, floors_us
from dsa_jax.cache.requests import page_bytes
from dsa_jax.cache.sizes import CacheSizes
from dsa_jax.config import V41Config
from dsa_jax.config_v4 import V4Config
from dsa_jax.config_v32 import V32Config
from dsa_jax.decode import LanguageModel, parameter_names
from dsa_jax.loading import abstract_model
from dsa_jax.numerics import Numerics
from dsa_jax.sampling import Sampling

STEPS, BURSTS, RUNS = 8, 4, 3
DISTINCT_PAGES = 2048  # pages are filled with so many different ones, again and again: scores repeat, addresses do not
POOL_SHARE = 0.6  # of the device's free memory
_SCOPES = (
    ("indexer", re.compile(r"/(indexer_logits|candidate_logits)/")),
    ("selection", re.compile(r"/top_k/")),
    ("attention", re.compile(r"/(sparse_decode|sparse_attention)/")),
    ("experts", re.compile(r"/experts/")),
)
_NESTED = re.compile(r"^(while|call|conditional)")  # their time is that of what runs inside


@dataclasses.dataclass(frozen=True)
class StepRow:
    """One measured step. Times in microseconds: us of the whole step, parts by name, floors of the parts (None where the
    chip's rates are not known), us_reference with XLA's references in place of the kernels (None if not asked for).
    shared: how many requests have a page in common where the pool does not hold all their tokens."""

    kind: str
    batch: int
    context: int
    rows: int
    us: float
    tokens_per_second: float
    parts: dict[str, float]
    floors: dict[str, float] | None
    us_reference: float | None
    shared: int
    layers: tuple[str, ...]
    device: str
    jax: str


def cut(config: Any, experts: int) -> Any:
    """`config` with the fewest layers that show every role, at most `experts` routed experts, no Engram and no drafts.

    V4.1: window, two ratio-2 sources each with a layer that reuses one, the candidate source, a layer that reuses it, and
    a consumer. V4: the roles of its first layers. V3.2: one dense layer and one of experts.
    """
    experts = min(experts, config.n_routed_experts)
    if isinstance(config, V41Config):
        return dataclasses.replace(
            config, num_hidden_layers=7, n_routed_experts=experts, compress_ratios=(0, 2, 2, 2, 1, 1, 1),
            kv_source_layer_ids=(1, 3, 4), index_source_layer_ids=(1, 3, 4, 6), candidate_source_layer_id=4,
            engram_layer_ids=(), engram_num_embeddings=(), num_nextn_predict_layers=0, dspark_target_layer_ids=(),
        )  # fmt: skip
    if isinstance(config, V4Config):
        ratios = config.compress_ratios[: config.num_hidden_layers]
        wanted = sorted({ratios.index(ratio) for ratio in set(ratios)})
        return dataclasses.replace(
            config, num_hidden_layers=len(wanted), compress_ratios=tuple(ratios[i] for i in wanted), n_routed_experts=experts,
            num_nextn_predict_layers=0, num_hash_layers=0, dspark=None,
        )  # fmt: skip
    assert isinstance(config, V32Config)
    return dataclasses.replace(
        config, num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=experts, num_nextn_predict_layers=0
    )


def random_model(config: Any, numerics: Numerics, implementation: str | None = None) -> LanguageModel:
    """A model with weights made on the device from the parameters' names; activations stay near 1."""
    graphdef, state = nnx.split(abstract_model(config))
    leaves, structure = jax.tree.flatten(state)
    arrays = [_weight(*pair) for pair in zip(parameter_names(state), leaves, strict=True)]
    return LanguageModel(nnx.merge(graphdef, jax.tree.unflatten(structure, arrays)), numerics, implementation)


def _weight(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
    kind = name.rpartition(".")[2]
    if kind == "scale":
        gain = (like.shape[-1] * 32) ** 0.5 * (2.9 if ".experts." in name else 1)
        exponent = -round(np.log2(gain))
        return jnp.full(like.shape, 127 + exponent if like.dtype == jnp.uint8 else 2.0**exponent, like.dtype)
    if "norm" in name:
        return jnp.ones(like.shape, like.dtype)
    if kind.endswith("_scale"):
        return jnp.full(like.shape, 0.5, like.dtype)
    near_one = like.dtype == jnp.float8_e4m3fn or len(like.shape) == 1 or name == "embed.weight"
    return _random(zlib.crc32(name.encode()) >> 1, like.shape, like.dtype, 1.0 if near_one else like.shape[-1] ** -0.5)


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "size"))
def _random(seed, shape: tuple[int, ...], dtype: Any, size: float) -> jax.Array:
    """Normal numbers of this size; bytes of any value; of other integers 0 and 1, which every table has."""
    key = jax.random.key(seed, impl="rbg")  # whose numbers take next to no time to compile
    if dtype == jnp.uint8:
        return jax.random.bits(key, shape, jnp.uint8)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, 0, 2).astype(dtype)
    return (jax.random.normal(key, shape) * size).astype(dtype)


def most_pages(lm: LanguageModel, batch: int, tokens: int) -> tuple[int, int]:
    """(pages of a pool for `batch` requests of `tokens` tokens, how many requests share a page): more than one where a pool
    with pages for each would not fit beside the weights."""
    shape = jax.eval_shape(lambda: lm.new_cache(1, tokens, CacheSizes(pages=1)))
    each = shape.block_table.shape[1]
    free = _free_bytes()
    pages = batch * each if free is None else min(batch * each, max(each, int(POOL_SHARE * free) // page_bytes(shape)))
    return pages, -(-batch * each // pages)


def filled_cache(lm: LanguageModel, batch: int, context: int, room: int, pages: int) -> Any:
    """A cache of `batch` requests that hold `context` random tokens and have room for `room` more, in so many pages."""

    def empty(pages: int) -> Any:
        return lm.new_cache(batch, context + room, CacheSizes(pages=pages))

    # What is not pages is taken from a cache with next to none: an empty pool beside the filled one may not fit.
    shape = jax.eval_shape(lambda: empty(pages))
    cache = jax.tree.map(_filled, shape, empty(1), is_leaf=lambda x: isinstance(x, ops.PagedRows))
    table = (np.arange(cache.block_table.size) % pages).astype(np.int32).reshape(cache.block_table.shape)
    length = jnp.full((batch,), context, jnp.int32)
    return dataclasses.replace(cache, length=length, block_table=jnp.asarray(table))


def _filled(like: Any, empty: Any) -> Any:
    """As many pages as `like` has, of random records; what is not pages, as `empty` is."""
    if not isinstance(like, ops.PagedRows):
        return empty
    return dataclasses.replace(like, pages=_random_pages(like.format, like.pages.shape[0], like.page_size))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _random_pages(format: ops.RecordFormat, pages: int, page_size: int) -> jax.Array:
    distinct = min(pages, DISTINCT_PAGES)
    empty = ops.PagedRows.zeros(format, distinct, page_size)
    values = jax.random.normal(jax.random.key(distinct, impl="rbg"), (empty.num_slots, format.width))
    some = empty.scatter(jnp.arange(empty.num_slots, dtype=jnp.int32), values).pages
    return jnp.tile(some, (-(-pages // distinct), *[1] * (some.ndim - 1)))[:pages]


def _free_bytes() -> int | None:
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None


def run(
    config: Any,
    numerics: Numerics,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    chunk: int,
    experts: int = 32,
    reference: bool = False,
    report: Callable[[StepRow], None] = lambda row: None,
    progress: bool = False,
) -> list[StepRow]:
    """Measures a decode step for every batch and context, and a prefill chunk of `chunk` tokens for every context.

    `reference` also times the same weights with XLA's references; `progress` shows a bar. ValueError where a context
    leaves no room in the config's positions or is shorter than the chunk.
    """
    for context in contexts:
        if context < max(chunk, STEPS * BURSTS) or context > config.max_position_embeddings:
            raise ValueError(
                f"context={context} must hold the chunk of {chunk} tokens, {STEPS * BURSTS} decode steps, and stay within the "
                f"{config.max_position_embeddings} positions of the config (max_position_embeddings)."
            )
    lm = random_model(cut(config, experts), numerics)
    models = [lm] + ([LanguageModel(lm.model(), numerics, "reference")] if reference else [])
    steps = [("prefill", 1, chunk), *(("decode", batch, 1) for batch in batches)]
    timed = [[_TimedStep(m, *step, context) for m in models] for context, step in itertools.product(contexts, steps)]
    # All are compiled now: compiling runs kernels of its own, which would be in the way of what is timed. XLA finds the
    # fastest form of a fusion once and then knows it, but not of one that two threads ask for at the same time; steps
    # that differ in context or implementation alone share most of theirs. So those of one context come first.
    every = [step for pair in timed for step in pair]
    first = [ours for ours, *_ in timed[: len(steps)]]
    bar = tqdm(total=len(every), desc="compile", unit="step", disable=not progress)
    with ThreadPoolExecutor(os.cpu_count()) as pool, bar:
        for together in (first, [step for step in every if step not in first]):
            for done in as_completed([pool.submit(step.compile, in_parts=step.lm is lm) for step in together]):
                done.result()
                bar.update()
    rows = []
    for ours, *theirs in tqdm(timed, desc="time", unit="step", disable=not progress):
        rows.append(_measure(ours, theirs[0] if theirs else None))
        report(rows[-1])
    return rows


def _measure(ours: "_TimedStep", reference: "_TimedStep | None") -> StepRow:
    us = ours.wall_us()
    return StepRow(
        kind=ours.kind, batch=ours.batch, context=ours.context, rows=ours.count, us=us,
        tokens_per_second=1e6 * ours.batch * ours.count / us,
        parts=ours.parts_us(), floors=floors_us(ours.lm, ours.batch, ours.context, ours.count),
        us_reference=None if reference is None else reference.wall_us(),
        shared=ours.shared, layers=tuple(getattr(role, "mode", None) or role.ffn for role in ours.lm.plan),
        device=jax.devices()[0].device_kind, jax=jax.__version__,
    )  # fmt: skip


class _TimedStep:
    """A step of one model at one size; its cache is made anew for every run, because a run uses it up."""

    def __init__(self, lm: LanguageModel, kind: str, batch: int, count: int, context: int):
        self.lm, self.kind, self.batch, self.count, self.context = lm, kind, batch, count, context
        if kind == "decode":
            function, static, self._inputs = lm._decode, {"steps": STEPS, "drafts": 0}, _decode_inputs
            self.steps, self.bursts = STEPS, BURSTS
        else:
            function, static, self._inputs = lm._prefill, {}, _prefill_inputs
            self.steps = self.bursts = 1
        self.pages, self.shared = most_pages(lm, batch, context)
        self._lowered = function.lower(*jax.eval_shape(self._arguments), **static)

    def _arguments(self) -> tuple:
        room = self.count * self.steps * self.bursts
        cache = filled_cache(self.lm, self.batch, self.context - room, room, self.pages)
        return self._inputs(self.lm, cache, self.batch, self.count)

    def compile(self, in_parts: bool) -> None:
        """Compiles the step and, with `in_parts`, once more without CUDA graphs."""
        self._program = self._lowered.compile()
        if in_parts:
            options = {"xla_gpu_enable_command_buffer": ""} if jax.default_backend() == "gpu" else None
            self._in_parts = self._lowered.compile(compiler_options=options)

    def wall_us(self) -> float:
        """Median wall-clock time of a step. Bursts of decode steps follow each other as the engine's do, each handed to the
        device while the one before it runs."""
        return float(np.median([self._once_us() for _ in range(1 + RUNS)][1:]))

    def _once_us(self) -> float:
        leaves, cache, logits, *others = jax.block_until_ready(self._arguments())
        begun = time.perf_counter()
        for _ in range(self.bursts):
            results = self._program(leaves, cache, logits, *others)
            if self.kind == "decode":
                cache, logits, others[0], _ = results
        jax.block_until_ready(results)
        return 1e6 * (time.perf_counter() - begun) / (self.steps * self.bursts)

    def parts_us(self) -> dict[str, float]:
        """Device time of a step by part."""
        part_of = _part_of_instructions(self._in_parts.as_text())
        jax.block_until_ready(self._in_parts(*self._arguments()))
        arguments = jax.block_until_ready(self._arguments())
        total = dict.fromkeys(PARTS, 0.0)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(self._in_parts(*arguments))
            (trace,) = Path(folder).glob("**/*.xplane.pb")
            profile = jax.profiler.ProfileData.from_file(str(trace))
            planes = list(profile.planes)
            planes = [plane for plane in planes if plane.name.startswith("/device:")] or planes  # a CPU's is the host's
            for event in (event for plane in planes for line in plane.lines for event in line.events):
                name = dict(event.stats).get("hlo_op")
                if name is not None and name in part_of and not _NESTED.match(name):
                    total[part_of[name]] += event.duration_ns / 1e3 / self.steps
        return total


def _decode_inputs(lm: LanguageModel, cache: Any, batch: int, count: int) -> tuple:
    """Arguments of a burst of decode steps."""
    logits = jax.random.normal(jax.random.key(0), (batch, lm.config.vocab_size))
    none, stops = jnp.zeros((batch,), bool), jnp.full((batch, 1), -1, jnp.int32)
    return lm.leaves, cache, logits, none, Sampling.of(batch), stops


def _prefill_inputs(lm: LanguageModel, cache: Any, batch: int, count: int) -> tuple:
    """Arguments of a chunk of `count` tokens."""
    tokens = jax.random.randint(jax.random.key(1), (batch, count), 0, lm.config.vocab_size, jnp.int32)
    logits = jnp.zeros((batch, lm.config.vocab_size), jnp.float32)
    return lm.leaves, cache, logits, tokens, jnp.full((batch,), count, jnp.int32), None


def _part_of_instructions(program: str) -> dict[str, str]:
    """Instruction name -> part, from the names of the operations that a compiled program's text gives for each."""
    parts = {}
    for name, rest in re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$", program, re.MULTILINE):
        found = re.search(r'op_name="([^"]*)"', rest)
        scope = found[1] if found else ""
        parts[name] = next((part for part, pattern in _SCOPES if pattern.search(scope)), "rest")
    return parts


def table(rows: Sequence[StepRow]) -> str:
    """The rows as a text table: step, throughput, each part over its floor."""
    lines = [f"{'step':28} {'us':>10} {'tokens/s':>11} {'XLA us':>10}  part: us / floor us"]
    for r in rows:
        name = f"{r.kind} batch {r.batch} at {r.context:,}" + (f" (pages shared by {r.shared})" if r.shared > 1 else "")
        plain = f"{r.us_reference:10.0f}" if r.us_reference is not None else f"{'-':>10}"
        parts = "  ".join(
            f"{part} {r.parts[part]:.0f}" + (f"/{r.floors[part]:.0f}" if r.floors is not None else "") for part in PARTS
        )
        lines.append(f"{name:28} {r.us:10.0f} {r.tokens_per_second:11.0f} {plain}  {parts}")
    return "\n".join(lines)


def to_json(rows: Sequence[StepRow]) -> str:
    """The rows as a JSON list of objects."""
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=1)


def plot(rows: Sequence[StepRow], path: str) -> None:
    """Draws the parts of every step as a stacked bar, with the sum of the floors as a mark. Needs matplotlib."""
    from dsa_jax import plots

    figure = plots.stacked_times(
        [f"{r.kind} batch {r.batch}\n{r.context:,}" for r in rows],
        {part: [r.parts[part] for r in rows] for part in PARTS},
        [None if r.floors is None else sum(r.floors.values()) for r in rows],
        f"one step on {rows[0].device}" if rows else "no rows",
    )
    figure.savefig(path, dpi=150)
