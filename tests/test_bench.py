"""Measuring: the procedure on clocks that we make, the loads, the command, the guests.

No test asserts a time.
"""

import dataclasses
import gc
import json
import sys
from pathlib import Path

import pytest

from minivllm import bench, peers
from minivllm.bench import Measurement, Trial, compare, make_rows, measure
from minivllm.bench_cache import (
    OWN_MANAGERS,
    OWN_TREES,
    CacheBench,
    bytes_per_token,
    evict_trial,
    fill,
    insert_trial,
    make_loads,
    match_trial,
    request_trial,
    single_pages,
)
from minivllm.cli import main


class Clock:
    """A clock that only work moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, *seconds: float):
        """Work that takes these times, one by one, and says how often it ran."""
        left, ran = list(seconds), []

        def once() -> int:
            self.now += left.pop(0)
            ran.append(1)
            return len(ran)

        return once


# ---- the procedure -------------------------------------------------------------------


def test_median_spread_and_paired_ratio_are_exact():
    clock = Clock()
    trials = {
        "one": Trial(clock.work(9, 1, 2, 8), num_ops=2),  # the first is the warm-up
        "two": Trial(clock.work(7, 4, 2, 16)),
    }
    found = measure(trials, repeats=3, warmups=1, clock=clock)
    one, two = found["one"], found["two"]
    assert one.values == (0.5, 1, 4) and two.values == (4, 2, 16)
    assert (one.low, one.median, one.high, one.count) == (0.5, 1, 4, 4)
    ratio = compare(two, one)
    assert ratio.values == (8, 2, 4)  # within the pairs
    assert (ratio.low, ratio.median, ratio.high) == (2, 4, 8)


def test_contestants_take_turns_and_the_order_turns_too():
    seen = []
    trials = {
        name: Trial(
            lambda name=name: seen.append(name) or 0,
            prepare=lambda name=name: seen.append(f"prepare {name}"),
        )
        for name in "ab"
    }
    measure(trials, repeats=2, warmups=1)
    once = ["prepare a", "a", "prepare b", "b"]
    assert seen == once + once[2:] + once[:2] + once


def test_what_is_prepared_is_not_timed():
    clock = Clock()
    trial = Trial(clock.work(1, 1), prepare=clock.work(100, 100))
    assert measure({"it": trial}, 1, 1, clock)["it"].values == (1,)


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_off_during_work_and_then_as_before(was_on):
    seen = []
    gc.enable() if was_on else gc.disable()
    try:
        measure({"it": Trial(lambda: seen.append(gc.isenabled()) or 0)}, 2)
        with pytest.raises(ZeroDivisionError):
            measure({"it": Trial(lambda: 1 / 0)}, 2)
        assert seen == [False] * 3 and gc.isenabled() == was_on
    finally:
        gc.enable()


def test_bad_numbers_of_repeats():
    with pytest.raises(ValueError, match="repeats must be at least 1, not 0"):
        measure({}, repeats=0)
    with pytest.raises(ValueError, match="zip"):
        compare(Measurement((1.0, 2.0)), Measurement((1.0,)))


def test_rows_compare_with_the_first_and_a_record_says_what_was_measured():
    found = {"ours": Measurement((1.0, 2.0, 4.0), 7), "theirs": Measurement((3, 2, 8))}
    rows = make_rows(("load", "match", 16), found)
    assert [row.ratio for row in rows] == [1, 2] and rows[1].against == "ours"
    assert (rows[1].ratio_low, rows[1].ratio_high, rows[0].tokens) == (1, 3, 7)
    record = bench.make_record("a command", rows, repeats=3)
    assert record["rows"][1]["median"] == 3 and record["repeats"] == 3
    assert {"command", "commit", "cpu", "cores", "python", "system"} < record.keys()
    assert json.loads(json.dumps(record)) == record


# ---- loads and operations ------------------------------------------------------------


def test_full_loads_have_the_stated_shape():
    loads = {load.name: load for load in make_loads()}
    shared, talks, twice, unshared = loads.values()
    assert len(shared.sequences) == len(unshared.sequences) == 1000
    assert {len(ids) for ids in shared.sequences} == {4096}
    assert len({bytes(ids[:2048]) for ids in shared.sequences}) == 1
    assert len({bytes(ids[2048:2064]) for ids in shared.sequences}) == 1000
    assert len(talks.sequences) == 20 and len(talks.sequences[0]) == 32_768
    ends = [len(ids) for ids in talks.entries()]
    assert ends == [512 * turn for turn in range(1, 65) for _ in range(20)]
    assert {len(ids) for ids in unshared.sequences} == {2048}
    assert len({bytes(ids[:16]) for ids in unshared.sequences}) == 1000
    tree = OWN_TREES["radix"](16)
    assert fill(tree, twice) == 20 * (32_768 + 64 * 16)
    num_nodes = sum(1 for _ in tree.cache.nodes())
    assert num_nodes == 20 * (64 + 63)  # a path of 64, a leaf beside all but the last


def test_loads_are_the_same_for_a_seed_and_renewed_tails_are_new():
    one, again, other = make_loads(1, 0.01), make_loads(1, 0.01), make_loads(2, 0.01)
    assert one == again and one != other
    for load in one:
        entered = list(load.entries())
        assert not any(ids is own for ids in entered for own in load.sequences)
        renewed = load.renewed("x")
        assert renewed == load.renewed("x") != load.renewed("y")
        for old, new in zip(load.sequences, renewed, strict=False):
            assert len(old) == len(new) and old[: -load.tail] == new[: -load.tail]
            assert old[-load.tail] != new[-load.tail]


class Twin:
    """The tree that is obviously right: a set of all prefixes, in pages."""

    def __init__(self, page_size):
        self.page_size, self.known, self.order = page_size, set(), []

    def encode(self, ids):
        return tuple(ids)

    def _ends(self, key):
        return range(self.page_size, len(key) + 1, self.page_size)

    def match(self, key):
        return max(
            (end for end in self._ends(key) if key[:end] in self.known), default=0
        )

    def insert(self, key):
        known = self.match(key)
        new = [key[:end] for end in self._ends(key) if end > known]
        self.known.update(new)
        self.order = [*new, *self.order]
        return known

    def evict(self, num_tokens):
        num_pages = -(-num_tokens // self.page_size)
        leaves = sorted(self.order[-2048:], key=len)[-num_pages:]
        self.known.difference_update(leaves)
        self.order = [key for key in self.order if key in self.known]
        return len(leaves) * self.page_size

    def untraced_bytes(self):
        return 1_000_000


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_operations_count_what_a_naive_twin_counts(index):
    for load in make_loads(3, 0.002):
        load = dataclasses.replace(
            load,
            sequences=tuple(ids[:1024] for ids in load.sequences),
            tail=256,
            step=min(load.step, 256),
        )
        counts = {}
        for name, tree in (("ours", OWN_TREES[index](16)), ("twin", Twin(16))):
            new = fill(tree, load)
            again = match_trial(tree, list(load.sequences)).work()
            fresh = match_trial(tree, load.renewed("z")).work()
            trial = insert_trial(tree, load)
            trial.prepare()
            counts[name] = (new, again, fresh, trial.work(), trial.num_ops)
        assert counts["ours"] == counts["twin"]
        assert counts["ours"][1] == 1024


def test_insertions_are_new_in_each_repeat():
    """Without that the second repeat would measure a match."""
    (load, *_), tree = make_loads(0, 0.002), OWN_TREES["radix"](16)
    fill(tree, load)
    found = measure({"it": insert_trial(tree, load)}, repeats=3)
    assert found["it"].count == 2048 and len(found["it"].values) == 3


def test_evictions_start_from_the_same_number_of_leaves():
    tree = OWN_TREES["radix"](16)
    trial = evict_trial(tree, single_pages(16), 10, 16, ops=4)
    for _ in range(3):
        trial.prepare()
        assert tree.cache.total_size == 160
        assert trial.work() == 16 and tree.cache.total_size == 96


def test_memory_counts_keys_and_tensors():
    load = make_loads(0, 0.002)[0]
    assert 4 < bytes_per_token(OWN_TREES["radix"], 16, load).median < 16
    kept = bytes_per_token(OWN_TREES["radix"], 1, load).median
    assert kept >= 8  # four for the id, four for the slot
    plain = bytes_per_token(Twin, 1024, load)
    assert plain.median > 1_000_000 / plain.count  # what tracemalloc cannot see


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize(
    ("state", "first", "second"), [("cold", 0, 0), ("full", 0, 0), ("warm", 0, 64)]
)
def test_requests_find_what_their_state_promises(index, state, first, second):
    managers = []

    def make(num_pages, page_size):
        managers.append(OWN_MANAGERS[index](num_pages, page_size))
        return managers[-1]

    trial = request_trial(make, state, num_tokens=64, ops=3)
    for expected in (first, second):
        trial.prepare()
        assert trial.work() == expected
    stats = managers[-1].cache.stats()
    assert (stats["pages_free"] == 0) == (state == "full")
    assert stats["evicted_tokens"] == (3 * 64 if state == "full" else 0)
    managers[-1].cache.check()


def test_a_twin_can_be_a_peer():
    tiny = CacheBench(
        {"radix": OWN_TREES["radix"], "twin": Twin}, {}, (512,), repeats=1, scale=0.002
    )
    rows = list(tiny.rows())
    assert {row.engine for row in rows} == {"radix", "twin"}
    both = {}
    for row in rows:
        if "evict" not in row.operation:
            both.setdefault((row.load, row.operation), set()).add(row.tokens)
    assert all(len(counts) == 1 for counts in both.values())


# ---- the command ---------------------------------------------------------------------


def run_main(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    return end.value.code, out, err


TINY = ["--scale", "0.002", "--repeats", "2", "--page-size", "16", "--seed", "5"]


def test_bench_cache_prints_a_record_and_keeps_it(capsys, tmp_path):
    path = tmp_path / "cache.json"
    given = ["bench", "cache", *TINY, "--json", "--record", str(path)]
    code, out, err = run_main(capsys, *given)
    record = json.loads(out)
    assert code == 0 and json.loads(path.read_text("utf-8")) == record
    assert record["schema_version"] == 1 and record["repeats"] == 2
    assert record["command"].endswith("--scale 0.002 --seed 5 --page-size 16")
    assert record["seed"] == 5 and record["peers"] == record["absent"] == {}
    assert {field.name for field in dataclasses.fields(bench.Row)} == set(
        record["rows"][0]
    )
    seen = {(row["load"], row["operation"]) for row in record["rows"]}
    for load in ("shared", "conversations", "answered twice", "unshared"):
        for what in ("match, new tail", "match, again", "insert", "memory of a token"):
            assert (load, what) in seen
    assert ("unshared", "evict 2,048 tokens") in seen
    assert {("2 leaves", "evict a page"), ("200 leaves", "evict a page")} < seen
    for size in ("4,096", "32,768"):
        assert {(f"request of {size}", s) for s in ("cold", "full", "warm")} < seen
    assert all(r["low"] <= r["median"] <= r["high"] for r in record["rows"])
    assert len(err.splitlines()) == 1 + len(record["rows"])  # the table, meanwhile


def test_bench_cache_for_people_and_an_absent_peer(capsys, monkeypatch):
    monkeypatch.setattr(peers, "distributions", lambda **asked: iter(()))
    peers.load_peer.cache_clear()
    given = ["bench", "cache", *TINY, "--peer", "sglang", "--peer-path", "/nowhere"]
    code, out, _ = run_main(capsys, *given)
    assert code == 0 and "sglang: not measured: not installed" in out
    assert "/nowhere" in out and "match, again" in out and "µs" in out
    assert peers.invite(["sglang"]).absent == {
        "sglang": "not installed, no --peer-path"
    }
    peers.load_peer.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["cache", "--repeats", "0"], "repeats"),
        (["cache", "--scale", "0"], "scale"),
        (["cache", "--scale", "two"], "--scale"),
        (["cache", "--page-size", "0"], "--page-size must be"),
        (["cache", "--peer", "llama"], "sglang, vllm"),
        (["cache", *TINY, "--record", "/nowhere/cache.json"], "cache.json cannot"),
        (["cash"], "cash"),
        (["cache", "--no-such-option"], "no-such-option"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_measured(arguments, named, capsys):
    code, out, err = run_main(capsys, "bench", *arguments)
    assert code == 2 and out == ""
    assert named in err and len(err.strip().splitlines()) == 1
    assert err.startswith("minivllm: ")


def test_help_names_the_commands_that_chapters_added(capsys):
    for arguments, word in (
        ([], "bench"),
        (["--help"], "bench"),
        (["bench", "--help"], "cache"),
        (["bench", "cache", "--help"], "--peer-path"),
    ):
        code, out, _ = run_main(capsys, *arguments)
        assert code == 0 and word in out


# ---- guests --------------------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A package whose cache imports what is not there, in a wheel nobody installs."""
    import zipfile

    path = tmp_path / "guest-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("guest/__init__.py", "raise ImportError('a GPU is needed')")
        made.writestr("guest/deep/__init__.py", "raise ImportError('a server too')")
        made.writestr(
            "guest/deep/tree.py",
            "import nowhere_to_be_found.fast as fast\n"
            "from guest.kernels import launch, Config\n"
            "from guest.deep import pages\n"
            "class Tree(Config[int], fast.Base, key=1):\n"
            "    @fast.traced(level=3)\n"
            "    def other(self): ...\n"
            "    def match(self): launch(fast.x.y); return pages.SIZE\n",
        )
        made.writestr("guest/deep/pages.py", "SIZE = 16")
        made.writestr("guest-1.2.dist-info/METADATA", "Name: guest\nVersion: 1.2\n")
    monkeypatch.setitem(peers.REAL, "guest", ["deep.tree", "deep.pages"])
    yield str(path)
    peers.load_peer.cache_clear()
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, peers.StandIns)]
    for name in [n for n in sys.modules if n.partition(".")[0] == "guest"]:
        del sys.modules[name]


def test_chosen_modules_of_a_wheel_run_among_stand_ins(wheel):
    before = list(sys.meta_path)
    assert peers.load_peer("guest", (wheel,)) == "1.2"
    assert sys.modules["guest.deep.tree"].Tree().match() == 16
    assert "nowhere_to_be_found" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        import nowhere_to_be_found  # noqa: F401
    assert json.loads("1") == 1 and before == [
        f for f in sys.meta_path if not isinstance(f, peers.StandIns)
    ]


def test_a_guest_that_does_not_load_is_absent_and_says_why(wheel, monkeypatch):
    monkeypatch.setitem(peers.REAL, "guest", ["deep.tree", "deep.gone"])
    guests = peers.invite(["guest"], [wheel])
    assert guests.versions == {} and "1.2 does not load" in guests.absent["guest"]
    assert "guest.deep.gone" in guests.absent["guest"]


def test_the_record_in_the_book_is_a_record_of_this_command():
    path = Path(__file__).parent.parent / "figures/measured/cache.json"
    record = json.loads(path.read_text("utf-8"))
    assert record["schema_version"] == 1 and record["command"].startswith("minivllm")
    assert {"radix", "hash"} <= {row["engine"] for row in record["rows"]}
