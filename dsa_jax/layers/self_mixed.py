"""A decoder layer whose sub-layers read the copied stream with mixes of their own (mHC without delay; spec deepseek-v4
section 4)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from dsa_jax.cache.state_v4 import LayerCache
from dsa_jax.config_v4 import V4Config
from dsa_jax.layer_plan_v4 import V4LayerRole
from dsa_jax.layers.decoder import MixedLayer
from dsa_jax.layers.draft import Attend, DraftHeads, Embedding
from dsa_jax.layers.hash_moe import HashMoE
from dsa_jax.layers.hybrid_attention import HybridAttention
from dsa_jax.layers.hyper_connections import collapse, expand, head_mix
from dsa_jax.layers.linear import QuantizedLinear, VocabularyLinear
from dsa_jax.layers.norm import RMSNorm
from dsa_jax.numerics import Numerics, f32
from dsa_jax.step import Step
from dsa_jax.tap import Tap


class SelfMixedBlock(MixedLayer):
    """Attention and experts, each between its own mixes."""

    def __init__(self, config: V4Config, role: V4LayerRole):
        super().__init__(config)
        self.attn = HybridAttention(config, role)
        self.ffn = HashMoE(config, hash_routed=role.hash_routed)

    def attention_input(
        self, stream: Float[Array, "B S c d"], numerics: Numerics
    ) -> tuple[Float[Array, "B S d"], Array, Array]:
        """What attention reads of the stream, normalised, and the mixes that its output is written with."""
        mix, post, comb = self.attention_mixes(stream)
        return self.attn_norm(collapse(stream, mix, numerics), numerics), post, comb

    def __call__(
        self,
        stream: Float[Array, "B S c d"],
        ids: Int32[Array, "B S"],
        step: Step,
        cache: LayerCache,
        numerics: Numerics,
        tap: Tap | None = None,
    ) -> tuple[Float[Array, "B S c d"], LayerCache]:
        """The stream after the layer, and the layer's caches after the step. `ids` are the tokens of the rows."""

        def attend(x):
            return self.attn(x, step, cache, numerics, tap)

        return self.around(attend, stream, ids, step, numerics, tap)

    def around(
        self,
        attend: Attend,
        stream: Float[Array, "B S c d"],
        ids: Int32[Array, "B S"],
        step: Step,
        numerics: Numerics,
        tap: Tap | None = None,
    ) -> tuple[Float[Array, "B S c d"], Any]:
        """The stream after the layer whose attention is `attend`, and the state that attention returned."""
        x, post, comb = self.attention_input(stream, numerics)
        y, state = attend(x)
        if tap is not None:
            tap("attn_out", y)
        stream = expand(y, stream, post, comb, numerics)
        mix, post, comb = self.feed_forward_mixes(stream)
        with jax.named_scope("experts"):
            y = self.ffn(self.ffn_norm(collapse(stream, mix, numerics), numerics), ids, step.valid, numerics, tap)
        stream = expand(y, stream, post, comb, numerics)
        if tap is not None:
            tap("ffn_out", y)
            tap("h", stream)
        return stream, state


class StreamHead(nnx.Module):
    """What reads the stream at the end with a mix of its own: float32 hc_head_fn [c, c·D], hc_head_base [c],
    hc_head_scale [1]. A base class, because the checkpoint keeps these beside the other tensors of whoever reads."""

    def __init__(self, config: V4Config):
        copies, self.head_eps, self.head_norm_eps = config.hc_mult, config.hc_eps, config.rms_norm_eps
        self.hc_head_fn = nnx.Param(jnp.zeros((copies, copies * config.hidden_size), jnp.float32))
        self.hc_head_base = nnx.Param(jnp.zeros((copies,), jnp.float32))
        self.hc_head_scale = nnx.Param(jnp.zeros((1,), jnp.float32))

    def read_stream(self, stream: Float[Array, "*rows c d"], numerics: Numerics) -> Float[Array, "*rows d"]:
        """The stream collapsed, rounded once; not normalised."""
        mix = head_mix(
            stream, self.hc_head_fn[...], self.hc_head_scale[...], self.hc_head_base[...],
            eps=self.head_eps, norm_eps=self.head_norm_eps,
        )  # fmt: skip
        return collapse(stream, mix, numerics)


