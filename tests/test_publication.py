"""When pages become visible: pages announced inside a step, and the accidents of it.

A request may borrow pages that another request of the same step is about to fill. Each
test runs on the runner that follows the whole past, and checks the pages after each
step.
"""

import dataclasses
import random

import pytest
from checking_runner import CheckingRunner, cold_continuation

from minivllm.engine import Engine, Limits, PublishAtFinish
from minivllm.options import EngineOptions, assemble
from minivllm.prefix_cache import PrefixCache
from minivllm.publication import Announcements, PublishPrompt
from minivllm.request import Request, SamplingParams, encode_ids
from minivllm.runner import ModelRunner
from minivllm.scheduler import RequestState, Scheduler, Silence

VOCAB, PAGE, PROMPT = 600, 16, list(range(493))


class Watcher(CheckingRunner):
    """Keeps each batch, and the pages by state while it runs."""

    engine: Engine

    def __init__(self, **options):
        super().__init__(PAGE, VOCAB, **options)
        self.batches, self.stats = [], []

    def run(self, chunks):
        self.batches.append({c.request_id: c for c in chunks})
        self.stats.append(self.engine.stats())
        return super().run(chunks)


def make_engine(publish="schedule", num_pages=200, runner=None, **options) -> Engine:
    options = EngineOptions(publish=publish, single_flight="none", **options)
    runner = runner or Watcher()
    engine = assemble(options, num_pages, runner, Limits(VOCAB, 2_000))
    runner.engine = engine
    return engine


def submit(engine, prompt, max_tokens=4, **options) -> str:
    return engine.submit(prompt, SamplingParams(max_tokens=max_tokens), **options)


def step(engine):
    outputs = engine.step()
    engine.scheduler.cache.check()
    assert not getattr(engine.runner, "faults", []), engine.runner.faults
    return outputs


def run_all(engine):
    """Step to the end; every answer must be the cold one, and nobody holds a page."""
    done = {}
    for _ in range(500):
        if not engine.has_unfinished():
            break
        done |= {o.request_id: o for o in step(engine) if o.finished}
    for output in done.values():
        tokens = output.outputs[0].token_ids
        if isinstance(engine.runner, CheckingRunner):
            cold = cold_continuation(output.prompt_token_ids, len(tokens), VOCAB)
            assert tokens == cold
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == stats["pages_private"] == 0
    assert stats["pages_pinned"] == 0
    assert stats["pages_free"] + stats["pages_evictable"] == stats["pages_total"]
    return done


def cached(engine) -> list[int]:
    done = run_all(engine)
    return [done[name].num_cached_tokens for name in sorted(done, key=int)]


# ---- The policies --------------------------------------------------------------------


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize(
    ("publish", "second"),
    [("finish", 0), ("prompt", 0), ("step", 0), ("schedule", 480)],
)
def test_two_cold_twins_in_one_step(index, publish, second):
    engine = make_engine(publish, index=index)
    for _ in range(2):
        submit(engine, PROMPT)
    assert cached(engine) == [0, second]
    assert len(engine.runner.batches[0]) == 2, "they must meet in one step"


@pytest.mark.parametrize(
    ("publish", "found"), [("finish", 0), ("prompt", 480), ("step", 480)]
)
def test_a_follower_after_the_first_token(publish, found):
    engine = make_engine(publish)
    submit(engine, PROMPT, max_tokens=40)
    step(engine)
    submit(engine, PROMPT)
    assert cached(engine) == [0, found]


@pytest.mark.parametrize(
    ("publish", "found"), [("finish", 0), ("prompt", 0), ("step", 192)]
)
def test_a_follower_in_the_middle_of_a_prefill(publish, found):
    """It is admitted in the step that computes the rest, 200 tokens being there."""
    engine = make_engine(publish, max_batch_tokens=1_000)
    engine.scheduler.max_batch_tokens = 200
    submit(engine, PROMPT)
    step(engine)
    engine.scheduler.max_batch_tokens = 1_000
    submit(engine, PROMPT)
    assert cached(engine) == [0, found]


def test_the_output_of_a_prompt_publisher_comes_at_its_end():
    engine = make_engine("prompt")
    submit(engine, PROMPT, max_tokens=40)
    for _ in range(39):
        step(engine)
        assert engine.stats()["published_tokens"] == 480
    run_all(engine)
    assert engine.stats()["published_tokens"] == 528, "493 + 39 committed"


