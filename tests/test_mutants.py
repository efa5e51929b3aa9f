"""Faults planted on purpose: for each, a test that must notice it, and name it.

A mutant is one method with one piece of its source replaced. If the piece is not there
any more the test fails too, so no mutant can be lost when the code changes.
"""

import inspect
import textwrap
from collections.abc import Callable

import pytest
import test_explain
import test_output
import test_pages
import test_radix
import test_sampling
import test_text

from minivllm import hashing, prefix_cache, radix, sampling
from minivllm.engine import Engine
from minivllm.explain import Explainer, History, Pages
from minivllm.prefix_cache import HashIndex, PrefixCache
from minivllm.radix import RadixCache
from minivllm.sampling import Sampler
from minivllm.scheduler import Scheduler
from minivllm.tokenizer import TextWriter


def compare_with_the_twin():
    for eviction in ("lru", "lfu", "fifo"):
        test_radix.long_history(1, eviction, num_steps=2_000)


def one_early_token_changes_every_later_name():
    one, other = [1] * 64, [2] + [1] * 63
    names = [hashing.page_hashes(tokens, 16) for tokens in (one, other)]
    assert not set(names[0]) & set(names[1]), "a name does not cover its past"


def both_duplicates():
    for index in ("radix", "hash"):
        test_pages.test_a_duplicate_is_freed_and_its_owner_remapped(index)


def both_pins():
    for index in ("radix", "hash"):
        test_pages.test_a_match_pins_before_anything_can_evict(index)


def a_scored_prompt():
    for flights in ("none", "completion"):
        test_output.test_a_scored_prompt_reads_no_cache_and_fills_it(
            "radix", "step", flights
        )


