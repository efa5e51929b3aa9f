# Exported from chapters/09_publication.py (5cbf4d93): edit the chapter.
"""When a computed page becomes visible to other requests."""

from __future__ import annotations

from minivllm.radix import Match
from minivllm.request import ExtraKey
from minivllm.scheduler import RequestState


class PublishPrompt:
    """The prompt at once, when all of it is computed; the output at the end."""

    def num_visible(self, state: RequestState) -> int:
        """All of the prompt or nothing."""
        num_prompt = len(state.request.prompt_token_ids)
        return num_prompt if state.num_committed >= num_prompt else 0


Past = int | tuple[str, ExtraKey]  # the page before, or the beginning under a key


class Announcements:
    """Pages that the forward pass of this step is going to fill.

    A request that is scheduled later in the same step may read them: every layer writes
    its keys and values before it attends. Valid for one step; the first announcer of a
    page wins. A page is known by its tokens and the page before it, so nothing needs to
    be confirmed. Meant for `PublishEachStep`: what is announced must be published after
    the pass. (vLLM enters blocks in its table while it schedules.)
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._pages: dict[tuple[Past, bytes], int] = {}

    def clear(self) -> None:
        """A new step begins."""
        self._pages.clear()

    def _tokens(self, state: RequestState, page: int) -> bytes:
        size = self.page_size
        return state.tokens[page * size : (page + 1) * size].tobytes()

    def announce(self, state: RequestState, num_tokens: int) -> None:
        """The first `num_tokens` tokens of a request will have K/V after this step."""
        lease = state.lease
        assert lease is not None
        others = lease.num_shared + lease.num_borrowed
        start = max(others, state.num_committed // self.page_size)
        for i in range(start, num_tokens // self.page_size):
            past = lease.pages[i - 1] if i else ("", state.request.extra_key)
            self._pages.setdefault((past, self._tokens(state, i)), lease.pages[i])

    def find(self, state: RequestState, match: Match) -> list[int]:
        """The announced pages that go on where a match ends."""
        pages = match.kv_indices.places
        past: Past = pages[-1] if pages else ("", state.request.extra_key)
        found: list[int] = []
        num_pages = len(state.tokens) // self.page_size
        for i in range(len(pages), num_pages):
            page = self._pages.get((past, self._tokens(state, i)))
            if page is None:
                break
            found.append(page)
            past = page
        return found
