"""Which prefixes of token sequences are still in memory: their pages, and the state that stands beside the pages.

A boundary is a number of tokens at which a request's whole state was kept: window rings, open groups, n-gram ids and
whatever else the cache holds per request lie in one place of the snapshot store, and compressed rows and index keys in
pages. A prefix can be taken up at a boundary only, so that it is common to all kinds.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from dsa_jax.engine.pages import PagePool


@dataclass(frozen=True)
class Prefix:
    """A kept boundary: `tokens` tokens, the pages that hold them, and the place of the snapshot."""

    tokens: int
    page_ids: tuple[int, ...]
    place: int


class PrefixCache:
    """Up to `len(places)` prefixes; the one that was not used for the longest time makes room for a new one."""

    def __init__(self, places: list[int], pool: PagePool):
        self._places, self._pool = list(places), pool
        self._kept: OrderedDict[bytes, Prefix] = OrderedDict()  # the tokens themselves are the key: no two can collide
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, tokens: np.ndarray) -> Prefix | None:
        """The longest kept prefix of `tokens` (int32) that leaves at least one token to run."""
        for length in sorted({prefix.tokens for prefix in self._kept.values()}, reverse=True):
            if length < len(tokens):
                key = tokens[:length].tobytes()
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
        return None

    def keep(self, tokens: np.ndarray, pages: list[int]) -> int | None:
        """The place where the state after `tokens` (int32) is to be stored; None where it is kept already, or nothing is.

        `pages` hold the tokens; the prefix becomes another holder of each.
        """
        key = tokens.tobytes()
        if key in self._kept:
            self._kept.move_to_end(key)
            return None
        if not self._places and not self.drop_oldest():
            return None
        place = self._places.pop()
        self._pool.hold(pages)
        self._kept[key] = Prefix(len(tokens), tuple(pages), place)
        return place

    def drop_oldest(self) -> bool:
        """Forgets the prefix that was not used for the longest time; False where there is none."""
        if not self._kept:
            return False
        _, prefix = self._kept.popitem(last=False)
        self._pool.release(prefix.page_ids)
        self._places.append(prefix.place)
        self.evicted += 1
        return True

    def make_room(self, pages: int, spare: Prefix | None = None) -> bool:
        """Forgets prefixes, oldest first and never `spare`, until `pages` pages are free; False where that cannot be."""
        if spare is not None:
            self._kept.move_to_end(next(key for key, prefix in self._kept.items() if prefix is spare))
        while self._pool.free < pages and len(self._kept) > (spare is not None):
            self.drop_oldest()
        return self._pool.free >= pages

    def clear(self) -> None:
        """Forgets all prefixes."""
        while self.drop_oldest():
            pass
