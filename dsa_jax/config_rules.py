"""What configs must satisfy: types, options that only one value of is carried, and values that fit together.

What the families share stands first, then V4.1's own rules. Every rule returns sentences; nothing raises before all of
them are collected.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

SCORING_FUNCTIONS = ("sqrtsoftplus", "sigmoid", "softmax")

# (section or None, key, allowed values, must be there). Another value would need arithmetic that a family does not define.
Option = tuple[str | None, str, tuple, bool]
_OPTIONS: tuple[Option, ...] = (
    ("text_config", "model_type", ("deepseek_v41_text",), False),
    ("text_config", "hidden_act", ("silu",), True),
    ("text_config", "scoring_func", SCORING_FUNCTIONS, True),
    ("text_config", "topk_method", ("noaux_tc",), False),
    ("text_config", "attention_bias", (False,), False),
    ("text_config", "tie_word_embeddings", (False,), False),
    ("text_config", "num_key_value_heads", (1,), False),
    ("text_config", "n_shared_experts", (1,), True),
    ("quantization_config", "quant_method", ("fp8",), True),
    ("quantization_config", "fmt", ("e4m3",), False),
    ("quantization_config", "activation_scheme", ("dynamic",), False),
    ("quantization_config", "scale_fmt", ("ue8m0",), True),
    ("quantization_config", "expert_dtype", ("fp4",), True),
)
# Values that a model with shared rows of keys and values needs above 0.
POSITIVE = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_lora_rank "
    "o_groups rms_norm_eps max_position_embeddings rope_theta compress_rope_theta n_routed_experts num_experts_per_tok "
    "moe_intermediate_size routed_scaling_factor sliding_window index_n_heads index_head_dim index_topk hc_mult "
    "hc_sinkhorn_iters hc_eps"
)
_YARN_POSITIVE = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
_ATTENTION_FACTORS = ("mscale", "mscale_all_dim", "attention_factor")


def refuse(where: str, problems: Sequence[str]) -> None:
    """Raises one ValueError with all `problems`, if there are any."""
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ValueError(f"{where} has {count}; nothing was loaded:{listed}")


class Reader:
    """Reads typed values out of parsed JSON and remembers what was missing or of another type."""

    def __init__(self):
        self.missing: list[str] = []
        self.problems: list[str] = []

    def read(self, section: Mapping[str, Any], key: str, kind: Any, prefix: str = "") -> Any:
        """section[key] as `kind` (int, float, bool, str, tuple[int, ...]); None where it cannot be had."""
        if key not in section:
            self.missing.append(prefix + key)
            return None
        value = section[key]
        if kind is int and type(value) is int:
            return value
        if kind is float and type(value) in (int, float) and math.isfinite(value):
            return float(value)
        if kind in (bool, str) and type(value) is kind:
            return value
        if kind == tuple[int, ...] and isinstance(value, list | tuple) and all(type(v) is int for v in value):
            return tuple(value)
        wanted = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}
        self.problems.append(f"{prefix}{key} is {value!r}; it must be {wanted.get(kind, 'a list of integers')}")
        return None

    def read_object(self, section: Mapping[str, Any], key: str, kind: type, prefix: str = "") -> Any:
        """section[key], an object, as {name: value} for the fields of the dataclass `kind`."""
        names = [field.name for field in dataclasses.fields(kind)]
        if key not in section:
            self.missing.append(prefix + key)
            return None
        if not isinstance(section[key], Mapping):
            self.problems.append(f"{prefix}{key} is {section[key]!r}; it must be an object with {', '.join(names)}")
            return None
        return self.read_fields(kind, section[key], (), f"{prefix}{key}.")

    def read_fields(
        self, kind: type, section: Mapping[str, Any], without: Collection[str], prefix: str = ""
    ) -> dict[str, Any]:
        """The fields of the dataclass `kind` but `without`, read under their own names."""
        return {
            field.name: self.read(section, field.name, field.type, prefix)
            for field in dataclasses.fields(kind)
            if field.name not in without
        }

    def build(
        self,
        kind: type,
        values: dict[str, Any],
        where: str,
        unsupported: Sequence[str],
        rules: Callable[[Any], Sequence[str]],
    ) -> Any:
        """The config `kind` of what was read, or one ValueError: all that is missing, of another type or `unsupported`,
        and what `rules` say about values where all of them are there."""
        problems = self.all_problems() + list(unsupported)
        if not self.all_problems():
            yarn = next(field.type for field in dataclasses.fields(kind) if field.name == "rope_scaling")
            values = values | {"rope_scaling": yarn(**values["rope_scaling"])}
            problems += rules(types.SimpleNamespace(**values))
        refuse(where, list(dict.fromkeys(problems)))
        return kind(**values)

    def all_problems(self) -> list[str]:
        missing = [f"missing, and there is no safe default: {', '.join(self.missing)}"] if self.missing else []
        return missing + self.problems


def sections(raw: Mapping[str, Any], names: Sequence[str], where: str) -> list[Mapping[str, Any]]:
    """The objects of `raw` under these names. ValueError where one is missing or no object."""
    found = [(name, raw.get(name)) for name in names]
    refuse(
        where,
        [
            f"{name} is {'missing' if value is None else 'not an object'}"
            for name, value in found
            if not isinstance(value, Mapping)
        ],
    )
    return [value for _, value in found]


def unsupported(name: str, value: Any, allowed: Sequence[Any]) -> str:
    """The sentence for an option whose value is not carried."""
    return f"{name} = {value!r} is not supported; allowed: {', '.join(map(repr, allowed))}"


def option_problems(raw: Mapping[str, Any], options: Sequence[Option], read: Collection[str] = ()) -> list[str]:
    """Options of the parsed config.json `raw` that have another value, or are needed and missing.

    Keys in `read` are reported as missing by whoever reads them.
    """
    problems = []
    for section_name, key, allowed, needed in options:
        section = raw if section_name is None else raw[section_name]
        name = key if section_name is None else f"{section_name}.{key}"
        if key not in section:
            if needed and key not in read:
                problems.append(f"missing, and there is no safe default: {name}; allowed: {', '.join(map(repr, allowed))}")
        elif section[key] not in allowed or type(section[key]) is not type(allowed[0]):
            problems.append(unsupported(name, section[key], allowed))
    return problems


def yarn_problems(section: Mapping[str, Any], prefix: str = "", refused: str | None = None) -> list[str]:
    """What is wrong with the kind of `rope_scaling` of `section`. refused: why it may have no attention factor."""
    rope = section.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return []
    problems = []
    key = "type" if "type" in rope else "rope_type"
    if rope.get(key) != "yarn":
        problems.append(unsupported(f"{prefix}rope_scaling.{key}", rope.get(key), ("yarn",)))
    if refused is not None:
        problems += [
            f"{prefix}rope_scaling.{name} is set, but {refused}"
            for name in _ATTENTION_FACTORS
            if rope.get(name) is not None
        ]
    return problems


def unsupported_options(raw: Mapping[str, Any]) -> list[str]:
    """Options of V4.1's parsed config.json `raw` whose value the model does not carry."""
    problems = option_problems(raw, _OPTIONS, ("scoring_func", "n_shared_experts"))
    if raw.get("tie_word_embeddings"):
        problems.append("tie_word_embeddings = true is not supported; V4.1 has a head of its own")
    return problems + yarn_problems(
        raw["text_config"], "text_config.", "V4.1 scales attention by head_dim^-0.5 alone"
    )


