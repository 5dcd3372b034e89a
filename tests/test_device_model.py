"""On a GPU with kernels: a model of the released widths gives with kernels what it gives with the references."""

import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_config

from dsa_jax.bench_model import random_model
from dsa_jax.decode import LanguageModel
from dsa_jax.numerics import BF16
from dsa_jax.tolerances import TOLERANCES
from pallas_kernels import platform

pytestmark = pytest.mark.skipif(
    platform.kernel_name() is None, reason="needs an NVIDIA GPU that the kernels know; here only the references run"
)

ROWS, CHUNKS = 512, 6
SHARED = {"indexer_logits", "candidate_logits", "top_k"}
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
        ours, theirs = taps[f"layer{layer}.index_score"], reference[f"layer{layer}.index_score"]
        if layer == 5:  # the consumer ranks inside its candidates only: rows whose candidates agree
            assert (np.diff(taps["layer3.candidates"], axis=1) != 0).any()
            columns = np.arange(theirs.shape[1]) // config.candidate_block_size
            same = (taps["layer3.candidates"] == reference["layer3.candidates"]).all(axis=1)
            listed = np.stack([np.isin(columns, row) for row in reference["layer3.candidates"]])
            ours, theirs = (np.where(listed, s, -np.inf) for s in (ours, theirs))
        else:
            same = np.ones(len(theirs), bool)
        finite = np.isfinite(theirs)
        error = np.where(finite, np.abs(np.where(finite, ours, 0) - np.where(finite, theirs, 0)), 0).max(axis=1)
        ordered = -np.sort(-theirs, axis=1)
        k = config.index_topk
        sure = same & (ordered[:, k - 1] - ordered[:, k] > 2 * error)
        equal = (taps[f"layer{layer}.selected"] == reference[f"layer{layer}.selected"]).all(axis=1)
        overlap = np.mean([len(np.intersect1d(a, b)) / k for a, b in
                           zip(taps[f"layer{layer}.selected"], reference[f"layer{layer}.selected"], strict=True)])  # fmt: skip
        print(f"layer {layer}: score error {error.max():.2e}, {sure.sum()} rows surely ranked, lists overlap {overlap:.4f}")
        assert equal[sure].all()
        assert overlap >= TOLERANCES["bf16"].lists
