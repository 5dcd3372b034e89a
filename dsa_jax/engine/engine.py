"""The engine: requests come and go, every step is one of a few compiled programs."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from dsa_jax.engine.demands import require_kernels, sizes_of
from dsa_jax.engine.pages import PagePool
from dsa_jax.engine.prefix import Prefix, PrefixCache
from dsa_jax.engine.report import Event, Stats
from dsa_jax.engine.request import STOP_IDS, Burst, Request, on_host
from dsa_jax.engine.state import EMPTY, State
from dsa_jax.sampling import Sampling


class Engine:
    """Serves requests of different lengths on one model, in the order of their arrival.

    A request is admitted when a row of the batch and pages for all the tokens that it may come to are free, so that one
    that runs never has to stop for others. Prompts are processed in chunks, several at a time; between two chunks all
    running requests decode a burst of steps in one call. States at boundaries of prompts, and at the end of requests, are
    kept as snapshots: a later request with the same first tokens begins there.
    """

    def __init__(
        self,
        model: Any,
        max_batch: int,
        max_context: int,
        page_size: int | None = None,
        *,
        pages: int | None = None,
        memory_bytes: int | None = None,
        prefill_bytes: int | None = None,
        prefill_shapes: Sequence[tuple[int, int]] | None = None,
        decode_rows: Sequence[int] | None = None,
        steps: int = 8,
        drafts: int = 0,
        max_rollback: int = 0,
        snapshots: int = 0,
        boundary: int | None = None,
    ):
        """model: a LanguageModel. max_batch requests of up to max_context tokens (prompt and answer) run at once.

        page_size: tokens of a page (default: the family's). The pool has `pages` pages; or, with `memory_bytes` of a device
        for all that the engine takes beside the weights, what the requests' own state and its largest step leave of them;
        or enough for max_batch requests of max_context tokens. prefill_bytes bounds those temporaries of a chunk that grow
        with its rows or its context, indexer scores included; prefill_shapes, (requests, tokens) of the chunks that are
        compiled, default to one long row and max_batch short ones. decode_rows: batch sizes of the compiled bursts, of
        `steps` steps. drafts: tokens that the model's draft layers propose a step. max_rollback: for `rollback`. snapshots:
        how many states are kept for reuse, those of prompts at multiples of `boundary` tokens (default: a chunk).
        ValueError or NotImplementedError, with a sentence, for what cannot be met.
        """
        self.model = model
        self.sizes = s = sizes_of(
            model, max_batch=max_batch, max_context=max_context, page_size=page_size, pages=pages,
            memory_bytes=memory_bytes, prefill_bytes=prefill_bytes, prefill_shapes=prefill_shapes, decode_rows=decode_rows,
            steps=steps, drafts=drafts, max_rollback=max_rollback, snapshots=snapshots, boundary=boundary,
        )  # fmt: skip
        require_kernels(model, s)
        self._state = State(model, s)
        self.page_tokens = self._state.page_tokens
        self._pool = PagePool(s.cache.pages)
        self._prefixes = PrefixCache(list(range(snapshots, EMPTY, -1)), self._pool)
        self._rows: list[Request | None] = [None] * max_batch
        self._queue: deque[Request] = deque()
        self._requests: dict[int, Request] = {}
        self._ahead: Burst | None = None  # a burst whose tokens are not read yet
        self._next_id, self._stats = 0, Stats()

    # ------------------------------------------------------------ what callers use

    def add(
        self,
        tokens: Sequence[int] | np.ndarray,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Sequence[int] | None = None,
        images: Sequence[Any] = (),
    ) -> int:
        """Queues a request and returns its id.

        sampling: of one request (default: greedy). stop_ids: default the config's end of sequence; a stop id is the last
        token of an answer. images: ImageSpans of the prompt. ValueError for a request that can never run: it says why.
        """
        prompt = np.asarray(tokens, np.int64).reshape(-1)
        stops = (self.model.config.eos_token_id,) if stop_ids is None else tuple(stop_ids)
        sampling = Sampling.of(1) if sampling is None else sampling
        if sampling.temperature.shape != (1,):
            raise ValueError(
                f"The sampling has values of shape {sampling.temperature.shape}; give that of one request, Sampling.of(1)."
            )
        self._refuse(prompt, max_new_tokens, stops, images)
        request = Request(
            self._next_id, prompt.tolist(), len(prompt), max_new_tokens,
            on_host(sampling), stops, images,
        )  # fmt: skip
        self._next_id += 1
        self._requests[request.id] = request
        self._queue.append(request)
        return request.id

    def step(self) -> list[Event]:
        """Admits what fits, processes one chunk of prompts and one burst of decode steps; returns what happened.

        On return the next burst may be under way: where no queued request could take the place of one that ends, and the
        engine was made without max_rollback. A prompt's next chunk comes after it, as it would otherwise.
        """
        events = self._admit()
        self._prefill()
        return events + self._decode()

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not self._requests

    @property
    def free_pages(self) -> int:
        """Pages of the pool that neither a request nor a kept prefix holds."""
        return self._pool.free

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self._pool.pages

    @property
    def stats(self) -> Stats:
        """Counts since the engine was made."""
        return replace(self._stats, evicted_prefixes=self._prefixes.evicted)

    def tokens(self, id: int) -> list[int]:
        """Prompt and answer so far of a request that is not finished."""
        return list(self._known(id).tokens)

    def cancel(self, id: int) -> None:
        """Ends a request; its pages are free at once. ValueError if the engine has none of that id."""
        request = self._known(id)
        if request.state == "queued":
            self._queue.remove(request)
        self._leave(request)

    def rollback(self, id: int, tokens: int, then: Sequence[int] = ()) -> None:
        """Takes back the newest tokens of a request's answer, and puts `then` in their place.

        The request goes on from there: what it generated before stands. ValueError for an engine made without max_rollback,
        for more tokens than the answer has or than max_rollback, for a request that waits, or where a shared page would have
        to be copied and no page is free.
        """
        request = self._known(id)
        answer, most = len(request.tokens) - request.prompt_tokens, self.sizes.max_rollback
        if request.state == "queued" or not most or not 0 <= tokens <= min(answer, most):
            raise ValueError(
                f"Request {id} ({request.state}) cannot take back {tokens} tokens: it has an answer of {answer}, and the "
                f"engine was made with max_rollback={most}."
            )
        if answer - tokens + len(then) >= request.max_new_tokens:
            raise ValueError(
                f"Request {id} would have an answer of {answer - tokens + len(then)} tokens and ends at "
                f"{request.max_new_tokens} (max_new_tokens): put fewer in place."
            )
        self.model.check_vocabulary(np.asarray(then, np.int64), f"Request {id}, tokens put in place,")
        kept = len(request.tokens) - tokens
        fed = min(request.fed, kept if then else kept - 1)  # the last token has to run again, to give logits
        if request.most_fed - fed > most + 1:
            raise ValueError(
                f"Request {id} was rolled back before and has run {request.most_fed} tokens: it cannot go back to {fed}, more "
                f"than max_rollback={most} behind. Let it run on first."
            )
        self._own_pages(request, fed // self.page_tokens)
        request.tokens = request.tokens[:kept] + [int(t) for t in then]
        request.fed, request.state = fed, "prefill"
        self._state.rewind(self._rows)

    def forget_prefixes(self) -> None:
        """Frees all kept prefixes."""
        self._prefixes.clear()

    def warm_up(self, images: bool = False) -> None:
        """Compiles every program that a step may need, with `images` also those of chunks with image embeddings. No request
        is touched. ValueError for images of a model that takes text alone."""
        self._state.warm_up(images)

    # ------------------------------------------------------------ admission

    def _refuse(self, prompt: np.ndarray, max_new_tokens: int, stops: tuple[int, ...], images: Sequence[Any]) -> None:
        total, s = len(prompt) + max_new_tokens, self.sizes
        if not len(prompt):
            raise ValueError("The prompt is empty: give at least one token, such as the begin-of-sequence id.")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1.")
        if len(stops) > STOP_IDS:
            raise ValueError(f"{len(stops)} stop ids were given; a request may have {STOP_IDS}.")
        if total > s.max_context:
            raise ValueError(
                f"Prompt of {len(prompt)} tokens with max_new_tokens={max_new_tokens} comes to {total} tokens, and the "
                f"engine was made for max_context={s.max_context}. Shorten one of them, or make a larger engine."
            )
        if self._pages_of(total) > self.pages:
            raise ValueError(
                f"A request of {total} tokens needs {self._pages_of(total)} pages of {self.page_tokens} tokens, and the pool "
                f"has {self.pages} in all. Shorten it, or make an engine with a larger pool."
            )
        self.model.check_vocabulary(prompt, "The prompt")
        self.model.check_images(prompt, images, "The prompt")

    def _pages_of(self, tokens: int) -> int:
        """Pages for `tokens` tokens and the drafted ones that are checked behind them."""
        return -(-(tokens + self.sizes.drafts) // self.page_tokens)

    def _admit(self) -> list[Event]:
        """Moves requests from the queue into the batch, in order, as long as they fit."""
        events, admitted, places, copies = [], [], [], []
        while self._queue:
            request = self._queue[0]
            reason = self._place(request, places, copies)
            if reason:
                if not request.waiting_said:
                    request.waiting_said = True
                    events.append(Event(request.id, "queued", text=reason))
                break
            self._queue.popleft()
            admitted.append(request)
            events.append(Event(request.id, "started"))
        self._copy(copies)
        self._state.admit(admitted, places)
        return events

    def _place(self, request: Request, places: list[int], copies: list[tuple[int, int]]) -> str:
        """Gives `request` a row and pages and appends where its state comes from; or says why it has to wait."""
        if None not in self._rows:
            return (
                f"Request {request.id} waits: all {self.sizes.max_batch} rows of the batch are taken (max_batch). It runs "
                "when one of them ends."
            )
        prompt = np.asarray(request.tokens, np.int32)
        prefix = self._prefixes.longest(prompt) if self.sizes.snapshots and not request.images else None
        whole = 0 if prefix is None else prefix.tokens // self.page_tokens
        needed = self._pages_of(request.most_tokens) - whole
        if not self._prefixes.make_room(needed, prefix):
            if prefix is not None and self._prefixes.make_room(self._pages_of(request.most_tokens)):
                prefix, whole, needed = None, 0, self._pages_of(request.most_tokens)
            else:
                return (
                    f"Request {request.id} waits: it needs {needed} pages and {self.free_pages} of {self.pages} are free. It "
                    "runs when others end."
                )
        own = self._pool.allocate(needed)
        if prefix is not None:
            self._pool.hold(prefix.page_ids[:whole])
            if whole < len(prefix.page_ids):  # the last page is not full: both would write to it
                copies.append((prefix.page_ids[whole], own[0]))
        request.page_ids = ([] if prefix is None else list(prefix.page_ids[:whole])) + own
        request.fed = request.most_fed = 0 if prefix is None else prefix.tokens
        request.slot, request.state = self._rows.index(None), "prefill"
        self._rows[request.slot] = request
        places.append(EMPTY if prefix is None else prefix.place)
        self._count_admission(request, prefix)
        return ""

    def _count_admission(self, request: Request, prefix: Prefix | None) -> None:
        self._stats.requests += 1
        self._stats.prompt_tokens += request.prompt_tokens
        if prefix is not None:
            self._stats.hits += 1
            self._stats.reused_tokens += prefix.tokens

    # ------------------------------------------------------------ steps

    def _prefill(self) -> None:
        """One chunk of as many waiting prompts as the shape takes that moves most tokens."""
        waiting = sorted((r for r in self._rows if r is not None and r.state == "prefill"), key=lambda r: r.id)
        if not waiting:
            return
        left = [self._next_boundary(r) - r.fed for r in waiting]

        def moved(shape: tuple[int, int]) -> tuple[int, int]:
            requests, rows = shape
            return sum(min(n, rows) for n in left[:requests]), -requests * rows

        requests, rows = max(self.sizes.prefill_shapes, key=moved)
        chosen = waiting[:requests]
        tokens, count = np.zeros((requests, rows), np.int32), np.zeros(requests, np.int32)
        for i, (request, n) in enumerate(zip(chosen, left, strict=False)):
            count[i] = min(n, rows)
            tokens[i, : count[i]] = request.tokens[request.fed : request.fed + count[i]]
        image = None
        if any(request.images for request in chosen):
            idle = requests - len(chosen)
            image = self.model.image_rows(
                [*(r.images for r in chosen), *[()] * idle], [*(r.fed for r in chosen), *[0] * idle], rows
            )
        self._state.prefill(chosen + [None] * (requests - len(chosen)), tokens, count, image)
        kept = []
        for request, n in zip(chosen, count, strict=False):
            request.fed += int(n)
            request.most_fed = max(request.most_fed, request.fed)
            self._stats.prefill_tokens += int(n)
            if request.fed == self._next_boundary(request, reached=True):
                kept.append(request)
            if request.fed == len(request.tokens):
                request.state = "decode"
        self._keep(kept, requests)

    def _next_boundary(self, request: Request, reached: bool = False) -> int:
        """Where the request's chunk has to end: its prompt's end, or before that the next boundary that is kept.

        reached: the boundary where it stands, if it stands at one.
        """
        end = len(request.tokens)
        if not self.sizes.snapshots or request.images:
            return end
        step = self.sizes.boundary
        return min(end, -(-request.fed // step) * step if reached else (request.fed // step + 1) * step)

    def _decode(self) -> list[Event]:
        """What a burst of decode steps gave. The one after it is under way while its tokens are read, where it can be."""
        burst, self._ahead = self._ahead or self._start_burst(), None
        if burst is None:
            return []
        if self._can_run_ahead(burst):
            self._ahead = self._start_burst()
        return self._finish_burst(burst)

    def _start_burst(self) -> Burst | None:
        """Starts a burst of all requests whose prompt is processed."""
        placed = [r if r is not None and r.state == "decode" else None for r in self._rows]
        running = [r for r in placed if r is not None]
        if not running:
            return None
        size = next(n for n in self.sizes.decode_rows if n >= len(running))
        padded = placed if size == self.sizes.max_batch else running + [None] * (size - len(running))
        with jax.transfer_guard_device_to_host("disallow"):
            return Burst(padded, self._state.decode(padded, all(r.is_greedy for r in running)))

    def _can_run_ahead(self, burst: Burst) -> bool:
        """Whether nothing has to be decided between `burst` and the next one.

        A request that ends in the burst under way takes part in the next one without effect: it samples its last token
        again, and feeds none. So it is enough that one goes on. Requests that wait for the room of one that ends should
        have it at once, and a rollback counts from the tokens that the caller has seen. Chunks of prompts are no reason to
        wait: this step's was started before, and the next one's would come after the next burst in any case.
        """
        if self.sizes.max_rollback:
            return False
        most, under_way = self.sizes.steps * (1 + self.sizes.drafts), set(burst.requests)
        running = [r for r in self._rows if r is not None and r.state == "decode"]
        go_on = [r not in under_way or len(r.tokens) + most < r.most_tokens for r in running]
        return all(go_on) if self._queue else any(go_on)

    def _finish_burst(self, burst: Burst) -> list[Event]:
        """Reads a burst's tokens. Those of requests that ended or were cancelled since it began are left out."""
        if not any(map(self._is_live, burst.requests)):
            return []
        events, ended = [], []
        for request, row in zip(burst.requests, np.asarray(burst.tokens), strict=True):
            if not self._is_live(request):
                continue
            new = tuple(row[row >= 0].tolist())
            request.tokens += new
            self._stats.decode_tokens += len(new)
            events.append(Event(request.id, "tokens", new))
            reason = self._end_of(request)
            request.fed = len(request.tokens) - bool(reason)
            request.most_fed = max(request.most_fed, request.fed)
            if reason:
                ended.append(request)
                events.append(Event(request.id, "finished", text=reason))
        for request in ended:
            if self.sizes.snapshots and not request.images:
                self._keep([request], 1)
            self._leave(request)
        return events

    def _is_live(self, request: Request | None) -> bool:
        return request is not None and self._requests.get(request.id) is request

    def _end_of(self, request: Request) -> str:
        if request.tokens[-1] in request.stop_ids:
            return f"Token {request.tokens[-1]} is a stop id."
        if len(request.tokens) == request.most_tokens:
            return f"The answer has max_new_tokens={request.max_new_tokens} tokens."
        return ""

    # ------------------------------------------------------------ pages

    def _keep(self, requests: list[Request], size: int) -> None:
        """Keeps the state of requests that stand at a boundary, by the program for up to `size` of them."""
        if not self.sizes.snapshots:
            return
        rows, places = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        for i, request in enumerate(requests):
            place = self._prefixes.keep(request.held(), request.page_ids[: -(-request.fed // self.page_tokens)])
            if place is not None:
                rows[i], places[i] = request.slot, place
        self._state.keep(rows, places)

    def _leave(self, request: Request) -> None:
        """Forgets `request` and frees its row and pages."""
        del self._requests[request.id]
        if request.slot >= 0:
            self._rows[request.slot] = None
            self._pool.release(request.page_ids)

    def _own_pages(self, request: Request, first: int) -> None:
        """Copies pages first, first + 1, .. of the request that others hold too, so that it may write them."""
        shared = [i for i in range(first, len(request.page_ids)) if self._pool.is_shared(request.page_ids[i])]
        if not self._prefixes.make_room(len(shared)):
            raise ValueError(
                f"Request {request.id} shares {len(shared)} pages that it would have to copy, and {self.free_pages} are "
                "free. Try again when another request has ended."
            )
        shared = [i for i in shared if self._pool.is_shared(request.page_ids[i])]
        copies = []
        for i, page in zip(shared, self._pool.allocate(len(shared)), strict=True):
            copies.append((request.page_ids[i], page))
            self._pool.release([request.page_ids[i]])
            request.page_ids[i] = page
        self._copy(copies)

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        self._stats.copied_pages += len(copies)
        self._state.copy(copies)

    def _known(self, id: int) -> Request:
        if id not in self._requests:
            raise ValueError(f"The engine has no request {id}: it was never added, has finished or was cancelled.")
        return self._requests[id]
