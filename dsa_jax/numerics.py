"""The three numerics modes, chosen once and passed down.

========  ==============  ==========================================================================
mode      results         activation and cache quantisers
========  ==============  ==========================================================================
``f32``   float32         off: the mathematics of the model, to test against first
``f32q``  float32         on: what quantisation alone does
``bf16``  bfloat16        on: as released, every result rounded where the reference rounds it
========  ==============  ==========================================================================

Products accumulate in float32 in every mode. Weights are the checkpoint's own in every mode: quantised weights are
dequantised exactly, and FP8 or FP4 linears quantise their input only where the quantisers are on.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dsa_jax import ops


@dataclass(frozen=True)
class CacheRows:
    """How one kind of cache row is stored: a record format, and the quantiser to apply where the format has none.

    The quantiser leaves the last `rotated` dims as they are.
    """

    format: ops.RecordFormat
    fake: str | None
    rotated: int = 0

    def prepare(self, x: Array) -> Array:
        """The values of `x` as attention will see them, or `x` itself where the record's writer quantises it."""
        if self.fake is None:
            return x
        plain = x.shape[-1] - self.rotated
        return jnp.concatenate([ops.fake_quantize(x[..., :plain], self.fake), x[..., plain:]], axis=-1)


@dataclass(frozen=True)
class Numerics:
    """One numerics mode. `dtype` is the dtype of results; `quantize` turns on the activation and cache quantisers."""

    mode: str
    dtype: jnp.dtype
    quantize: bool

    def round(self, x: Array) -> Array:
        """`x` in the result dtype: where the reference rounds a result, so does this."""
        if self.dtype == jnp.bfloat16 and x.dtype == jnp.float32:
            # XLA drops a cast to bfloat16 that is followed by one back to float32; this it keeps.
            x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return x.astype(self.dtype)

    def fake(self, x: Array, kind: str) -> Array:
        """Quantise and dequantise `x` where quantisers are on."""
        return ops.fake_quantize(x, kind) if self.quantize else x

    @property
    def score_rounding(self) -> jnp.dtype | None:
        """The dtype that index scores are rounded to between their steps; None keeps float32."""
        return self.dtype if self.dtype == jnp.bfloat16 else None

    def _rows(self, width: int, record: type, kind: str) -> CacheRows:
        if self.dtype == jnp.bfloat16:
            return CacheRows(record(width), None)
        return CacheRows(ops.Plain(width, self.dtype), kind if self.quantize else None)

    def window_rows(self, width: int) -> CacheRows:
        """Window KV: FP8 in groups of 32 over all dims, 528 bytes at width 512."""
        return self._rows(width, ops.V41MXFP8, "fp8_32")

    def compressed_rows(self, width: int) -> CacheRows:
        """Compressed KV: FP4 in groups of 16 with E4M3 scales, 288 bytes at width 512."""
        return self._rows(width, ops.V41NVFP4, "nvfp4_16")

    def partly_rotated_rows(self, width: int, rotated: int) -> CacheRows:
        """Window and compressed KV of V4: FP8 in groups of 64, the last `rotated` dims bf16; 584 bytes at width 512.

        The record keeps what the quantiser gives to the bit: FP8 times a power of two is exact in bf16.
        """
        if self.dtype == jnp.bfloat16:
            return CacheRows(ops.Model1(width, rotated), None)
        return CacheRows(ops.Plain(width, self.dtype), "fp8_64" if self.quantize else None, rotated)

    def index_key_rows(self, width: int) -> CacheRows:
        """Index keys: FP4 in groups of 32 with power-of-two scales, 68 bytes at width 128."""
        return self._rows(width, ops.IndexMXFP4, "mxfp4_32")


F32 = Numerics("f32", jnp.dtype(jnp.float32), quantize=False)
F32Q = Numerics("f32q", jnp.dtype(jnp.float32), quantize=True)
BF16 = Numerics("bf16", jnp.dtype(jnp.bfloat16), quantize=True)
MODES = {n.mode: n for n in (F32, F32Q, BF16)}


def numerics(mode: str) -> Numerics:
    """The mode of that name. ValueError for a name that is not one."""
    if mode not in MODES:
        raise ValueError(f"The numerics mode {mode!r} is not known. Allowed: {', '.join(MODES)}.")
    return MODES[mode]


def matmul(x: Float[Array, "*rows i"], weight: Float[Array, "o i"]) -> Float[Array, "*rows o"]:
    """x · weightᵀ, accumulated and returned in float32, never through a shorter format (no TF32)."""
    return lax.dot_general(
        x, weight, (((x.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
    )  # fmt: skip


def matmul_f32(x: Float[Array, "*rows i"], weight: Float[Array, "o i"]) -> Float[Array, "*rows o"]:
    """`matmul` of the operands in float32. bf16 ones are multiplied as they are: the products are exact in float32 either
    way, and no float32 copy of the weight is made."""
    if x.dtype == weight.dtype == jnp.bfloat16:
        return matmul(x, weight)
    return matmul(f32(x), f32(weight))


def f32(x: Array) -> Array:
    """`x` in float32."""
    return jnp.asarray(x).astype(jnp.float32)


jax.tree_util.register_static(Numerics)
