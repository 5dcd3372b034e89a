"""Runs the token ids of a golden file through a model and names the results as the file does.

A golden file holds what DeepSeek's own code computed: prompt, positions kept, tensors of the prefill, then of decode
steps whose input tokens are given (teacher forcing), then the draft head after every step.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dsa_jax.cache import Cache
from dsa_jax.decode import ImageSpan, LanguageModel
from dsa_jax.weights.header import scan_file

MODE_OF_SUFFIX = {"f32": "f32", "f32q": "f32q", "ref": "bf16"}
NEG_INF = np.float32(-np.inf)

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One prompt of a golden file. `prefix` stands in front of its tensors' names."""

    prefix: str
    tensors: Tensors

    @property
    def prompt(self) -> np.ndarray:
        return self.tensors["input_ids"].reshape(-1)

    @property
    def fed(self) -> np.ndarray:
        """decode.token_ids: id 0 follows the prompt, id t is fed at step t."""
        return self.tensors["decode.token_ids"].reshape(-1)


def mode_of_file(path: Path) -> str:
    """The numerics mode that the file's name says. ValueError if it says none."""
    suffix = path.stem.rpartition("_")[2]
    if suffix not in MODE_OF_SUFFIX:
        raise ValueError(
            f"{path.name} does not end in one of {', '.join('_' + s for s in MODE_OF_SUFFIX)}, so the mode must be given: "
            "--mode f32, f32q or bf16."
        )
    return MODE_OF_SUFFIX[suffix]


def read_cases(path: Path) -> list[Case]:
    """The prompts of an end-to-end golden file.

    ValueError: not a safetensors file, a file of another kind, or one recorded with the released code's stale index keys.
    """
    if path.stem.startswith("released_decode"):
        raise ValueError(
            f"{path.name} records the released decode loop with its known fault: between two finished groups it scores "
            "ratio-2 layers against another layer's index keys. This project scores every layer against its own keys, so "
            "there is nothing to compare. Use golden_*, short_* or image_* files."
        )
    tensors = {info.name: np.asarray(info.view()) for info in scan_file(path).tensors}
    prefixes = sorted({m[1] for m in (re.match(r"(len\d+\.)", n) for n in tensors) if m}, key=lambda p: int(p[3:-1]))
    cases = [Case(p, {n[len(p) :]: v for n, v in tensors.items() if n.startswith(p)}) for p in prefixes or [""]]
    for case in cases:
        missing = [n for n in ("input_ids", "decode.token_ids") if n not in case.tensors]
        if missing:
            raise ValueError(
                f"{path.name} has no {case.prefix}{missing[0]}: it is not an end-to-end golden file (golden_*, short_*, "
                "image_*)."
            )
    return cases


def run_case(lm: LanguageModel, case: Case) -> Iterator[tuple[str, Tensors]]:
    """Yields the progress made ("prefill", "step 1", ..), and at the end every result under the file's names."""
    n, steps = len(case.prompt), len(case.fed) - 1
    cache = lm.new_cache(1, n + steps)
    rows = max(16, 1 << (n - 1).bit_length()) if n <= 64 else n
    out = _run_prefill(lm, case, cache, rows)
    cache = out.pop("cache")
    yield "prefill", {}
    with_draft = any(name.startswith("dspark.") for name in case.tensors)
    taken: list[Tensors] = []
    drafts = []
    for t in range(steps):
        logits, cache, taps = lm.forward(cache, case.fed[None, t : t + 1].astype(np.int32), np.ones(1, np.int32))
        taken.append(_rows_of(taps, 1) | {"logits": np.asarray(logits)[0]})
        if with_draft:
            drafts.append(lm.draft(cache, case.fed[t + 1 : t + 2]))
        yield f"step {t + 1} of {steps}", {}
    out |= _decode_results(lm, case, taken, n)
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


