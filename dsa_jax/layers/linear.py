"""Linear layers: weights as the checkpoint stores them, dequantised where they are used."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dsa_jax import ops, ranks
from dsa_jax.numerics import Numerics, matmul, matmul_f32


class Linear(nnx.Module):
    """An unquantised linear without bias: y = x · Wᵀ, rounded once. Weight bf16 [out, in]."""

    def __init__(self, out_features: int, in_features: int):
        self.weight = nnx.Param(jnp.zeros((out_features, in_features), jnp.bfloat16))

    def __call__(self, x: Float[Array, "*rows i"], numerics: Numerics) -> Float[Array, "*rows o"]:
        return numerics.round(matmul(x, self.weight[...].astype(x.dtype)))

    def in_float32(self, x: Float[Array, "*rows i"]) -> Float[Array, "*rows o"]:
        """The same product on float32 operands, result not rounded (routing, pooling, heads)."""
        return matmul_f32(x, self.weight[...])


class VocabularyLinear(Linear):
    """A linear with one output a token of the vocabulary, float32; on several devices each has some tokens' rows."""

    def __init__(self, tokens: int, in_features: int):
        super().__init__(tokens, in_features)
        self.tokens = tokens

    def in_float32(self, x: Float[Array, "*rows i"]) -> Float[Array, "*rows V"]:
        """Float32 logits of all tokens, on every device."""
        logits = super().in_float32(x)
        # Rows are filled up to a multiple of the devices.
        return ranks.joined(logits, "vocabulary", logits.ndim - 1)[..., : self.tokens]


class QuantizedLinear(nnx.Module):
    """An FP8 linear: weight E4M3 [out, in] with one scale per tile; the input is quantised to FP8 in groups as wide.

    Products of quantised values accumulate in float32 and are rounded once (spec deepseek-v41 section 3.4).
    summed_over: the logical axis that divides the inputs on several devices, whose products are added before rounding.
    """

    def __init__(self, out_features: int, in_features: int, block: tuple[int, int], summed_over: str | None = None):
        self.block, self.input_kind, self.summed_over = block, f"fp8_{block[1]}", summed_over
        tiles = (-(-out_features // block[0]), -(-in_features // block[1]))
        self.weight = nnx.Param(jnp.zeros((out_features, in_features), jnp.float8_e4m3fn))
        self.scale = nnx.Param(jnp.zeros(tiles, jnp.uint8))

    def dequantized(self, numerics: Numerics) -> Float[Array, "o i"]:
        """The weight in the result dtype."""
        return ops.dequantize_weight(self.weight[...], self.scale[...], self.block, numerics.dtype)

    def __call__(self, x: Float[Array, "*rows i"], numerics: Numerics) -> Float[Array, "*rows o"]:
        y = matmul(numerics.fake(x, self.input_kind), self.dequantized(numerics))
        return numerics.round(y if self.summed_over is None else ranks.total(y, self.summed_over))


class ExpertLinears(nnx.Module):
    """The same FP4 linear of every expert: packed weight uint8 [E, out, in/2], scales E8M0 [E, out, in/32].

    The input is quantised to FP8 in groups of `group`.
    """

    def __init__(self, experts: int, out_features: int, in_features: int, group: int = 32):
        self.out_features, self.in_features, self.input_kind = out_features, in_features, f"fp8_{group}"
        self.weight = nnx.Param(jnp.zeros((experts, out_features, in_features // 2), jnp.uint8))
        self.scale = nnx.Param(jnp.zeros((experts, out_features, in_features // 32), jnp.uint8))

    def one(self, expert: Array, x: Float[Array, "rows i"], numerics: Numerics) -> Float[Array, "rows o"]:
        """The linear of one expert (a traced index): only its weight is dequantised."""
        weight, scale = self.weight[...][expert], self.scale[...][expert]
        dense = ops.dequantize_fp4_by_parity(weight, scale, numerics.dtype)
        return numerics.round(matmul(ops.by_parity(numerics.fake(x, self.input_kind)), dense))
