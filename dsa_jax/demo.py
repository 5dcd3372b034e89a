"""Small random checkpoints in the official formats, for trying everything without a download.

All tensor kinds, the real names and dtypes, every layer role. The weights are random, scaled so that activations stay
near 1; what the model writes means nothing.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dsa_jax import demo_v4, demo_v32
from dsa_jax.config import V41Config
from dsa_jax.config_v4 import V4Config
from dsa_jax.config_v32 import V32Config
from dsa_jax.demo_tokenizer import IMAGE, NOISE, SPECIAL_TOKENS, VOCABULARY, demo_tokenizer
from dsa_jax.inventory import inventory_of
from dsa_jax.layers.engram_hash import compressed_token_map, engram_primes
from dsa_jax.weights.checkpoint import INDEX
from dsa_jax.weights.header import DTYPES
from dsa_jax.weights import official_v32
from dsa_jax.weights.official import TensorSpec
from dsa_jax.weights.writer import write_checkpoint

SHARDS = 3
_MARK = {"made_by": "dsa-jax demo"}

_TEXT = {
    "model_type": "deepseek_v41_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 96,
    "o_lora_rank": 32,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "max_position_embeddings": 65536,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
    "compress_rope_theta": 160000,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 32,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 7, 9],
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 16,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 6,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 64,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": SPECIAL_TOKENS.index("<｜▁pad▁｜>"),
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 3,
    "dspark_noise_token_id": SPECIAL_TOKENS.index(NOISE),
    "dspark_target_layer_ids": [7, 8, 9],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}
_VISION = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "patch_size": 2,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 36,
    "max_wh_ratio": None,
}
_OUTER = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": SPECIAL_TOKENS.index(IMAGE),
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
}


@dataclass(frozen=True)
class Recipe:
    """One family's demo. raw_config(compressed): its config.json, where the tokenizer's Engram map has so many ids.
    file_name: official tensor name -> the name in the files."""

    config: type
    raw_config: Callable[[int], dict]
    file_name: Callable[[str], str]


def write_demo_checkpoint(directory: str | Path, *, family: str = "v41", seed: int = 0) -> Any:
    """Writes a checkpoint of `family` (a name in RECIPES) into `directory` (made if absent) and returns its config.

    The same seed, the same bytes. About 5 MB: three shards, index, config.json, tokenizer.json, tokenizer_config.json.
    Raises ValueError for an unknown family, and where the folder holds something else than a demo checkpoint: nothing of
    others is overwritten.
    """
    if family not in RECIPES:
        raise ValueError(f"There is no demo of the family {family!r}. Allowed: {', '.join(RECIPES)}.")
    recipe = RECIPES[family]
    directory = Path(directory)
    _check_folder(directory)
    tokenizer = demo_tokenizer()
    raw = recipe.raw_config(int(compressed_token_map(tokenizer).max()) + 1)
    config = recipe.config.from_dict(raw, "the demo's config")
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", raw)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[1],
            "pad_token": SPECIAL_TOKENS[2],
            "model_max_length": config.max_position_embeddings,
        },
    )
    tensors = {recipe.file_name(name): array for name, array in _tensors(config, seed).items()}
    write_checkpoint(directory, tensors, SHARDS, _MARK)
    return config


def _check_folder(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file. Give a folder for the demo checkpoint.")
    if not directory.exists() or not any(directory.iterdir()):
        return
    try:
        metadata = json.loads((directory / INDEX).read_text(encoding="utf-8"))["metadata"]
        ours = metadata.items() >= _MARK.items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        ours = False
    if not ours:
        raise ValueError(f"{directory} is not empty and holds no demo checkpoint. Give an empty or a new folder.")


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _v41_raw_config(compressed: int) -> dict:
    text = {**_TEXT, "engram_compressed_vocab_size": compressed, "engram_num_embeddings": [1, 1]}
    raw = {**_OUTER, "text_config": text, "vision_config": _VISION}
    primes = engram_primes(V41Config.from_dict(raw, "the demo's config"))
    text["engram_num_embeddings"] = [sum(map(sum, layer)) for layer in primes]
    return raw


RECIPES = {
    "v41": Recipe(V41Config, _v41_raw_config, lambda name: name),
    "v4": Recipe(V4Config, lambda compressed: demo_v4.RAW_CONFIG, lambda name: name),
    "v32": Recipe(V32Config, lambda compressed: demo_v32.RAW_CONFIG, official_v32.file_name),
}


def _tensors(config: Any, seed: int) -> dict[str, np.ndarray]:
    """Every official tensor with random values, in official order."""
    rng = np.random.default_rng(seed)
    specs = inventory_of(config).tensors(config)
    arrays: dict[str, np.ndarray] = {}
    for name, spec in specs.items():
        if name in arrays:  # a scale, written with its weight
            continue
        scale = specs.get(name.removesuffix(".weight") + ".scale") if name.endswith(".weight") else None
        if scale is None:
            arrays[name] = _plain(name, spec, config, rng).astype(DTYPES[spec.dtype])
        else:
            weight, scales = _quantised(name, spec, config, rng)
            # E8M0 powers of two, exact in float32 too.
            arrays[name], arrays[name.removesuffix(".weight") + ".scale"] = weight, scales.astype(DTYPES[scale.dtype])
    return {name: arrays[name] for name in specs}


# Values by the end of the name, first match; `r` draws a standard normal of the tensor's shape. A matrix that is not
# listed keeps the size of what it multiplies: it is divided by the square root of its input width.
_VALUES: tuple[tuple[str, Callable[[np.ndarray, Any], np.ndarray]], ...] = (
    ("norm.weight", lambda r, c: 1 + 0.1 * r),
    ("norm1.weight", lambda r, c: 1 + 0.1 * r),
    ("norm2.weight", lambda r, c: 1 + 0.1 * r),
    (".q_weight", lambda r, c: 1 + 0.1 * r),
    (".k_weight", lambda r, c: 1 + 0.1 * r),
    ("embed.weight", lambda r, c: r),
    ("image_start", lambda r, c: r),
    ("image_newline", lambda r, c: r),
    ("image_end", lambda r, c: r),
    ("attn_sink", lambda r, c: r),
    (".bias", lambda r, c: 0.1 * r),
    (".bias_vl", lambda r, c: 0.1 * r),
    (".tid2eid", lambda r, c: _expert_table(r, c.n_routed_experts)),
    (".ape", lambda r, c: r),
    ("hc_head_base", lambda r, c: _mix_base(c.hc_mult)[: c.hc_mult] + 0.1 * r),
    ("_scale", lambda r, c: 0.5 + 0.05 * r),
    ("_base", lambda r, c: _mix_base(c.hc_mult) + 0.1 * r),
    # Twice as wide as the rest, so that the next token is not close to uniform.
    ("head.weight", lambda r, c: 2 * r / np.sqrt(r.shape[-1])),
)


def _mix_base(copies: int) -> np.ndarray:
    """Biases of a hyper-connection: copies collapse to about their mean and mostly stay where they are."""
    collapse = np.full(copies, -np.log(copies - 1.0))  # sigmoid gives 1 / copies
    return np.concatenate([collapse, np.zeros(copies), 2 * np.eye(copies).ravel()])


def _expert_table(drawn: np.ndarray, experts: int) -> np.ndarray:
    """Distinct expert ids for each token: neighbours of a random one."""
    first = (np.abs(drawn[:, :1]) * 1e4).astype(np.int64)
    return (first + np.arange(drawn.shape[1])) % experts


def _plain(name: str, spec: TensorSpec, config: Any, rng: np.random.Generator) -> np.ndarray:
    drawn = rng.standard_normal(spec.shape, np.float32)
    for end, values in _VALUES:
        if name.endswith(end):
            return values(drawn, config)
    return drawn / np.sqrt(spec.shape[-1])


def _quantised(
    name: str, spec: TensorSpec, config: Any, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A random weight as stored, and its E8M0 scales: FP4 and table rows by 32 columns, FP8 linears by tile."""
    if spec.dtype == "I8":
        values = _plain(name, TensorSpec("F32", (spec.shape[0], 2 * spec.shape[1])), config, rng)
        scaled, scales = _scaled(values, (1, 32), 6.0)
        codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        return (codes[:, 0::2] | codes[:, 1::2] << 4).view(np.int8), scales
    block = (1, 32) if ".engram.embed." in name else config.weight_block_size
    scaled, scales = _scaled(_plain(name, spec, config, rng), block, 448.0)
    return scaled.astype(ml_dtypes.float8_e4m3fn), scales


def _scaled(values: np.ndarray, block: tuple[int, ...], largest: float) -> tuple[np.ndarray, np.ndarray]:
    """values / scale, none above `largest`, and the power-of-two scales of the blocks as E8M0."""
    rows, columns = (-(-size // step) for size, step in zip(values.shape, block, strict=True))
    padded = np.zeros((rows * block[0], columns * block[1]), np.float32)
    padded[: values.shape[0], : values.shape[1]] = np.abs(values)
    amax = padded.reshape(rows, block[0], columns, block[1]).max((1, 3))
    fraction, exponent = np.frexp(amax / np.float32(largest))
    exponent = exponent - (fraction == 0.5)  # the power of two at or above
    spread = np.repeat(np.repeat(exponent, block[0], 0), block[1], 1)[: values.shape[0], : values.shape[1]]
    return np.ldexp(values, -spread), (exponent + 127).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
