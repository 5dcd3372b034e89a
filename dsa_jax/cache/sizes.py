"""How large the arrays of a cache are, beyond what config and number of requests say."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array

from dsa_jax import ranks


@dataclass(frozen=True)
class Pool:
    """Paged arrays: pages in all, tokens a page holds, and the block table int32 [B, M] of an empty cache."""

    pages: int
    page_tokens: int
    block_table: Array

    def rows(self, ratio: int) -> int:
        """Rows of one page on this device, at one row for `ratio` tokens."""
        return self.page_tokens // (ratio * ranks.parts("context"))


@dataclass(frozen=True)
class CacheSizes:
    """pages: pages of every pool, shared by the requests, whose block tables start without any (-1); None gives every
    request pages of its own for all its tokens. page_tokens: tokens a page holds, on all devices of a divided cache
    together; None is the family's default on each. max_rollback: how many of its newest tokens a request may take back.
    """

    pages: int | None = None
    page_tokens: int | None = None
    max_rollback: int = 0

    def pool(self, requests: int, max_tokens: int, max_positions: int, unit: int, default: int) -> Pool:
        """The pool for `requests` requests of up to `max_tokens` tokens; a page holds a multiple of `unit` tokens on each
        of the devices that divide it.

        ValueError for sizes that are not positive, more tokens than `max_positions`, or a page that cuts a group.
        """
        if requests < 1 or max_tokens < 1:
            raise ValueError(f"A cache for {requests} requests of {max_tokens} tokens: both must be at least 1.")
        if max_tokens > max_positions:
            raise ValueError(
                f"A cache of {max_tokens} tokens is longer than the {max_positions} positions that the checkpoint's "
                "config allows (max_position_embeddings). Ask for a shorter one."
            )
        if self.max_rollback < 0:
            raise ValueError(f"max_rollback={self.max_rollback} must be at least 0 tokens.")
        ways = ranks.parts("context")
        tokens = ways * -(-default // unit) * unit if self.page_tokens is None else self.page_tokens
        if tokens < 1 or tokens % (unit * ways):
            where = "" if ways == 1 else f" on {ways} devices (cp), in equal parts,"
            raise ValueError(
                f"A page of {tokens} tokens{where} would cut a compressed group or a candidate block: give a positive "
                f"multiple of {unit * ways}."
            )
        each = -(-max_tokens // tokens)
        if self.pages is None:
            table = jnp.arange(requests * each, dtype=jnp.int32).reshape(requests, each)
            return Pool(requests * each, tokens, table)
        if self.pages < 1:
            raise ValueError(f"A pool of {self.pages} pages holds nothing: give at least 1.")
        return Pool(self.pages, tokens, jnp.full((requests, each), -1, jnp.int32))
