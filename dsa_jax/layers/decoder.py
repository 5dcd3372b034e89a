"""One decoder layer: attention and experts between hyper-connections."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from dsa_jax.config import SharedKVConfig, V41Config
from dsa_jax.layer_plan import LayerRole
from dsa_jax.layers.attention import Attention
from dsa_jax.layers.hyper_connections import Mixes, collapse, expand, mixes
from dsa_jax.layers.moe import MoE
from dsa_jax.layers.norm import RMSNorm
from dsa_jax.numerics import Numerics
from dsa_jax.tap import Tap

State = TypeVar("State")


class MixedLayer(nnx.Module):
    """The norms of a layer's two sub-layers, and the hyper-connections around them."""

    def __init__(self, config: SharedKVConfig):
        self.iterations, self.hc_eps, self.eps = config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
        copies, width = config.hc_mult, config.hidden_size
        n = 2 * copies + copies * copies
        self.attn_norm = RMSNorm(width, self.eps)
        self.ffn_norm = RMSNorm(width, self.eps)
        self.hc_attn_fn = nnx.Param(jnp.zeros((n, copies * width), jnp.float32))
        self.hc_attn_base = nnx.Param(jnp.zeros((n,), jnp.float32))
        self.hc_attn_scale = nnx.Param(jnp.zeros((3,), jnp.float32))
        self.hc_ffn_fn = nnx.Param(jnp.zeros((n, copies * width), jnp.float32))
        self.hc_ffn_base = nnx.Param(jnp.zeros((n,), jnp.float32))
        self.hc_ffn_scale = nnx.Param(jnp.zeros((3,), jnp.float32))

    def attention_mixes(self, stream: Float[Array, "*rows c d"]) -> Mixes:
        """The mixes that come from the stream in front of attention."""
        return self._mixes(stream, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base)

    def feed_forward_mixes(self, stream: Float[Array, "*rows c d"]) -> Mixes:
        """The mixes that come from the stream in front of the experts."""
        return self._mixes(stream, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base)

    def _mixes(self, stream: Float[Array, "*rows c d"], fn: nnx.Param, scale: nnx.Param, base: nnx.Param) -> Mixes:
        return mixes(
            stream, fn[...], scale[...], base[...], iterations=self.iterations, eps=self.hc_eps, norm_eps=self.eps
        )


class Block(MixedLayer):
    """A layer over the copied stream. The mix that a sub-layer reads with comes from the sub-layer before it."""

    def __init__(self, config: V41Config, role: LayerRole, experts: int, experts_per_token: int):
        super().__init__(config)
        self.attn = Attention(config, role)
        self.ffn = MoE(config, experts, experts_per_token)

    def __call__(
        self,
        stream: Float[Array, "B S c d"],
        mix: Float[Array, "B S c"],
        attend: Callable[[Float[Array, "B S d"]], tuple[Float[Array, "B S d"], State]],
        valid: Bool[Array, "B S"],
        is_image: Bool[Array, "B S"] | None,
        numerics: Numerics,
        tap: Tap | None = None,
    ) -> tuple[Float[Array, "B S c d"], Float[Array, "B S c"], State]:
        """The stream after the layer, the mix for the next one, and the state that attention returned.

        `attend` is the layer's attention at this step: it takes the normalised input and returns its output and a state.
        """
        next_mix, post, comb = self.attention_mixes(stream)
        y, state = attend(self.attn_norm(collapse(stream, mix, numerics), numerics))
        if tap is not None:
            tap("attn_out", y)
        stream = expand(y, stream, post, comb, numerics)
        mix, (next_mix, post, comb) = next_mix, self.feed_forward_mixes(stream)
        with jax.named_scope("experts"):
            y = self.ffn(self.ffn_norm(collapse(stream, mix, numerics), numerics), valid, is_image, numerics, tap)
        stream = expand(y, stream, post, comb, numerics)
        if tap is not None:
            tap("ffn_out", y)
            tap("h", stream)
            tap("pre_mix", next_mix)
        return stream, next_mix, state