# name: (owner, method, what the source says, what the mutant says, who must notice)
MUTANTS: dict[str, tuple[object, str, str, str, Callable[[], None]]] = {
    "hash without its parent": (
        hashing,
        "page_name",
        "name.update(past)\n",
        "\n",
        one_early_token_changes_every_later_name,
    ),
    "split that forgets the lock": (
        RadixCache,
        "_split",
        "int(node.locks > 0)",
        "0",
        test_radix.test_lock_survives_a_split_below_and_above,
    ),
    "split that refreshes the unmatched half": (
        RadixCache,
        "_split",
        "node.parent = upper",
        "node.parent, node.last_access = upper, self._clock + 1",
        test_radix.test_split_refreshes_only_the_matched_half,
    ),
    "lock that holds the whole node": (
        RadixCache,
        "lock",
        "self._node_at(self._end_of(match))",
        "self._end_of(match)[0]",
        test_radix.test_lock_protects_exactly_the_match,
    ),
    "eviction of a pinned leaf": (
        RadixCache,
        "_pin",
        "node.locks += 1",
        "node.locks += node.children != {}",
        test_radix.test_lock_survives_a_split_below_and_above,
    ),
    "eviction of a pinned page": (
        PrefixCache,
        "acquire",
        "self.index.lock(match)",
        "radix.Handle(None)",
        both_pins,
    ),
    "pages promised to a request are counted as evictable for it": (
        PrefixCache,
        "acquire",
        "self.index.evictable_len(match)",
        "0",
        test_pages.test_a_match_is_no_room_for_its_own_request,
    ),
    "duplicate freed and not remapped": (
        PrefixCache,
        "publish",
        "lease.pages[start : lease.num_shared] = published",
        "",
        both_duplicates,
    ),
    "duplicate remapped and not freed": (
        PrefixCache,
        "publish",
        "if a != b",
        "if a == -1",
        both_duplicates,
    ),
    "a page published after one that was refused": (
        PrefixCache,
        "publish",
        "lease.num_shared < start",
        "False",
        test_pages.test_no_page_is_published_without_its_past,
    ),
    "partial page published": (
        PrefixCache,
        "publish",
        "num_committed // self.page_size",
        "self.pages_for(num_committed)",
        lambda: test_pages.test_aborted_at_token_20_leaves_16("radix"),
    ),
    "LRU off by one": (
        RadixCache,
        "lock",
        "node.last_access = self._clock",
        "node.last_access = self._clock - 1",
        test_radix.test_leaves_go_in_the_order_of_their_last_use,
    ),
    "a use forgotten when its leaf goes": (
        RadixCache,
        "_trim",
        "parent.last_access = max(parent.last_access, leaf.last_access)",
        "",
        compare_with_the_twin,
    ),
    "extend that counts as a hit": (
        RadixCache,
        "extend",
        "if end is not node:",
        "end.num_hits += 1\n    if end is not node:",
        compare_with_the_twin,
    ),
    "a leaf that grows under another's lock": (
        RadixCache,
        "_add",
        "parent.locks == num_own_locks",
        "True",
        compare_with_the_twin,
    ),
    "match that rounds up": (
        radix,
        "shared_pages",
        "return low",
        "return min(low + 1, len(one) // step)",
        compare_with_the_twin,
    ),
    "tokens of a hash hit not compared": (
        HashIndex,
        "_walk",
        "or not found.key.startswith(page)",
        "",
        test_radix.test_a_stolen_name_gives_no_page,
    ),
    "tokens within a run not compared": (
        HashIndex,
        "_walk",
        "agree = shared_pages(node.key[within:], key[start:at], step)",
        "agree = num_pages",
        test_radix.test_a_stolen_name_within_a_run_gives_no_page,
    ),
    "parent of a hash hit not compared": (
        HashIndex,
        "_walk",
        "found.parent is not node or",
        "",
        test_radix.test_a_name_under_another_parent_gives_no_page,
    ),
    "evicted page left in the table": (
        HashIndex,
        "_trim",
        "list(map(self._table.__delitem__, names[num_pages:]))",
        "pass",
        compare_with_the_twin,
    ),
    "names that stay with the lower half": (
        HashIndex,
        "_split",
        "self._table.update(dict.fromkeys(names[:cut], upper))",
        "",
        compare_with_the_twin,
    ),
    "double free": (
        test_pages.PagePool,
        "free",
        "if not going <= self._out:",
        "if False:",
        lambda: test_pages.test_a_bad_free_frees_nothing([0, 3]),
    ),
    "the prompt counted as output": (
        sampling,
        "count_tokens",
        "torch.arange(c.end) >= c.num_prompt",
        "torch.arange(c.end) >= 0",
        test_sampling.test_the_prompt_counts_for_repetition_only,
    ),
    "a negative logit divided": (
        sampling,
        "penalise",
        "old > 0",
        "old > -torch.inf",
        test_sampling.test_repetition_penalty_is_that_of_transformers,
    ),
    "infinite logits after a penalty": (
        sampling,
        "bend",
        ".clamp_(-LARGEST_LOGIT, LARGEST_LOGIT)",
        "",
        lambda: test_sampling.test_nonsense_hurts_nobody_else(
            {"repetition_penalty": 5e-324}, 1.0
        ),
    ),
    "a token of no probability drawn": (
        sampling,
        "draw",
        ">= near",
        "> near",
        lambda: test_sampling.test_a_share_of_nothing_is_never_drawn(0.0),
    ),
    "one point for all folds": (
        sampling,
        "draw",
        "points.to(folds[0])",
        "points[:, :1].expand_as(points).to(folds[0])",
        test_sampling.test_draws_follow_the_probabilities,
    ),
    "a forbidden token at a high temperature": (
        sampling,
        "bend",
        "masked_fill_(forbidden, -torch.inf)",
        "masked_fill_(forbidden, -LARGEST_LOGIT)",
        test_sampling.test_what_is_forbidden_is_so_at_every_temperature,
    ),
    "one point for all positions": (
        Sampler,
        "_points",
        " at {chunk.end}",
        "",
        test_sampling.test_a_draw_depends_on_seed_and_position_only,
    ),
    "a thousand tokens are enough for anybody": (
        sampling,
        "cut_top_p",
        "late[:, -1].all() or ",
        "True or ",
        test_sampling.test_the_first_thousand_are_not_enough,
    ),
    "a prompt scored again after a preemption": (
        Engine,
        "_note",
        "len(prompt) - 1 - chunk.start",
        "0",
        lambda: test_output.test_nothing_is_reported_twice_after_a_preemption(
            5, "step"
        ),
    ),
    "a scored prompt that matches": (
        Scheduler,
        "_try_admit",
        "state.sought, state",
        "state.tokens, state",
        a_scored_prompt,
    ),
    "a scored prompt that waits": (
        Engine,
        "_coordinator",
        " if progress.state.sought else Independent()",
        "",
        a_scored_prompt,
    ),
    "a stream that shows what is taken back": (
        TextWriter,
        "text",
        "- self._num_held()",
        "",
        test_text.test_a_stream_is_never_taken_back,
    ),
    "half a character written": (
        TextWriter,
        "push",
        "self._num_waiting > 3",
        "self._num_waiting > 0",
        test_text.test_any_text_comes_through,
    ),
    "a window that begins within a character": (
        TextWriter,
        "push",
        "if not 0 < self._num_waiting <= 3:",
        "if True:",
        test_text.test_any_text_comes_through,
    ),
    "an explainer that ignores the extra key": (
        Explainer,
        "_report",
        "nearest(ids, state.request.extra_key, self.look)",
        "nearest(ids, None, self.look)",
        test_explain.some_histories,
    ),
    "an explainer that is off by one at a page's border": (
        Explainer,
        "_why",
        "elsewhere >= cached + size",
        "elsewhere > cached + size",
        test_explain.some_histories,
    ),
    "tokens of a page counted as known that is not whole": (
        Explainer,
        "_report",
        "min(num_known // self",
        "min((num_known + 1) // self",
        test_explain.some_histories,
    ),
    "a history that forgets in silence": (
        History,
        "_trim",
        "self.forgot = max(self.forgot, leaf.last_access)",
        "pass",
        test_explain.some_histories,
    ),
    "an eviction that nobody caused": (
        Explainer,
        "_on_evict",
        "self.clock.now(), owner)",
        "self.clock.now())",
        test_explain.some_histories,
    ),
    "every difference a fault": (
        Explainer,
        "_costs",
        "self.page_size, size) > 0",
        "self.page_size, size) >= 0",
        test_explain.some_histories,
    ),
    "a queue that counts what was before": (
        Explainer,
        "_queue",
        "self._refusals.copy()",
        "Counter()",
        test_explain.some_histories,
    ),
    "the youngest ghost forgotten first": (
        Pages,
        "bury",
        "popitem(last=False)",
        "popitem(last=True)",
        test_explain.test_the_oldest_ghost_is_forgotten_first,
    ),
}


def mutated(owner: object, name: str, old: str, new: str) -> Callable[..., object]:
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(old) == 1, f"{name} says {old!r} {source.count(old)} times"
    source = source.replace(old, new).replace("super()", "super(type(self), self)")
    module = inspect.getmodule(getattr(owner, name))
    scope = {**vars(module), "radix": radix}
    exec(f"from __future__ import annotations\n{source}", scope)
    return scope[name]


@pytest.mark.parametrize("fault", MUTANTS)
def test_the_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, old, new, notice = MUTANTS[fault]
    if notice is not compare_with_the_twin:
        notice()  # it has nothing to say about the code as it is
    mutant = mutated(owner, name, old, new)
    monkeypatch.setattr(owner, name, mutant)
    if owner is hashing:
        monkeypatch.setattr(prefix_cache, name, mutant)
    with pytest.raises((AssertionError, KeyError, ValueError, pytest.fail.Exception)):
        notice()
