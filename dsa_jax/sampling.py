"""Choosing the next token: greedy, temperature, top-p, top-k, with a key of its own for every request."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from dsa_jax.pytree import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """How each of B requests samples: arrays, so that changing a value compiles nothing.

    temperature: float32 [B], 0 is greedy. top_k: int32 [B], 0 keeps all tokens. top_p: float32 [B], 1 keeps all.
    key: [B] typed PRNG keys.
    """

    temperature: Leaf
    top_k: Leaf
    top_p: Leaf
    key: Leaf

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
        return cls(*(jnp.asarray(values[n]) for n in ("temperature", "top_k", "top_p")), keys)


def repeated(sampling: Sampling, times: int) -> Sampling:
    """The sampling of [B · times] rows: `times` rows after one another of each request."""
    return jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), sampling)


def sample(logits: Float[Array, "B V"], sampling: Sampling, position: Int32[Array, " B"]) -> Int32[Array, " B"]:
    """The next token of each request, to stand at `position`.

    The noise depends on the request's key and on the position alone, so a request draws the same tokens alone, in a
    batch, and after a restart. Ties: the lower token id.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: jnp.where(sampling.temperature > 0, _draw(logits, sampling, position), greedy),
        lambda: greedy,
    )


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

    The likeliest token is always kept.
    """
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    probability = jnp.take_along_axis(jax.nn.softmax(scaled, axis=-1), order, axis=-1)
    mass_before = jnp.cumsum(probability, axis=-1) - probability
    rank = jnp.arange(scaled.shape[-1], dtype=jnp.int32)
    keep = (mass_before < top_p[:, None]) & ((rank < top_k[:, None]) | (top_k == 0)[:, None])
    keep = keep.at[:, 0].set(True)
    return jnp.put_along_axis(jnp.zeros_like(keep), order, keep, axis=-1, inplace=False)
