"""The two steps that serving is made of: a chunk of prompts, and a burst of decode steps.

`model` is a module of any family, or what stands in for one: a call, `logits`, and `draft` where drafts are asked for.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from dsa_jax import ranks
from dsa_jax.cache.requests import rolled_back
from dsa_jax.numerics import Numerics
from dsa_jax.sampling import Sampling, repeated, sample

Cache = Any  # a cache of the model's family
MOST_STEPS_TOGETHER = 16


def prefill_chunk(
    model: Any,
    numerics: Numerics,
    cache: Cache,
    logits: Float[Array, "B V"],
    tokens: Int32[Array, "B S"],
    count: Int32[Array, " B"],
    image: Any = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """(logits after the last token of each request, `logits` where it brings none; the cache with the tokens)."""
    h, cache = model(cache, tokens, count, numerics, image)
    last = jnp.take_along_axis(h, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where((count > 0)[:, None], model.logits(last, numerics), logits), cache


def steps_together(steps: int) -> int:
    """After how many of `steps` steps of a burst it is asked whether a request is left: their largest divisor of up to
    MOST_STEPS_TOGETHER.

    The host decides whether a loop goes on, waits for it, and only then hands the next step's kernels to the GPU: half a
    millisecond where one request's kernels took an H200 two. Of steps whose number is known it hands over one while the
    one before runs.
    """
    return max((n for n in range(1, min(steps, MOST_STEPS_TOGETHER) + 1) if steps % n == 0), default=1)


def decode_burst(
    model: Any,
    numerics: Numerics,
    cache: Cache,
    logits: Float[Array, "B V"],
    done: Bool[Array, " B"],
    sampling: Sampling,
    stop_ids: Int32[Array, "B n"],
    limit: Int32[Array, " B"],
    steps: int,
    drafts: int = 0,
) -> tuple[Cache, Float[Array, "B V"], Bool[Array, " B"], Int32[Array, "B N"]]:
    """`steps` decode steps of every request that is not done.

    Every step samples a token from `logits` and, unless that token is a stop id or the request holds `limit` tokens
    already, runs it through the model. With `drafts` the model also checks as many drafted tokens in the same pass:
    those that equal what it samples itself are kept, the rest is rolled back (the cache needs max_rollback >= drafts).
    So the tokens are those of plain decoding, sampled or greedy. Returns cache, logits after the last token that it
    holds, done, and tokens int32 [B, steps · (1 + drafts)]: in order, with -1 wherever there is none.

    Where all requests are done, those of other devices too (dp), the steps after the next multiple of `steps_together`
    are left out.
    """
    width = 1 + drafts

    def is_stop(token: Array) -> Array:
        return jnp.any(token[..., None] == stop_ids.reshape(len(done), *(1,) * (token.ndim - 1), -1), axis=-1)

    def is_any_left(done: Array) -> Array:
        # Groups of devices exchange rows in every step, so none may leave earlier than the others.
        return ranks.largest(jnp.any(~done).astype(jnp.int32), "requests") > 0

    def step(i, carry):
        cache, logits, done, out = carry
        start = cache.length
        token = sample(logits, sampling, start)
        fed = model.draft(cache, token, numerics).ids[:, :width] if drafts else token[:, None]
        emitted = ~done
        done = done | is_stop(token) | (start >= limit)
        h, cache = model(cache, fed, jnp.where(done, 0, width), numerics)
        new = model.logits(h, numerics)
        accepted = jnp.zeros_like(start)
        if drafts:
            # A draft is kept if the model samples the same, and if plain decoding would feed it: stops and the last
            # token of a request are left to the next step, which ends the request there.
            positions = start[:, None] + 1 + jnp.arange(drafts, dtype=jnp.int32)
            own = sample(new[:, :drafts].reshape(-1, new.shape[-1]), repeated(sampling, drafts), positions.reshape(-1))
            kept = (own.reshape(positions.shape) == fed[:, 1:]) & ~is_stop(fed[:, 1:]) & (positions < limit[:, None])
            accepted = jnp.where(done, 0, jnp.sum(jnp.cumprod(kept, axis=1), axis=1, dtype=jnp.int32))
            cache = rolled_back(cache, jnp.where(done, 0, drafts - accepted))
        after = jnp.take_along_axis(new, accepted[:, None, None], axis=1)[:, 0]
        logits = jnp.where(done[:, None], logits, after)
        columns = jnp.arange(width, dtype=jnp.int32)
        written = jnp.where(emitted[:, None] & (columns <= accepted[:, None]), fed, -1)
        out = lax.dynamic_update_slice(out, written, (0, i * width))
        return cache, logits, done, out

    def some_steps(first, carry):
        return lax.fori_loop(0, together, lambda i, carry: step(first + i, carry), carry)

    together = steps_together(steps)
    carry = (cache, logits, done, jnp.full((len(done), steps * width), -1, jnp.int32))
    if together == steps:
        return some_steps(0, carry)
    return lax.while_loop(
        lambda state: (state[0] < steps) & is_any_left(state[1][2]),
        lambda state: (state[0] + together, some_steps(*state)),
        (jnp.int32(0), carry),
    )[1]
