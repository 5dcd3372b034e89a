"""Checkpoint names as data: from a tensor's name in a file to the path of the parameter that it fills."""

import dataclasses
import re
from collections.abc import Sequence

# (pattern, replacement), applied in order: what re-exports of V4.1, and the official files of V3.2, write differently
# from the names of DeepSeek's own inference code, which are those of our parameters.
RENAMES = (
    (r"^model\.", ""),
    (r"\.self_attn\.", ".attn."),
    (r"^(?!vision\.)(.*)\.mlp\.", r"\1.ffn."),
    (r"\.weight_scale_inv$", ".scale"),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_a_layernorm\.", ".q_norm."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.kv_a_proj_with_mqa\.", ".wkv_a."),
    (r"\.kv_a_layernorm\.", ".kv_norm."),
    (r"\.kv_b_proj\.", ".wkv_b."),
    (r"\.o_proj\.", ".wo."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.down_proj\.", ".w2."),
    (r"\.up_proj\.", ".w3."),
)

# (pattern of the renamed name, why its tensors are left out).
LEFT_OUT = (
    (r"^vision\.", "the vision tower: image embeddings are given by the caller"),
    (r"^aligner\.", "the aligner of the vision tower: image embeddings are given by the caller"),
    (r"^mtp\.\d+\.embed\.weight$", "copies of the embedding in draft stages: they share the model's own"),
    (r"^mtp\.\d+\.head\.weight$", "copies of the head in draft stages: they share the model's own"),
)

# Routed experts: one tensor each in the files, stacked along a new first axis in memory.
STACKED = r"^(.*\.ffn\.experts)\.(\d+)\.(w[123]\.(?:weight|scale))$"

_RENAMES = tuple((re.compile(pattern), replacement) for pattern, replacement in RENAMES)
_LEFT_OUT = tuple((re.compile(pattern), reason) for pattern, reason in LEFT_OUT)
_STACKED = re.compile(STACKED)
# One search settles most of a checkpoint's hundred thousand names.
_ANY_RENAME = re.compile("|".join(pattern.pattern for pattern, _ in _RENAMES))
_ANY_LEFT_OUT = re.compile("|".join(pattern.pattern for pattern, _ in _LEFT_OUT))


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor goes: the parameter's path, and its place on the stacked axis or None."""

    path: str
    expert: int | None


def official_name(name: str) -> str:
    """The official name of the tensor called `name` in a file."""
    if _ANY_RENAME.search(name) is None:
        return name
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def left_out_reason(name: str, rules: Sequence[tuple[str, str]] = ()) -> str | None:
    """Why the tensor of official name `name` is not loaded; None if it is. rules: (pattern, reason) beside LEFT_OUT."""
    for pattern, reason in rules:
        if re.search(pattern, name):
            return reason
    if _ANY_LEFT_OUT.search(name) is None:
        return None
    return next(reason for pattern, reason in _LEFT_OUT if pattern.search(name))


def target(name: str) -> Target:
    """The parameter that the tensor of official name `name` fills."""
    found = _STACKED.match(name)
    if found is None:
        return Target(name, None)
    return Target(f"{found[1]}.{found[3]}", int(found[2]))
