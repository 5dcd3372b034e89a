"""What a layer writes to its caches: rows and index keys, from the result of their norm to their bytes in a page."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels import checks, dispatch
from pallas_kernels.records import PagedRows

PAIRS = ("interleaved", "half_split")
QUERY_FORMATS = ("fp8", "mxfp4")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotation:
    """A rotary embedding of rows: cosines and sines [rows, half] of their positions, and which values are a pair.

    pairs: "interleaved", (2i, 2i + 1) of the last 2 * half values (keys and values of all families, index keys of V4
    and V4.1), or "half_split", (i, i + half) of the first 2 * half values (index queries and keys of V3.2).
    """

    cos: Any
    sin: Any
    pairs: str = dataclasses.field(default="interleaved", metadata={"static": True})

    def __post_init__(self):
        if self.pairs not in PAIRS:
            raise ValueError(f"pairs={self.pairs!r} is not known. Allowed: {', '.join(PAIRS)}.")


def write_rows(
    cache: PagedRows,
    slots: Int32[Array, " M"],
    x: Float[Array, "M width"],
    *,
    rotation: Rotation | None = None,
    hadamard: bool = False,
    rounding: Any = jnp.bfloat16,
    implementation: str | None = None,
) -> PagedRows:
    """The cache with rows `x` (after their norm) rotated, quantised as its format says, and stored at `slots`.

    A slot below 0 or beyond the last page writes nothing; slots that do write must differ from one another. The
    rotation is float32; `hadamard` then multiplies a row by a Hadamard matrix over sqrt(width) (width a power of two);
    each result is rounded to `rounding` (None: not at all), because that is what the quantisers of the released models
    see. Padding within a record is 0, bytes between records stay. Under jit with a donated cache the pages are written
    in place. A NaN makes the scale of its group NaN (E8M0 byte 255); outside jit, a row with one is an error unless
    its slot writes nothing. Source: the cache formats of FlashMLA and DeepGEMM, the quantisers of DeepSeek's code.
    """
    sizes = {"width": cache.format.width}
    checks.shape("x", x, "M width", sizes)
    checks.shape("slots", slots, "M", sizes)
    checks.integer("slots", slots)
    _check_rotation(rotation, sizes["M"], sizes["width"])
    _check_hadamard(hadamard, sizes["width"])
    if not isinstance(x, jax.core.Tracer) and not isinstance(slots, jax.core.Tracer):
        bad = jnp.isnan(x).any(axis=1) & (slots >= 0) & (slots < cache.num_slots)
        if bad.any():
            raise ValueError(
                f"x has a NaN in row {int(jnp.argmax(bad))}, which slot {int(slots[jnp.argmax(bad)])} would keep; give "
                "finite rows, or slot -1 for rows that only fill up a batch."
            )
    return dispatch.call(
        __name__, "write_rows", implementation, cache, slots, x, rotation=rotation, hadamard=hadamard, rounding=rounding
    )


def quantize_index_queries(
    q: Float[Array, "M H D"],
    weights: Float32[Array, "M H"],
    *,
    rotation: Rotation | None = None,
    hadamard: bool = False,
    format: str = "fp8",
    rounding: Any = jnp.bfloat16,
    implementation: str | None = None,
) -> tuple[Shaped[Array, "M H stored"], Shaped[Array, "M H _"] | None, Float32[Array, "M H"]]:
    """Index queries rotated and quantised like index keys, with what the scores need of their scales.

    Returns (values, scales, weights). format "fp8": float8_e4m3fn [M, H, D] under one power-of-two scale a head, which
    is multiplied into `weights`; scales is None. "mxfp4": packed uint8 [M, H, D / 2], E8M0 exponents uint8
    [M, H, D / 32], and weights as they came. rotation, hadamard, rounding as in `write_rows`.
    """
    sizes = {}
    checks.shape("q", q, "M H D", sizes)
    checks.floating("q", q)
    checks.shape("weights", weights, "M H", sizes)
    if format not in QUERY_FORMATS:
        raise ValueError(f"format={format!r} is not known. Allowed: {', '.join(QUERY_FORMATS)}.")
    if format == "mxfp4" and sizes["D"] % 32:
        raise ValueError(f"q has D={sizes['D']}; MXFP4 has a scale for every 32 values, so D must be a multiple of 32.")
    _check_rotation(rotation, sizes["M"], sizes["D"])
    _check_hadamard(hadamard, sizes["D"])
    return dispatch.call(
        __name__, "quantize_index_queries", implementation, q, weights, rotation=rotation, hadamard=hadamard,
        format=format, rounding=rounding,
    )  # fmt: skip


def _check_rotation(rotation, rows, width):
    if rotation is None:
        return
    sizes = {"rows": rows}
    checks.shape("rotation.cos", rotation.cos, "rows half", sizes)
    checks.shape("rotation.sin", rotation.sin, "rows half", sizes)
    if 2 * sizes["half"] > width:
        raise ValueError(f"rotation turns {2 * sizes['half']} values, and a row has {width}.")


def _check_hadamard(hadamard, width):
    if hadamard and width & (width - 1):
        raise ValueError(f"hadamard=True for rows of {width} values; their width must be a power of two.")
