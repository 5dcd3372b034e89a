"""What an engine has on the device, and the calls of the programs that change it."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsa_jax.cache.requests import snapshots_of
from dsa_jax.engine.demands import Sizes
from dsa_jax.engine.programs import Slots
from dsa_jax.engine.request import Request, table_of, terms_of

ADMITTED = 8  # requests that one call of the admission program takes
EMPTY = 0  # place of the snapshot store that holds the state of a request without tokens

Requests = Sequence[Request | None]
"""Requests of a program's rows, None where a row has none."""


class State:
    """The rows of a batch of requests (`slots`) and kept states of prefixes (`store`) of `lm`, a LanguageModel."""

    def __init__(self, lm: Any, sizes: Sizes):
        self.lm, self.sizes = lm, sizes
        cache = lm.new_cache(sizes.max_batch, sizes.table_tokens, sizes.cache)
        self.page_tokens, self._table_width = cache.page_tokens, cache.block_table.shape[1]
        self.store = lm.on_devices(snapshots_of(cache, 1 + sizes.snapshots))
        logits = jnp.zeros((sizes.max_batch, lm.config.vocab_size), jnp.float32)
        terms = jax.tree.map(jnp.asarray, terms_of([None] * sizes.max_batch))
        self.slots = Slots(cache, *lm.on_devices((logits, terms)))

    def warm_up(self, images: bool) -> None:
        """Compiles every program, those of chunks and bursts at the same time, and runs each on no request."""
        s, programs, nobody = self.sizes, self.lm.programs, [None]
        chunks = [
            (nobody * requests, np.zeros((requests, rows), np.int32), np.zeros(requests, np.int32), image)
            for requests, rows in s.prefill_shapes
            for image in ((None, self.lm.no_images(requests, rows)) if images else (None,))
        ]
        bursts = [(nobody * requests, is_greedy) for requests in s.decode_rows for is_greedy in (True, False)]
        lowered = [programs.prefill.lower(*self._prefill_arguments(*chunk)) for chunk in chunks]
        for burst in bursts:
            arguments, static = self._decode_arguments(*burst)
            lowered.append(programs.decode.lower(*arguments, **static))
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # the calls below take up what is compiled here
            list(pool.map(lambda program: program.compile(), lowered))
        self.admit(nobody, [EMPTY])
        self.copy([(-1, -1)])
        for chunk in chunks:
            self.prefill(*chunk)
        for burst in bursts:
            self.decode(*burst)
        if s.snapshots:
            for requests in {requests for requests, _ in s.prefill_shapes} | {1}:
                self.keep(*np.full((2, requests), -1, np.int32))
        if s.max_rollback:
            self.rewind(nobody * s.max_batch)

    def admit(self, requests: Requests, places: Sequence[int]) -> None:
        """Puts requests into their rows, each with the kept state of its place."""
        size = min(ADMITTED, self.sizes.max_batch)
        for first in range(0, len(requests), size):
            part = [*requests[first : first + size], *[None] * size][:size]
            rows = np.array([-1 if r is None else r.slot for r in part], np.int32)
            taken = np.array([*places[first : first + size], *[EMPTY] * size][:size], np.int32)
            table = table_of(part, self._table_width)
            self.slots = self.lm.programs.admit(self.slots, self.store, rows, taken, table, terms_of(part))

    def prefill(self, requests: Requests, tokens: np.ndarray, count: np.ndarray, image: Any) -> None:
        """A chunk: count[i] of tokens[i] of each request."""
        self.slots = self.lm.programs.prefill(*self._prefill_arguments(requests, tokens, count, image))

    def decode(self, requests: Requests, is_greedy: bool) -> jax.Array:
        """A burst, `is_greedy` where none of the requests draws; its tokens int32 [R, N], -1 where there is none."""
        arguments, static = self._decode_arguments(requests, is_greedy)
        self.slots, tokens = self.lm.programs.decode(*arguments, **static)
        return tokens

    def keep(self, rows: np.ndarray, places: np.ndarray) -> None:
        """Keeps the states of rows in places of the store; -1 for none."""
        self.store = self.lm.programs.keep(self.store, places, self.slots, rows)

    def rewind(self, requests: Requests) -> None:
        """Tells the device how many tokens each request of the batch holds, and its pages."""
        lengths = np.array([0 if r is None else r.fed for r in requests], np.int32)
        self.slots = self.lm.programs.rewind(self.slots, lengths, table_of(requests, self._table_width))

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copies pages, (from, to) each."""
        size = self.sizes.max_batch
        for first in range(0, len(pages), size):
            pairs = np.array([*pages[first : first + size], *[(-1, -1)] * size][:size], np.int32)
            self.slots = self.lm.programs.copy(self.slots, pairs[:, 0], pairs[:, 1])

    def _prefill_arguments(self, requests: Requests, tokens: np.ndarray, count: np.ndarray, image: Any) -> tuple[Any, ...]:
        rows = np.array([-1 if r is None else r.slot for r in requests], np.int32)
        return self.lm.leaves, self.slots, rows, tokens, count, image

    def _decode_arguments(self, requests: Requests, is_greedy: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rows = None  # all rows of the batch, each at its own place
        if len(requests) < self.sizes.max_batch:
            rows = np.array([-1 if r is None else r.slot for r in requests], np.int32)
        active = np.array([r is not None for r in requests])
        static = {"steps": self.sizes.steps, "drafts": self.sizes.drafts, "is_greedy": is_greedy}
        return (self.lm.leaves, self.slots, rows, active), static
