"""One decoder layer around a single residual stream."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dsa_jax.cache.latent import LatentLayer
from dsa_jax.config_v32 import V32Config
from dsa_jax.layer_plan_v32 import LatentRole
from dsa_jax.layers.grouped_moe import GroupedMoE
from dsa_jax.layers.latent_attention import LatentAttention
from dsa_jax.layers.moe import SharedExpert
from dsa_jax.layers.norm import RMSNorm
from dsa_jax.numerics import Numerics, f32
from dsa_jax.step import Step
from dsa_jax.tap import Tap


class ResidualBlock(nnx.Module):
    """Attention and feed-forward around one residual stream, which is kept apart from the latest sub-layer's output.

    The two are added in float32; the norm reads the unrounded sum, and the sum is kept rounded.
    """

    def __init__(self, config: V32Config, role: LatentRole):
        width, eps = config.hidden_size, config.rms_norm_eps
        self.is_dense = role.ffn == "dense"
        self.attn_norm = RMSNorm(width, eps, jnp.float32)
        self.ffn_norm = RMSNorm(width, eps, jnp.float32)
        self.attn = LatentAttention(config, role.rope)
        if self.is_dense:
            self.ffn = SharedExpert(width, config.intermediate_size, config.weight_block_size, 0.0)
        else:
            self.ffn = GroupedMoE(config)

    def __call__(
        self, total: Float[Array, "B S d"], step: Step, cache: LatentLayer, numerics: Numerics, tap: Tap | None
    ) -> tuple[Float[Array, "B S d"], LatentLayer]:
        """`total`: float32, residual plus what was added last. Returns the same after the layer, and the cache."""
        y, cache = self.attn(self.attn_norm(total, numerics), step, cache, numerics, tap)
        if tap is not None:
            tap("attn_out", y)
        total = f32(numerics.round(total)) + f32(y)
        x = self.ffn_norm(total, numerics)
        if self.is_dense:
            y = self.ffn(x.reshape(-1, x.shape[-1]), numerics).reshape(x.shape)
        else:
            with jax.named_scope("experts"):
                y = self.ffn(x, step.valid, numerics, tap)
        total = f32(numerics.round(total)) + f32(y)
        if tap is not None:
            tap("ffn_out", y)
            tap("h", total)
        return total, cache
