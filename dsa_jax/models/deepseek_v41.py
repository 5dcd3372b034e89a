"""DeepSeek-V4.1's language model: embed, layers by plan, head."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.cache.state import NO_TOKEN
from dsa_jax.config import V41Config
from dsa_jax.layer_plan import LayerRole, draft_plan, layer_plan
from dsa_jax.layers.attention import AttentionState
from dsa_jax.layers.decoder import Block
from dsa_jax.layers.draft import Draft, DraftStage, Embedding, draft, remember, tap_stream
from dsa_jax.layers.engram import Engram
from dsa_jax.layers.engram_hash import EngramHash, hash_rows
from dsa_jax.layers.hyper_connections import collapse, start_stream
from dsa_jax.layers.linear import VocabularyLinear
from dsa_jax.layers.norm import RMSNorm
from dsa_jax.numerics import Numerics
from dsa_jax.pytree import Leaf
from dsa_jax.step import Step, keep_recent, with_recent
from dsa_jax.tap import Tap


class Layer(Block):
    """A backbone layer: a block, and the Engram in front of it where the plan has one."""

    def __init__(self, config: V41Config, role: LayerRole):
        super().__init__(config, role, config.n_routed_experts, config.num_experts_per_tok)
        if role.engram:
            rows = config.engram_num_embeddings[config.engram_layer_ids.index(role.index)]
            self.engram = Engram(config, rows)


class Buffer(nnx.Variable):
    """An array that the model needs and the checkpoint's tensors do not hold."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ImageRows:
    """Embeddings that replace those of image positions: embeddings float32 [B, S, D] where is_image, bool [B, S]."""

    embeddings: Leaf
    is_image: Leaf


class DeepseekV41(nnx.Module):
    """The model. Parameter paths, joined by dots, are the checkpoint's tensor names (experts stacked).

    `token_map` holds the tokenizer's compressed token ids, int32 [V], for the Engram hashes.
    """

    def __init__(self, config: V41Config):
        self.config, self.plan = config, layer_plan(config)
        self.hashes = EngramHash.from_config(config)
        width = config.hidden_size
        self.token_map = Buffer(jnp.zeros((config.vocab_size,), jnp.int32))
        self.embed = Embedding(config.vocab_size, width)
        self.layers = nnx.List([Layer(config, role) for role in self.plan])
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.head = VocabularyLinear(config.vocab_size, width)
        self.image_start = nnx.Param(jnp.zeros((width,), jnp.bfloat16))
        self.image_newline = nnx.Param(jnp.zeros((width,), jnp.bfloat16))
        self.image_end = nnx.Param(jnp.zeros((width,), jnp.bfloat16))
        stages = draft_plan(config)
        self.mtp = nnx.List(
            [DraftStage(config, role, first=role is stages[0], last=role is stages[-1]) for role in stages]
        )

    def __call__(
        self,
        cache: Cache,
        tokens: Int32[Array, "B S"],
        count: Int32[Array, " B"],
        numerics: Numerics,
        image: ImageRows | None = None,
        tap: Tap | None = None,
    ) -> tuple[Float[Array, "B S d"], Cache]:
        """Processes count[b] tokens of each request after those that the cache holds.

        Returns the hidden rows before the final norm (`logits` takes the ones that are wanted) and the cache after.
        """
        window = (self.config.sliding_window, cache.windows[0].page_size)
        step = Step.of(cache.length, count, cache.block_table, tokens.shape[1], window)
        is_image = None if image is None else image.is_image
        x = self.embed(tokens, numerics)
        if image is not None:
            x = jnp.where(is_image[..., None], numerics.round(image.embeddings), x)
        compressed_ids = jnp.where(step.valid, ops.gather_rows(self.token_map[...], tokens), NO_TOKEN)
        if image is not None:
            compressed_ids = jnp.where(is_image, NO_TOKEN, compressed_ids)
        context = self._ngram_context(cache.engram_ids, compressed_ids, step)

        stream, mix = start_stream(x, self.config.hc_mult)
        windows, sources, selected, taps = list(cache.windows), cache.sources, None, []
        for role, layer in zip(self.plan, self.layers, strict=True):
            layer_tap = None if tap is None else tap.within(f"layer{role.index}.")
            if role.engram:
                rows = hash_rows(self.hashes.of_layer(role.index), context)
                stream = layer.engram(stream, rows, is_image, numerics)
                if tap is not None:
                    layer_tap("engram_hash_ids", rows)
                    layer_tap("engram_out", stream)
            if role.draft_tap:
                taps.append(tap_stream(stream, numerics))
            state = AttentionState(windows[role.index], sources, selected)

            def attend(y, layer=layer, state=state, layer_tap=layer_tap):
                return layer.attn(y, step, state, numerics, layer_tap)

            stream, mix, state = layer(stream, mix, attend, step.valid, is_image, numerics, layer_tap)
            windows[role.index], sources, selected = state.window, state.sources, state.selected
        h = collapse(stream, mix, numerics)
        draft_windows = cache.draft_windows
        if self.mtp:
            main_hidden = jnp.concatenate(taps, axis=-1)
            draft_windows = remember(self.mtp, draft_windows, main_hidden, step, numerics)
            if tap is not None:
                tap("main_hidden", main_hidden)
        if tap is not None:
            tap("final_hidden", h)
        return h, Cache(
            length=step.end,
            block_table=cache.block_table,
            windows=tuple(windows),
            sources=sources,
            engram_ids=keep_recent(cache.engram_ids, compressed_ids, step),
            draft_windows=draft_windows,
            page_tokens=cache.page_tokens,
        )

    def logits(self, h: Float[Array, "*rows d"], numerics: Numerics) -> Float[Array, "*rows V"]:
        """Float32 logits of hidden rows."""
        return self.head.in_float32(self.norm(h, numerics))

    def draft(self, cache: Cache, tokens: Int32[Array, " B"], numerics: Numerics) -> Draft:
        """Greedy drafts after `tokens`, which follow the tokens in the cache. The cache is not changed."""
        n = self.config.dspark_block_size
        step = Step.of(cache.length, jnp.full_like(cache.length, n), cache.block_table, n)
        return draft(
            self.mtp, cache.draft_windows, self.embed, self.head, step, tokens,
            self.config.dspark_noise_token_id, self.config.hc_mult, numerics,
        )  # fmt: skip

    def _ngram_context(
        self, ring: Int32[Array, "B n"], ids: Int32[Array, "B S"], step: Step
    ) -> Int32[Array, "B S places"]:
        """Compressed ids of each token and the ones before it; from the first cut on, the pad's id."""
        places = self.config.engram_max_ngram_size
        positions = step.positions[..., None] - jnp.arange(places, dtype=jnp.int32)
        index = step.recent(jnp.where(step.valid[..., None], positions, -1), ring.shape[1])
        found = jnp.where(index < 0, NO_TOKEN, ops.gather_rows(with_recent(ring, ids), index))
        pad = self.token_map[...][self.config.engram_pad_token_id]
        return jnp.where(jnp.cumprod(found != NO_TOKEN, axis=-1) > 0, found, pad)
