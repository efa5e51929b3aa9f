# Exported from chapters/04_pages.py (ea94727d): edit the chapter.
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
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: page 0 goes first
        self._is_out = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """Hand out pages, all or none. Raises `OutOfPages`."""
        if num_pages > len(self._free):
            raise OutOfPages(f"{num_pages} pages asked for, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(num_pages)]
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
        self._free.extend(pages)

    def is_out(self, page: int) -> bool:
        """Whether somebody holds this page."""
        return bool(self._is_out[page])
