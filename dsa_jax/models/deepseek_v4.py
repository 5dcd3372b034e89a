"""DeepSeek-V4's language model: embed, layers by plan, head; and what drafts, an MTP layer or DSpark's stages."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from dsa_jax import ops
from dsa_jax.cache.state_v4 import MTPCache, V4Cache
from dsa_jax.config_v4 import V4Config
from dsa_jax.layer_plan_v4 import draft_plan, layer_plan
from dsa_jax.layers.draft import Draft, Embedding, draft, remember, tap_stream
from dsa_jax.layers.hyper_connections import start_stream
from dsa_jax.layers.linear import VocabularyLinear
from dsa_jax.layers.norm import RMSNorm
from dsa_jax.layers.self_mixed import MTPLayer, SelfMixedBlock, SelfMixedStage, StreamHead
from dsa_jax.numerics import Numerics
from dsa_jax.step import Step, flatten_rows, keep_recent
from dsa_jax.tap import Tap


class DeepseekV4(StreamHead):
    """The model. Parameter paths, joined by dots, are the checkpoint's tensor names (experts stacked)."""

    def __init__(self, config: V4Config):
        super().__init__(config)
        self.config, self.plan = config, layer_plan(config)
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List([SelfMixedBlock(config, role) for role in self.plan])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = VocabularyLinear(config.vocab_size, config.hidden_size)
        drafts = draft_plan(config)
        if config.dspark is None:
            self.mtp = nnx.List([MTPLayer(config, role) for role in drafts])
        else:
            self.mtp = nnx.List(
                [SelfMixedStage(config, role, first=role is drafts[0], last=role is drafts[-1]) for role in drafts]
            )

    def __call__(
        self,
        cache: V4Cache,
        tokens: Int32[Array, "B S"],
        count: Int32[Array, " B"],
        numerics: Numerics,
        image: None = None,
        tap: Tap | None = None,
    ) -> tuple[Float[Array, "B S d"], V4Cache]:
        """Processes count[b] tokens of each request after those that the cache holds. `image` is for other families.

        Returns the hidden rows before the final norm (`logits` takes the ones that are wanted) and the cache after.
        """
        window = (self.config.sliding_window, cache.layers[0].window.page_size)
        step = Step.of(cache.length, count, cache.block_table, tokens.shape[1], window)
        embedded = self.embed(tokens, numerics)
        stream, _ = start_stream(embedded, self.config.hc_mult)
        layers, taps = [], []
        for role, layer, own in zip(self.plan, self.layers, cache.layers, strict=True):
            layer_tap = None if tap is None else tap.within(f"layer{role.index}.")
            stream, own = layer(stream, tokens, step, own, numerics, layer_tap)
            layers.append(own)
            if role.draft_tap:
                taps.append(tap_stream(stream, numerics))
        h = self.read_stream(stream, numerics)
        mtp, draft_windows = cache.mtp, cache.draft_windows
        if taps:
            main_hidden = jnp.concatenate(taps, axis=-1)
            draft_windows = remember(self.mtp, draft_windows, main_hidden, step, numerics)
            if tap is not None:
                tap("main_hidden", main_hidden)
        elif self.mtp:
            mtp = self._remember(cache, step, stream, embedded, tokens, numerics, tap)
        if tap is not None:
            tap("final_hidden", h)
        return h, V4Cache(
            length=step.end,
            block_table=cache.block_table,
            layers=tuple(layers),
            mtp=mtp,
            draft_windows=draft_windows,
            page_tokens=cache.page_tokens,
        )

    def logits(self, h: Float[Array, "*rows d"], numerics: Numerics) -> Float[Array, "*rows V"]:
        """Float32 logits of hidden rows."""
        return self.head.in_float32(self.norm(h, numerics))

    def draft(self, cache: V4Cache, tokens: Int32[Array, " B"], numerics: Numerics) -> Draft:
        """Greedy drafts after `tokens`, which follow the tokens in the cache: one of an MTP layer (which needs a token in
        the cache), a block of DSpark's stages.

        The cache is not changed.
        """
        if self.config.dspark is not None:
            n = self.config.dspark.block_size
            step = Step.of(cache.length, jnp.full_like(cache.length, n), cache.block_table, n)
            return draft(
                self.mtp, cache.draft_windows, self.embed, self.head, step, tokens,
                self.config.dspark.noise_token_id, self.config.hc_mult, numerics,
            )  # fmt: skip
        (layer,) = self.mtp
        embedded = self.embed(tokens[:, None], numerics)
        step = self._mtp_step(cache, jnp.ones_like(cache.length), 1)
        h = layer.predict(waiting_stream(cache), embedded, tokens[:, None], step, cache.mtp.layer, numerics)
        logits = self.head.in_float32(h)
        best = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
        return Draft(jnp.stack([tokens, best], axis=1), logits, None)

    def _mtp_step(self, cache: V4Cache, count: Int32[Array, " B"], rows: int) -> Step:
        """The MTP layer's step: its rows stand one position before the tokens that complete them."""
        window = (self.config.sliding_window, cache.mtp.layer.window.page_size)
        return Step.of(cache.length - 1, count, cache.block_table, rows, window)

    def _remember(
        self,
        cache: V4Cache,
        step: Step,
        stream: Float[Array, "B S c d"],
        embedded: Float[Array, "B S d"],
        tokens: Int32[Array, "B S"],
        numerics: Numerics,
        tap: Tap | None,
    ) -> MTPCache:
        """The MTP layer's cache: this step's tokens complete the rows of the tokens one place before them.

        Row i of the layer's step stands at position length - 1 + i; before the first token that is -1, no row at all.
        """
        (layer,) = self.mtp
        before = jnp.concatenate([waiting_stream(cache), stream[:, :-1]], axis=1)
        own = self._mtp_step(cache, step.count, tokens.shape[1])
        if tap is not None:
            h = layer.predict(before, embedded, tokens, own, cache.mtp.layer, numerics)
            tap("mtp.logits", self.head.in_float32(h))
        window = layer.remember(before, embedded, own, cache.mtp.layer, numerics)
        return MTPCache(window, keep_recent(cache.mtp.stream, stream, step))


def waiting_stream(cache: V4Cache) -> Float[Array, "B 1 c d"]:
    """The stream at the last token of each request, of which the MTP layer makes a row once the next token is there."""
    ring, last = cache.mtp.stream, cache.length - 1
    requests, capacity = ring.shape[:2]
    slots = jnp.where(last < 0, -1, jnp.arange(requests, dtype=jnp.int32) * capacity + last % capacity)
    return ops.gather_rows(flatten_rows(ring), slots)[:, None]