def _run_prefill(lm: LanguageModel, case: Case, cache: Cache, rows: int) -> dict:
    n = len(case.prompt)
    tokens = np.zeros((1, rows), np.int32)
    tokens[0, :n] = case.prompt
    image = None
    if "token_types" in case.tensors:
        spans = [[image_span(lm, case)]]
        image = lm.image_rows(spans, 0, rows)
    logits, cache, taps = lm.forward(cache, tokens, np.array([n], np.int32), image)
    values = _rows_of(taps, n)
    out = {"prefill.logits": np.asarray(logits)[0, :n], "cache": cache}
    out |= {f"prefill.{name}": value for name, value in _layer_results(lm, values, n, n).items()}
    for role in lm.plan:
        ring = np.asarray(cache.windows[role.index].gather(jnp.arange(lm.config.sliding_window, dtype=jnp.int32), np.float32))
        out[f"prefill.layer{role.index}.window_kv_ring"] = ring
        if role.mode == "full":
            source = cache.sources[role.index]
            slots = jnp.arange(n // role.ratio, dtype=jnp.int32)  # of one request, whose pages are in order
            out[f"prefill.layer{role.index}.compress_kv"] = np.asarray(source.compressed.gather(slots, np.float32))
            out[f"prefill.layer{role.index}.index_k"] = np.asarray(source.index_keys.gather(slots, np.float32))
            out[f"prefill.layer{role.index}.compressor_latent"] = out.pop(f"prefill.layer{role.index}.latent")
    return out


def image_span(lm: LanguageModel, case: Case) -> ImageSpan:
    """The embeddings of the file's one image: learned vectors, and the vision tower's rows that the file gives."""
    types = case.tensors["token_types"].reshape(-1)
    encoded = iter(np.asarray(case.tensors["encoded_image"], np.float32))
    learned = {0: "image_start", 2: "image_newline", 3: "image_end"}
    rows = [
        next(encoded) if kind == 1 else np.asarray(lm.parameter(learned[int(kind)])).astype(np.float32)
        for kind in types
        if kind >= 0
    ]
    return ImageSpan(int(np.flatnonzero(types >= 0)[0]), np.stack(rows))


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


def _layer_results(lm: LanguageModel, values: Tensors, rows: int, length: int) -> Tensors:
    """Adds what the file derives from scores: margins, candidate masks and block scores; cuts columns to the length."""
    config, out, mask = lm.config, {}, None
    for name, value in values.items():
        layer, _, kind = name.partition(".")
        if kind == "candidates":
            continue
        if kind != "index_score":
            out[name] = value
            continue
        role = lm.plan[int(layer.removeprefix("layer"))]
        score = value[:, : length // role.ratio]
        out[name] = score
        if role.makes_candidates:
            visible = (np.arange(length - rows, length) + 1) // role.ratio
            blocks = block_scores(score, visible, config.candidate_block_size)
            mask = candidate_mask(values[f"{layer}.candidates"], config.candidate_block_size, score.shape[1])
            out[f"{layer}.candidate_block_scores"] = blocks
            out[f"{layer}.candidate_margin"] = edge_margin(blocks, config.candidate_topk_blocks)
            out[f"{layer}.candidates"] = mask.astype(np.uint8)
        ranked = np.where(mask, score, NEG_INF) if role.uses_candidates else score
        out[f"{layer}.index_topk_margin"] = edge_margin(ranked, config.index_topk)
    return out


def _decode_results(lm: LanguageModel, case: Case, taken: list[Tensors], n: int) -> Tensors:
    results = [_layer_results(lm, values, 1, n + t + 1) for t, values in enumerate(taken)]
    out: Tensors = {}
    for name in sorted(set().union(*results)):
        rows = [r[name] for r in results if name in r]
        width = max(r.shape[-1] for r in rows)
        if name.endswith(".latent"):
            out[f"decode.{name}_steps"] = np.flatnonzero([len(r) for r in rows])
        elif name.endswith((".index_score", ".candidates", ".candidate_block_scores")):
            pad = 0 if name.endswith(".candidates") else NEG_INF
            rows = [np.pad(r, ((0, 0), (0, width - r.shape[1])), constant_values=pad) for r in rows]
        out[f"decode.{name}"] = np.concatenate(rows)
    return out


def block_scores(score: np.ndarray, visible: np.ndarray, size: int) -> np.ndarray:
    """[S, N] -> [S, blocks]: block maxima with the newest block at +inf."""
    blocks = -(-score.shape[1] // size)
    padded = np.full((len(score), blocks * size), NEG_INF)
    padded[:, : score.shape[1]] = score
    maxima = padded.reshape(len(score), blocks, size).max(-1)
    rows = np.flatnonzero(visible > 0)
    maxima[rows, (visible[rows] - 1) // size] = np.inf
    return maxima


def candidate_mask(blocks: np.ndarray, size: int, columns: int) -> np.ndarray:
    """Block lists [S, C] (-1: none) -> which of the columns lie in a listed block, bool [S, N]."""
    mask = np.zeros((len(blocks), -(-columns // size) + 1), bool)
    np.put_along_axis(mask, np.where(blocks < 0, mask.shape[1] - 1, blocks), True, axis=1)
    return np.repeat(mask[:, :-1], size, axis=1)[:, :columns]


def edge_margin(score: np.ndarray, k: int) -> np.ndarray:
    """Gap between the k-th and the next score of each row; inf where nothing finite is cut."""
    if score.shape[1] <= k:
        return np.full(len(score), np.inf, np.float32)
    ordered = -np.sort(-score, axis=-1)
    nothing_cut = ordered[:, k] == NEG_INF
    with np.errstate(invalid="ignore"):
        return np.where(nothing_cut, np.float32(np.inf), ordered[:, k - 1] - ordered[:, k])
