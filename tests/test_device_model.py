"""On a GPU with kernels: a model of the released widths gives with kernels what it gives with the references."""

import functools
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from jax import lax
from tiny import tiny_config

from dsa_jax.bench_model import random_model
from dsa_jax.decode import LanguageModel
from dsa_jax.numerics import BF16
from dsa_jax.tolerances import TOLERANCES
from pallas_kernels import dispatch, platform

pytestmark = pytest.mark.skipif(
    platform.kernel_name() is None, reason="needs an NVIDIA GPU that the kernels know; here only the references run"
)

ROWS, CHUNKS = 512, 6
SHARED = {"indexer_logits", "candidate_logits", "top_k", "grouped_gemm"}
KERNELS = {"prefill": SHARED | {"sparse_attention"}, "decode": SHARED | {"sparse_decode"}}


def released_widths():
    """Six layers of V4.1-Flash's widths with few experts and a small vocabulary; 128 candidate blocks, so that the
    filter bites in a short context."""
    return tiny_config(
        vocab_size=4096, hidden_size=5120, num_attention_heads=64, head_dim=512, qk_rope_head_dim=64, q_lora_rank=1280,
        o_lora_rank=1024, o_groups=8, n_routed_experts=8, num_experts_per_tok=6, moe_intermediate_size=2304,
        swiglu_limit=10.0, sliding_window=128, index_n_heads=32, index_head_dim=128, index_topk=512,
        candidate_topk_blocks=128, candidate_block_size=8, num_nextn_predict_layers=0, dspark_target_layer_ids=(),
        compress_ratios=(0, 2, 2, 1, 1, 1), image_token_id=4095, max_position_embeddings=65536,
    )  # fmt: skip


def kernels_of(program):
    """The operations that a compiled program gives to kernels."""
    calls = re.findall(r'^.*custom_call_target="[^"]*mosaic_gpu.*op_name="([^"]*)"', program.as_text(), re.MULTILINE)
    return {part for name in calls for part in name.split("/")} & set().union(*KERNELS.values())


def programs_of(*models):
    """(chunk of a prefill, step of decoding) of each model, compiled at once, and the arguments behind the cache of both."""
    one, many = (np.zeros((1, rows), np.int32) for rows in (1, ROWS))
    lowered = []
    for lm in models:
        cache = lm.new_cache(1, CHUNKS * ROWS + 1)
        for rows in (many, one):
            lowered.append(lm._forward.lower(lm.leaves, cache, *lm.on_devices((rows, np.zeros(1, np.int32))), None))
    compiled = compiled_together(lowered)
    return list(zip(compiled[::2], compiled[1::2], strict=True))


