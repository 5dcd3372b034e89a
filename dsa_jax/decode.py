"""From prompts to tokens: a jitted prefill in chunks, and a jitted decode loop of many steps a call."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from dsa_jax import ops
from dsa_jax.families import family_of
from dsa_jax.layers.draft import Draft
from dsa_jax.models.deepseek_v41 import ImageRows
from dsa_jax.numerics import Numerics
from dsa_jax.sampling import Sampling, sample
from dsa_jax.tap import Tap

SMALLEST_CHUNK = 16
LARGEST_CHUNK = 512

Cache = Any  # the family's own: a pytree with `length` and `requests`
HostOrDevice = np.ndarray | Array
Cache = Any
"""A cache of the model's family: what its `new_cache` makes."""
Tokens = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class ImageSpan:
    """Embeddings [n, D] that take the places start .. start+n-1 of a prompt; the token ids there are image_token_id."""

    start: int
    embeddings: np.ndarray


def parameter_names(state: nnx.State) -> list[str]:
    """The dotted path of every leaf of `state`, in its flattening order."""
    return [".".join(str(key.key) for key in path[:-1]) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]


class LanguageModel:
    """A model with its weights on the device, and its compiled functions.

    The module is split once; compiled functions take the leaves. Caches are donated: a cache passed in is gone.
    `traces` counts how often each function was traced, which is how often it was compiled.
    """

    def __init__(self, model: nnx.Module, numerics: Numerics, implementation: str | None = None):
        """`implementation` names that of every operation; None takes the GPU's kernels where they carry a call."""
        self.config, self.numerics, self.plan = model.config, numerics, model.plan
        self.family = family_of(model.config)
        self.traces: dict[str, int] = {}
        graphdef, state = nnx.split(model)
        self.leaves, structure = jax.tree.flatten(state)
        self._names = parameter_names(state)

        def merged(leaves):
            return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))

        def forward(leaves, cache, tokens, count, image):
            self._traced("forward")
            tap = Tap()
            model = merged(leaves)
            h, cache = model(cache, tokens, count, self.numerics, image, tap)
            return model.logits(h, self.numerics), cache, tap.values

        def prefill(leaves, cache, logits, tokens, count, image):
            self._traced("prefill")
            model = merged(leaves)
            h, cache = model(cache, tokens, count, self.numerics, image)
            last = jnp.take_along_axis(h, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
            return jnp.where((count > 0)[:, None], model.logits(last, self.numerics), logits), cache

        def decode(leaves, cache, logits, done, sampling, stop_ids, steps):
            self._traced("decode")
            model = merged(leaves)

            def step(carry):
                i, cache, logits, done, out = carry
                token = sample(logits, sampling, cache.length)
                out = lax.dynamic_update_index_in_dim(out, jnp.where(done, -1, token), i, 1)
                done = done | jnp.any(token[:, None] == stop_ids, axis=1) | (cache.length >= room)
                h, cache = model(cache, token[:, None], jnp.where(done, 0, 1), self.numerics)
                logits = jnp.where(done[:, None], logits, model.logits(h[:, 0], self.numerics))
                return i + 1, cache, logits, done, out

            room = self.family.capacity(cache, self.config)
            out = jnp.full((len(done), steps), -1, jnp.int32)
            carry = (jnp.int32(0), cache, logits, done, out)
            return lax.while_loop(lambda c: (c[0] < steps) & ~jnp.all(c[3]), step, carry)[1:]

        def draft(leaves, cache, tokens):
            self._traced("draft")
            return merged(leaves).draft(cache, tokens, self.numerics)

        def compiled(function, **options):
            def traced(*arguments, **static):
                with ops.preferred(implementation):
                    return function(*arguments, **static)

            return jax.jit(traced, **options)

        self._forward = compiled(forward, donate_argnums=1)
        self._prefill = compiled(prefill, donate_argnums=(1, 2))
        self._decode = compiled(decode, donate_argnums=(1, 2, 3), static_argnames="steps")
        self._draft = compiled(draft)

    def _traced(self, name: str) -> None:
        self.traces[name] = self.traces.get(name, 0) + 1

    def parameter(self, name: str) -> Array:
        """The parameter with this dotted name, as stored."""
        return self.leaves[self._names.index(name)]

    def new_cache(self, requests: int, max_tokens: int) -> Cache:
        """An empty cache for `requests` requests of up to `max_tokens` tokens each."""
        return self.family.new_cache(self.config, self.numerics, requests, max_tokens)

    def forward(
        self,
        cache: Cache,
        tokens: Int32[HostOrDevice, "B S"],
        count: Int32[HostOrDevice, " B"],
        image: ImageRows | None = None,
    ) -> tuple[Float[Array, "B S V"], Cache, dict[str, Array]]:
        """Logits of every row and all taps of one step: for comparing numerics, not for speed."""
        return self._forward(self.leaves, cache, jnp.asarray(tokens), jnp.asarray(count), image)

    def draft(self, cache: Cache, tokens: Int32[HostOrDevice, " B"]) -> Draft:
        """Drafts that follow `tokens`, which follow the tokens in the cache (not changed, not donated).

        ValueError if the checkpoint has no draft stages; NotImplementedError if its model does not run them.
        """
        if not self.config.num_nextn_predict_layers:
            raise ValueError("This checkpoint has no draft stages (num_nextn_predict_layers is 0).")
        if not hasattr(self.family.model, "draft"):
            raise NotImplementedError(
                f"{self.family.model.__name__} does not run its draft layer. Use decode, one token a step."
            )
        return self._draft(self.leaves, cache, jnp.asarray(tokens, jnp.int32))

    def prefill(
        self,
        cache: Cache,
        prompts: Sequence[Tokens],
        images: Sequence[Sequence[ImageSpan]] | None = None,
        chunk: int | None = None,
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Appends one list of tokens to each request of `cache`. Returns the logits after the last token of each.

        Tokens are processed `chunk` at a time (default: the next power of two of the longest prompt, 16 to 512); the
        result does not depend on it. An empty prompt leaves its request as it is (its logits are 0).
        ValueError: a number of prompts other than the cache's requests, a token id outside the vocabulary, an image id
        without embeddings or the other way round, more tokens than the cache has room for.
        """
        prompts = [np.asarray(p, np.int64).reshape(-1) for p in prompts]
        images = [()] * len(prompts) if images is None else images
        self._check(cache, prompts, images)
        longest = max((len(p) for p in prompts), default=0)
        if chunk is None:
            chunk = min(max(SMALLEST_CHUNK, 1 << (longest - 1).bit_length() if longest else 1), LARGEST_CHUNK)
        if chunk < 1:
            raise ValueError(f"chunk={chunk} must be at least 1 token.")
        logits = jnp.zeros((len(prompts), self.config.vocab_size), jnp.float32)
        for first in range(0, longest, chunk):
            parts = [p[first : first + chunk] for p in prompts]
            tokens = np.zeros((len(prompts), chunk), np.int32)
            for row, part in zip(tokens, parts, strict=True):
                row[: len(part)] = part
            count = np.array([len(p) for p in parts], np.int32)
            logits, cache = self._prefill(
                self.leaves, cache, logits, tokens, count, self.image_rows(images, first, chunk)
            )
        return logits, cache

    def decode(
        self,
        cache: Cache,
        logits: Float[Array, "B V"],
        done: Array,
        sampling: Sampling,
        stop_ids: Int32[Array, " n"],
        steps: int,
    ) -> tuple[Cache, Float[Array, "B V"], Array, Int32[Array, "B steps"]]:
        """Up to `steps` tokens for every request that is not done, in one compiled call.

        Starts from the logits after the last token in the cache. Returns (cache, logits, done, tokens): tokens are -1
        behind a stop id, which is the last token of its request; a request whose cache is full is done as well. Ends
        early when all are done.
        """
        return self._decode(self.leaves, cache, logits, done, sampling, stop_ids, steps=steps)

    def _check(self, cache: Cache, prompts: list[np.ndarray], images: Sequence[Sequence[ImageSpan]]) -> None:
        config = self.config
        if len(prompts) != cache.requests or len(images) != cache.requests:
            raise ValueError(
                f"{len(prompts)} prompts and {len(images)} image lists for a cache of {cache.requests} requests: give one "
                "of each per request."
            )
        room, held = self.family.capacity(cache, config), np.asarray(cache.length)
        for b, (prompt, spans) in enumerate(zip(prompts, images, strict=True)):
            wrong = prompt[(prompt < 0) | (prompt >= config.vocab_size)]
            if len(wrong):
                raise ValueError(
                    f"Prompt {b} has the token id {wrong[0]}, outside the vocabulary of {config.vocab_size} tokens "
                    f"(0 to {config.vocab_size - 1}). Was it made with this checkpoint's tokenizer?"
                )
            if held[b] + len(prompt) > room:
                raise ValueError(
                    f"Prompt {b} has {len(prompt)} tokens after {held[b]} that the cache holds, and the cache has room "
                    f"for {room}. Make the cache with max_tokens of at least {held[b] + len(prompt)}."
                )
            image_token_id = getattr(config, "image_token_id", None)
            if image_token_id is None:
                if spans:
                    raise ValueError(f"Prompt {b} has image spans, but {self.family.model.__name__} takes text alone.")
                continue
            covered = np.zeros(len(prompt), bool)
            for span in spans:
                n = len(span.embeddings)
                if span.start < 0 or span.start + n > len(prompt) or covered[span.start : span.start + n].any():
                    raise ValueError(
                        f"Prompt {b}: an image span covers {span.start} to {span.start + n}; spans must lie inside the "
                        f"{len(prompt)} tokens of the prompt and not overlap."
                    )
                if np.shape(span.embeddings) != (n, config.hidden_size):
                    raise ValueError(
                        f"Prompt {b}: image embeddings of shape {np.shape(span.embeddings)}; expected "
                        f"[n, {config.hidden_size}]."
                    )
                covered[span.start : span.start + n] = True
            mismatch = np.flatnonzero(covered != (prompt == image_token_id))
            if len(mismatch):
                place = mismatch[0]
                what = "has embeddings" if covered[place] else "has none"
                raise ValueError(
                    f"Prompt {b}, place {place}: token id {prompt[place]} {what}. Places with the image token id "
                    f"{image_token_id}, and only those, take image embeddings (ImageSpan)."
                )

    def image_rows(self, images: Sequence[Sequence[ImageSpan]], first: int, chunk: int) -> ImageRows | None:
        """The rows of the prompts' places first .. first+chunk-1 that image spans replace; None without any span."""
        if not any(images):
            return None
        embeddings = np.zeros((len(images), chunk, self.config.hidden_size), np.float32)
        is_image = np.zeros((len(images), chunk), bool)
        for b, spans in enumerate(images):
            for span in spans:
                low, high = max(span.start, first), min(span.start + len(span.embeddings), first + chunk)
                if low < high:
                    embeddings[b, low - first : high - first] = span.embeddings[low - span.start : high - span.start]
                    is_image[b, low - first : high - first] = True
        return ImageRows(jnp.asarray(embeddings), jnp.asarray(is_image))


def stream(
    lm: LanguageModel,
    prompts: Sequence[Tokens],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] | None = None,
    every: int = 8,
    images: Sequence[Sequence[ImageSpan]] | None = None,
) -> Iterator[list[list[int]]]:
    """Generates up to `max_new_tokens` tokens for each prompt; yields the new tokens of each after every `every` steps.

    stop_ids: default the config's end-of-sequence id; a stop id is the last token of its request. Every request stops by
    itself. ValueError for what `prefill` refuses, an empty prompt, or max_new_tokens or every below 1.
    """
    if max_new_tokens < 1 or every < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} and every={every} must be at least 1.")
    empty = [b for b, prompt in enumerate(prompts) if len(prompt) == 0]
    if empty or not prompts:
        raise ValueError(f"Prompts {empty} are empty: give at least one token, such as the begin-of-sequence id.")
    longest = max(len(p) for p in prompts)
    cache = lm.new_cache(len(prompts), longest + -(-max_new_tokens // every) * every)
    logits, cache = lm.prefill(cache, prompts, images)
    sampling = Sampling.of(len(prompts)) if sampling is None else sampling
    stops = jnp.asarray([lm.config.eos_token_id] if stop_ids is None else list(stop_ids), jnp.int32)
    done = jnp.zeros((len(prompts),), bool)
    for first in range(0, max_new_tokens, every):
        cache, logits, done, out = lm.decode(cache, logits, done, sampling, stops, every)
        rows = np.asarray(out)[:, : max_new_tokens - first]
        yield [[int(t) for t in row if t >= 0] for row in rows]
        if bool(np.all(done)):
            return


def generate(lm: LanguageModel, prompts: Sequence[Tokens], max_new_tokens: int, **options) -> list[list[int]]:
    """All new tokens of each prompt; options as for `stream`."""
    tokens: list[list[int]] = [[] for _ in prompts]
    for chunk in stream(lm, prompts, max_new_tokens, **options):
        for all_tokens, new in zip(tokens, chunk, strict=True):
            all_tokens.extend(new)
    return tokens
