"""Four attention layers, each on its own input, against DeepSeek's modules: window, ratio-2 source, candidate source,
consumer; a prefill of 41 tokens, then 8 steps (tests/golden/v41/ops/attention_*)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from flax import nnx
from test_layers import MODULE_MODES, both
from tiny import CHECKPOINT

from dsa_jax.cache import new_cache
from dsa_jax.config import load_config
from dsa_jax.layer_plan import layer_plan
from dsa_jax.layers.attention import Attention, AttentionState
from dsa_jax.layers.linear import Linear
from dsa_jax.layers.per_head import per_head
from dsa_jax.step import Step
from dsa_jax.tap import Tap

PREFILL, STEPS = 41, 8
TIE = 1e-6  # rows whose margin at the edge is below this hold a tie: which position is kept is free


class Unquantized(Linear):
    """The file's weights are bf16: a linear that stands where the checkpoint has an FP8 one."""

    def dequantized(self, numerics):
        return self.weight[...].astype(numerics.dtype)

    def per_group(self, x, numerics):
        return per_head(x, self.dequantized(numerics).reshape(x.shape[2], -1, x.shape[3]), 2, numerics)


@pytest.fixture(scope="module")
def config():
    g = both("attention")["f32"]
    heads, d = len(g["layer0.w.attn_sink"]), len(g["layer0.w.kv_norm.weight"])
    window = g["layer0.prefill.attn_topk_idxs"].shape[-1]
    base = load_config(CHECKPOINT)
    return dataclasses.replace(
        base,
        hidden_size=g["layer0.x"].shape[-1],
        num_hidden_layers=4,
        num_attention_heads=heads,
        head_dim=d,
        qk_rope_head_dim=32,
        q_lora_rank=len(g["layer0.w.q_norm.weight"]),
        o_groups=heads * d // g["layer0.w.wo_a.weight"].shape[1],
        o_lora_rank=32,
        sliding_window=window,
        compress_ratios=(0, 2, 1, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2,
        candidate_topk_blocks=2,
        candidate_block_size=8,
        index_topk=g["layer1.prefill.attn_topk_idxs"].shape[-1] - window,
        index_head_dim=len(g["layer1.w.indexer.k_norm.weight"]),
        index_n_heads=len(g["layer1.w.indexer.weights_proj.weight"]),
        rope_scaling=dataclasses.replace(base.rope_scaling, original_max_position_embeddings=1024),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        engram_layer_ids=(),
        engram_num_embeddings=(),
    )


def layer_of(layer, index: int, golden):
    """`layer` with the weights that the file has for the layer of this index."""
    prefix = f"layer{index}.w."
    for name, value in golden.items():
        if not name.startswith(prefix):
            continue
        *path, last = name[len(prefix) :].split(".")
        owner = layer
        for part in path[:-1] if path else []:
            owner = getattr(owner, part)
        if last == "weight" and "norm" not in path[-1]:
            setattr(owner, path[-1], Unquantized(*value.shape))
        (getattr(owner, path[-1]) if path else owner).__getattribute__(last).set_value(jnp.asarray(value))
    return layer


def margin(score: np.ndarray, k: int) -> np.ndarray:
    """Gap at the edge of the k best; inf where nothing finite is cut."""
    if score.shape[1] <= k:
        return np.full(len(score), np.inf)
    ordered = -np.sort(-score.astype(np.float64), axis=-1)
    return np.where(np.isneginf(ordered[:, k]), np.inf, ordered[:, k - 1] - np.where(np.isneginf(ordered[:, k]), 0, ordered[:, k]))


def check(ours: np.ndarray, golden: np.ndarray, mode: str, what: str) -> None:
    finite = np.isfinite(golden)
    assert np.array_equal(finite, np.isfinite(ours)), what
    scale = max(1.0, float(np.abs(golden[finite]).max(initial=0)))
    gap = float(np.abs(ours[finite] - golden[finite]).max(initial=0)) / scale
    assert gap <= tolerances.of("model.attention." + mode), f"{what}: {gap}"


@pytest.mark.parametrize("mode", ["f32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_attention_layers_in_prefill_and_decode(config, mode):
    golden, numerics = both("attention")[mode], MODULE_MODES[mode]
    plan = layer_plan(config)
    layers = [nnx.split(layer_of(Attention(config, role), role.index, golden)) for role in plan]
    cache = new_cache(config, numerics, 2, 128)
    windows, sources, start = list(cache.windows), cache.sources, 0

    @jax.jit
    def run(xs, windows, sources, start):
        rows = xs[0].shape[1]
        step = Step.of(jnp.full((2,), start), jnp.full((2,), rows, jnp.int32), cache.block_table, rows, (config.sliding_window,) * 2)
        outs, taps, selected = [], Tap(), None
        for i, (graphdef, state) in enumerate(layers):
            out, after = nnx.merge(graphdef, state)(
                xs[i], step, AttentionState(windows[i], sources, selected), numerics, taps.within(f"{i}.")
            )
            windows[i], sources, selected = after.window, after.sources, after.selected
            outs.append(out)
        return outs, windows, sources, taps.values

    for name, first, last in [("prefill", 0, PREFILL)] + [(f"step{t}", t, t + 1) for t in range(PREFILL, PREFILL + STEPS)]:
        xs = [numerics.round(jnp.asarray(golden[f"layer{i}.x"][:, first:last])) for i in range(4)]
        outs, windows, sources, taps = run(xs, windows, sources, jnp.int32(first))
        for role in plan:
            compare_layer(config, role, golden, name, first, last, np.asarray(outs[role.index], np.float32), taps, mode)
    for role in plan:
        if role.mode == "full":
            columns = jnp.arange(PREFILL // role.ratio, dtype=jnp.int32)
            for b in range(2):
                slots = cache.block_table[b, 0] * sources[role.index].index_keys.page_size + columns
                keys = np.asarray(sources[role.index].index_keys.gather(slots, jnp.float32))
                check(keys, golden[f"layer{role.index}.prefill.index_k"][b], mode, f"layer {role.index} keys")


def compare_layer(config, role, golden, name, first, last, out, taps, mode) -> None:
    label, columns = f"layer{role.index}", last // role.ratio if role.ratio else 0
    sure = np.ones(out.shape[:2], bool)
    if role.ratio:
        score = np.asarray(taps[f"{role.index}.index_score"])[:, :, :columns]
        check(score, golden[f"{label}.{name}.index_score"], mode, f"{label} {name} scores")
        if f"{label}.{name}.index_weights" in golden:
            weights = np.asarray(taps[f"{role.index}.index_weights"], np.float32)
            check(weights, golden[f"{label}.{name}.index_weights"], mode, f"{label} {name} weights")
        ranked = score
        if role.uses_candidates:
            blocks = np.asarray(taps["2.candidates"])
            listed = (np.arange(columns) // config.candidate_block_size == blocks[..., None]).any(axis=2)
            ranked = np.where(listed, score, -np.inf)
        if f"{label}.{name}.index_score_masked" in golden:
            check(ranked, golden[f"{label}.{name}.index_score_masked"], mode, f"{label} {name} masked scores")
        if role.makes_candidates and name == "prefill":
            blocks = np.asarray(taps["2.candidates"])
            listed = (np.arange(columns) // config.candidate_block_size == blocks[..., None]).any(axis=2)
            assert np.array_equal(listed, golden["candidates"] != 0)
        sure = np.stack([margin(r, config.index_topk) for r in ranked]) > TIE
        wanted = golden[f"{label}.{name}.attn_topk_idxs"] if f"{label}.{name}.attn_topk_idxs" in golden else None
        if wanted is not None:
            wanted = wanted[:, :, config.sliding_window :]
            wanted = np.where(wanted < 0, -1, wanted - (PREFILL if name == "prefill" else config.sliding_window))
            ours = np.asarray(taps[f"{role.index}.selected"])[:, :, : wanted.shape[-1]]
            assert np.array_equal(ours[sure], wanted[sure]), f"{label} {name} lists"
    check(out[sure], golden[f"{label}.{name}_out"][sure], mode, f"{label} {name} output")
