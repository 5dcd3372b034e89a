"""Many requests on one model: paged pools they share, chunked prefill, bursts of decode steps, prefixes kept and reused."""

from dsa_jax.engine.engine import Engine, Event, Stats

__all__ = ["Engine", "Event", "Stats"]