def test_a_prompt_publisher_shows_all_of_the_prompt_or_nothing():
    policy = PublishPrompt()
    state = RequestState(
        Request("0", encode_ids(range(40)), SamplingParams(), None, 0, 0, 0.0),
        encode_ids(range(45)),
        9,
        0,
    )
    for num_committed, shown in [(0, 0), (39, 0), (40, 40), (44, 40)]:
        state.num_committed = num_committed
        assert policy.num_visible(state) == shown


def test_without_an_index_nothing_is_announced():
    engine = make_engine(index="none")
    assert isinstance(engine.scheduler.announcer, Silence)
    for _ in range(2):
        submit(engine, PROMPT)
    assert cached(engine) == [0, 0]


# ---- Borrowing -----------------------------------------------------------------------


def test_a_full_hit_by_borrowing_computes_one_token():
    engine = make_engine()
    for _ in range(2):
        submit(engine, PROMPT[:480])
    assert cached(engine) == [0, 479]
    owner, borrower = engine.runner.batches[0].values()
    assert (borrower.start, len(borrower.token_ids)) == (479, 1)
    assert tuple(borrower.pages) == tuple(owner.pages)
    assert borrower.num_shared == 30, "its K/V must not go to the owner's page"


def test_a_borrower_goes_on_with_pages_of_its_own():
    engine = make_engine()
    submit(engine, PROMPT[:100], max_tokens=30)
    submit(engine, [*PROMPT[:70], *PROMPT[200:300]], max_tokens=30)
    assert cached(engine) == [0, 64]


def test_a_borrower_of_a_borrower():
    engine = make_engine()
    longer = [*PROMPT[:64], *PROMPT[200:300]]
    for prompt in (PROMPT[:64], longer, longer):
        submit(engine, prompt)
    assert cached(engine) == [0, 64, 160]
    first, second, third = (c.pages for c in engine.runner.batches[0].values())
    assert third[:4] == second[:4] == first[:4] and third[4:10] == second[4:10]


def test_published_pages_first_and_then_announced_ones():
    engine = make_engine()
    submit(engine, PROMPT[:40])
    run_all(engine)
    for _ in range(2):
        submit(engine, PROMPT)
    assert cached(engine) == [32, 480]


def test_a_chunked_owner_lends_what_it_has_planned():
    """48 of 70 tokens in the first step; 22 in the second, and 26 of the twin's."""
    found = {}
    for publish in ("step", "schedule"):
        engine = make_engine(publish, max_batch_tokens=48)
        for _ in range(2):
            submit(engine, PROMPT[:70])
        found[publish] = cached(engine)
        assert len(engine.runner.batches[0]) == 1 and len(engine.runner.batches[1]) == 2
    assert found == {"step": [0, 48], "schedule": [0, 64]}


@pytest.mark.parametrize("budget", [7, 48, 200, 4_096])
def test_a_burst_costs_what_the_same_requests_cost_one_by_one(budget):
    """Whoever is admitted finds all before it published or planned."""
    rng = random.Random(9)
    prompts = [
        PROMPT[: rng.randrange(400)] + [7] * rng.randrange(1, 60) for _ in range(40)
    ]
    computed = {}
    for one_by_one in (True, False):
        engine = make_engine(num_pages=2_000, max_batch_tokens=budget)
        for prompt in prompts:
            submit(engine, prompt)
            if one_by_one:
                run_all(engine)
        run_all(engine)
        computed[one_by_one] = engine.stats()["prefill_tokens"]
    assert computed[True] == computed[False] < sum(map(len, prompts)) / 3


def test_another_key_borrows_nothing():
    engine = make_engine()
    for key in ("a", "b", None, "a"):
        submit(engine, PROMPT, extra_key=key)
    assert cached(engine) == [0, 0, 0, 480]


@pytest.mark.parametrize("max_tokens", [(1, 1), (1, 9), (9, 1)])
def test_ends_in_the_step_of_the_borrowing(max_tokens):
    engine = make_engine()
    for size in max_tokens:
        submit(engine, PROMPT, max_tokens=size)
    assert cached(engine) == [0, 480]
    assert engine.stats()["preemptions"] == 0


