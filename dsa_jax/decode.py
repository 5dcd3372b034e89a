"""From prompts to tokens: a jitted prefill in chunks, and a jitted decode loop of many steps a call."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from dsa_jax import ops, sharding
from dsa_jax.burst import decode_burst, prefill_chunk
from dsa_jax.cache.requests import capacity
from dsa_jax.cache.sizes import CacheSizes
from dsa_jax.engine import Engine
from dsa_jax.engine.demands import DEFAULT_PREFILL_BYTES, chunk_of_budget, drafted_tokens
from dsa_jax.engine.programs import Programs
from dsa_jax.families import family_of
from dsa_jax.layers.draft import Draft
from dsa_jax.models.deepseek_v41 import ImageRows
from dsa_jax.numerics import Numerics
from dsa_jax.sampling import Sampling
from dsa_jax.tap import Tap

SMALLEST_CHUNK = 16

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

    def __init__(
        self,
        model: nnx.Module,
        numerics: Numerics,
        implementation: str | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ):
        """`implementation` names that of every operation; None takes the GPU's kernels where they carry a call.

        mesh: the devices that the model runs on together (`sharding.make_mesh`), over which its weights lie already
        (`sharding.place`).
        """
        self.config, self.numerics, self.plan = model.config, numerics, model.plan
        self.family = family_of(model.config)
        self.traces: dict[str, int] = {}
        self.implementation, self.mesh = implementation, mesh
        self._graphdef, state = nnx.split(model)
        self.leaves, self._structure = jax.tree.flatten(state)
        self._names = parameter_names(state)

        def forward(model, cache, tokens, count, image):
            tap = Tap()
            h, cache = model(cache, tokens, count, self.numerics, image, tap)
            return model.logits(h, self.numerics), cache, tap.values

        def prefill(model, cache, logits, tokens, count, image):
            return prefill_chunk(model, self.numerics, cache, logits, tokens, count, image)

        def decode(model, cache, logits, done, sampling, stop_ids, steps, drafts):
            limit = jnp.full_like(cache.length, self.capacity(cache))
            return decode_burst(model, self.numerics, cache, logits, done, sampling, stop_ids, limit, steps, drafts)

        def draft(model, cache, tokens):
            return model.draft(cache, tokens, self.numerics)

        self._forward = self.compiled("forward", forward, donate_argnums=1)
        self._prefill = self.compiled("prefill", prefill, donate_argnums=(1, 2))
        self._decode = self.compiled("decode", decode, donate_argnums=(1, 2, 3), static_argnames=("steps", "drafts"))
        self._draft = self.compiled("draft", draft)

    def compiled(self, name: str, function: Callable, **options) -> Callable:
        """`function(model, ..)` as a compiled function of (leaves, ..), counted in `traces` under `name`.

        options: as of jax.jit.
        """

        def traced(leaves, *arguments, **static):
            self.traces[name] = self.traces.get(name, 0) + 1
            with ops.preferred(self.implementation):
                return function(self.model(leaves), *arguments, **static)

        if self.mesh is not None:
            traced = sharding.spmd(traced, self.mesh, self._names)
        return jax.jit(traced, **options)

    @functools.cached_property
    def programs(self) -> Programs:
        """The engine's compiled functions, which all engines of this model share."""
        return Programs(self)

    def parameters(self) -> dict[str, Array]:
        """Dotted name -> parameter, as stored."""
        return dict(zip(self._names, self.leaves, strict=True))

    def parameter(self, name: str) -> Array:
        """The parameter with this dotted name, as stored."""
        return self.leaves[self._names.index(name)]

    def new_cache(self, requests: int, max_tokens: int, sizes: CacheSizes = CacheSizes()) -> Cache:
        """An empty cache for `requests` requests of up to `max_tokens` tokens each; divided over the mesh's dp and cp.

        sizes.pages are those of all groups of devices (dp). ValueError for what the family's cache refuses, and for requests or
        pages that dp does not divide.
        """
        ways = self.groups
        for count, what in ((requests, "requests"), (sizes.pages or ways, "pages")):
            if count % ways:
                raise ValueError(
                    f"A cache of {count} {what} on a mesh of dp={ways}: every group of devices has as many. Give a multiple "
                    f"of {ways}, or a mesh without dp."
                )
        own = sizes if sizes.pages is None else replace(sizes, pages=sizes.pages // ways)

        def empty():
            return self.family.new_cache(self.config, self.numerics, requests // ways, max_tokens, own)

        return empty() if self.mesh is None else jax.jit(sharding.spmd(empty, self.mesh))()

    @property
    def groups(self) -> int:
        """How many groups of devices have requests of their own: the mesh's dp."""
        return 1 if self.mesh is None else self.mesh.shape["dp"]

    def on_devices(self, arrays: Any) -> Any:
        """A pytree of arrays where the model runs: whole on every device of its mesh."""
        return arrays if self.mesh is None else jax.device_put(arrays, sharding.everywhere(self.mesh))

    def capacity(self, cache: Cache) -> int:
        """How many tokens a request of `cache` may hold."""
        return capacity(cache, self.config.max_position_embeddings)

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
        self.require_drafts()
        return self._draft(self.leaves, cache, jnp.asarray(tokens, jnp.int32))

    def require_drafts(self) -> None:
        """Raises what `draft` raises for a model that does not draft."""
        if not self.config.num_nextn_predict_layers:
            raise ValueError("This checkpoint has no draft stages (num_nextn_predict_layers is 0).")
        if not hasattr(self.family.model, "draft"):
            raise NotImplementedError(
                f"{self.family.model.__name__} does not run its draft layer. Use decode, one token a step."
            )

    def prefill(
        self,
        cache: Cache,
        prompts: Sequence[Tokens],
        images: Sequence[Sequence[ImageSpan]] | None = None,
        chunk: int | None = None,
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Appends one list of tokens to each request of `cache`. Returns the logits after the last token of each.

        Tokens are processed `chunk` at a time (default: as `default_chunk` says); the result does not depend on it. An empty
        prompt leaves its request as it is (its logits are 0).
        ValueError: a number of prompts other than the cache's requests, a token id outside the vocabulary, an image id
        without embeddings or the other way round, more tokens than the cache has room for.
        """
        prompts = [np.asarray(p, np.int64).reshape(-1) for p in prompts]
        images = [()] * len(prompts) if images is None else images
        self._check(cache, prompts, images)
        longest = max((len(p) for p in prompts), default=0)
        if chunk is None:
            chunk = default_chunk(self, longest, self.capacity(cache), len(prompts))
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
                self.leaves, cache, logits, tokens, count, self.image_rows(images, [first] * len(images), chunk)
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
        drafts: int = 0,
    ) -> tuple[Cache, Float[Array, "B V"], Array, Int32[Array, "B N"]]:
        """`steps` steps of every request that is not done, in one compiled call; with `drafts` as `decode_burst` says.

        Starts from the logits after the last token in the cache. Returns (cache, logits, done, tokens): tokens are -1
        behind a stop id, which is the last token of its request; a request whose cache is full is done as well. A sampling
        that is known to be greedy and one that is not have a program each.
        """
        stops = jnp.broadcast_to(stop_ids, (len(done), len(stop_ids)))
        return self._decode(self.leaves, cache, logits, done, sampling, stops, steps=steps, drafts=drafts)

    def model(self, leaves: list[Array] | None = None) -> nnx.Module:
        """The module with `leaves` as its parameters; None takes the model's own."""
        leaves = self.leaves if leaves is None else leaves
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._structure, leaves))

    def _check(self, cache: Cache, prompts: list[np.ndarray], images: Sequence[Sequence[ImageSpan]]) -> None:
        config = self.config
        if len(prompts) != cache.requests or len(images) != cache.requests:
            raise ValueError(
                f"{len(prompts)} prompts and {len(images)} image lists for a cache of {cache.requests} requests: give one "
                "of each per request."
            )
        room, held = self.capacity(cache), sharding.on_host(cache.length)
        for b, (prompt, spans) in enumerate(zip(prompts, images, strict=True)):
            self.check_vocabulary(prompt, f"Prompt {b}")
            if held[b] + len(prompt) > room:
                raise ValueError(
                    f"Prompt {b} has {len(prompt)} tokens after {held[b]} that the cache holds, and the cache has room "
                    f"for {room}. Make the cache with max_tokens of at least {held[b] + len(prompt)}."
                )
            self.check_images(prompt, spans, f"Prompt {b}")

    def check_vocabulary(self, tokens: np.ndarray, what: str) -> None:
        """Raises ValueError where one of `tokens` is no token id; `what` they are begins the sentence."""
        size = self.config.vocab_size
        wrong = tokens[(tokens < 0) | (tokens >= size)]
        if len(wrong):
            raise ValueError(
                f"{what} has the token id {wrong[0]}, outside the vocabulary of {size} tokens (0 to {size - 1}). Was it "
                "made with this checkpoint's tokenizer?"
            )

    def check_images(self, prompt: np.ndarray, spans: Sequence[ImageSpan], what: str) -> None:
        """Raises ValueError where image spans and image token ids of a prompt do not belong together."""
        config, image_token_id = self.config, getattr(self.config, "image_token_id", None)
        if image_token_id is None:
            if spans:
                raise ValueError(f"{what} has image spans, but {self.family.model.__name__} takes text alone.")
            return
        covered = np.zeros(len(prompt), bool)
        for span in spans:
            n = len(span.embeddings)
            if span.start < 0 or span.start + n > len(prompt) or covered[span.start : span.start + n].any():
                raise ValueError(
                    f"{what}: an image span covers {span.start} to {span.start + n}; spans must lie inside the "
                    f"{len(prompt)} tokens of the prompt and not overlap."
                )
            if np.shape(span.embeddings) != (n, config.hidden_size):
                raise ValueError(
                    f"{what}: image embeddings of shape {np.shape(span.embeddings)}; expected [n, {config.hidden_size}]."
                )
            covered[span.start : span.start + n] = True
        mismatch = np.flatnonzero(covered != (prompt == image_token_id))
        if len(mismatch):
            place = mismatch[0]
            has = "has embeddings" if covered[place] else "has none"
            raise ValueError(
                f"{what}, place {place}: token id {prompt[place]} {has}. Places with the image token id {image_token_id}, "
                "and only those, take image embeddings (ImageSpan)."
            )

    def image_rows(self, images: Sequence[Sequence[ImageSpan]], first: Sequence[int], chunk: int) -> ImageRows | None:
        """The rows of each prompt's places first[b] .. first[b]+chunk-1 that spans replace; None without any span."""
        if not any(images):
            return None
        rows = self.no_images(len(images), chunk)
        embeddings, is_image = rows.embeddings, rows.is_image
        for b, (spans, begin) in enumerate(zip(images, first, strict=True)):
            for span in spans:
                low, high = max(span.start, begin), min(span.start + len(span.embeddings), begin + chunk)
                if low < high:
                    embeddings[b, low - begin : high - begin] = span.embeddings[low - span.start : high - span.start]
                    is_image[b, low - begin : high - begin] = True
        return rows

    def no_images(self, requests: int, chunk: int) -> ImageRows:
        """Rows of a chunk none of which is an image's, as arrays on the host. ValueError if the model takes text alone."""
        if getattr(self.config, "image_token_id", None) is None:
            raise ValueError(f"{self.family.model.__name__} takes text alone: leave images out.")
        shape = (requests, chunk)
        return ImageRows(np.zeros((*shape, self.config.hidden_size), np.float32), np.zeros(shape, bool))


def stream(
    lm: LanguageModel,
    prompts: Sequence[Tokens],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] | None = None,
    every: int = 8,
    images: Sequence[Sequence[ImageSpan]] | None = None,
    drafts: int = 0,
) -> Iterator[list[list[int]]]:
    """Generates up to `max_new_tokens` tokens for each prompt; yields the new tokens of each after every `every` steps.

    stop_ids: default the config's end-of-sequence id; a stop id is the last token of its request. Every request stops by
    itself. drafts: tokens proposed a step by the model's draft layers; the result is the same. An `Engine` does the work:
    make one yourself to add and cancel requests as they come. (On a mesh with dp it does not run; there dp has to divide the
    prompts.) ValueError for what it refuses, an empty prompt, or max_new_tokens or every below 1.
    """
    if max_new_tokens < 1 or every < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} and every={every} must be at least 1.")
    empty = [b for b, prompt in enumerate(prompts) if len(prompt) == 0]
    if empty or not prompts:
        raise ValueError(f"Prompts {empty} are empty: give at least one token, such as the begin-of-sequence id.")
    batch, longest = len(prompts), max(len(p) for p in prompts)
    context = longest + max_new_tokens
    rows = default_chunk(lm, longest, context, batch)
    sampling = Sampling.of(batch) if sampling is None else sampling
    if lm.groups > 1:
        yield from _stream_in_groups(lm, prompts, max_new_tokens, rows, sampling, stop_ids, every, images, drafts)
        return
    engine = Engine(
        lm, batch, context, prefill_shapes=((batch, rows),), decode_rows=(batch,), steps=every, drafts=drafts
    )
    places = {}
    for b, prompt in enumerate(prompts):
        own = jax.tree.map(lambda x, b=b: x[b : b + 1], sampling)
        places[engine.add(prompt, max_new_tokens, own, stop_ids, () if images is None else images[b])] = b
    while not engine.is_idle:
        new: list[list[int]] = [[] for _ in prompts]
        for event in engine.step():
            new[places[event.id]].extend(event.tokens)
        if any(new):
            yield new


