"""What the engine tells its caller."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Event:
    """What happened to a request in a step. tokens: the new ones ("tokens"). text: a sentence ("queued": why it waits;
    "finished": what ended it)."""

    id: int
    kind: Literal["queued", "started", "tokens", "finished"]
    tokens: tuple[int, ...] = ()
    text: str = ""


@dataclass
class Stats:
    """Counts since the engine was made. A hit is a request whose prompt begins with a kept prefix."""

    requests: int = 0
    prompt_tokens: int = 0
    hits: int = 0
    reused_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    copied_pages: int = 0
    evicted_prefixes: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were taken from kept prefixes."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
