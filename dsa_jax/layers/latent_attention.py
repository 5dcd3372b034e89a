"""Multi-head latent attention over selected tokens, in the latent space (spec deepseek-v32 section 3).

All heads share one key, [latent | rotated key], and one value, the latent; what a head makes of the latent is absorbed
into its query and its output. DeepSeek's code expands keys and values per head in a prefill, which is the same
mathematics rounded elsewhere. Here every step takes the latent form, so that a token's result does not depend on how it
arrived.
"""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from dsa_jax import ops
from dsa_jax.cache.latent import LatentLayer
from dsa_jax.config_v32 import V32Config
from dsa_jax.layer_plan import RopeSpec
from dsa_jax.layers.linear import QuantizedLinear
from dsa_jax.layers.norm import RMSNorm
from dsa_jax.layers.rope import apply_rope, rope_angles
from dsa_jax.layers.token_indexer import TokenIndexer
from dsa_jax.numerics import Numerics
from dsa_jax.step import Step, flatten_rows
from dsa_jax.tap import Tap

LATENT_QUANTISER = "fp8_128"


class LatentAttention(nnx.Module):
    """Projections of one layer, and its indexer."""

    def __init__(self, config: V32Config, rope: RopeSpec):
        self.rope, self.scale, self.heads = rope, config.attention_scale, config.num_attention_heads
        self.latent, self.rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
        self.nope, self.value = config.qk_nope_head_dim, config.v_head_dim
        width, eps, block = config.hidden_size, config.rms_norm_eps, config.weight_block_size
        self.wq_a = QuantizedLinear(config.q_lora_rank, width, block)
        self.q_norm = RMSNorm(config.q_lora_rank, eps, jnp.float32)
        self.wq_b = QuantizedLinear(self.heads * (self.nope + self.rope_dim), config.q_lora_rank, block)
        self.wkv_a = QuantizedLinear(self.latent + self.rope_dim, width, block)
        self.kv_norm = RMSNorm(self.latent, eps, jnp.float32)
        self.wkv_b = QuantizedLinear(self.heads * (self.nope + self.value), self.latent, block)
        self.wo = QuantizedLinear(width, self.heads * self.value, block)
        self.indexer = TokenIndexer(config)

    def __call__(
        self, x: Float[Array, "B S d"], step: Step, cache: LatentLayer, numerics: Numerics, tap: Tap | None = None
    ) -> tuple[Float[Array, "B S d"], LatentLayer]:
        """The layer's output, and its cache with the rows of this step."""
        angles = rope_angles(self.rope_dim, self.rope, jnp.maximum(step.positions, 0))
        q_latent = self.q_norm(self.wq_a(x, numerics), numerics)
        q = self.wq_b(q_latent, numerics).reshape(*x.shape[:-1], self.heads, self.nope + self.rope_dim)
        q = apply_rope(q, angles, numerics)

        row = self.wkv_a(x, numerics)
        c = self.kv_norm(row[..., : self.latent], numerics)
        rotated = apply_rope(row[..., self.latent :], angles, numerics)
        row = jnp.concatenate([numerics.fake(c, LATENT_QUANTISER), rotated], axis=-1)
        keys = self.indexer.keys(x, angles, numerics)
        slots = self.slots(step.positions[..., None], step, cache).reshape(-1)
        cache = LatentLayer(
            cache.latent.scatter(slots, flatten_rows(row)), cache.index_keys.scatter(slots, flatten_rows(keys))
        )

        index_q, weights = self.indexer.query(x, q_latent, angles, numerics)
        selected = self.indexer(index_q, weights, cache.index_keys, step)
        if tap is not None:
            tap("index_weights", weights)
            score = ops.paged_indexer_logits(
                index_q, cache.index_keys, weights, context_lens=step.visible(1), block_table=step.block_table
            )
            tap("index_score", score)
            tap("selected", selected)
        o = self.attend(q, cache.latent, self.slots(selected, step, cache), numerics)
        return self.wo(o.reshape(*x.shape[:-1], -1), numerics), cache

    def slots(self, positions: Array, step: Step, cache: LatentLayer) -> Array:
        """Slots of request-local positions [B, S, n]; -1 stays -1."""
        return ops.positions_to_slots(positions, step.block_table, cache.latent.page_size)[0]

    def attend(
        self, q: Float[Array, "B S H h"], rows: ops.PagedRows, slots: Array, numerics: Numerics
    ) -> Float[Array, "B S H v"]:
        """Softmax over the listed latent rows, per head in and out of the latent space. Every product is rounded."""
        wkv_b = self.wkv_b.dequantized(numerics).reshape(self.heads, self.nope + self.value, self.latent)
        absorbed = per_head(q[..., : self.nope], wkv_b[:, : self.nope], 1, numerics)
        q = jnp.concatenate([absorbed, q[..., self.nope :]], axis=-1)
        o, _ = ops.sparse_decode(
            q, (rows,), (slots,), scale=self.scale, v_width=self.latent, p_dtype=numerics.dtype
        )
        return per_head(o, wkv_b[:, self.nope :], 2, numerics)


def per_head(x: Float[Array, "B S H i"], weight: Float[Array, "H _ _"], axis: int, numerics: Numerics) -> Array:
    """x[.., h, :] times each head's matrix, contracted over `axis` of it; float32 sums, rounded once."""
    product = lax.dot_general(
        x, weight, (((3,), (axis,)), ((2,), (0,))), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return numerics.round(jnp.moveaxis(product, 0, 2))
