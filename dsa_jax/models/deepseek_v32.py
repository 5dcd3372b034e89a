"""DeepSeek-V3.2: embed, layers by plan, head."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from dsa_jax.cache.latent import LatentCache
from dsa_jax.config_v32 import V32Config
from dsa_jax.layer_plan_v32 import latent_plan
from dsa_jax.layers.draft import Embedding
from dsa_jax.layers.linear import VocabularyLinear
from dsa_jax.layers.norm import RMSNorm
from dsa_jax.layers.residual_block import ResidualBlock
from dsa_jax.numerics import Numerics, f32
from dsa_jax.step import Step
from dsa_jax.tap import Tap


class DeepseekV32(nnx.Module):
    """The model. Parameter paths, joined by dots, are the tensor names of DeepSeek's inference code (experts stacked)."""

    def __init__(self, config: V32Config):
        self.config, self.plan = config, latent_plan(config)
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List([ResidualBlock(config, role) for role in self.plan])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, jnp.float32)
        self.head = VocabularyLinear(config.vocab_size, config.hidden_size)

    def __call__(
        self,
        cache: LatentCache,
        tokens: Int32[Array, "B S"],
        count: Int32[Array, " B"],
        numerics: Numerics,
        image: None = None,
        tap: Tap | None = None,
    ) -> tuple[Float[Array, "B S d"], LatentCache]:
        """Processes count[b] tokens of each request after those that the cache holds. The model takes no images.

        Returns the hidden rows before the final norm, float32 (`logits` takes the ones that are wanted), and the cache
        after.
        """
        step = Step.of(cache.length, count, cache.block_table, tokens.shape[1])
        total, kept = f32(self.embed(tokens, numerics)), []
        for role, layer, own in zip(self.plan, self.layers, cache.layers, strict=True):
            total, own = layer(total, step, own, numerics, None if tap is None else tap.within(f"layer{role.index}."))
            kept.append(own)
        if tap is not None:
            tap("final_hidden_normed", self.norm(total, numerics))
        return total, LatentCache(step.end, cache.block_table, tuple(kept), cache.page_tokens)

    def logits(self, h: Float[Array, "*rows d"], numerics: Numerics) -> Float[Array, "*rows V"]:
        """Float32 logits of hidden rows."""
        return self.head.in_float32(self.norm(h, numerics))
