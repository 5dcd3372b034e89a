"""Indexer with a compressor of its own, whose queries and keys are Hadamard-rotated (spec deepseek-v4 section 7)."""

from flax import nnx
from jaxtyping import Array, Float, Int32

from dsa_jax import context, ops
from dsa_jax.config_v4 import V4Config
from dsa_jax.layer_plan_v4 import V4LayerRole
from dsa_jax.layers.group_compressor import GroupCompressor
from dsa_jax.layers.hadamard import hadamard
from dsa_jax.layers.indexer import every_head
from dsa_jax.layers.linear import Linear, QuantizedLinear
from dsa_jax.layers.rope import Angles, apply_rope
from dsa_jax.numerics import Numerics, f32
from dsa_jax.step import Step


class RotatedIndexer(nnx.Module):
    """Index queries, head weights, and the small compressor that makes the keys."""

    def __init__(self, config: V4Config, role: V4LayerRole):
        self.heads, self.width, self.k = config.index_n_heads, config.index_head_dim, config.index_topk
        self.ratio = role.ratio
        self.wq_b = QuantizedLinear(self.heads * self.width, config.q_lora_rank, config.weight_block_size)
        self.weights_proj = Linear(self.heads, config.hidden_size)
        self.compressor = GroupCompressor(
            config.hidden_size, self.width, role.ratio, role.overlap, config.rms_norm_eps
        )

    def keys(self, latent: Float[Array, "B G e"], angles: Angles, numerics: Numerics) -> Float[Array, "B G e"]:
        """Index keys of the compressor's latents, as their record's writer takes them; RoPE comes before Hadamard."""
        return numerics.index_key_rows(self.width).prepare(hadamard(apply_rope(latent, angles, numerics), numerics))

    def query(
        self, x: Float[Array, "B S d"], q_latent: Float[Array, "B S r"], angles: Angles, numerics: Numerics
    ) -> tuple[Float[Array, "B S H e"], Float[Array, "B S H"]]:
        """Index queries, quantised, and head weights with both scale factors."""
        q = self.wq_b(q_latent, numerics).reshape(*x.shape[:-1], -1, self.width)
        q = numerics.fake(hadamard(apply_rope(q, angles, numerics), numerics), "mxfp4_32")
        weights = f32(self.weights_proj(x, numerics)) * (self.width**-0.5 * self.heads**-0.5)
        return every_head(q, numerics.round(weights))

    def __call__(
        self,
        q: Float[Array, "B S H e"],
        weights: Float[Array, "B S H"],
        keys: ops.PagedRows,
        step: Step,
        numerics: Numerics,
    ) -> Int32[Array, "B S K"]:
        """The compressed positions of the k best scores of every row: ascending, then -1."""
        found = context.select(
            q, keys, weights, self.k,
            context_lens=step.visible(self.ratio), block_table=step.block_table, rounding=numerics.score_rounding,
            schedule=step.scoring(self.ratio, keys, q.shape[2]),
        )  # fmt: skip
        return found.topk_indices
