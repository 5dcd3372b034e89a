"""What the engine knows of one request, on the host."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from dsa_jax.engine.programs import Terms
from dsa_jax.sampling import Sampling

STOP_IDS = 8  # how many a request may have


@dataclass(eq=False)
class Request:
    """One request. tokens: prompt, then what was generated. fed: how many of them the cache holds, and most_fed the
    most that it ever held. sampling: as `on_host` gives it. slot: its row of the engine's arrays, and page_ids: its pages,
    from its admission on."""

    id: int
    tokens: list[int]
    prompt_tokens: int
    max_new_tokens: int
    sampling: tuple[np.ndarray, ...]
    stop_ids: tuple[int, ...]
    images: Sequence[Any] = ()
    state: Literal["queued", "prefill", "decode"] = "queued"
    fed: int = 0
    most_fed: int = 0
    slot: int = -1
    page_ids: list[int] = field(default_factory=list)
    waiting_said: bool = False

    @property
    def most_tokens(self) -> int:
        """Tokens that it may come to."""
        return self.prompt_tokens + self.max_new_tokens

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the likeliest token every time."""
        temperature, *_ = self.sampling
        return not temperature.any()

    def held(self) -> np.ndarray:
        """The tokens that the cache holds."""
        return np.asarray(self.tokens[: self.fed], np.int32)


@dataclass(frozen=True)
class Burst:
    """A burst of decode steps that was started: the request of every row (None: none), and its tokens int32 [R, N] on the
    device, -1 where there is none."""

    requests: Sequence[Request | None]
    tokens: jax.Array


def table_of(requests: Sequence[Request | None], width: int) -> np.ndarray:
    """The block table int32 [R, width] of requests (None: one without pages), -1 padded."""
    table = np.full((len(requests), width), -1, np.int32)
    for row, request in zip(table, requests, strict=True):
        if request is not None:
            row[: len(request.page_ids)] = request.page_ids
    return table


def on_host(sampling: Sampling) -> tuple[np.ndarray, ...]:
    """(temperature, top_k, top_p, key data) of one request, read from the device once."""
    return jax.device_get((sampling.temperature, sampling.top_k, sampling.top_p, jax.random.key_data(sampling.key)))


@functools.cache
def _nobody() -> tuple[np.ndarray, ...]:
    return on_host(Sampling.of(1))


def terms_of(requests: Sequence[Request | None]) -> Terms:
    """How requests decode, as arrays on the host (None: one that does not)."""
    temperature, top_k, top_p, key = zip(*(_nobody() if r is None else r.sampling for r in requests), strict=True)
    stops = np.full((len(requests), STOP_IDS), -1, np.int32)
    for row, request in zip(stops, requests, strict=True):
        if request is not None:
            row[: len(request.stop_ids)] = request.stop_ids
    return Terms(
        temperature=np.concatenate(temperature),
        top_k=np.concatenate(top_k),
        top_p=np.concatenate(top_p),
        key=np.concatenate(key),
        stop_ids=stops,
        limit=np.array([0 if r is None else r.most_tokens - 1 for r in requests], np.int32),
    )
