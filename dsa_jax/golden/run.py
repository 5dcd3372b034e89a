"""Runs the token ids of a golden file through a model and names the results as the file does."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from dsa_jax.config import V41Config
from dsa_jax.config_v4 import V4Config
from dsa_jax.config_v32 import V32Config
from dsa_jax.decode import LanguageModel
from dsa_jax.golden import v4, v32, v41
from dsa_jax.golden.cases import Case, Tensors
from dsa_jax.golden.margins import NEG_INF

# What a family's files hold beyond the taps: a module with `of_layers` (derived from taps), `of_cache` (read from the
# cache after the prefill), `of_prefill` (everything else that follows a prefill), `of_end` (read from the cache after
# the last step) and `image_span` (where its prompts may hold an image).
RESULTS = {V41Config: v41, V4Config: v4, V32Config: v32}


def run_case(lm: LanguageModel, case: Case) -> Iterator[tuple[str, Tensors]]:
    """Yields the progress made ("prefill", "step 1", ..), and at the end every result under the file's names."""
    results = RESULTS[type(lm.config)]
    n, steps = len(case.prompt), len(case.fed) - 1
    cache = lm.new_cache(1, n + steps)
    rows = max(16, 1 << (n - 1).bit_length()) if n <= 64 else n
    out, cache = _prefill(lm, results, case, cache, rows)
    out |= results.of_prefill(lm, case, cache, out)
    yield "prefill", {}
    with_draft = any(name.startswith("dspark.") for name in case.tensors)
    taken: list[Tensors] = []
    drafts = []
    for t in range(steps):
        logits, cache, taps = lm.forward(cache, case.fed[None, t : t + 1].astype(np.int32), np.ones(1, np.int32))
        values = results.of_layers(lm, _rows_of(taps, 1), 1, n + t + 1)
        taken.append(values | {"logits": np.asarray(logits)[0]})
        if with_draft:
            drafts.append(lm.draft(cache, case.fed[t + 1 : t + 2]))
        yield f"step {t + 1} of {steps}", {}
    out |= _stacked(taken) | results.of_end(lm, cache, n + steps)
    if drafts:
        out |= {
            "dspark.output_ids": np.concatenate([np.asarray(d.ids) for d in drafts]),
            "dspark.logits": np.concatenate([np.asarray(d.logits) for d in drafts]),
            "dspark.confidence": np.concatenate([np.asarray(d.confidence) for d in drafts]),
        }
    best = np.concatenate([out["prefill.logits"][-1:], out["decode.logits"]])
    ordered = np.sort(best, axis=-1)
    out["decode.token_ids"] = best.argmax(-1)
    out["decode.greedy_margin"] = ordered[:, -1] - ordered[:, -2]
    yield "done", out


def _prefill(lm: LanguageModel, results, case: Case, cache: Any, rows: int) -> tuple[Tensors, Any]:
    n = len(case.prompt)
    tokens = np.zeros((1, rows), np.int32)
    tokens[0, :n] = case.prompt
    image = None
    if "token_types" in case.tensors:
        image = lm.image_rows([[results.image_span(lm, case)]], [0], rows)
    logits, cache, taps = lm.forward(cache, tokens, np.array([n], np.int32), image)
    values = results.of_layers(lm, _rows_of(taps, n), n, n) | results.of_cache(lm, cache, n)
    for name in [name for name in values if name.endswith(".latent")]:
        values[name.removesuffix("latent") + "compressor_latent"] = values.pop(name)
    return {"prefill.logits": np.asarray(logits)[0, :n]} | {f"prefill.{k}": v for k, v in values.items()}, cache


def _rows_of(taps: dict, n: int) -> Tensors:
    """Taps of request 0, its first n rows, as NumPy; latents are cut to the groups that ended."""
    values = {}
    for name, value in taps.items():
        if name.endswith(".groups"):
            continue
        array = np.asarray(value)
        array = array[0].astype(np.float32) if array.dtype.kind not in "iub" else array[0]
        if name.endswith(".latent"):
            groups = np.asarray(taps[name.removesuffix("latent") + "groups"])[0]
            values[name] = array[groups >= 0]
        else:
            values[name] = array[:n]
    return values


def _stacked(taken: list[Tensors]) -> Tensors:
    """The steps' tensors one behind the other, rows of growing width padded as the files pad them."""
    out: Tensors = {}
    for name in sorted(set().union(*taken)):
        rows = [step[name] for step in taken if name in step]
        width = max(r.shape[-1] for r in rows)
        if name.endswith(".latent"):
            out[f"decode.{name}_steps"] = np.flatnonzero([len(r) for r in rows])
        elif name.endswith((".index_score", ".candidates", ".candidate_block_scores")):
            pad = 0 if name.endswith(".candidates") else NEG_INF
            rows = [np.pad(r, ((0, 0), (0, width - r.shape[1])), constant_values=pad) for r in rows]
        out[f"decode.{name}"] = np.concatenate(rows)
    return out
