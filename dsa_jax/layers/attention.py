"""Attention of V4.1: one softmax over the window's rows and the selected compressed rows (spec deepseek-v41 section 5)."""

from dataclasses import dataclass

from jaxtyping import Array, Float

from dsa_jax import context, ops
from dsa_jax.cache import SourceCache
from dsa_jax.config import V41Config
from dsa_jax.layer_plan import LayerRole
from dsa_jax.layers.compressor import Compressor
from dsa_jax.layers.indexer import Indexer, Selected
from dsa_jax.layers.rope import Angles, apply_rope
from dsa_jax.layers.shared_kv import SharedKVAttention
from dsa_jax.numerics import Numerics
from dsa_jax.step import Step, flatten_rows
from dsa_jax.tap import Tap


@dataclass(frozen=True)
class AttentionState:
    """What attention reads and writes besides its input: the layer's own window ring, the caches of all KV sources
    (by layer), and the selection of the latest index source (None before the first)."""

    window: ops.PagedRows
    sources: dict[int, SourceCache]
    selected: Selected | None


class Attention(SharedKVAttention):
    """Window rows, and whatever the layer's role adds: compressor, indexer."""

    def __init__(self, config: V41Config, role: LayerRole):
        super().__init__(config, role.rope, norm_heads=False)
        self.role = role
        if role.mode == "full":
            self.compressor = Compressor(config.hidden_size, self.head_dim, role.ratio, config.rms_norm_eps)
        if role.mode in ("full", "reindex"):
            self.indexer = Indexer(config, role)

    def window_rows(self, x: Float[Array, "B S d"], angles: Angles, numerics: Numerics) -> Float[Array, "B S h"]:
        """The rows that `x` adds to the window, as its record's writer takes them."""
        return numerics.window_rows(self.head_dim).prepare(self.kv_row(x, angles, numerics))

    def __call__(
        self, x: Float[Array, "B S d"], step: Step, state: AttentionState, numerics: Numerics, tap: Tap | None = None
    ) -> tuple[Float[Array, "B S d"], AttentionState]:
        """The layer's output, and the state with this layer's rows written and its selection made."""
        angles = self.angles(step.positions)
        q_latent, q = self.query(x, angles, numerics)
        rows = self.window_rows(x, angles, numerics)
        if tap is not None:
            tap("window_kv", rows)
        recent, window = self.extend_window(state.window, rows, step, numerics)
        caches, slots = (recent,), (step.ring.seen,)
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
                    tap("candidates", context.candidate_blocks(selected.candidates, source.index_keys.page_size))
            caches += (source.compressed,)
            slots += (selected.slots,)
        y = self.attend(q, caches, slots, step.block_table, angles, numerics, tap)
        return y, AttentionState(window, sources, selected)

    def extend_source(
        self, x: Float[Array, "B S d"], step: Step, source: SourceCache, numerics: Numerics, tap: Tap | None = None
    ) -> SourceCache:
        """Appends the groups that end in this step: index keys first, from the latent before its rotation."""
        latent, groups, tail = self.compressor(x, source.tail, step, numerics)
        angles = self.angles(groups * self.role.ratio)
        keys = self.indexer.keys(latent, angles, numerics)
        rows = numerics.compressed_rows(self.head_dim).prepare(apply_rope(latent, angles, numerics))
        slots = context.slots(groups[..., None], step.block_table, source.compressed.page_size).reshape(-1)
        if tap is not None:
            tap("latent", latent)
            tap("groups", groups)
        return SourceCache(
            compressed=source.compressed.scatter(slots, flatten_rows(rows)),
            index_keys=source.index_keys.scatter(slots, flatten_rows(keys)),
            tail=tail,
        )


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
    score = context.scores(
        q, keys, weights,
        context_lens=step.visible(ratio), block_table=step.block_table, rounding=numerics.score_rounding,
    )  # fmt: skip
    tap("index_score", score)