def must_be_positive(c: Any, names: str) -> list[str]:
    """Sentences for those of `names` (separated by spaces), and of YaRN's values, that are not above 0."""
    given = [(name, getattr(c, name)) for name in names.split()]
    given += [(f"rope_scaling.{name}", getattr(c.rope_scaling, name)) for name in _YARN_POSITIVE]
    return [f"{name} = {value} must be positive" for name, value in given if value <= 0]


def model_problems(c: Any) -> list[str]:
    """Rules that hold in every family."""
    problems, yarn = [], c.rope_scaling
    if yarn.beta_fast < yarn.beta_slow:
        problems.append(f"rope_scaling.beta_fast = {yarn.beta_fast} must not be below beta_slow = {yarn.beta_slow}")
    if c.n_shared_experts != 1:
        problems.append(unsupported("n_shared_experts", c.n_shared_experts, (1,)))
    if not c.norm_topk_prob:
        problems.append("norm_topk_prob = false is not supported; the weights of the chosen experts are normalised")
    for name in ("bos_token_id", "eos_token_id", "image_token_id", "pad_token_id"):
        token = getattr(c, name, None)
        if token is not None and not 0 <= token < c.vocab_size:
            problems.append(f"{name} = {token} is outside the vocabulary of {c.vocab_size}")
    return problems


