"""What attention with one shared head of keys and values has in every layer: projections, sink, grouped output.

The same rows serve as keys and as values, so the output is rotated back (spec deepseek-v41 section 5).
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dsa_jax import context, ops, ranks
from dsa_jax.config import SharedKVConfig
from dsa_jax.layer_plan import RopeSpec
from dsa_jax.layers.linear import QuantizedLinear
from dsa_jax.layers.norm import RMSNorm
from dsa_jax.layers.rope import Angles, apply_rope, rope_angles
from dsa_jax.numerics import Numerics, f32
from dsa_jax.step import Step, flatten_rows
from dsa_jax.tap import Tap


class SharedKVAttention(nnx.Module):
    """Low-rank queries, one row of keys and values a token, attention over listed rows, low-rank grouped output.

    With `norm_heads` every query head is normalised before its rotation.
    """

    def __init__(self, config: SharedKVConfig, rope: RopeSpec, *, norm_heads: bool):
        self.rope, self.norm_heads, self.eps = rope, norm_heads, config.rms_norm_eps
        self.heads, self.head_dim, self.rope_dim = (
            config.num_attention_heads,
            config.head_dim,
            config.qk_rope_head_dim,
        )
        self.groups, self.window = config.o_groups, config.sliding_window
        width, eps, block = config.hidden_size, config.rms_norm_eps, config.weight_block_size
        self.wq_a = QuantizedLinear(config.q_lora_rank, width, block)
        self.q_norm = RMSNorm(config.q_lora_rank, eps)
        self.wq_b = QuantizedLinear(self.heads * self.head_dim, config.q_lora_rank, block)
        self.wkv = QuantizedLinear(self.head_dim, width, block)
        self.kv_norm = RMSNorm(self.head_dim, eps)
        self.wo_a = QuantizedLinear(
            self.groups * config.o_lora_rank, self.heads * self.head_dim // self.groups, block
        )
        self.wo_b = QuantizedLinear(width, self.groups * config.o_lora_rank, block, summed_over="heads")
        self.attn_sink = nnx.Param(jnp.zeros((self.heads,), jnp.float32))

    def angles(self, positions: Array) -> Angles:
        """This layer's rotation at `positions`; negative ones (padding) rotate by 0."""
        return rope_angles(self.rope_dim, self.rope, jnp.maximum(positions, 0))

    def query(
        self, x: Float[Array, "B S d"], angles: Angles, numerics: Numerics
    ) -> tuple[Float[Array, "B S r"], Float[Array, "B S H h"]]:
        """The latent that the indexer shares, and the rotated queries."""
        latent = self.q_norm(self.wq_a(x, numerics), numerics)
        q = self.wq_b(latent, numerics).reshape(*x.shape[:-1], -1, self.head_dim)
        if self.norm_heads:
            q = normalize_heads(q, self.eps, numerics)
        return latent, apply_rope(q, angles, numerics)

    def kv_row(self, x: Float[Array, "B S d"], angles: Angles, numerics: Numerics) -> Float[Array, "B S h"]:
        """The rotated row of each token, not quantised yet."""
        return apply_rope(self.kv_norm(self.wkv(x, numerics), numerics), angles, numerics)

    def extend_window(
        self, ring: ops.PagedRows, rows: Float[Array, "B S h"], step: Step, numerics: Numerics
    ) -> tuple[ops.PagedRows, ops.PagedRows]:
        """(the cache that `step.ring.seen` lists slots of, the ring after the step)."""
        rows = flatten_rows(rows)
        after = ring.scatter(step.ring.kept.reshape(-1), rows)
        return after if step.ring.in_place else self.join_window(ring, rows, numerics), after

    def join_window(self, ring: ops.PagedRows, rows: Float[Array, "N h"], numerics: Numerics) -> ops.PagedRows:
        """[ring rows | new rows] as one cache. Window records are row-contiguous, so pages of one row are the same bytes
        in another shape."""
        fresh = ops.PagedRows.zeros(ring.format, len(rows), 1).scatter(jnp.arange(len(rows), dtype=jnp.int32), rows)
        old = ring.pages.reshape(ring.num_slots, *fresh.pages.shape[1:])
        return ops.PagedRows(jnp.concatenate([old, fresh.pages]), ring.format, 1)

    def attend(
        self,
        q: Float[Array, "B S H h"],
        caches: tuple[ops.PagedRows, ...],
        slots: tuple[Array, ...],
        block_table: Array,
        angles: Angles,
        numerics: Numerics,
        tap: Tap | None = None,
    ) -> Float[Array, "B S d"]:
        """Softmax over the listed rows of the caches with the sink, inverse rotation, grouped output projection.

        The first cache is the window's, which is on every device; a second one may be divided (`context`), and its slots are
        of the block table's pages.
        """
        options = dict(scale=self.head_dim**-0.5, p_dtype=numerics.dtype)
        if len(caches) == 1:
            o, _ = ops.attend(q, caches, slots, sink=self.attn_sink[...], **options)
        else:
            o, _ = context.attend(
                q, caches, slots, whole=1, block_table=block_table, sink=self.attn_sink[...], **options
            )
        if tap is not None:
            tap("sparse_attn_out", ranks.joined(o, "heads", 2))
            if tap.asked_for("selected_lse") and len(caches) > 1:
                _, lse = context.attend(q, caches[1:], slots[1:], whole=0, block_table=block_table, **options)
                tap("selected_lse", ranks.joined(lse, "heads", 2))
        groups = self.groups * o.shape[2] // self.heads  # those of the heads that this device has
        o = apply_rope(o, angles, numerics, inverse=True).reshape(*o.shape[:2], groups, -1)
        u = self.wo_a.per_group(o, numerics)
        return self.wo_b(u.reshape(*u.shape[:2], -1), numerics)


def normalize_heads(q: Float[Array, "*rows h"], eps: float, numerics: Numerics) -> Float[Array, "*rows h"]:
    """q / sqrt(mean(q²) + eps) over the last axis, without a weight.

    The reference computes on tensors of q's dtype, so square, mean, sum with eps and root are each rounded
    (spec deepseek-v4 section 5); the mean itself accumulates in float32.
    """
    mean = numerics.round(jnp.mean(f32(numerics.round(jnp.square(f32(q)))), axis=-1, keepdims=True))
    root = numerics.round(jnp.reciprocal(jnp.sqrt(f32(numerics.round(f32(mean) + eps)))))
    return numerics.round(f32(q) * f32(root))
