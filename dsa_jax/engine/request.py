"""What the engine knows of one request, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from dsa_jax.sampling import Sampling


@dataclass
class Request:
    """One request. tokens: prompt, then what was generated. fed: how many of them the cache holds. slot: its row of the
    engine's arrays, and pages: its pages, from its admission on."""

    id: int
    tokens: list[int]
    prompt_tokens: int
    max_new_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    images: Sequence[Any] = ()
    state: Literal["queued", "prefill", "decode"] = "queued"
    fed: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    waiting_said: bool = False

    @property
    def most_tokens(self) -> int:
        """Tokens that it may come to."""
        return self.prompt_tokens + self.max_new_tokens

    def held(self) -> np.ndarray:
        """The tokens that the cache holds."""
        return np.asarray(self.tokens[: self.fed], np.int32)
