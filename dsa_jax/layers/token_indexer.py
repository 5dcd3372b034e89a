"""Lightning indexer of V3.2: which tokens a token attends to (spec deepseek-v32 section 4).

Queries and keys are [rotated | rest], half-split pairs, Hadamard-rotated, and FP8 with one power-of-two scale a vector
where quantisers are on. A query's scale goes into its head weights.
"""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from dsa_jax import context, ops
from dsa_jax.config_v32 import V32Config
from dsa_jax.layers.hadamard import hadamard
from dsa_jax.layers.indexer import every_head
from dsa_jax.layers.linear import Linear, QuantizedLinear
from dsa_jax.layers.norm import LayerNorm
from dsa_jax.layers.rope import Angles, apply_rope_half_split
from dsa_jax.numerics import Numerics
from dsa_jax.step import Step

KEY_NORM_EPS = 1e-6  # of DeepSeek's inference code; the config has no key for it

ROWS_TO_SKIP = 256
"""Rows of a step for which it pays to ask whether they need scores. A GPU waits for the host in every layer to be told: by
estimate as long as scores and top-k of so many rows take where no more than 2048 tokens are visible, tens of us."""


class TokenIndexer(nnx.Module):
    """Queries, keys and head weights of one layer, and its selection."""

    def __init__(self, config: V32Config):
        self.heads, self.width, self.k = config.index_n_heads, config.index_head_dim, config.index_topk
        width, block = config.hidden_size, config.weight_block_size
        self.wq_b = QuantizedLinear(self.heads * self.width, config.q_lora_rank, block)
        self.wk = QuantizedLinear(self.width, width, block)
        self.k_norm = LayerNorm(self.width, KEY_NORM_EPS)
        self.weights_proj = Linear(self.heads, width)

    def keys(self, x: Float[Array, "B S d"], angles: Angles, numerics: Numerics) -> Float[Array, "B S e"]:
        """Index keys as their cache gives them back: quantised where quantisers are on."""
        key = apply_rope_half_split(self.k_norm(self.wk(x, numerics), numerics), angles, numerics)
        return numerics.fake(hadamard(key, numerics), f"fp8_{self.width}")

    def query(
        self, x: Float[Array, "B S d"], q_latent: Float[Array, "B S r"], angles: Angles, numerics: Numerics
    ) -> tuple[Float[Array, "B S H e"], Float[Array, "B S H"]]:
        """Index queries (FP8 values where quantisers are on), and head weights with all scale factors, float32."""
        q = self.wq_b(q_latent, numerics).reshape(*x.shape[:-1], -1, self.width)
        q = hadamard(apply_rope_half_split(q, angles, numerics), numerics)
        weights = self.weights_proj.in_float32(x) * self.heads**-0.5
        if numerics.quantize:
            q, scale = ops.quantize_fp8(q, self.width)
            weights = weights * scale[..., 0]
        return every_head(q, weights * self.width**-0.5)

    def __call__(
        self, q: Float[Array, "B S H e"], weights: Float[Array, "B S H"], keys: ops.PagedRows, step: Step
    ) -> Int32[Array, "B S K"]:
        """Positions of the k best visible tokens of every row, ascending, then -1. Scores are float32.

        A step of ROWS_TO_SKIP rows or more that sees no more than k tokens takes them all, unscored.
        """
        visible, schedule = step.visible(1), step.scoring(1, keys, q.shape[2])

        def every_visible():
            positions = jnp.arange(self.k, dtype=jnp.int32)
            return jnp.where(positions < visible[..., None], positions, -1)

        def best():
            found = context.select(
                q, keys, weights, self.k, context_lens=visible, block_table=step.block_table, schedule=schedule
            )
            return found.topk_indices

        if step.positions.size < ROWS_TO_SKIP:
            return best()
        return lax.cond(jnp.max(step.end) <= self.k, every_visible, best)