class MTPLayer(SelfMixedBlock, StreamHead):
    """The multi-token-prediction layer: at each token, from the stream there and the token after it, the one after that.

    Window only. Embedding and LM head are the model's; mix, norm and rotation are its own (spec deepseek-v4 section 9).
    """

    def __init__(self, config: V4Config, role: V4LayerRole):
        SelfMixedBlock.__init__(self, config, role)
        StreamHead.__init__(self, config)
        width, eps, block = config.hidden_size, config.rms_norm_eps, config.weight_block_size
        self.e_proj = QuantizedLinear(width, width, block)
        self.h_proj = QuantizedLinear(width, width, block)
        self.enorm = RMSNorm(width, eps)
        self.hnorm = RMSNorm(width, eps)
        self.norm = RMSNorm(width, eps)

    def start(
        self, stream: Float[Array, "B S c d"], embedded: Float[Array, "B S d"], numerics: Numerics
    ) -> Float[Array, "B S c d"]:
        """The layer's own stream, from the model's at each token and the embedding of the token after it."""
        e = self.e_proj(self.enorm(embedded, numerics), numerics)
        h = self.h_proj(self.hnorm(stream, numerics), numerics)
        return numerics.round(f32(e)[..., None, :] + f32(h))

    def remember(
        self,
        stream: Float[Array, "B S c d"],
        embedded: Float[Array, "B S d"],
        step: Step,
        cache: LayerCache,
        numerics: Numerics,
    ) -> LayerCache:
        """The layer's window with the rows of this step, without the rest of the layer."""
        x, _, _ = self.attention_input(self.start(stream, embedded, numerics), numerics)
        rows = self.attn.window_rows(x, self.attn.angles(step.positions), numerics)
        _, window = self.attn.extend_window(cache.window, rows, step, numerics)
        return LayerCache(window, None, None)

    def predict(
        self,
        stream: Float[Array, "B S c d"],
        embedded: Float[Array, "B S d"],
        ids: Int32[Array, "B S"],
        step: Step,
        cache: LayerCache,
        numerics: Numerics,
    ) -> Float[Array, "B S d"]:
        """Rows for the LM head, normalised. `ids` are the tokens after the rows', which `embedded` holds."""
        x, _ = self(self.start(stream, embedded, numerics), ids, step, cache, numerics)
        return self.norm(self.read_stream(x, numerics), numerics)


class MarkovTables(nnx.Module):
    """`draft.MarkovHead` under the names of this family's checkpoints: markov_w1 bf16 [V, rank], markov_w2 bf16 [V, rank]."""

    def __init__(self, vocab: int, rank: int):
        self.markov_w1 = Embedding(vocab, rank)
        self.markov_w2 = VocabularyLinear(vocab, rank)

    def row(self, ids: Int32[Array, "*rows"], numerics: Numerics) -> Float[Array, "*rows r"]:
        """What is known of the token before."""
        return self.markov_w1(ids, numerics)

    def logits(self, row: Float[Array, "*rows r"]) -> Float[Array, "*rows V"]:
        """Float32 logits of a row."""
        return self.markov_w2.in_float32(row)


class SelfMixedStage(SelfMixedBlock, StreamHead, DraftHeads):
    """A DSpark stage whose block mixes for itself; the last stage reads the stream by a mix of its own.

    Window only, all experts, chosen by score (spec deepseek-v4 section 9).
    """

    def __init__(self, config: V4Config, role: V4LayerRole, *, first: bool, last: bool):
        SelfMixedBlock.__init__(self, config, role)
        if last:
            StreamHead.__init__(self, config)
        rank, taps = config.dspark.markov_rank, len(config.dspark.target_layer_ids)
        DraftHeads.__init__(
            self, config, taps, MarkovTables(config.vocab_size, rank), rank, first=first, last=last
        )

    def run(
        self, stream: Float[Array, "B S c d"], mix: Float[Array, "B S c"], attend: Attend, step: Step, numerics: Numerics
    ) -> tuple[Float[Array, "B S c d"], Float[Array, "B S c"]]:
        """The stream after the stage; the mix is not used. The gate goes by score, so that the rows need no token ids."""
        stream, _ = self.around(attend, stream, jnp.zeros_like(step.positions), step, numerics)
        return stream, mix

    def read(
        self, stream: Float[Array, "B S c d"], mix: Float[Array, "B S c"], numerics: Numerics
    ) -> Float[Array, "B S d"]:
        """The stream collapsed by the head's own mix."""
        return self.read_stream(stream, numerics)
