"""Many requests on one model: paged pools they share, chunked prefill, bursts of decode steps, prefixes kept and reused."""

from dsa_jax.engine.engine import Engine
from dsa_jax.engine.report import Event, Stats

__all__ = ["Engine", "Event", "Stats"]
