# Exported from chapters/04_pages.py (5d58959e): edit the chapter.
"""K/V memory in pages: who may write where."""

from __future__ import annotations

from collections.abc import Sequence


class OutOfPages(MemoryError):
    """Fewer pages are free than were asked for."""


class PagePool:
    """`num_pages` pages of `page_size` tokens; all of them can be handed out.

    A page is a number. Its slots, one for each token, are `page * page_size + offset`.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens")
        self.num_pages = num_pages
        self.page_size = page_size
        self._returned: list[int] = []  # the last to come back goes out first
        self._num_touched = 0  # pages from here on were never handed out
        self._out: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._returned) + self.num_pages - self._num_touched

    def allocate(self, num_pages: int) -> list[int]:
        """Hand out pages, all or none. Raises `OutOfPages`."""
        if num_pages < 0:
            raise ValueError(f"{num_pages} pages asked for")
        if num_pages > self.num_free:
            raise OutOfPages(f"{num_pages} pages asked for, {self.num_free} free")
        reused = self._returned[max(0, len(self._returned) - num_pages) :][::-1]
        del self._returned[len(self._returned) - len(reused) :]
        fresh = self._num_touched + num_pages - len(reused)
        pages = [*reused, *range(self._num_touched, fresh)]
        self._num_touched = fresh
        self._out.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Take pages back. Raises `ValueError`, and takes none, if one is not out."""
        going = set(pages)
        if not going <= self._out:
            raise ValueError(f"page {min(going - self._out)} is not allocated")
        if len(going) < len(pages):
            raise ValueError(f"a page appears twice in {list(pages)}")
        self._out -= going
        self._returned.extend(reversed(pages))

    def is_out(self, page: int) -> bool:
        """Whether somebody holds this page."""
        return page in self._out
