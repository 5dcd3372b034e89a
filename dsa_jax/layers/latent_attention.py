"""Multi-head latent attention over selected tokens, in two forms of one mathematics (spec deepseek-v32 section 3).

Absorbed: all heads share one key, [latent | rotated key], and one value, the latent; what a head makes of the latent is
absorbed into its query and its output. Reads listed rows alone.
Expanded: every head has keys and values of its own, made of all rows once, under a mask. Costs less a query row, and more
for every cached row, so it pays where many query rows see the same rows, and where the selection takes all of them.

DeepSeek's code expands in every prefill. The forms differ in roundings only.
"""

import math

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float

from dsa_jax import context, ops, ranks
from dsa_jax.cache.latent import LatentLayer
from dsa_jax.config_v32 import V32Config
from dsa_jax.layer_plan import RopeSpec
from dsa_jax.layers.linear import QuantizedLinear
from dsa_jax.layers.norm import RMSNorm
from dsa_jax.layers.per_head import per_head
from dsa_jax.layers.rope import apply_rope, rope_angles
from dsa_jax.layers.token_indexer import TokenIndexer
from dsa_jax.numerics import Numerics, f32
from dsa_jax.step import Step, flatten_rows
from dsa_jax.tap import Tap

LATENT_QUANTISER = "fp8_128"
HEADS_AT_ONCE = 8  # of the expanded form, whose scores take heads · rows · cached rows


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
        self.wo = QuantizedLinear(width, self.heads * self.value, block, summed_over="heads")
        self.indexer = TokenIndexer(config)
        # Products a head: the expanded form saves `saved` for each pair of a query row and a cached row, and spends
        # `spent` on each cached row. 171 query rows at the released widths.
        saved, spent = 2 * self.latent - self.nope - self.value, self.latent * (self.nope + self.value)
        self.rows_to_expand = math.ceil(spent / saved) if saved > 0 else math.inf

    def __call__(
        self, x: Float[Array, "B S d"], step: Step, cache: LatentLayer, numerics: Numerics, tap: Tap | None = None
    ) -> tuple[Float[Array, "B S d"], LatentLayer]:
        """The layer's output, and its cache with the rows of this step.

        The expanded form where a step brings `rows_to_expand` rows a request and no row sees more tokens than the
        indexer selects, the absorbed form elsewhere.
        """
        angles = rope_angles(self.rope_dim, self.rope, jnp.maximum(step.positions, 0))
        q_latent = self.q_norm(self.wq_a(x, numerics), numerics)
        q = self.wq_b(q_latent, numerics).reshape(*x.shape[:-1], -1, self.nope + self.rope_dim)
        q = apply_rope(q, angles, numerics)

        row = self.wkv_a(x, numerics)
        c = self.kv_norm(row[..., : self.latent], numerics)
        rotated = apply_rope(row[..., self.latent :], angles, numerics)
        row = jnp.concatenate([numerics.fake(c, LATENT_QUANTISER), rotated], axis=-1)
        keys = self.indexer.keys(x, angles, numerics)
        slots = context.slots(step.positions[..., None], step.block_table, cache.latent.page_size).reshape(-1)
        cache = LatentLayer(
            cache.latent.scatter(slots, flatten_rows(row)), cache.index_keys.scatter(slots, flatten_rows(keys))
        )

        index_q, weights = self.indexer.query(x, q_latent, angles, numerics)
        selected = self.indexer(index_q, weights, cache.index_keys, step)
        if tap is not None:
            tap("index_weights", weights)
            score = context.scores(
                index_q, cache.index_keys, weights, context_lens=step.visible(1), block_table=step.block_table
            )
            tap("index_score", score)
            tap("selected", selected)

        def absorbed():
            slots = context.listed(selected, step.block_table, cache.latent.page_size)
            return self.attend(q, cache.latent, slots, step.block_table, numerics)

        def expanded():
            return self.attend_to_all(q, cache, step, numerics)

        if x.shape[1] < self.rows_to_expand:
            o, lse = absorbed()
        else:
            o, lse = lax.cond(jnp.max(step.end) <= self.indexer.k, expanded, absorbed)
        if tap is not None:
            tap("selected_lse", ranks.joined(lse, "heads", 2))
        return self.wo(o.reshape(*x.shape[:-1], -1), numerics), cache

    def attend(
        self, q: Float[Array, "B S H h"], rows: ops.PagedRows, slots: Array, block_table: Array, numerics: Numerics
    ) -> tuple[Float[Array, "B S H v"], Float[Array, "B S H"]]:
        """Softmax over the listed latent rows, of the block table's pages, per head in and out of the latent space, and its
        log-sum-exp. Every product is rounded."""
        wkv_b = self.wkv_b.dequantized(numerics).reshape(-1, self.nope + self.value, self.latent)
        absorbed = per_head(q[..., : self.nope], wkv_b[:, : self.nope], 1, numerics)
        q = jnp.concatenate([absorbed, q[..., self.nope :]], axis=-1)
        o, lse = context.attend(
            q, (rows,), (slots,), whole=0, block_table=block_table, scale=self.scale, v_width=self.latent,
            p_dtype=numerics.dtype,
        )  # fmt: skip
        return per_head(o, wkv_b[:, self.nope :], 2, numerics), lse

    def attend_to_all(
        self, q: Float[Array, "B S H h"], cache: LatentLayer, step: Step, numerics: Numerics
    ) -> tuple[Float[Array, "B S H v"], Float[Array, "B S H"]]:
        """Every row over all tokens that it sees, for steps that see no more than the indexer selects."""
        page = cache.latent.page_size
        held = min(self.indexer.k, context.held(step.block_table, page))
        positions = jnp.arange(context.own_most(held, page), dtype=jnp.int32)  # as this device counts its own
        written = jnp.where(positions < context.own_count(step.end, page)[:, None], positions, -1)
        slots, _ = ops.positions_to_slots(written[:, None], step.block_table, page)
        rows = cache.latent.gather(slots[:, 0], numerics.dtype)
        return self.attend_expanded(q, rows, positions < context.own_count(step.visible(1), page)[..., None], numerics)

    def attend_expanded(
        self, q: Float[Array, "B S H h"], rows: Float[Array, "B T r"], mask: Bool[Array, "B S T"], numerics: Numerics
    ) -> tuple[Float[Array, "B S H v"], Float[Array, "B S H"]]:
        """Softmax over the latent rows that `mask` shows, with keys and values of every head's own, and its log-sum-exp;
        over those of all devices, where the rows are divided.

        Float32 sums; scores, scaled scores, probabilities and outputs are each rounded. A row that sees none gives 0 and
        -inf.
        """
        expanded = self.wkv_b(rows[..., : self.latent], numerics)
        expanded = expanded.reshape(*rows.shape[:2], -1, self.nope + self.value)
        shared = rows[..., self.latent :]

        def head(operands):
            q, expanded = operands  # [B, S, h], [B, T, nope + v]
            key = jnp.concatenate([expanded[..., : self.nope], shared], axis=-1)
            scores = numerics.round(product(q, key, 2))
            scores = f32(numerics.round(f32(scores) * self.scale))
            scores = jnp.where(mask, scores, -jnp.inf)
            shift = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), -1e30)  # finite, where a row sees none
            p = jnp.exp(scores - shift)
            total = jnp.sum(p, axis=-1, keepdims=True)
            p = numerics.round(p / jnp.maximum(total, 1e-30))
            out, lse = context.merged(product(p, expanded[..., self.nope :], 1), (shift + jnp.log(total))[..., 0])
            return numerics.round(out), lse

        heads = (jnp.moveaxis(q, 2, 0), jnp.moveaxis(expanded, 2, 0))
        out, lse = lax.map(head, heads, batch_size=HEADS_AT_ONCE)
        return jnp.moveaxis(out, 0, 2), jnp.moveaxis(lse, 0, 2)


def product(a: Float[Array, "B S i"], b: Float[Array, "B _ _"], axis: int) -> Float[Array, "B S o"]:
    """a times each request's b, contracted over `axis` of b; float32."""
    return lax.dot_general(
        a, b, (((2,), (axis,)), ((0,), (0,))), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
