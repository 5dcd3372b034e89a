"""Lightning indexer: which compressed positions a token attends to (spec deepseek-v41 sections 7.2 to 8)."""

from dataclasses import dataclass

import jax
from flax import nnx
from jaxtyping import Array, Float

from dsa_jax import context, ops, ranks
from dsa_jax.config import V41Config
from dsa_jax.layer_plan import LayerRole
from dsa_jax.layers.linear import Linear, QuantizedLinear
from dsa_jax.layers.norm import RMSNorm
from dsa_jax.layers.rope import Angles, apply_rope
from dsa_jax.numerics import Numerics, f32
from dsa_jax.pytree import Leaf
from dsa_jax.step import Step


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Selected:
    """What an index source hands to the layers after it.

    topk_indices: compressed positions, int32 [B, S, K], ascending, then -1. slots: the same as slots of the source's
    pages, and candidates: the blocks that later sources may choose from (Candidates), both of what this device holds where
    the context is divided; no candidates (None) before the layer that makes them.
    """

    topk_indices: Leaf
    slots: Leaf
    candidates: Leaf


def every_head(
    q: Float[Array, "B S _ e"], weights: Float[Array, "B S _"]
) -> tuple[Float[Array, "B S H e"], Float[Array, "B S H"]]:
    """Queries and weights of all heads, where several devices have made those of some heads each.

    Every device then sums a score over all heads in the order of one device: the same scores to the bit, so the same
    selection on each. The queries of a row are also far fewer bytes than its scores, which sums of parts would move.
    """
    return ranks.joined(q, "index_heads", 2), ranks.joined(weights, "index_heads", 2)


class Indexer(nnx.Module):
    """Queries and head weights of an index source; a KV source's indexer also makes the keys."""

    def __init__(self, config: V41Config, role: LayerRole):
        self.heads, self.width, self.k = config.index_n_heads, config.index_head_dim, config.index_topk
        self.makes_candidates, self.uses_candidates = role.makes_candidates, role.uses_candidates
        self.topk_blocks, self.block_size = config.candidate_topk_blocks, config.candidate_block_size
        self.ratio = role.ratio
        self.wq_b = QuantizedLinear(self.heads * self.width, config.q_lora_rank, config.weight_block_size)
        self.weights_proj = Linear(self.heads, config.hidden_size)
        if role.mode == "full":
            self.wk = Linear(self.width, config.head_dim)
            self.k_norm = RMSNorm(self.width, config.rms_norm_eps)

    def keys(self, latent: Float[Array, "B G h"], angles: Angles, numerics: Numerics) -> Float[Array, "B G d"]:
        """Index keys of latents that are not rotated yet; `angles` at the first token of each group."""
        key = apply_rope(self.k_norm(self.wk(latent, numerics), numerics), angles, numerics)
        return numerics.index_key_rows(self.width).prepare(key)

    def query(
        self, x: Float[Array, "B S d"], q_latent: Float[Array, "B S r"], angles: Angles, numerics: Numerics
    ) -> tuple[Float[Array, "B S H e"], Float[Array, "B S H"]]:
        """Index queries, quantised, and head weights with both scale factors."""
        q = self.wq_b(q_latent, numerics).reshape(*x.shape[:-1], -1, self.width)
        q = numerics.fake(apply_rope(q, angles, numerics), "mxfp4_32")
        weights = f32(self.weights_proj(x, numerics)) * (self.width**-0.5 * self.heads**-0.5)
        return every_head(q, numerics.round(weights))

    def __call__(
        self,
        q: Float[Array, "B S H e"],
        weights: Float[Array, "B S H"],
        keys: ops.PagedRows,
        step: Step,
        before: Selected | None,
        numerics: Numerics,
    ) -> Selected:
        """The top-k of this source. It scores all visible keys, or the candidate blocks if it is to use them."""
        visible = step.visible(self.ratio)
        blocks = {}
        if self.makes_candidates:
            blocks = {"candidate_topk_blocks": self.topk_blocks, "candidate_block_size": self.block_size}
        elif self.uses_candidates:
            blocks = {"candidates": before.candidates}
        schedule = step.scoring(self.ratio, keys, q.shape[2], blocks.get("candidates"))
        found = context.select(
            q, keys, weights, self.k,
            context_lens=visible, block_table=step.block_table, rounding=numerics.score_rounding,
            schedule=schedule, **blocks,
        )  # fmt: skip
        slots = context.listed(found.topk_indices, step.block_table, keys.page_size, visible)
        candidates = before.candidates if before is not None else None
        if self.makes_candidates:
            candidates = context.candidates(found.candidate_blocks, visible, self.block_size, keys.page_size)
        return Selected(found.topk_indices, slots, candidates)
