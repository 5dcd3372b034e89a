"""What `inspect` asks of a family: its plan as a table, its official tensors, the bytes of its caches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dsa_jax import layer_plan_v4, layer_plan_v32, memory, memory_v4
from dsa_jax.config import V41Config
from dsa_jax.config_v4 import V4Config
from dsa_jax.config_v32 import V32Config
from dsa_jax.layer_plan import LayerRole, draft_plan, layer_plan
from dsa_jax.weights import official, official_v4, official_v32
from dsa_jax.weights.official import TensorSpec


@dataclass(frozen=True)
class Inventory:
    """One family.

    plan, draft(config): the roles of its layers and of what it drafts with. columns: heads of the plan's table, behind the
    layer's own; row(config, role): the cells below them. tensors(config): official name -> how it is stored.
    caches(config, context, batch): ValueError for sizes that the model does not take. left_out(config): (pattern of
    official names, reason) of what is not run, beside what every family leaves out.
    """

    name: str
    model_type: str
    plan: Callable[[Any], Sequence[Any]]
    draft: Callable[[Any], Sequence[Any]]
    columns: tuple[str, ...]
    row: Callable[[Any, Any], tuple[str, ...]]
    tensors: Callable[[Any], dict[str, TensorSpec]]
    caches: Callable[[Any, int, int], memory.CacheBytes]
    left_out: Callable[[Any], tuple[tuple[str, str], ...]]


def _v41_row(config: V41Config, role: LayerRole) -> tuple[str, ...]:
    def layer(index: int | None) -> str:
        return "-" if index is None else str(index)

    candidates = "makes" if role.makes_candidates else "uses" if role.uses_candidates else "-"
    flags = ("yes" if role.engram else "-", "yes" if role.draft_tap else "-")
    sources = (layer(role.kv_source), layer(role.index_source))
    return (str(role.ratio), role.mode, *sources, candidates, *flags, *_rope(role))


def _v4_row(config: V4Config, role: layer_plan_v4.V4LayerRole) -> tuple[str, ...]:
    selected = str(config.index_topk) if role.mode == "indexed" else "-"
    flags = ("token" if role.hash_routed else "score", "yes" if role.draft_tap else "-")
    return (str(role.ratio), role.mode, selected, *flags, *_rope(role))


def _v32_row(config: V32Config, role: layer_plan_v32.LatentRole) -> tuple[str, ...]:
    return (role.ffn, str(config.index_topk), *_rope(role))


def _rope(role: Any) -> tuple[str, str]:
    yarn = role.rope.yarn
    return f"{role.rope.theta:g}", "-" if yarn is None else f"x{yarn.factor:g}"


_INVENTORIES: dict[type, Inventory] = {
    V41Config: Inventory(
        name="DeepSeek-V4.1",
        model_type="deepseek_v41",
        plan=layer_plan,
        draft=draft_plan,
        columns=("ratio", "mode", "KV of", "top-k of", "candidates", "Engram", "draft tap", "theta", "YaRN"),
        row=_v41_row,
        tensors=official.official_tensors,
        caches=memory.cache_bytes,
        left_out=lambda config: (),
    ),
    V4Config: Inventory(
        name="DeepSeek-V4",
        model_type="deepseek_v4",
        plan=layer_plan_v4.layer_plan,
        draft=layer_plan_v4.draft_plan,
        columns=("ratio", "mode", "top-k", "experts by", "draft tap", "theta", "YaRN"),
        row=_v4_row,
        tensors=official_v4.official_tensors,
        caches=memory_v4.cache_bytes,
        left_out=lambda config: (),
    ),
    V32Config: Inventory(
        name="DeepSeek-V3.2",
        model_type="deepseek_v32",
        plan=layer_plan_v32.latent_plan,
        draft=lambda config: (),
        columns=("feed-forward", "top-k", "theta", "YaRN"),
        row=_v32_row,
        tensors=official_v32.official_tensors,
        caches=memory.latent_cache_bytes,
        left_out=layer_plan_v32.left_out,
    ),
}


def inventory_of(config: Any) -> Inventory:
    """The inventory of the family whose config this is."""
    return _INVENTORIES[type(config)]