def _stream_in_groups(
    lm: LanguageModel,
    prompts: Sequence[Tokens],
    max_new_tokens: int,
    rows: int,
    sampling: Sampling,
    stop_ids: Sequence[int] | None,
    every: int,
    images: Sequence[Sequence[ImageSpan]] | None,
    drafts: int,
) -> Iterator[list[list[int]]]:
    """`stream` where groups of devices have requests of their own: all prompts in chunks of `rows` tokens, then bursts."""
    drafted = drafted_tokens(lm) if drafts else 0
    if not 0 <= drafts <= drafted:
        raise ValueError(f"drafts={drafts}, but the model drafts {drafted} tokens at a time: give 0 to {drafted}.")
    room = max(len(p) for p in prompts) + max_new_tokens + drafts
    logits, cache = lm.prefill(lm.new_cache(len(prompts), room, CacheSizes(max_rollback=drafts)), prompts, images, rows)
    stops = jnp.asarray((lm.config.eos_token_id,) if stop_ids is None else tuple(stop_ids), jnp.int32)
    left = np.full(len(prompts), max_new_tokens)
    while left.any():
        cache, logits, done, tokens = lm.decode(cache, logits, jnp.asarray(left == 0), sampling, stops, every, drafts)
        new = [row[row >= 0][:most].tolist() for row, most in zip(sharding.on_host(tokens), left, strict=True)]
        left = np.where(sharding.on_host(done), 0, left - [len(row) for row in new])
        yield new


def default_chunk(lm: LanguageModel, longest: int, context: int, requests: int) -> int:
    """Tokens of a chunk of each of `requests` requests with prompts of up to `longest` tokens: the next power of two, 16 at
    least, and no more than DEFAULT_PREFILL_BYTES of temporaries allow at `context` tokens of context.

    The more, the faster: every chunk reads the weights. ValueError where not even one fits.
    """
    at_once = max(1, requests // lm.groups)  # on a device
    wanted = max(SMALLEST_CHUNK, 1 << (longest - 1).bit_length() if longest else 1)
    return max(1, min(wanted, chunk_of_budget(lm.config, context, DEFAULT_PREFILL_BYTES, at_once) // at_once))


def generate(lm: LanguageModel, prompts: Sequence[Tokens], max_new_tokens: int, **options) -> list[list[int]]:
    """All new tokens of each prompt; options as for `stream`."""
    tokens: list[list[int]] = [[] for _ in prompts]
    for chunk in stream(lm, prompts, max_new_tokens, **options):
        for all_tokens, new in zip(tokens, chunk, strict=True):
            all_tokens.extend(new)
    return tokens
