"""What V4.1's golden files hold beyond the taps of a forward pass."""

import jax.numpy as jnp
import numpy as np

from dsa_jax.cache import Cache
from dsa_jax.decode import ImageSpan, LanguageModel
from dsa_jax.golden.cases import Case, Tensors
from dsa_jax.golden.margins import NEG_INF, edge_margin


def of_cache(lm: LanguageModel, cache: Cache, n: int) -> Tensors:
    """Rings, compressed rows and index keys of the one request after `n` tokens."""
    out: Tensors = {}
    for role in lm.plan:
        ring = cache.windows[role.index].gather(jnp.arange(lm.config.sliding_window, dtype=jnp.int32), np.float32)
        out[f"layer{role.index}.window_kv_ring"] = np.asarray(ring)
        if role.mode == "full":
            source = cache.sources[role.index]
            slots = jnp.arange(n // role.ratio, dtype=jnp.int32)  # of one request, whose pages are in order
            out[f"layer{role.index}.compress_kv"] = np.asarray(source.compressed.gather(slots, np.float32))
            out[f"layer{role.index}.index_k"] = np.asarray(source.index_keys.gather(slots, np.float32))
    return out


def of_prefill(lm: LanguageModel, case: Case, cache: Cache, out: Tensors) -> Tensors:
    """Nothing else follows a prefill."""
    return {}


def of_end(lm: LanguageModel, cache: Cache, n: int) -> Tensors:
    """The files hold no cache after the last step."""
    return {}


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


def of_layers(lm: LanguageModel, values: Tensors, rows: int, length: int) -> Tensors:
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