def test_announced_pages_count_as_private():
    engine = make_engine()
    for _ in range(2):
        submit(engine, PROMPT)
    step(engine)
    (during,) = engine.runner.stats
    assert during["pages_private"] == 31 + 1, "31 of the owner, 1 of the borrower"
    assert during["pages_pinned"] == during["pages_evictable"] == 0
    after = engine.stats()
    assert (after["pages_private"], after["pages_pinned"]) == (2, 30)


# ---- The table of announcements ------------------------------------------------------


def leased(cache: PrefixCache, tokens, key=None) -> RequestState:
    request = Request("0", encode_ids(tokens), SamplingParams(), key, 0, 0, 0.0)
    state = RequestState(request, encode_ids(tokens), 9, 0)
    state.lease = cache.acquire(cache.find(tokens, key), len(tokens))
    return state


def test_the_first_announcer_wins():
    cache, table = PrefixCache(20, PAGE), Announcements(PAGE)
    one, two = leased(cache, PROMPT[:40]), leased(cache, PROMPT[:70])
    table.announce(one, 40)
    table.announce(two, 70)
    assert one.lease and two.lease
    nothing = cache.find(PROMPT)
    assert table.find(two, nothing) == one.lease.pages[:2], (
        "the others lie behind a page that nobody will find"
    )


def test_announcements_hold_what_the_step_completes_and_no_more():
    cache, table = PrefixCache(20, PAGE), Announcements(PAGE)
    state = leased(cache, PROMPT[:70])
    assert state.lease
    for num_tokens, num_pages in [(15, 0), (16, 1), (47, 2), (70, 4)]:
        table.clear()
        table.announce(state, num_tokens)
        found = table.find(state, cache.find(PROMPT))
        assert found == state.lease.pages[:num_pages]
    table.clear()
    assert table.find(state, cache.find(PROMPT)) == []


def test_the_next_step_finds_no_announcement():
    engine = make_engine()
    engine.publisher = PublishAtFinish()  # so that only an announcement can be found
    submit(engine, PROMPT, max_tokens=40)
    step(engine)
    submit(engine, PROMPT)
    assert cached(engine) == [0, 0]


# ---- Accidents -----------------------------------------------------------------------


@pytest.mark.parametrize("known", [0, 64])
def test_a_forward_pass_fails_with_borrowed_pages(known):
    engine = make_engine()
    if known:
        submit(engine, PROMPT[:known])
        run_all(engine)
    engine.runner.fail = {engine.runner.num_runs + 1}
    for _ in range(2):
        submit(engine, PROMPT)
    done = run_all(engine)
    assert [o.outputs[0].finish_reason for o in done.values()][-2:] == ["error"] * 2
    assert engine.stats()["published_tokens"] == known
    submit(engine, PROMPT)
    assert cached(engine) == [known]


def test_aborted_after_its_announcement():
    """Scheduled and announced, then aborted before its forward pass; and sent again."""
    cache = PrefixCache(100, PAGE)
    scheduler = Scheduler(cache, announcer=Announcements(PAGE))
    for name in range(2):
        ids = encode_ids(PROMPT)
        request = Request(str(name), ids, SamplingParams(), None, 0, name, 0.0)
        state = RequestState(request, ids[:], 9, 0)
        scheduler.add(state)
        scheduler.schedule()
        assert state.num_cached_tokens == 0
        scheduler.finish(state, "abort")
        cache.check()
    assert cache.pool.num_free == 100


def interrupted(max_tokens=4) -> tuple[Engine, str, str]:
    """Two twins whose first forward pass is cut short by Ctrl-C."""
    engine = make_engine()
    owner, borrower = (submit(engine, PROMPT, max_tokens) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.runner, "run", raise_interrupt)
        engine.step()
    engine.scheduler.cache.check()
    return engine, owner, borrower


def raise_interrupt(chunks):
    raise KeyboardInterrupt


def test_an_interrupted_step_is_planned_again():
    engine, _, borrower = interrupted()
    done = run_all(engine)
    assert len(done) == 2 and done[borrower].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("first", [0, 1])