def compiled_together(lowered):
    """Compiled programs; a model's takes half a minute, and does not need all cores."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda program: program.compile(), lowered))


def run(lm, prefill, decode):
    """Logits and taps of the last of six chunks of 512 tokens, and logits of the token after it."""
    tokens = np.random.default_rng(0).integers(0, 4000, (CHUNKS, 1, ROWS)).astype(np.int32)
    cache = lm.new_cache(1, CHUNKS * ROWS + 1)
    for chunk in tokens:
        logits, cache, taps = prefill(lm.leaves, cache, *lm.on_devices((chunk, np.array([ROWS], np.int32))), None)
    wanted = ("index_score", "selected", "candidates")
    kept = {n: np.asarray(v)[0] for n, v in taps.items() if n.endswith(wanted)}
    after, _, _ = decode(lm.leaves, cache, *lm.on_devices((tokens[0, :, :1], np.array([1], np.int32))), None)
    return np.asarray(logits)[0], kept, np.asarray(after)[0]


def test_kernels_and_references_choose_the_same_and_agree_in_logits():
    config = released_widths()
    kernels = random_model(config, BF16)
    references = LanguageModel(kernels.model(), BF16, "reference")
    programs = programs_of(kernels, references)
    for kind, *pair in zip(KERNELS, *programs, strict=True):
        # Where dispatch holds kernels back, both runs would be the references, and their agreement would say nothing.
        assert [kernels_of(program) for program in pair] == [KERNELS[kind], set()], kind
    logits, taps, after = run(kernels, *programs[0])
    expected, reference, expected_after = run(references, *programs[1])
    for kind, found, wanted in (("prefill", logits, expected), ("decode", after, expected_after)):
        distance = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        print(f"logits of {kind}: relative distance {distance:.2e}")
        assert np.isfinite(found).all() and distance <= TOLERANCES["bf16"].hidden, kind
    for layer in (1, 3, 5):
        pairs = zip(taps[f"layer{layer}.selected"], reference[f"layer{layer}.selected"], strict=True)
        overlap = np.mean([len(np.intersect1d(a, b)) / config.index_topk for a, b in pairs])
        print(f"layer {layer}: lists overlap {overlap:.4f}")
        assert overlap >= TOLERANCES["bf16"].lists
    assert (np.diff(taps["layer3.candidates"], axis=1) != 0).any()


def scores_beside(k, again, _):
    """Of scores that are not rounded: a row whose k-th and next score are further apart than twice the row's error must
    have the same k best."""
    ours, theirs = again(None, rounding=None), again("reference", rounding=None)
    seen = ~jnp.isneginf(theirs)
    error = jnp.where(seen, jnp.abs(jnp.where(seen, ours, 0) - jnp.where(seen, theirs, 0)), 0).max(axis=-1)
    (edge, following), best = (lax.top_k(theirs, k + 1)[0][..., at] for at in (k - 1, k)), jnp.where(seen, theirs, 0)
    ranked = ~jnp.isneginf(following)
    sure = ranked & (edge - following > 2 * error)
    equal = (jnp.sort(lax.top_k(ours, k)[1]) == jnp.sort(lax.top_k(theirs, k)[1])).all(axis=-1)
    return {
        "masks": jnp.sum(jnp.isneginf(ours) == seen), "error": error.max() / jnp.maximum(jnp.abs(best).max(), 1e-9),
        "ranked": ranked.sum(), "sure": sure.sum(), "wrong": (sure & ~equal).sum(),
    }  # fmt: skip


def positions_beside(_, again, found):
    return {"wrong": sum(jnp.sum(a != b) for a, b in zip(found, again("reference"), strict=True))}


def attention_beside(_, again, found):
    (ours, lse), (theirs, wanted) = found, again("reference")
    ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
    there = jnp.isfinite(wanted)
    lse = jnp.where(there, lse, 0) - jnp.where(there, wanted, 0)
    return {"error": jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs), "lse": jnp.abs(lse).max()}


def products_beside(_, again, found):
    """Of one weight, or a tuple's of several."""
    ours, theirs = (
        jnp.concatenate([each.astype(jnp.float32).ravel() for each in jax.tree.leaves(products)])
        for products in (found, again("reference"))
    )
    return {"error": jnp.linalg.norm(ours - theirs) / jnp.maximum(jnp.linalg.norm(theirs), 1e-9)}


BESIDE = {
    "grouped_gemm": products_beside, "quantized_matmul": products_beside,
    "paged_indexer_logits": scores_beside, "candidate_logits": scores_beside, "top_k": positions_beside,
    "top_k_and_candidate_blocks": positions_beside, "sparse_attention": attention_beside, "sparse_decode": attention_beside,
}  # fmt: skip


def test_every_operation_gives_in_the_model_what_its_reference_gives_of_the_same(monkeypatch):
    """The test above compares after layers of roundings, which scores and lists follow. Here every call of a kernel is
    followed by its reference on the same operands."""
    config, inner, noted = released_widths(), dispatch._call, []

    def call(package, function, implementation, *args, **kwargs):
        found = inner(package, function, implementation, *args, **kwargs)
        if function in BESIDE and dispatch.named(implementation) is None:

            def again(name, **other):
                schedule = {"schedule": None} if name == "reference" and "schedule" in kwargs else {}
                return inner(package, function, name, *args, **kwargs | other | schedule)

            values = BESIDE[function](config.index_topk, again, found)
            jax.debug.callback(functools.partial(lambda name, **values: noted.append((name, values)), function), **values)
        return found

    monkeypatch.setattr(dispatch, "_call", call)
    lm = random_model(config, BF16)
    run(lm, *programs_of(lm)[0])
    jax.effects_barrier()
    worst = {}
    for name, values in noted:
        for kind, value in values.items():
            take = max if kind in ("error", "lse") else np.add
            worst[name, kind] = take(worst.get((name, kind), 0), float(value))
    for (name, kind), value in worst.items():
        print(f"{name}: {kind} {value:.3g}")
    assert {name for name, _ in noted} == set(BESIDE)
    for name in ("paged_indexer_logits", "candidate_logits"):
        assert worst[name, "error"] <= tolerances.of("kernels_indexer.logits") and worst[name, "masks"] == 0
        assert worst[name, "sure"] > 0.5 * worst[name, "ranked"] > 0 and worst[name, "wrong"] == 0
    assert worst["top_k", "wrong"] == worst["top_k_and_candidate_blocks", "wrong"] == 0
    for name in ("grouped_gemm", "quantized_matmul"):
        assert worst[name, "error"] <= tolerances.of("kernels.products_in_bf16")
    for name in ("sparse_attention", "sparse_decode"):
        assert worst[name, "error"] <= tolerances.of("kernels.sparse_attention")
        assert worst[name, "lse"] <= tolerances.of("kernels.lse")
