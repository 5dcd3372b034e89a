"""Choosing the next token: greedy, temperature, top-p, top-k, with a key of its own for every request."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from dsa_jax.pytree import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """How each of B requests samples: arrays, so that changing a value compiles nothing.

    temperature: float32 [B], 0 is greedy. top_k: int32 [B], 0 keeps all tokens. top_p: float32 [B], 1 keeps all.
    key: [B] typed PRNG keys. is_greedy: all temperatures are known to be 0; a compiled function for such has nothing of
    drawing in it, and is another than that for the rest.
    """

    temperature: Leaf
    top_k: Leaf
    top_p: Leaf
    key: Leaf
    is_greedy: bool = field(default=False, metadata={"static": True})

    @classmethod
    def of(
        cls,
        requests: int,
        *,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        seed: int | Sequence[int] = 0,
    ) -> "Sampling":
        """One value for all requests, or one each. A single seed gives request b the seed + b.

        ValueError for a negative temperature or top_k, a top_p outside (0, 1], or a wrong number of values.
        """
        values = {}
        for name, value, dtype in (
            ("temperature", temperature, np.float32),
            ("top_k", top_k, np.int32),
            ("top_p", top_p, np.float32),
            ("seed", [seed + b for b in range(requests)] if isinstance(seed, int) else seed, np.uint32),
        ):
            array = np.asarray(value, dtype)
            if array.shape not in ((), (requests,)):
                raise ValueError(f"{name} has shape {array.shape}; give one value, or one for each of {requests} requests.")
            values[name] = np.broadcast_to(array, (requests,))
        if not (values["temperature"] >= 0).all() or not np.isfinite(values["temperature"]).all():
            raise ValueError(f"temperature={temperature} must be finite and at least 0 (0 is greedy).")
        if (values["top_k"] < 0).any():
            raise ValueError(f"top_k={top_k} must be at least 0 (0 keeps all tokens).")
        if not ((values["top_p"] > 0) & (values["top_p"] <= 1)).all():
            raise ValueError(f"top_p={top_p} must be above 0 and at most 1.")
        keys = jax.vmap(jax.random.key)(jnp.asarray(values["seed"]))
        arrays = (jnp.asarray(values[n]) for n in ("temperature", "top_k", "top_p"))
        return cls(*arrays, keys, is_greedy=not values["temperature"].any())


def repeated(sampling: Sampling, times: int) -> Sampling:
    """The sampling of [B · times] rows: `times` rows after one another of each request."""
    return jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), sampling)


def sample(logits: Float[Array, "B V"], sampling: Sampling, position: Int32[Array, " B"]) -> Int32[Array, " B"]:
    """The next token of each request, to stand at `position`.

    The noise depends on the request's key and on the position alone, so a request draws the same tokens alone, in a
    batch, and after a restart. Ties: the lower token id.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if sampling.is_greedy:
        return greedy
    return jnp.where(sampling.temperature > 0, _draw(logits, sampling, position), greedy)


def _draw(logits: Float[Array, "B V"], sampling: Sampling, position: Int32[Array, " B"]) -> Int32[Array, " B"]:
    scaled = logits / jnp.maximum(sampling.temperature, 1e-5)[:, None]
    keep = kept_tokens(scaled, sampling.top_k, sampling.top_p)
    noise = jax.vmap(lambda key, t, row: jax.random.gumbel(jax.random.fold_in(key, t), row.shape))(
        sampling.key, position, scaled
    )
    return jnp.argmax(jnp.where(keep, scaled + noise, -jnp.inf), axis=-1).astype(jnp.int32)


def kept_tokens(
    scaled: Float[Array, "B V"], top_k: Int32[Array, " B"], top_p: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """Tokens that may be drawn: among the top_k, and in the smallest set of likely tokens whose mass reaches top_p.

    The likeliest token is always kept; of equal ones, those with lower ids come first. Nothing is sorted: the last kept
    value is found two bits at a time, from how many tokens are likelier, and their mass.
    """
    value, probability = _ascending(scaled), jax.nn.softmax(scaled, axis=-1)
    most = jnp.where(top_k == 0, scaled.shape[-1], top_k)[:, None]
    mass = jnp.where(top_p >= 1, jnp.inf, top_p)[:, None]  # rounded sums of probabilities may be 1 before the last

    def likelier(*than: Array) -> list[tuple[Array, Array]]:
        """How many tokens have more than each of the given values, and their mass; all in one pass."""
        terms = []
        for bound in than:
            above = value > bound
            terms += [above.astype(jnp.int32), jnp.where(above, probability, 0)]
        zeros = [jnp.zeros((), term.dtype) for term in terms]
        sums = lax.reduce(terms, zeros, lambda x, y: [a + b for a, b in zip(x, y, strict=True)], (1,))
        sums = [found[:, None] for found in sums]
        return list(zip(sums[::2], sums[1::2], strict=True))

    def lower(i: Array, last: Array) -> Array:
        shift = jnp.uint32(30) - 2 * i.astype(jnp.uint32)
        found = likelier(*(last - (jnp.uint32(n) << shift) for n in (1, 2, 3)))
        kept = sum(((count < most) & (weight < mass)).astype(jnp.uint32) for count, weight in found)
        return last - (kept << shift)

    # A GPU's host starts a loop's rounds one by one; written out they are part of the graph that it starts.
    written_out = jax.default_backend() == "gpu"
    last = lax.fori_loop(0, 16, lower, jnp.full_like(value[:, :1], 0xFFFFFFFF), unroll=written_out)
    ((count, weight),) = likelier(last)
    is_last = value == last
    earlier = jnp.cumsum(is_last, axis=-1) - 1
    return (value > last) | (is_last & (count + earlier < most) & (weight + earlier * probability < mass))


def _ascending(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """uint32 numbers in the order of float32 ones; both zeros are one."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0, x).astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