def shared_kv_problems(c: Any) -> list[str]:
    """Rules that hold where all heads share one row a token."""
    problems = []
    for name in ("head_dim", "index_head_dim"):
        if c.qk_rope_head_dim > getattr(c, name):
            problems.append(f"qk_rope_head_dim = {c.qk_rope_head_dim} is wider than {name} = {getattr(c, name)}")
    if c.qk_rope_head_dim % 2:
        problems.append(f"qk_rope_head_dim = {c.qk_rope_head_dim} must be even: values rotate in pairs")
    if c.num_attention_heads % c.o_groups:
        problems.append(f"o_groups = {c.o_groups} must divide num_attention_heads = {c.num_attention_heads}")
    if c.scoring_func not in SCORING_FUNCTIONS:
        problems.append(unsupported("scoring_func", c.scoring_func, SCORING_FUNCTIONS))
    if c.num_experts_per_tok > c.n_routed_experts:
        problems.append(
            f"num_experts_per_tok = {c.num_experts_per_tok} is above n_routed_experts = {c.n_routed_experts}"
        )
    if c.swiglu_limit < 0:
        problems.append(f"swiglu_limit = {c.swiglu_limit} must not be negative (0: no clamp)")
    return problems


def ratio_problems(c: Any, stages: int, what: str) -> list[str]:
    """Rules of compress_ratios: an entry for each layer, then 0 for each of the `stages` called `what`."""
    ratios, layers = c.compress_ratios, c.num_hidden_layers
    problems = []
    if len(ratios) != layers + stages:
        problems.append(
            f"compress_ratios has {len(ratios)} entries; {layers} layers and {stages} {what} need {layers + stages}"
        )
    if any(ratio < 0 for ratio in ratios):
        problems.append(f"compress_ratios = {list(ratios)} has a negative entry; 0 means window only")
    if any(ratios[layers:]):
        problems.append(f"compress_ratios ends in {list(ratios[layers:])}; the {what} see the window alone: ratio 0")
    return problems


def dspark_problems(
    c: Any, block_size: int, noise_token_id: int, target_layer_ids: Sequence[int], markov_rank: int
) -> list[str]:
    """Rules of DSpark's values, which all stand under their names with dspark_ in front."""
    problems = _ids("dspark_target_layer_ids", target_layer_ids, c.num_hidden_layers)
    if not target_layer_ids:
        problems.append("dspark_target_layer_ids is empty: the draft stages have nothing to read")
    for name, value in (("dspark_block_size", block_size), ("dspark_markov_rank", markov_rank)):
        if value <= 0:
            problems.append(f"{name} = {value} must be positive")
    if not 0 <= noise_token_id < c.vocab_size:
        problems.append(f"dspark_noise_token_id = {noise_token_id} is outside the vocabulary of {c.vocab_size}")
    return problems


def problems_of_values(c: Any) -> list[str]:
    """Sentences about values of the V4.1 config `c` that are out of range or do not fit together."""
    return [*_sizes(c), *_layers(c), *_candidates(c), *_engram(c), *_draft(c)]


def _sizes(c: Any) -> list[str]:
    problems = must_be_positive(c, POSITIVE + " candidate_topk_blocks candidate_block_size")
    if problems:
        return problems
    # Groups of 32 (FP8 and MXFP4) are cut from each of these widths.
    for name in ("hidden_size", "head_dim", "q_lora_rank", "moe_intermediate_size", "index_head_dim"):
        if getattr(c, name) % 32:
            problems.append(f"{name} = {getattr(c, name)} must be a multiple of 32, the quantisation group")
    if c.o_groups * c.o_lora_rank % 32:
        problems.append(f"o_groups * o_lora_rank = {c.o_groups * c.o_lora_rank} must be a multiple of 32")
    if len(c.weight_block_size) != 2 or any(size <= 0 or size % 32 for size in c.weight_block_size):
        problems.append(f"weight_block_size = {list(c.weight_block_size)} must be two positive multiples of 32")
    return problems + model_problems(c) + shared_kv_problems(c)


def _ids(name: str, ids: Sequence[int], layers: int) -> list[str]:
    if list(ids) != sorted(set(ids)):
        return [f"{name} = {list(ids)} must ascend without repeats"]
    if any(not 0 <= i < layers for i in ids):
        return [f"{name} = {list(ids)} names a layer outside 0..{layers - 1}"]
    return []


def source_of(ids: Sequence[int], layer: int) -> int | None:
    """The largest of `ids` that is not above `layer`; None if there is none."""
    return max((i for i in ids if i <= layer), default=None)


