"""Compressor: groups of r tokens become one latent row (spec deepseek-v41 section 7.1)."""

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


class Compressor(nnx.Module):
    """Ratio 1: a normalised projection of each token. Ratio r: a gated mean over each group of r tokens."""

    def __init__(self, width: int, head_dim: int, ratio: int, eps: float):
        self.ratio = ratio
        self.wkv = Linear(head_dim, width)
        if ratio > 1:
            self.wgate = Linear(head_dim, width)
        self.norm = RMSNorm(head_dim, eps)

    def __call__(
        self, x: Float[Array, "B S d"], tail: CompressorTail | None, step: Step, numerics: Numerics
    ) -> tuple[Float[Array, "B G h"], Int32[Array, "B G"], CompressorTail | None]:
        """Latents of the groups that end in this step, their group numbers (-1: none), and the new tail.

        At ratio > 1 projections, gate and pooling are float32 and the pooled row is rounded before the norm.
        """
        groups = step.finished_groups(self.ratio)
        if self.ratio == 1:
            return self.norm(self.wkv(x, numerics), numerics), groups, None
        kv, gate = self.wkv.in_float32(x), self.wgate.in_float32(x)
        members = groups[..., None] * self.ratio + jnp.arange(self.ratio, dtype=jnp.int32)
        rows = step.recent(jnp.where(groups[..., None] < 0, -1, members), tail.kv.shape[1])
        group_kv = ops.gather_rows(with_recent(tail.kv, kv), rows)
        share = jax.nn.softmax(ops.gather_rows(with_recent(tail.gate, gate), rows), axis=2)
        latent = self.norm(numerics.round(jnp.sum(f32(group_kv) * share, axis=2)), numerics)
        return latent, groups, CompressorTail(keep_recent(tail.kv, kv, step), keep_recent(tail.gate, gate, step))
