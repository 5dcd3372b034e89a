"""Float scales of weights as exponent bytes, where they are powers of two: what kernels multiply by."""

import functools
import logging
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from dsa_jax import sharding

log = logging.getLogger("dsa_jax")


def as_exponents(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """`arrays` (path -> parameter) with every float32 scale whose factors are all powers of two, 2^-127 to 2^127, as uint8 E8M0
    exponents of the same values, on the same devices.

    So it is in checkpoints whose scale_fmt is ue8m0. A scale with another factor stays float32, for which products have no
    kernel; one log line counts them. On a mesh of several processes all of them have to call it.
    """
    converted = {
        path: _converted(x.sharding)(x)
        for path, x in arrays.items()
        if path.endswith(".scale") and x.dtype == jnp.float32
    }
    exact = {path: exponents for path, (exponents, is_exact) in converted.items() if sharding.on_host(is_exact)}
    if len(exact) < len(converted):
        log.warning(
            "weights: %d of %d float scales have factors that are no powers of two; no kernel multiplies by their weights",
            len(converted) - len(exact), len(converted),
        )  # fmt: skip
    return {**arrays, **exact}


@functools.cache
def _converted(place: jax.sharding.Sharding):
    """The compiled conversion of a scale that lies so."""
    whole = sharding.everywhere(place.mesh) if isinstance(place, NamedSharding) else place
    return jax.jit(_exponents, out_shardings=(place, whole))


def _exponents(scale):
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    exponents = bits >> 23  # above 255 where the number is negative
    is_power = (bits & 0x7FFFFF == 0) & (exponents > 0) & (exponents < 255)
    return exponents.astype(jnp.uint8), jnp.all(is_power | (bits == 0x00400000))  # 2^-127 is subnormal: byte 0
