"""Compressor with a learned position embedding: groups of r tokens, or two neighbouring groups, become one latent row
(spec deepseek-v4 section 6)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from dsa_jax import ops
from dsa_jax.cache import CompressorTail
from dsa_jax.layers.linear import Linear
from dsa_jax.layers.norm import RMSNorm
from dsa_jax.numerics import Numerics, f32
from dsa_jax.step import Step, keep_recent, with_recent


class GroupCompressor(nnx.Module):
    """A gated mean over each group of `ratio` tokens; wkv, wgate bf16 [c, D], ape float32 [ratio, c].

    With `overlap` a row also pools the group before its own (nothing before the first), and projections are twice as
    wide: a token enters its own group's row by the second half of its columns, the next group's by the first half.
    """

    def __init__(self, width: int, head_dim: int, ratio: int, overlap: bool, eps: float):
        self.ratio, self.overlap, self.head_dim = ratio, overlap, head_dim
        columns = 2 * head_dim if overlap else head_dim
        self.ape = nnx.Param(jnp.zeros((ratio, columns), jnp.float32))
        self.wkv = Linear(columns, width)
        self.wgate = Linear(columns, width)
        self.norm = RMSNorm(head_dim, eps)

    def __call__(
        self, x: Float[Array, "B S d"], tail: CompressorTail, step: Step, numerics: Numerics
    ) -> tuple[Float[Array, "B G h"], Int32[Array, "B G"], CompressorTail]:
        """Latents of the groups that end in this step, their group numbers (-1: none), and the new tail.

        Projections, gate and pooling are float32; the pooled row is rounded before the norm.
        """
        groups = step.finished_groups(self.ratio)
        kv = self.wkv.in_float32(x)
        gate = self.wgate.in_float32(x) + ops.gather_rows(self.ape[...], step.positions % self.ratio)
        recent_kv, recent_gate = with_recent(tail.kv, kv), with_recent(tail.gate, gate)

        def entries(groups_back: int, columns: slice) -> tuple[Array, Array]:
            """Values and gates [B, G, ratio, h] of the tokens of each group's own group, or of one before it."""
            members = (groups[..., None] - groups_back) * self.ratio + jnp.arange(self.ratio, dtype=jnp.int32)
            ended = groups[..., None] >= 0
            rows = step.recent(jnp.where(ended, members, -1), tail.kv.shape[1])
            # Rows before the first token have no share. (A group that does not end here gets a mean of zeros.)
            absent = ((rows < 0) & ended)[..., None]
            gates = jnp.where(absent, -jnp.inf, ops.gather_rows(recent_gate, rows)[..., columns])
            return ops.gather_rows(recent_kv, rows)[..., columns], gates

        if self.overlap:
            before, own = entries(1, slice(None, self.head_dim)), entries(0, slice(self.head_dim, None))
            values, gates = (jnp.concatenate(pair, axis=2) for pair in zip(before, own, strict=True))
        else:
            values, gates = entries(0, slice(None))
        pooled = jnp.sum(f32(values) * jax.nn.softmax(gates, axis=2), axis=2)
        latent = self.norm(numerics.round(pooled), numerics)
        return latent, groups, CompressorTail(keep_recent(tail.kv, kv, step), keep_recent(tail.gate, gate, step))
