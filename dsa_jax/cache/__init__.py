"""What a request carries between steps: frozen pytrees, passed in, donated, returned."""

from dsa_jax.cache.state import Cache, CompressorTail, SourceCache, new_cache

__all__ = ["Cache", "CompressorTail", "SourceCache", "new_cache"]
