"""Linear layers: weights as the checkpoint stores them, dequantised by the operation that multiplies by them."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from dsa_jax import ops, ranks
from dsa_jax.layers.per_head import per_head
from dsa_jax.numerics import Numerics, matmul, matmul_f32

TILE_ROWS = (8, 128)
"""Fewest and most rows of a tile that is multiplied by a stored weight: a tensor core's, and a kernel's."""


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
        is_part = self.summed_over is not None and ranks.parts(self.summed_over) > 1
        x, out_dtype = numerics.fake(x, self.input_kind), jnp.float32 if is_part else numerics.dtype
        y = ops.quantized_matmul(x, self.weight[...], self.scale[...], block=self.block, out_dtype=out_dtype)
        return numerics.round(ranks.total(y, self.summed_over)) if is_part else y

    def both(
        self, other: "QuantizedLinear", x: Float[Array, "*rows i"], numerics: Numerics
    ) -> tuple[Float[Array, "*rows o"], Float[Array, "*rows o"]]:
        """(self(x), other(x)) by one operation: of two linears of one shape, whose inputs no other device has."""
        weights, scales = zip(*((each.weight[...], each.scale[...]) for each in (self, other)), strict=True)
        x = numerics.fake(x, self.input_kind)
        return ops.quantized_matmul(x, weights, scales, block=self.block, out_dtype=numerics.dtype)

    def per_group(self, x: Float[Array, "B S G i"], numerics: Numerics) -> Float[Array, "B S G _"]:
        """x[.., g, :] times group g of the outputs, of G equal groups; float32 sums, rounded once. x is not quantised."""
        (batch, count, groups, inputs), dtype = x.shape, numerics.dtype
        weight = self.weight[...].reshape(groups, -1, inputs)
        rows = batch * count
        if rows <= ops.MOST_DENSE_ROWS and weight.shape[1] % self.block[0] == 0:  # a group has whole tiles of scales
            scale = self.scale[...]
            scale = scale.reshape(groups, -1, scale.shape[-1])
            tile = tile_rows(rows)
            tiles = -(-rows // tile)
            options = dict(block=self.block, out_dtype=dtype)
            if ops.multiplies_stored(groups * tiles, tile, x.dtype, weight, scale, **options):
                x = jnp.moveaxis(x.reshape(rows, groups, inputs), 1, 0)
                x = jnp.pad(x, ((0, 0), (0, tiles * tile - rows), (0, 0))).reshape(groups * tiles, tile, inputs)
                of_tile = np.repeat(np.arange(groups, dtype=np.int32), tiles)
                y = ops.grouped_gemm(x, weight, scale, jnp.asarray(of_tile), **options)
                y = jnp.moveaxis(y.reshape(groups, tiles * tile, -1)[:, :rows], 0, 1)
                return y.reshape(batch, count, groups, -1)
        return per_head(x, self.dequantized(numerics).reshape(weight.shape), 2, numerics)


def tile_rows(rows: int) -> int:
    """The rows of a tile that is multiplied by stored weights, for about so many rows of a weight: a power of two."""
    fewest, most = TILE_ROWS
    return min(max(fewest, 1 << (rows - 1).bit_length()), most)


class ExpertLinears(nnx.Module):
    """The same FP4 linear of every expert: packed weight uint8 [E, out, in/2], scales E8M0 [E, out, in/32].

    The input is quantised to FP8 in groups of `group`.
    """

    block: tuple[int, int] | None = None

    def __init__(self, experts: int, out_features: int, in_features: int, group: int = 32):
        self.input_kind = f"fp8_{group}"
        self.weight = nnx.Param(jnp.zeros((experts, out_features, in_features // 2), jnp.uint8))
        self.scale = nnx.Param(jnp.zeros((experts, out_features, in_features // 32), jnp.uint8))

    def __call__(
        self, x: Float[Array, "tiles R i"], expert: Int32[Array, " tiles"], numerics: Numerics
    ) -> Float[Array, "tiles R o"]:
        """Tiles of rows that are `quantized`, each by the linear of its expert; 0 for those whose expert is none of 0..E-1."""
        options = dict(block=self.block, out_dtype=numerics.dtype)
        return ops.grouped_gemm(x, self.weight[...], self.scale[...], expert, **options)

    def both(
        self, other: "ExpertLinears", x: Float[Array, "tiles R i"], expert: Int32[Array, " tiles"], numerics: Numerics
    ) -> tuple[Float[Array, "tiles R o"], Float[Array, "tiles R o"]]:
        """(self(..), other(..)) by one operation: of two linears of one shape."""
        weights, scales = zip(*((each.weight[...], each.scale[...]) for each in (self, other)), strict=True)
        return ops.grouped_gemm(x, weights, scales, expert, block=self.block, out_dtype=numerics.dtype)

    def quantized(self, x: Float[Array, "*rows i"], numerics: Numerics) -> Float[Array, "*rows i"]:
        """The inputs as they are multiplied. Linears with the same inputs can share them."""
        return numerics.fake(x, self.input_kind)

    def multiplies_stored(self, tiles: int, rows: int, numerics: Numerics) -> bool:
        """Whether so many tiles of rows are multiplied without a dequantised weight in memory."""
        weight, scale = self.weight.get_value(), self.scale.get_value()  # which may be shapes alone
        options = dict(block=self.block, out_dtype=numerics.dtype)
        return ops.multiplies_stored(tiles, rows, numerics.dtype, weight, scale, **options)
