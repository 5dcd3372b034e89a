"""Engram: n-gram hashes look up rows of a large table, and a gate decides per copy of the stream how much enters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from dsa_jax import ops, ranks
from dsa_jax.config import V41Config
from dsa_jax.layers.linear import QuantizedLinear
from dsa_jax.layers.norm import inverse_rms
from dsa_jax.numerics import Numerics, f32

SCALE_BLOCK = (1, 32)


class Table(nnx.Module):
    """FP8 rows [N, w] with one scale per 32 columns [N, w/32]; only the rows asked for are dequantised."""

    def __init__(self, rows: int, width: int):
        self.weight = nnx.Param(jnp.zeros((rows, width), jnp.float8_e4m3fn))
        self.scale = nnx.Param(jnp.zeros((rows, width // SCALE_BLOCK[1]), jnp.uint8))

    def __call__(self, row_ids: Int32[Array, "*rows n"], numerics: Numerics) -> Float[Array, "*rows n w"]:
        row_ids = ranks.own(row_ids, "table_rows", len(self.weight[...]))
        weight = ops.gather_rows(self.weight[...], row_ids)
        scale = ops.gather_rows(self.scale[...], row_ids)
        # Rows of other devices are zeros here, so their sum is the row.
        return ranks.total(ops.dequantize_weight(weight, scale, SCALE_BLOCK, numerics.dtype), "table_rows")


@dataclasses.dataclass(frozen=True, eq=False)
class HostRows:
    """A table on the host: weight float8_e4m3fn [N, w] and scale [N, w/32], such as views of mapped files."""

    weight: np.ndarray
    scale: np.ndarray

    def take(self, row_ids: Int32[Array, "*rows"]) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of the rows, and their scales; zeros for a row that the table does not have."""
        ids = np.asarray(row_ids)
        inside = ((ids >= 0) & (ids < len(self.weight)))[..., None]
        ids = np.where(inside[..., 0], ids, 0)
        return np.where(inside, self.weight.view(np.uint8)[ids], 0), np.where(inside, self.scale[ids], 0)


class HostTable(nnx.Module):
    """A `Table` that stays on the host: a step fetches the rows that its tokens need. The same results, bit for bit.

    It has no parameters. Every device fetches its rows itself, so that nothing is exchanged.
    """

    def __init__(self, weight: np.ndarray, scale: np.ndarray):
        self.rows = HostRows(weight, scale)

    def __call__(self, row_ids: Int32[Array, "*rows n"], numerics: Numerics) -> Float[Array, "*rows n w"]:
        rows = self.rows
        kinds = (
            jax.ShapeDtypeStruct((*row_ids.shape, rows.weight.shape[1]), jnp.uint8),
            jax.ShapeDtypeStruct((*row_ids.shape, rows.scale.shape[1]), rows.scale.dtype),
        )
        weight, scale = jax.pure_callback(rows.take, kinds, row_ids)
        weight = lax.bitcast_convert_type(weight, jnp.float8_e4m3fn)
        return ops.dequantize_weight(weight, scale, SCALE_BLOCK, numerics.dtype)


class Engram(nnx.Module):
    """Adds gate · value to every copy of the stream (spec deepseek-v41 section 9.3)."""

    def __init__(self, config: V41Config, table_rows: int):
        self.eps = config.rms_norm_eps
        copies, width = config.hc_mult, config.hidden_size
        looked_up = (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim
        self.embed = Table(table_rows, config.engram_head_dim)
        self.wkv = QuantizedLinear((copies + 1) * width, looked_up, config.weight_block_size)
        self.q_weight = nnx.Param(jnp.zeros((copies, width), jnp.bfloat16))
        self.k_weight = nnx.Param(jnp.zeros((copies, width), jnp.bfloat16))

    def __call__(
        self,
        stream: Float[Array, "*rows c d"],
        row_ids: Int32[Array, "*rows n"],
        is_image: Bool[Array, "*rows"] | None,
        numerics: Numerics,
    ) -> Float[Array, "*rows c d"]:
        """The gate is 0 on image positions. Everything after the projection is float32, rounded once."""
        rows = self.embed(row_ids, numerics)
        kv = self.wkv(rows.reshape(*row_ids.shape[:-1], -1), numerics)
        return inject(stream, kv, self.q_weight[...], self.k_weight[...], is_image, self.eps, numerics)


def inject(
    stream: Float[Array, "*rows c d"],
    kv: Float[Array, "*rows cd1"],
    q_weight: Float[Array, "c d"],
    k_weight: Float[Array, "c d"],
    is_image: Bool[Array, "*rows"] | None,
    eps: float,
    numerics: Numerics,
) -> Float[Array, "*rows c d"]:
    """stream + sigmoid(signed root of the normalised match of stream and key) · value."""
    *_, c, d = stream.shape
    h = f32(stream)
    key = f32(kv[..., : c * d]).reshape(*kv.shape[:-1], c, d)
    value = f32(kv[..., c * d :])
    scale = (inverse_rms(h, eps) * inverse_rms(key, eps))[..., 0]
    match = jnp.sum(h * (f32(q_weight) * f32(k_weight)) * key, axis=-1) * scale * jnp.float32(d) ** -0.5
    gate = jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(match), 1e-6)), match))
    if is_image is not None:
        gate = jnp.where(is_image[..., None], 0.0, gate)
    return numerics.round(h + gate[..., None] * value[..., None, :])
