"""Attention of V4.1: one softmax over the window's rows and the selected compressed rows (spec deepseek-v41 section 5).

Keys and values are one shared head: the same rows serve as both, so the output is rotated back.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dsa_jax import ops
from dsa_jax.cache import SourceCache
from dsa_jax.config import V41Config
from dsa_jax.layer_plan import LayerRole
from dsa_jax.layers.compressor import Compressor
from dsa_jax.layers.indexer import Indexer, Selected
from dsa_jax.layers.linear import QuantizedLinear
from dsa_jax.layers.norm import RMSNorm
from dsa_jax.layers.rope import Angles, apply_rope, rope_angles
from dsa_jax.numerics import Numerics, matmul
from dsa_jax.step import Step, flatten_rows
from dsa_jax.tap import Tap


@dataclass(frozen=True)
class AttentionState:
    """What attention reads and writes besides its input: the layer's own window ring, the caches of all KV sources
    (by layer), and the selection of the latest index source (None before the first)."""

    window: ops.PagedRows
    sources: dict[int, SourceCache]
    selected: Selected | None


class Attention(nnx.Module):
    """Projections, window rows, sink, and whatever the layer's role adds: compressor, indexer."""

    def __init__(self, config: V41Config, role: LayerRole):
        self.role = role
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
        self.wo_b = QuantizedLinear(width, self.groups * config.o_lora_rank, block)
        self.attn_sink = nnx.Param(jnp.zeros((self.heads,), jnp.float32))
        if role.mode == "full":
            self.compressor = Compressor(width, self.head_dim, role.ratio, eps)
        if role.mode in ("full", "reindex"):
            self.indexer = Indexer(config, role)

    def angles(self, positions: Array) -> Angles:
        """This layer's rotation at `positions`; negative ones (padding) rotate by 0."""
        return rope_angles(self.rope_dim, self.role.rope, jnp.maximum(positions, 0))

    def query(
        self, x: Float[Array, "B S d"], angles: Angles, numerics: Numerics
    ) -> tuple[Float[Array, "B S r"], Float[Array, "B S H h"]]:
        """The latent that the indexer shares, and the rotated queries (not normalised per head)."""
        latent = self.q_norm(self.wq_a(x, numerics), numerics)
        q = self.wq_b(latent, numerics).reshape(*x.shape[:-1], self.heads, self.head_dim)
        return latent, apply_rope(q, angles, numerics)

    def window_rows(self, x: Float[Array, "B S d"], angles: Angles, numerics: Numerics) -> Float[Array, "B S h"]:
        """The rows that `x` adds to the window, as its record's writer takes them."""
        row = apply_rope(self.kv_norm(self.wkv(x, numerics), numerics), angles, numerics)
        return numerics.window_rows(self.head_dim).prepare(row)

    def attend(
        self,
        q: Float[Array, "B S H h"],
        caches: tuple[ops.PagedRows, ...],
        slots: tuple[Array, ...],
        angles: Angles,
        numerics: Numerics,
        tap: Tap | None = None,
    ) -> Float[Array, "B S d"]:
        """Softmax over the listed rows of the caches with the sink, inverse rotation, grouped output projection."""
        o, _ = ops.sparse_decode(
            q, caches, slots, sink=self.attn_sink[...], scale=self.head_dim**-0.5, p_dtype=numerics.dtype
        )
        if tap is not None:
            tap("sparse_attn_out", o)
        o = apply_rope(o, angles, numerics, inverse=True).reshape(*o.shape[:2], self.groups, -1)
        wo_a = self.wo_a.dequantized(numerics).reshape(self.groups, -1, o.shape[-1])
        u = jnp.stack([numerics.round(matmul(o[:, :, g], wo_a[g])) for g in range(self.groups)], axis=2)
        return self.wo_b(u.reshape(*u.shape[:2], -1), numerics)

    def __call__(
        self, x: Float[Array, "B S d"], step: Step, state: AttentionState, numerics: Numerics, tap: Tap | None = None
    ) -> tuple[Float[Array, "B S d"], AttentionState]:
        """The layer's output, and the state with this layer's rows written and its selection made."""
        angles = self.angles(step.positions)
        q_latent, q = self.query(x, angles, numerics)
        rows = self.window_rows(x, angles, numerics)
        if tap is not None:
            tap("window_kv", rows)
        recent, window = extend_window(state.window, rows, step)
        caches = (recent,)
        slots = (step.recent(step.window(self.window), self.window),)
        sources, selected = state.sources, state.selected
        if self.role.ratio:
            if self.role.mode == "full":
                own = self.extend_source(x, step, sources[self.role.index], numerics, tap)
                sources = sources | {self.role.index: own}
            source = sources[self.role.kv_source]
            if self.role.mode != "reuse":
                index_q, weights = self.indexer.query(x, q_latent, angles, numerics)
                if tap is not None:
                    tap_scores(tap, index_q, weights, source.index_keys, step, self.role.ratio, numerics)
                selected = self.indexer(index_q, weights, source.index_keys, step, selected, numerics)
            if tap is not None:
                tap("selected", selected.topk_indices)
                if self.role.makes_candidates:
                    tap("candidates", selected.candidates.blocks)
            caches += (source.compressed,)
            slots += (selected.slots,)
        y = self.attend(q, caches, slots, angles, numerics, tap)
        return y, AttentionState(window, sources, selected)

    def extend_source(
        self, x: Float[Array, "B S d"], step: Step, source: SourceCache, numerics: Numerics, tap: Tap | None = None
    ) -> SourceCache:
        """Appends the groups that end in this step: index keys first, from the latent before its rotation."""
        latent, groups, tail = self.compressor(x, source.tail, step, numerics)
        angles = self.angles(groups * self.role.ratio)
        keys = self.indexer.keys(latent, angles, numerics)
        rows = numerics.compressed_rows(self.head_dim).prepare(apply_rope(latent, angles, numerics))
        slots, _ = ops.positions_to_slots(groups[..., None], step.block_table, source.compressed.page_size)
        slots = slots.reshape(-1)
        if tap is not None:
            tap("latent", latent)
            tap("groups", groups)
        return SourceCache(
            compressed=source.compressed.scatter(slots, flatten_rows(rows)),
            index_keys=source.index_keys.scatter(slots, flatten_rows(keys)),
            tail=tail,
        )


