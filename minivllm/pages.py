# Exported from chapters/04_pages.py (3d11b3a4): edit the chapter.
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
        self._is_out = bytearray(num_pages)

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
        pages = [
            self._returned.pop() for _ in range(min(num_pages, len(self._returned)))
        ]
        fresh = self._num_touched + num_pages - len(pages)
        pages += range(self._num_touched, fresh)
        self._num_touched = fresh
        for page in pages:
            self._is_out[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Take pages back. Raises `ValueError`, and takes none, if one is not out."""
        for page in pages:
            if not 0 <= page < self.num_pages or not self._is_out[page]:
                raise ValueError(f"page {page} is not allocated")
        if len(set(pages)) < len(pages):
            raise ValueError(f"a page appears twice in {list(pages)}")
        for page in pages:
            self._is_out[page] = 0
        self._returned.extend(reversed(pages))

    def is_out(self, page: int) -> bool:
        """Whether somebody holds this page."""
        return bool(self._is_out[page])
