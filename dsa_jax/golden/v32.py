"""What V3.2's golden files hold beyond the taps of a forward pass."""

from typing import NoReturn

import jax.numpy as jnp
import numpy as np

from dsa_jax.cache.latent import LatentCache
from dsa_jax.decode import LanguageModel
from dsa_jax.golden.cases import Case, Tensors
from dsa_jax.golden.margins import edge_margin


def of_cache(lm: LanguageModel, cache: LatentCache, n: int) -> Tensors:
    """Latents, rotated keys and index keys of the one request after `n` tokens."""
    out: Tensors = {}
    slots = jnp.arange(n, dtype=jnp.int32)  # of one request, whose pages are in order
    for index, layer in enumerate(cache.layers):
        rows = np.asarray(layer.latent.gather(slots, np.float32))
        out[f"layer{index}.kv_cache"] = rows[:, : lm.config.kv_lora_rank]
        out[f"layer{index}.pe_cache"] = rows[:, lm.config.kv_lora_rank :]
        out[f"layer{index}.index_k"] = np.asarray(layer.index_keys.gather(slots, np.float32))
    return out


def of_prefill(lm: LanguageModel, case: Case, cache: LatentCache, out: Tensors) -> Tensors:
    """Nothing else follows a prefill."""
    return {}


def of_end(lm: LanguageModel, cache: LatentCache, n: int) -> Tensors:
    """The files hold no cache after the last step."""
    return {}


def image_span(lm: LanguageModel, case: Case) -> NoReturn:
    """V3.2 reads text alone."""
    raise ValueError("The golden file has an image, and V3.2 takes none. Is it a file of another family?")


def of_layers(lm: LanguageModel, values: Tensors, rows: int, length: int) -> Tensors:
    """Adds the margins that the file derives from scores; cuts score columns to the length."""
    out = dict(values)
    for name in [name for name in values if name.endswith(".index_score")]:
        out[name] = values[name][:, :length]
        out[name.removesuffix("score") + "topk_margin"] = edge_margin(out[name], lm.config.index_topk)
    return out