def extend_window(
    ring: ops.PagedRows, rows: Float[Array, "B S h"], step: Step
) -> tuple[ops.PagedRows, ops.PagedRows]:
    """([ring rows as they were | new rows] as one cache for this step, the ring after the step)."""
    rows = flatten_rows(rows)
    fresh = ops.PagedRows.zeros(ring.format, len(rows), 1).scatter(jnp.arange(len(rows), dtype=jnp.int32), rows)
    # Window records are row-contiguous, so pages of one row are the same bytes in another shape.
    old = ring.pages.reshape(ring.num_slots, *fresh.pages.shape[1:])
    recent = ops.PagedRows(jnp.concatenate([old, fresh.pages]), ring.format, 1)
    return recent, ring.scatter(step.ring_slots(ring.page_size).reshape(-1), rows)


def tap_scores(
    tap: Tap,
    q: Float[Array, "B S H e"],
    weights: Float[Array, "B S H"],
    keys: ops.PagedRows,
    step: Step,
    ratio: int,
    numerics: Numerics,
) -> None:
    """Taps the indexer's query side and all its scores, which the selection itself never holds at once."""
    tap("index_q", q)
    tap("index_weights", weights)
    score = ops.paged_indexer_logits(
        q, keys, weights,
        context_lens=step.visible(ratio), block_table=step.block_table, rounding=numerics.score_rounding,
    )  # fmt: skip
    tap("index_score", score)