def test_an_interrupted_step_and_then_aborts(first):
    engine, *names = interrupted()
    for name in (names[first], names[1 - first]):
        assert engine.abort(name).outputs[0].finish_reason == "abort"
        engine.scheduler.cache.check()
    assert engine.stats()["pages_free"] == 200, "published what nobody has computed"


@pytest.mark.parametrize("survivor", [0, 1])
def test_an_interrupted_step_and_one_survivor(survivor):
    engine, *names = interrupted(max_tokens=20)
    engine.abort(names[1 - survivor])
    submit(engine, PROMPT[100:300])  # takes the pages that came back
    assert len(run_all(engine)) == 2


def first_byte(past, page):
    """A hash that looks at the first byte of a page only."""
    return page[:1]


@pytest.mark.parametrize("owner_tokens", [1, 30])
def test_a_borrower_whose_pages_the_index_refuses(monkeypatch, owner_tokens):
    """The owner's second page has the name of another one, and is refused."""
    monkeypatch.setattr("minivllm.hashing.page_name", first_byte)
    monkeypatch.setattr("minivllm.prefix_cache.page_name", first_byte)
    engine = make_engine(index="hash")
    submit(engine, [9] * 16 + [2] * 16)
    run_all(engine)
    prompt = [1] * 16 + [2] * 17  # its second page has the name of the known one
    submit(engine, prompt, max_tokens=owner_tokens)
    submit(engine, prompt, max_tokens=30)
    done = run_all(engine)
    assert done["2"].num_cached_tokens == 32, "borrowed before the refusal"
    assert engine.stats()["preemptions"] == 1, "once: a refused page is not announced"


def test_a_borrowed_page_is_remapped():
    """A's output completes page 0 in the step in which Z, B and D compute page 1.

    Z began before A had announced anything, so B's page 1 follows A's page 0 and Z's
    its own. D borrows B's. But Z publishes first, and B's page turns out a duplicate.
    """
    engine = make_engine()
    head = [*PROMPT[:10], *cold_continuation(PROMPT[:10], 6, VOCAB)]
    submit(engine, PROMPT[:10], max_tokens=9)
    for _ in range(5):
        step(engine)
    z = submit(engine, [*head, *PROMPT[100:140]], max_tokens=30)
    engine.scheduler.max_batch_tokens = 6
    step(engine)
    b, d = (submit(engine, [*head, *PROMPT[100:140]], max_tokens=30) for _ in "bd")
    engine.scheduler.max_batch_tokens = 200
    step(engine)
    batch = engine.runner.batches[-1]
    assert (batch[b].start, batch[d].start) == (16, 48)
    assert batch[d].pages[1] == batch[b].pages[1] != batch[z].pages[1]
    step(engine)
    batch = engine.runner.batches[-1]
    assert batch[d].pages[:3] == batch[b].pages[:3] == batch[z].pages[:3]
    assert len(run_all(engine)) == 4


# ---- With a real model ---------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(random_decoder):
    return random_decoder(VOCAB, max_context=1024)


def test_a_real_model_answers_the_same(tiny):
    answers = {}
    longer = [*PROMPT[:64], *PROMPT[200:250]]
    for options in ({"index": "none"}, {"index": "radix"}, {"index": "hash"}):
        runner = ModelRunner(tiny, 200, PAGE)
        for memory in runner.memory:  # what was never written must never be used
            memory.keys.fill_(float("nan"))
        engine = make_engine(runner=runner, **options)
        for prompt in (PROMPT[:80], PROMPT[:80], longer, longer, PROMPT[:64]):
            submit(engine, prompt, max_tokens=12)
        done = run_all(engine)
        names = sorted(done, key=int)
        answers[options["index"]] = [done[n].outputs[0].token_ids for n in names]
        found = [done[n].num_cached_tokens for n in names]
        expected = [0] * 5 if options["index"] == "none" else [0, 79, 64, 112, 63]
        assert found == expected
    assert answers["radix"] == answers["hash"] == answers["none"]


def test_options_that_do_not_change_the_answer():
    """After a step both have published alike."""
    stats = {}
    for publish in ("step", "schedule"):
        engine = make_engine(publish)
        submit(engine, PROMPT, max_tokens=40)
        step(engine)
        stats[publish] = dataclasses.asdict(engine.scheduler.counters), engine.stats()
    assert stats["step"] == stats["schedule"]
