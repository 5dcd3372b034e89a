"""What V4's golden files hold beyond the taps of a forward pass."""

from typing import NoReturn

import jax.numpy as jnp
import numpy as np

from dsa_jax.cache.state_v4 import V4Cache
from dsa_jax.decode import LanguageModel
from dsa_jax.golden.cases import Case, Tensors
from dsa_jax.golden.margins import edge_margin


def of_cache(lm: LanguageModel, cache: V4Cache, n: int) -> Tensors:
    """Rings, compressed rows and index keys of the one request after `n` tokens."""
    out: Tensors = {}
    for role, layer in zip(lm.plan, cache.layers, strict=True):
        ring = layer.window.gather(jnp.arange(lm.config.sliding_window, dtype=jnp.int32), np.float32)
        out[f"layer{role.index}.window_kv_ring"] = np.asarray(ring)
        for name, owned in (("compress_kv", layer.compressed), ("index_k", layer.index_keys)):
            if owned is not None:
                slots = jnp.arange(n // role.ratio, dtype=jnp.int32)  # of one request, whose pages are in order
                out[f"layer{role.index}.{name}"] = np.asarray(owned.rows.gather(slots, np.float32))
    return out


def of_end(lm: LanguageModel, cache: V4Cache, n: int) -> Tensors:
    """All compressed rows after the last decode step."""
    rows = of_cache(lm, cache, n)
    return {f"decode.{name}_cache_end": value for name, value in rows.items() if name.endswith(".compress_kv")}


def of_prefill(lm: LanguageModel, case: Case, cache: V4Cache, out: Tensors) -> Tensors:
    """The MTP layer over the whole prompt: its row at a token takes the token after, at the last the best one.

    The rows before the last came with the prefill, which gives row i at position i - 1; the last is the draft.
    """
    if "prefill.mtp.logits" not in out:
        return {}
    first = out["prefill.logits"][-1].argmax().astype(np.int32)
    last = np.asarray(lm.draft(cache, first[None]).logits)[0]
    return {
        "mtp.input_ids": np.append(case.prompt[1:], first)[None],
        "mtp.input_h": out[f"prefill.layer{len(lm.plan) - 1}.h"],
        "mtp.logits": np.concatenate([out.pop("prefill.mtp.logits")[1:], last]),
    }


def image_span(lm: LanguageModel, case: Case) -> NoReturn:
    """V4 reads text alone."""
    raise ValueError("The golden file has an image, and V4 takes none. Is it a file of another family?")


def of_layers(lm: LanguageModel, values: Tensors, rows: int, length: int) -> Tensors:
    """Adds the margins that the file derives from scores; cuts columns to the length."""
    out: Tensors = {}
    for name, value in values.items():
        layer, _, kind = name.partition(".")
        if kind == "index_score":
            value = value[:, : length // lm.plan[int(layer.removeprefix("layer"))].ratio]
            out[f"{layer}.index_topk_margin"] = edge_margin(value, lm.config.index_topk)
        out[name] = value
    return out
