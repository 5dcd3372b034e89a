"""What a step works in is in the memory plans: of an engine's pool, and of what lies on several devices."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from engines import BATCH, CONTEXT, PAGE, small_model
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr
from test_device_model import released_widths
from test_v32_config import RELEASED

from dsa_jax import bench_model, cli, ops
from dsa_jax.cache.requests import arrays_of, page_bytes, request_bytes
from dsa_jax.cache.sizes import CacheSizes
from dsa_jax.config_v32 import V32Config
from dsa_jax.decode import LanguageModel
from dsa_jax.demo import write_demo_checkpoint
from dsa_jax.device_plan import plan_devices
from dsa_jax.engine import Engine
from dsa_jax.engine.demands import sizes_of
from dsa_jax.inventory import inventory_of
from dsa_jax.layers.moe import Experts
from dsa_jax.loading import abstract_model
from dsa_jax.memory import SCORE_BYTES, expert_bytes, human, step_bytes
from dsa_jax.numerics import BF16
from pallas_kernels import platform


def arrays_in(jaxpr):
    """Every array that a traced program makes, in loops and branches too."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                yield from arrays_in(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


@pytest.mark.parametrize("requests, rows", [(1, 4096), (128, 1)], ids=["chunk", "burst"])
def test_scores_at_one_time_are_what_a_selection_with_kernels_makes(monkeypatch, requests, rows):
    """A chunk and a decode step at 131,072 positions: the largest array of scores, and its two copies."""
    pages, page = 131072 // 64, 64
    monkeypatch.setattr(platform, "kernel_name", lambda: "sm90")
    keys = jax.eval_shape(lambda: ops.PagedRows.zeros(ops.IndexFP8(128), pages, page))

    def chosen(q, keys, weights, lengths, table):
        options = dict(context_lens=lengths, block_table=table, implementation="reference")
        return ops.select(q, keys, weights, 2048, **options).topk_indices

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    traced = jax.make_jaxpr(chosen)(
        array(jnp.bfloat16, requests, rows, 64, 128), keys, array(jnp.float32, requests, rows, 64),
        array(jnp.int32, requests, rows), array(jnp.int32, requests, pages),
    )  # fmt: skip
    scores = max(x.size * 4 for x in arrays_in(traced.jaxpr) if x.dtype == jnp.float32 and x.shape[-1:] == (pages * page,))
    counted = min(3 * 4 * requests * rows * pages * page, SCORE_BYTES)
    assert counted / 2 < 3 * scores <= counted


@pytest.mark.parametrize("stored", [False, True], ids=["dequantised", "stored"])
@pytest.mark.parametrize("rows", [1, 3, 16, 600, 4096])
@pytest.mark.parametrize("widths", [(3072, 1024), (16384, 18432)], ids=["several", "one"])
def test_what_experts_take_is_what_the_layer_makes_at_one_time(rows, widths, stored, monkeypatch):
    """The rows of all tiles with gate and up or with the result; and the weights that one iteration of the reference's
    products holds, whose tiles are spread evenly over the iterations. (A GPU stores none of those of single rows, here up to
    ten tokens; they are counted all the same.) As kernels have the tiles, whose references are traced here."""
    hidden, inner = widths
    config = dataclasses.replace(
        released_widths(), hidden_size=hidden, moe_intermediate_size=inner, n_routed_experts=32, num_experts_per_tok=6
    )
    monkeypatch.setattr(ops, "multiplies_stored", lambda *_, **__: stored)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Experts(32, hidden, inner, 10.0)))

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    traced = jax.make_jaxpr(lambda state, *rows: nnx.merge(graphdef, state)(*rows, BF16))(
        state, array(jnp.bfloat16, rows, hidden), array(jnp.int32, rows, 6), array(jnp.float32, rows, 6),
        array(jnp.bool_, rows),
    )  # fmt: skip
    arrays = [x for x in arrays_in(traced.jaxpr) if x.ndim == 3 and x.dtype == jnp.bfloat16]
    one, counted = 2 * hidden * inner, expert_bytes(config, rows, 2, stored)
    shapes = {x.shape for x in arrays if x.shape[-2:] not in ((inner, hidden), (hidden, inner))}
    held = max(tiles * tile for tiles, tile, width in shapes if width == hidden)
    assert held == max(tiles * tile for tiles, tile, width in shapes if width == inner) >= 6 * rows
    held *= 2 * max(2 * hidden, hidden + 2 * inner)
    if stored:
        assert counted <= held < 1.02 * counted  # the reference fills up its last iteration
    else:
        at_once = max(x.shape[0] for x in arrays if x.shape[-2:] in ((inner, hidden), (hidden, inner)))
        assert (counted - held) / 2 < at_once * one <= counted - held <= max(ops.DEQUANTIZED_BYTES, one)