def _layers(c: Any) -> list[str]:
    ratios, layers, stages = c.compress_ratios, c.num_hidden_layers, c.num_nextn_predict_layers
    if stages < 0:
        return [f"num_nextn_predict_layers = {stages} must not be negative"]
    problems = ratio_problems(c, stages, "draft stages")
    problems += _ids("kv_source_layer_ids", c.kv_source_layer_ids, layers)
    problems += _ids("index_source_layer_ids", c.index_source_layer_ids, layers)
    if problems:
        return problems
    for layer in sorted({*c.kv_source_layer_ids, *c.index_source_layer_ids}):
        if ratios[layer] == 0:
            problems.append(f"layer {layer} is a source, but its compress ratio is 0: it has nothing to compress")
    for layer in c.kv_source_layer_ids:
        if layer not in c.index_source_layer_ids:
            problems.append(
                f"layer {layer} is in kv_source_layer_ids but not in index_source_layer_ids: "
                "its readers would select by the keys of another layer"
            )
    for layer in range(layers):
        if ratios[layer] == 0:
            continue
        kv_source = source_of(c.kv_source_layer_ids, layer)
        index_source = source_of(c.index_source_layer_ids, layer)
        if kv_source is None:
            problems.append(
                f"layer {layer} (ratio {ratios[layer]}) has no KV source: kv_source_layer_ids has no layer <= {layer}"
            )
        elif ratios[kv_source] != ratios[layer]:
            problems.append(
                f"layer {layer} has ratio {ratios[layer]}, but its KV source, layer {kv_source}, "
                f"has ratio {ratios[kv_source]}"
            )
        if index_source is None:
            problems.append(
                f"layer {layer} (ratio {ratios[layer]}) has no index source: "
                f"index_source_layer_ids has no layer <= {layer}"
            )
    return problems


def _candidates(c: Any) -> list[str]:
    source = c.candidate_source_layer_id
    if source < -1 or source >= c.num_hidden_layers:
        return [f"candidate_source_layer_id = {source} is neither -1 (none) nor a layer 0..{c.num_hidden_layers - 1}"]
    if source == -1:
        return []
    if source not in c.index_source_layer_ids:
        return [f"candidate_source_layer_id = {source} is not in index_source_layer_ids: it has no scores to choose by"]
    problems = []
    kv_source = source_of(c.kv_source_layer_ids, source)
    for layer in c.index_source_layer_ids:
        if layer > source and source_of(c.kv_source_layer_ids, layer) != kv_source:
            problems.append(
                f"layer {layer} would choose inside the candidates of layer {source}, but reads the KV of layer "
                f"{source_of(c.kv_source_layer_ids, layer)}, not of layer {kv_source}"
            )
    kept = (c.candidate_topk_blocks - 1) * c.candidate_block_size + 1
    if kept < c.index_topk:
        problems.append(
            f"candidate_topk_blocks = {c.candidate_topk_blocks} blocks of {c.candidate_block_size} may hold as few as "
            f"{kept} visible rows, fewer than index_topk = {c.index_topk}"
        )
    return problems


def _engram(c: Any) -> list[str]:
    problems = _ids("engram_layer_ids", c.engram_layer_ids, c.num_hidden_layers)
    if len(c.engram_num_embeddings) != len(c.engram_layer_ids):
        problems.append(
            f"engram_num_embeddings has {len(c.engram_num_embeddings)} entries for "
            f"{len(c.engram_layer_ids)} engram_layer_ids"
        )
    if not c.engram_layer_ids:
        return problems
    for name in ("engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size"):
        if getattr(c, name) <= 0:
            problems.append(f"{name} = {getattr(c, name)} must be positive")
    if c.engram_max_ngram_size < 2:
        problems.append(f"engram_max_ngram_size = {c.engram_max_ngram_size} must be at least 2")
    if c.engram_head_dim % 32:
        problems.append(
            f"engram_head_dim = {c.engram_head_dim} must be a multiple of 32, the scale group of a table row"
        )
    if not 0 <= c.engram_pad_token_id < c.vocab_size:
        problems.append(f"engram_pad_token_id = {c.engram_pad_token_id} is outside the vocabulary of {c.vocab_size}")
    if any(not 0 < rows < 2**31 for rows in c.engram_num_embeddings):
        problems.append(f"engram_num_embeddings = {list(c.engram_num_embeddings)} must lie between 1 and 2^31 - 1")
    return problems


def _draft(c: Any) -> list[str]:
    if c.num_nextn_predict_layers <= 0:
        return []
    problems = dspark_problems(
        c, c.dspark_block_size, c.dspark_noise_token_id, c.dspark_target_layer_ids, c.dspark_markov_rank
    )
    for name in ("dspark_n_routed_experts", "dspark_num_experts_per_tok"):
        if getattr(c, name) <= 0:
            problems.append(f"{name} = {getattr(c, name)} must be positive")
    if c.dspark_num_experts_per_tok > c.dspark_n_routed_experts:
        problems.append(
            f"dspark_num_experts_per_tok = {c.dspark_num_experts_per_tok} is above "
            f"dspark_n_routed_experts = {c.dspark_n_routed_experts}"
        )
    return problems
