"""Which pages of a pool are in use, and by how many holders. Host-side integers alone; no arrays."""

from collections.abc import Iterable


class PagePool:
    """`pages` pages with a count of holders each. A page without holders is free."""

    def __init__(self, pages: int):
        self._holders = [0] * pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def pages(self) -> int:
        """All pages, free or not."""
        return len(self._holders)

    @property
    def free(self) -> int:
        """Pages without a holder."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, with one holder from now on. ValueError where fewer are free; then none is taken."""
        if count > len(self._free):
            raise ValueError(f"{count} pages were asked for and {len(self._free)} of {self.pages} are free.")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each of `pages`, which are in use."""
        for page in pages:
            self._require_used(page)
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder fewer for each of `pages`; those without any are free again."""
        for page in pages:
            self._require_used(page)
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether `page` has more than one holder: who wants to write it has to copy it first."""
        return self._holders[page] > 1

    def _require_used(self, page: int) -> None:
        if not self._holders[page]:
            raise ValueError(f"Page {page} is free: it has no holder that could be added to or removed.")