# V3.2's widths: what a query row takes beside scores (stream, heads, hidden rows of 8 experts), a row of a tile of experts in
# bf16 before and after them, and their weights in bf16, 18 at a time, which is what fits in 512 MiB.
QUERY, VOCABULARY = 3 * 4 * (7168 + 128 * 576 + 8 * 2048), 129280
ROW_OF_TILE, WEIGHTS = 2 * 7168 * 2, 18 * 7168 * 2048 * 2


def v32_model():
    return LanguageModel(abstract_model(bench_model.cut(V32Config.from_dict(RELEASED), 32)), BF16)


@pytest.mark.parametrize(
    ("batch", "shape", "work"),
    [
        (4, (1, 512), 512 * 2**20 + 512 * QUERY + 12 * VOCABULARY + 64 * 128 * ROW_OF_TILE + WEIGHTS),
        (4, (1, 256), 12 * 131072 * 256 + 256 * QUERY + 12 * VOCABULARY + 48 * 128 * ROW_OF_TILE + WEIGHTS),
        (512, (1, 1), 512 * 2**20 + 512 * (QUERY + 12 * VOCABULARY) + 64 * 128 * ROW_OF_TILE + WEIGHTS),
    ],
    ids=["chunk", "short-chunk", "burst"],
)
def test_the_largest_step_comes_out_of_the_memory_that_the_pool_is_sized_from(batch, shape, work):
    """131,072 tokens: index scores with their two copies, 512 MiB at most; the rows of the step; its logits; tiles of 32 experts
    and weights. What is left, and no byte less, is pages."""
    lm = v32_model()
    options = dict(
        max_batch=batch, max_context=131072, page_size=64, pages=None, prefill_bytes=None, prefill_shapes=[shape],
        decode_rows=None, steps=8, drafts=0, max_rollback=0, snapshots=2, boundary=None,
    )  # fmt: skip
    cache = jax.eval_shape(lambda: lm.new_cache(1, 131072, CacheSizes(1, 64)))
    page, fixed = page_bytes(cache), (batch + 3) * request_bytes(cache) + work
    assert sizes_of(lm, memory_bytes=fixed + 3000 * page, **options).cache.pages == 3000
    assert sizes_of(lm, memory_bytes=fixed + 3000 * page - 1, **options).cache.pages == 2999
    with pytest.raises(ValueError, match=rf"what a step works in \({re.escape(human(work))}\); one request .* needs 2048 pages"):
        sizes_of(lm, memory_bytes=fixed + 2047 * page, **options)


def test_the_pool_and_the_states_are_as_large_as_was_planned():
    """Pages, states of requests and snapshots that an engine makes are the memory without its largest step's, to a page."""
    budget, shape = 900_000, (1, 8)
    engine = Engine(small_model(), BATCH, CONTEXT, PAGE, memory_bytes=budget, prefill_shapes=(shape,), snapshots=2)
    held = sum(x.nbytes for x in jax.tree.leaves((engine._state.slots.cache, engine._state.store)))
    page = sum(x.nbytes // engine.pages for x in arrays_of(engine._state.slots.cache)[1])
    config = engine.model.config
    chunk, burst = (
        step_bytes(config, rows, CONTEXT, logits) + expert_bytes(config, rows, 4, stored=False)
        for rows, logits in ((8, 1), (BATCH, BATCH))
    )
    assert budget - page < held + max(chunk, burst) <= budget and engine.pages > 5


def test_a_plan_for_several_devices_counts_what_a_step_works_in(tmp_path, capsys):
    """2 GiB, the engine's prefill, or a decode step that takes more; and the experts of a chunk of 512 tokens, which is what the
    engine's prefill is at 131,072 tokens, or of the decode step: tiles of 128 or 256 rows of a device's 32 experts."""
    config = V32Config.from_dict(RELEASED)
    inventory = inventory_of(config)

    def share(batch, part):
        plan = plan_devices(config, inventory.tensors(config), inventory.caches(config, 131072, batch), 8, 2**60)
        return next(share.nbytes for share in plan.shares if share.part == part)

    assert share(8, "work of a step") == 2 * 2**30
    assert share(2048, "work of a step") == 512 * 2**20 + 2048 * (QUERY + 12 * VOCABULARY)
    assert share(8, "work of experts") == (32 + 512 * 8 // 128) * 128 * ROW_OF_TILE + WEIGHTS
    assert share(2048, "work of experts") == (32 + 2048 * 8 // 256) * 256 * ROW_OF_TILE + WEIGHTS
    write_demo_checkpoint(tmp_path)
    assert cli.main(["inspect", str(tmp_path), "--devices", "2"]) == 0
    assert re.search(r"work of experts +\d+\.\d\d [KM]iB +on each", capsys.readouterr().out)
