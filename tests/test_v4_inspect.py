"""V4's official tensors and cache sizes, from the config alone."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import tolerances
from official_v4 import official_v4_config
from tiny_v4 import CHECKPOINT

from dsa_jax import demo_v4
from dsa_jax.cache.state_v4 import new_cache
from dsa_jax.config import load_config
from dsa_jax.config_v4 import V4Config
from dsa_jax.demo import write_demo_checkpoint
from dsa_jax.inspect import inspect_checkpoint
from dsa_jax.loading import abstract_parameters, load_model
from dsa_jax.memory import weights_per_device
from dsa_jax.memory_v4 import cache_bytes
from dsa_jax.numerics import BF16
from dsa_jax.weights.checkpoint import scan_checkpoint
from dsa_jax.weights import make_plan
from dsa_jax.weights.official import TensorSpec
from dsa_jax.weights.official_v4 import official_tensors


@pytest.mark.parametrize(("size", "count", "gibibytes"), [("flash", 69187, None), ("flash-0731", 72317, 166_878_536_440 / 2**30), ("pro", 145116, 805.3)])
def test_the_official_checkpoints(size, count, gibibytes):
    """The published numbers of tensors, and of bytes where they are published (to the byte for Flash-0731)."""
    jaxtyping.config.update("jaxtyping_disable", True)  # a hundred thousand tensors pass; the golden ones are checked below
    try:
        tensors = official_tensors(V4Config.from_dict(official_v4_config(size)))
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert len(tensors) == count
    if gibibytes is not None:  # listed as GB, in units of 2^30
        total = sum(spec.nbytes for spec in tensors.values())
        assert total == gibibytes * 2**30 if size == "flash-0731" else abs(total / 2**30 - gibibytes) < 0.05


def test_the_golden_checkpoint_has_exactly_these_tensors():
    stored = {name: TensorSpec(t.dtype, t.shape) for name, t in scan_checkpoint(CHECKPOINT).tensors.items()}
    assert stored == official_tensors(load_config(CHECKPOINT))


def test_cache_sizes_are_those_of_the_arrays():
    """A cache of whole pages holds what the sizes say, besides page padding, lengths and page tables."""
    config = V4Config.from_dict(official_v4_config("flash"))
    tokens, batch = 1024, 2
    parts = cache_bytes(config, tokens, batch).parts
    cache = jax.eval_shape(lambda: new_cache(config, BF16, batch, tokens))
    sizes = {name: 0 for name in parts}
    for layer in cache.layers:
        sizes["window rows"] += batch * config.sliding_window * layer.window.format.row_bytes
        for name, owned in (("compressed KV", layer.compressed), ("index keys", layer.index_keys)):
            if owned is not None:
                sizes[name] += owned.rows.num_slots * owned.rows.format.row_bytes
                sizes["open groups"] += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(owned.tail))
    sizes["draft window rows"] = batch * config.sliding_window * cache.mtp.layer.window.format.row_bytes
    sizes["draft streams"] = cache.mtp.stream.size * jnp.dtype(cache.mtp.stream.dtype).itemsize
    assert sizes == parts


@pytest.mark.parametrize(("context", "batch"), [(0, 1), (2**21, 1), (8, 0)])
def test_sizes_that_the_model_does_not_take(context, batch):
    with pytest.raises(ValueError, match="context|batch"):
        cache_bytes(load_config(CHECKPOINT), context, batch)


def test_inspect_tells_plan_parts_and_memory():
    report = inspect_checkpoint(CHECKPOINT, context=1024)
    assert report.problems == () and report.found_tensors == report.tensors
    text = "\n".join(report.lines())
    assert "DeepSeek-V4, 5 layers, 1 draft stages" in text
    rows = [line.split() for line in report.lines() if line.startswith(("  layer", "  mtp"))]
    assert rows == [
        ["layer", "0", "0", "window", "-", "token", "-", "10000", "-"],
        ["layer", "1", "128", "all", "-", "token", "-", "160000", "x16"],
        ["layer", "2", "4", "indexed", "16", "score", "-", "160000", "x16"],
        ["layer", "3", "128", "all", "-", "score", "-", "160000", "x16"],
        ["layer", "4", "4", "indexed", "16", "score", "-", "160000", "x16"],
        ["mtp.0", "0", "window", "-", "score", "-", "10000", "-"],
    ]
    assert report.weights_per_device[2] < report.weights_per_device[1] and report.by_part["draft"][0] == 29 + 6 * 4 + 10
    assert "other" not in report.by_part


def test_the_demo_checkpoint_is_a_v4_checkpoint(tmp_path):
    write_demo_checkpoint(tmp_path, family="v4")
    report = inspect_checkpoint(tmp_path)
    assert report.problems == () and report.missing_shards == () and report.config == load_config(tmp_path)
    assert {role.mode for role in report.plan} == {"window", "indexed", "all"}
    assert 1_000_000 < report.total_bytes < 10_000_000
    assert not make_plan(abstract_parameters(report.config), tmp_path).notes
    table = scan_checkpoint(tmp_path).tensors["layers.0.ffn.gate.tid2eid"].view()
    assert 0 <= table.min() < table.max() < report.config.n_routed_experts and (table[:, 0] != table[:, 1]).all()


@pytest.fixture
def with_dspark(tmp_path, monkeypatch):
    """A demo checkpoint of two layers and two DSpark stages, whose config still says one draft layer."""
    dspark = {"block_size": 3, "noise_token_id": 5, "target_layer_ids": [0, 1], "markov_rank": 32}
    changes = {"num_hidden_layers": 2, "compress_ratios": [0, 4, 0, 0]} | {f"dspark_{k}": v for k, v in dspark.items()}
    monkeypatch.setattr(demo_v4, "RAW_CONFIG", demo_v4.RAW_CONFIG | changes)
    write_demo_checkpoint(tmp_path, family="v4")
    return tmp_path


def test_a_checkpoint_with_dspark_stages_is_inspected_and_planned(with_dspark):
    report = inspect_checkpoint(with_dspark)
    assert report.problems == () and len(report.draft) == 2 and "other" not in report.by_part
    assert not make_plan(abstract_parameters(report.config), with_dspark).notes, "nothing is left out"
    assert report.cache.parts["draft streams"] == 0 and report.cache.parts["draft window rows"] > 0
    markov = weights_per_device(report.config, [("mtp.1.markov_head.markov_w2.weight", report.config.vocab_size)], [2])
    assert markov == {2: report.config.vocab_size // 2}


@pytest.mark.slow
def test_a_checkpoint_with_dspark_stages_drafts_in_the_released_arithmetic(with_dspark):
    """Windows are FP8 records: drafts after a prompt in one piece and in two are the same block."""
    lm, prompt = load_model(with_dspark, "bf16", progress=False), list(range(20, 60))
    drafts = []
    for pieces in ([prompt], [prompt[:17], prompt[17:]]):
        cache = lm.new_cache(1, 64)
        for piece in pieces:
            _, cache = lm.prefill(cache, [piece], chunk=64)
        drafts.append(lm.draft(cache, np.array([7], np.int32)))
    assert drafts[0].ids.shape == (1, 4) and drafts[0].confidence.shape == (1, 3)
    gap = np.linalg.norm(drafts[0].logits - drafts[1].logits) / np.linalg.norm(drafts[0].logits)
    assert gap <= tolerances.of("model.arrival.bf16") and np.isfinite(drafts[0].logits).all()
