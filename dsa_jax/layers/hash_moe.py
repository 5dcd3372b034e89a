"""Mixture of experts whose gate chooses by score, or by a table of token ids (spec deepseek-v4 section 8)."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from dsa_jax import ops
from dsa_jax.config_v4 import V4Config
from dsa_jax.layers.moe import Experts, SharedExpert, expert_scores
from dsa_jax.numerics import Numerics, f32
from dsa_jax.tap import Tap


class ScoreGate(nnx.Module):
    """Chooses the k best experts by score plus bias: weight bf16 [E, D], bias float32 [E]."""

    def __init__(self, experts: int, width: int, k: int):
        self.k = k
        self.weight = nnx.Param(jnp.zeros((experts, width), jnp.bfloat16))
        self.bias = nnx.Param(jnp.zeros((experts,), jnp.float32))

    def choose(self, scores: Float[Array, "T E"], ids: Int32[Array, " T"]) -> Int32[Array, "T k"]:
        """Expert ids in descending biased score; ties: lower id."""
        return lax.top_k(scores + self.bias[...], self.k)[1].astype(jnp.int32)


class TableGate(nnx.Module):
    """Chooses experts by token id: tid2eid int32 [V, k]. weight bf16 [E, D] still gives their weights."""

    def __init__(self, experts: int, width: int, k: int, vocab: int):
        self.k = k
        self.weight = nnx.Param(jnp.zeros((experts, width), jnp.bfloat16))
        self.tid2eid = nnx.Param(jnp.zeros((vocab, k), jnp.int32))

    def choose(self, scores: Float[Array, "T E"], ids: Int32[Array, " T"]) -> Int32[Array, "T k"]:
        """Expert ids in the table's order."""
        return ops.gather_rows(self.tid2eid[...], ids)


def chosen_weights(
    scores: Float[Array, "T E"], chosen: Int32[Array, "T k"], scoring_func: str, routed_scaling_factor: float
) -> Float[Array, "T k"]:
    """Weights of the chosen experts from their unbiased scores, float32: normalised to the factor, except softmax's."""
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if scoring_func != "softmax":
        weights = weights / weights.sum(-1, keepdims=True)
    return weights * routed_scaling_factor


class HashMoE(nnx.Module):
    """Gate, routed experts and shared expert of one layer; the clamps of the routed experts hold for the shared one too."""

    def __init__(self, config: V4Config, *, hash_routed: bool):
        self.scoring_func, self.routed_scaling_factor = config.scoring_func, config.routed_scaling_factor
        width, inner, limit = config.hidden_size, config.moe_intermediate_size, config.swiglu_limit
        experts, k, block = config.n_routed_experts, config.num_experts_per_tok, config.weight_block_size
        self.gate = TableGate(experts, width, k, config.vocab_size) if hash_routed else ScoreGate(experts, width, k)
        self.experts = Experts(experts, width, inner, limit, block[1])
        self.shared_experts = SharedExpert(width, inner * config.n_shared_experts, block, limit)

    def __call__(
        self,
        x: Float[Array, "B S d"],
        ids: Int32[Array, "B S"],
        valid: Bool[Array, "B S"],
        numerics: Numerics,
        tap: Tap | None = None,
    ) -> Float[Array, "B S d"]:
        """Routed sum plus shared expert, float32, rounded once. `ids` are the tokens that the rows stand for."""
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        scores = expert_scores(x, self.gate.weight[...], self.scoring_func)
        chosen = self.gate.choose(scores, ids.reshape(-1))
        weights = chosen_weights(scores, chosen, self.scoring_func, self.routed_scaling_factor)
        if tap is not None:
            tap("gate_indices", chosen.reshape(*shape[:-1], -1))
            tap("gate_weights", weights.reshape(*shape[:-1], -1))
        routed = self.experts(x, chosen, weights, valid.reshape(-1), numerics)
        return numerics.round(routed + f32(self.shared_experts(x, numerics))).reshape(shape)
