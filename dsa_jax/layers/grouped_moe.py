"""Mixture of experts of V3.2: group-limited routing, FP8 experts, one shared expert (spec deepseek-v32 section 5)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from dsa_jax.config_v32 import V32Config
from dsa_jax.layers.linear import ExpertLinears
from dsa_jax.layers.moe import Experts, SharedExpert, swiglu
from dsa_jax.numerics import Numerics, f32, matmul_f32
from dsa_jax.tap import Tap


class GroupedGate(nnx.Module):
    """Router weights: weight bf16 [E, D], bias float32 [E]."""

    def __init__(self, experts: int, width: int):
        self.weight = nnx.Param(jnp.zeros((experts, width), jnp.bfloat16))
        self.bias = nnx.Param(jnp.zeros((experts,), jnp.float32))


def route_in_groups(
    x: Float[Array, "T d"],
    weight: Float[Array, "E d"],
    bias: Float[Array, " E"] | None,
    k: int,
    *,
    n_group: int,
    topk_group: int,
    scoring_func: str,
    routed_scaling_factor: float,
) -> tuple[Int32[Array, "T k"], Float[Array, "T k"]]:
    """Expert ids in descending biased score (ties: lower id) and their weights from the unbiased scores, float32.

    Only experts of the topk_group best groups are chosen. A group counts as much as its two largest biased scores
    together; without a bias, as its largest. Sigmoid weights are normalised to sum to the scaling factor, softmax
    weights are only multiplied by it. Source: the gate of DeepSeek-V3.2's inference code.
    """
    logits = matmul_f32(x, weight)
    scores = jax.nn.softmax(logits, axis=-1) if scoring_func == "softmax" else jax.nn.sigmoid(logits)
    ranked = scores if bias is None else scores + bias
    if n_group > 1:
        groups = ranked.reshape(len(ranked), n_group, -1)
        of_group = jnp.sum(lax.top_k(groups, 1 if bias is None else 2)[0], axis=-1)
        kept = lax.top_k(of_group, topk_group)[1]
        is_kept = jnp.any(kept[..., None] == jnp.arange(n_group), axis=1)
        ranked = jnp.where(is_kept[..., None], groups, -jnp.inf).reshape(ranked.shape)
    _, chosen = lax.top_k(ranked, k)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if scoring_func == "sigmoid":
        weights = weights / weights.sum(-1, keepdims=True)
    return chosen.astype(jnp.int32), weights * routed_scaling_factor


class QuantizedExpertLinears(ExpertLinears):
    """The same FP8 linear of every expert: weight E4M3 [E, out, in] with one scale per tile of each expert.

    The input is quantised to FP8 in groups as wide as a tile.
    """

    def __init__(self, experts: int, out_features: int, in_features: int, block: tuple[int, int]):
        self.block, self.input_kind = block, f"fp8_{block[1]}"
        tiles = (-(-out_features // block[0]), -(-in_features // block[1]))
        self.weight = nnx.Param(jnp.zeros((experts, out_features, in_features), jnp.float8_e4m3fn))
        self.scale = nnx.Param(jnp.zeros((experts, *tiles), jnp.uint8))


class QuantizedExperts(Experts):
    """The routed experts, stacked: FP8 linears, and the route weight enters after w2, in float32."""

    def __init__(self, experts: int, width: int, inner: int, block: tuple[int, int]):
        self.limit = 0.0
        self.w1 = QuantizedExpertLinears(experts, inner, width, block)
        self.w2 = QuantizedExpertLinears(experts, width, inner, block)
        self.w3 = QuantizedExpertLinears(experts, inner, width, block)

    def weighted(
        self,
        rows: Float[Array, "tiles R d"],
        expert: Int32[Array, " tiles"],
        weight: Float[Array, "tiles R 1"],
        numerics: Numerics,
    ) -> Float[Array, "tiles R d"]:
        """expert(rows)·weight, float32, of rows that are quantised for w1."""
        gate, up = self.w1.both(self.w3, rows, expert, numerics)
        a = numerics.round(swiglu(gate, up, self.limit, None))
        return f32(self.w2(self.w2.quantized(a, numerics), expert, numerics)) * weight

    def weighted_dtype(self, numerics: Numerics) -> Any:
        """float32 in every mode."""
        return jnp.float32


class GroupedMoE(nnx.Module):
    """Gate, routed experts and shared expert of one layer."""

    def __init__(self, config: V32Config):
        self.k = config.num_experts_per_tok
        self.routing = {
            name: getattr(config, name) for name in ("n_group", "topk_group", "scoring_func", "routed_scaling_factor")
        }
        width, inner, block = config.hidden_size, config.moe_intermediate_size, config.weight_block_size
        self.gate = GroupedGate(config.n_routed_experts, width)
        self.experts = QuantizedExperts(config.n_routed_experts, width, inner, block)
        self.shared_experts = SharedExpert(width, inner * config.n_shared_experts, block, 0.0)

    def __call__(
        self, x: Float[Array, "*rows d"], valid: Bool[Array, "*rows"], numerics: Numerics, tap: Tap | None = None
    ) -> Float[Array, "*rows d"]:
        """Routed sum plus shared expert, float32, rounded once."""
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        chosen, weights = route_in_groups(x, self.gate.weight[...], self.gate.bias[...], self.k, **self.routing)
        if tap is not None:
            tap("gate_indices", chosen.reshape(*shape[:-1], self.k))
            tap("gate_weights", weights.reshape(*shape[:-1], self.k))
        routed = self.experts(x, chosen, weights, valid.reshape(-1), numerics)
        return numerics.round(routed + f32(self.shared_experts(x, numerics))).reshape(shape)
