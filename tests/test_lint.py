"""What breaks reuse in a log: causes, costs, the command, and a live run beside it."""

import json
import os
import random
import re
import shlex
from array import array
from collections import Counter
from itertools import pairwise, permutations
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_chat import MARKED, talker  # noqa: F401  # a fixture
from test_commands import command  # noqa: F401  # a fixture

import minivllm.command_explain as command_explain
from minivllm import LLM, SamplingParams
from minivllm.chat import ChatTemplate
from minivllm.explain import lost_tokens
from minivllm.lint import (
    CacheOnly,
    Encoder,
    Linter,
    Missing,
    Recent,
    cause_of,
    differences,
    find_gaps,
    kind_of,
    rewrite,
)

ROOT = Path(__file__).resolve().parent.parent
PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<answer>"
WITH_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + PLAIN
RULES = "You are the guide of a small museum. Answer in one sentence, and be kind. " * 4


class Letters:
    """A tokenizer whose tokens are the characters; it knows a BOS, as a character."""

    def encode(self, text, add_special_tokens=True):
        offsets = [(i, i + 1) for i in range(len(text))]
        return SimpleNamespace(ids=[ord(letter) for letter in text], offsets=offsets)


def encoder(template=WITH_TOOLS):
    return Encoder(lambda: (Letters(), template and ChatTemplate(template)))


def lint(bodies, page_size=16, index="radix", capacity=0):
    name = (index, page_size)
    linter = Linter({name: CacheOnly(*name, capacity)})
    for number, body in enumerate(bodies, 1):
        linter.add(encoder()(number, body))
    return linter, linter.findings(name)


def chat(system, user="Where is the exit?", **more):
    messages = [("system", system), ("user", user)]
    return {"messages": [{"role": r, "content": c} for r, c in messages]} | more


# ---- Causes: each planted, each found where it is ------------------------------------

KEYS = {"name": "stock", "unit": "piece", "where": "in the cellar", "count": 3}
TOOLS = [
    {"name": name, "description": f"Looks up the {name} in the museum's own list."}
    for name in ("prices", "rooms", "guides")
]


def keys_in(order):
    return json.dumps({key: KEYS[key] for key in order})


PLANTED = {
    "time": (
        [chat(f"It is 09:4{i}:0{i} now. {RULES}") for i in range(6)],
        ("messages[0].content", "a time or date"),
    ),
    "date": (
        [chat(f"Today is 2026-11-0{i + 1}. {RULES}") for i in range(6)],
        ("messages[0].content", "a time or date"),
    ),
    "seconds since 1970": (
        [chat(f"At {1764500000 + 977 * i}: {RULES}") for i in range(6)],
        ("messages[0].content", "a time or date"),
    ),
    "uuid": (
        [
            chat(f"Trace {UUID(int=random.Random(i).getrandbits(128))}. {RULES}")
            for i in range(6)
        ],
        ("messages[0].content", "an id"),
    ),
    "hex": (
        [chat(f"Session 7{i}c0ffee{i}9ab. {RULES}") for i in range(6)],
        ("messages[0].content", "an id"),
    ),
    "counter": (
        [chat(f"Request #{i + 1}. {RULES}") for i in range(6)],
        ("messages[0].content", "an id"),
    ),
    "number": (
        [chat(f"It is {i + 14} degrees outside. {RULES}") for i in range(6)],
        ("messages[0].content", "a number"),
    ),
    "name": (
        [
            chat(f"You talk with {name}. {RULES}")
            for name in ("Anna", "Boris", "Zoë Li", "José", "Dilara", "Emil")
        ],
        ("messages[0].content", "a name"),
    ),
    "white space": (
        [chat(f"You are{' ' * (1 + i)}a guide.{RULES}") for i in range(6)],
        ("messages[0].content", "white space"),
    ),
    "keys": (
        [chat(f"Stock: {keys_in(order)}. {RULES}") for order in permutations(KEYS)],
        ("messages[0].content", "keys in another order"),
    ),
    "keys of tools": (
        [
            chat(RULES, tools=[{key: KEYS[key] for key in order}])
            for order in permutations(KEYS)
        ],
        ("tools", "keys in another order"),
    ),
    "tools": (
        [chat(RULES, tools=list(order)) for order in permutations(TOOLS)],
        ("tools", "tools in another order"),
    ),
    "moved text": (
        [
            chat(" ".join(parts))
            for parts in permutations([RULES[:77], json.dumps(KEYS), json.dumps(TOOLS)])
        ],
        ("messages[0].content", "text in another place"),
    ),
    "BOS": (
        [{"prompt": "\u0002" * (i % 2) + RULES} for i in range(6)],
        ("prompt", "a token too many at the start, as a BOS"),
    ),
    "other text": (
        [chat(f"Here {word} {RULES}") for word in ("they go", "is, say", "come xy")],
        ("messages[0].content", "other text"),
    ),
    "put in": (
        [chat(f"{'Please note: ' * i}{RULES}") for i in range(6)],
        ("messages[0].content", "text put in or left out"),
    ),
    "salt": (
        [chat(RULES, cache_salt=f"tenant {i}") for i in range(6)],
        ("cache_salt", "another salt"),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named_first(name):
    bodies, expected = PLANTED[name]
    _, findings = lint(bodies)
    assert findings, "nothing was found"
    assert (findings[0].path, findings[0].cause) == expected
    assert findings[0].lost["radix", 16] > 100
    assert 1 <= findings[0].requests < len(bodies)


def test_the_offset_is_where_the_value_is():
    bodies, _ = PLANTED["time"]
    example = lint(bodies)[1][0].example
    assert (example.here, example.there) == ("09:41:01", "09:40:00")
    assert example.offset == len("It is 09:4") and example.nearest_line == 1


def test_a_value_in_a_field_of_unicode():
    bodies = [chat(f"Grüß Gott 😀, es ist 09:4{i}:00. {RULES}") for i in range(4)]
    example = lint(bodies)[1][0].example
    assert example.offset == len("Grüß Gott 😀, es ist 09:4")


def test_several_faults_are_ranked_by_what_they_cost():
    """The first costs what stands between it and the second."""
    rng = random.Random(1)
    half = RULES[:200]
    bodies = [
        chat(
            f"At 09:{rng.randrange(10, 60)}:00. {half}\nFor "
            f"{chr(65 + i)}nna. {RULES}{RULES}",
        )
        for i in range(20)
    ]
    findings = lint(bodies)[1]
    assert [f.cause for f in findings] == ["a name", "a time or date"]
    costs = [f.lost["radix", 16] for f in findings]
    assert costs == sorted(costs, reverse=True) and costs[1] > 1000


def test_a_log_without_a_fault_says_so():
    """Other questions, longer histories and identical requests are no faults."""
    rng = random.Random(2)
    words = [chr(c) * 3 for c in range(97, 123)]
    bodies, history = [], []
    for _ in range(10):
        question = " ".join(rng.choices(words, k=30))
        bodies += [chat(RULES, question)] * 2
        history += [{"role": "user", "content": question}]
        messages = [{"role": "system", "content": RULES}, *history]
        bodies.append({"messages": messages})
        history += [{"role": "assistant", "content": " ".join(rng.choices(words))}]
    linter, findings = lint(bodies)
    assert findings == []
    assert linter.caches["radix", 16].reused > 0.5 * linter.tokens


def test_kinds_of_words():
    kinds = {
        "a time or date": "09:41 2026-11-30 30/11/2026 1764500000 1764500000.25 pm "
        "2026-11-30T09:41:07Z 2026-11-30T09:41:07.123+01:00 Monday November",
        "an id": "3f0b8a52-1c3d-4e5f-8a9b-0c1d2e3f4a5b req_17ab user-0042 deadbeef01",
        "a number": "17 3.5 -2 40% 1,000",
        "a name": "Anna Åse O'Hara anna@example.org @anna",
        "": "the wolf",
    }
    for kind, words in kinds.items():
        assert {word: kind_of(word) for word in words.split()} == dict.fromkeys(
            words.split(), kind
        )
    assert kind_of("17", "order ") == "an id"
    assert cause_of("Anna 09:41", "Bert 09:52") == "a name and a time or date"
    assert cause_of("17", "Anna") == cause_of("Anna", "17") == "other text"


def test_a_token_that_begins_with_a_space_is_not_the_word_before():
    class Words:
        def encode(self, text, add_special_tokens=True):
            found = list(re.finditer(r"\s*\S+", text))
            ids = [crc32(each[0].encode()) // 2 for each in found]
            return SimpleNamespace(ids=ids, offsets=[each.span() for each in found])

    texts = (f"The guest is called {n}, and is kind. {RULES}" for n in ("Anna", "Emil"))
    read = Encoder(lambda: (Words(), None))
    one, other = (read(i, {"prompt": text}) for i, text in enumerate(texts))
    found = [(each.here, each.there, each.cause) for each in differences(other, one)]
    assert found == [("Emil,", "Anna,", "a name")]


# ---- Costs: the engine's cache, and a naive twin of all the counts -------------------

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), max_size=12)


def common(one, other):
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@given(PROMPTS, st.sampled_from([1, 2, 4, 16]), st.sampled_from(["radix", "hash"]))
def test_an_unbounded_cache_finds_what_a_naive_one_finds(prompts, page_size, index):
    cache, seen = CacheOnly(index, page_size, 0), []
    for prompt in prompts:
        best = max((common(prompt, old) for old in seen), default=0)
        expected = min(best // page_size * page_size, len(prompt) - 1)
        assert cache.play(array("i", prompt)) == expected
        seen.append(prompt)


STRETCH = st.lists(st.integers(100, 999), min_size=9, max_size=30, unique=True)


@given(st.lists(st.tuples(STRETCH, st.booleans(), st.booleans()), min_size=1))
def test_gaps_are_where_pieces_were_put_in(parts):
    """Planted pieces of one token between stretches that both prompts have."""
    here, there, planted, seen = [], [], [], set()
    for number, (stretch, in_here, in_there) in enumerate(parts):
        stretch = [
            1000 * (number + 1) + token for token in stretch
        ]  # unlike the others
        if in_here or in_there:
            planted.append((len(here), len(there), len(stretch)))
        here += [1] * in_here + stretch
        there += [2] * in_there + stretch
        seen |= {*stretch}
    gaps = find_gaps(array("i", here), array("i", there))
    found = [(g.here, g.there) for g in gaps]
    assert found == [(a, b) for a, b, _ in planted][:32]
    for gap in gaps:
        a, b, n = gap.here_end, gap.there_end, gap.alike
        assert here[a : a + n] == there[b : b + n]
        assert here[a + n : a + n + 1] != there[b + n : b + n + 1] or a + n == len(here)


@given(PROMPTS)
def test_gaps_and_agreements_make_up_both_prompts(prompts):
    for one, other in pairwise(prompts):
        i = j = common(one, other)
        for gap in find_gaps(array("i", one), array("i", other)):
            assert (gap.here, gap.there) == (i, j)
            i, j = gap.here_end + gap.alike, gap.there_end + gap.alike
            assert one[gap.here_end : i] == other[gap.there_end : j]
        assert i == len(one) or j == len(other)


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
    st.integers(0, 40),
    st.sampled_from([1, 4, 16]),
)
def test_what_the_differences_cost_adds_up(alike, first, page):
    """All that one prompt would have found, without any, less what it found."""
    size = first + sum(alike) + 1
    cached, reach, lost = first // page * page, first, 0
    for each in alike:
        lost += lost_tokens(reach, each, cached, page, size)
        reach += each
    assert cached + lost == min(reach // page * page, size - 1)


def test_the_cost_is_what_the_cache_finds_without_the_fault():
    """Before + lost = after, when one fault is all that there is."""
    for page in (1, 16, 64):
        bodies = [chat(f"It is 09:4{i}:00 now.\n{RULES}") for i in range(8)]
        linter, findings = lint(bodies, page)
        lost = sum(f.lost["radix", page] for f in findings)
        fixed = [chat(f"It is 09:40:00 now.\n{RULES}") for _ in range(8)]
        without, _ = lint(fixed, page)
        found = [each.caches["radix", page].reused for each in (linter, without)]
        assert abs(found[0] + lost - found[1]) <= 7 * max(page, 50)
        assert lost > 0.8 * (found[1] - found[0])


def test_nobody_is_charged_for_what_was_reused_anyway():
    """Two clocks in turn: the nearest has the other one, and yet all is found."""
    bodies = [chat(f"It is 09:4{i % 2}:00 now. {RULES}") for i in range(6)]
    linter, findings = lint(bodies)
    size = len(encoder()(1, bodies[0]).ids)
    found = linter.caches["radix", 16].reused
    assert found == 16 + 4 * (size // 16 * 16)
    assert findings[0].lost["radix", 16] < size


def test_several_differences_of_one_request_add_up_to_whole_pages():
    texts = [
        f"At 09:4{i}. {RULES[:70]} For {n}. {RULES[:41]} End {n}."
        for i, n in enumerate(("Anna", "Emil"))
    ]
    bodies = [{"prompt": f"{text} {RULES}"} for text in texts]
    linter, findings = lint(bodies)
    asked = [encoder()(0, body) for body in bodies]
    gaps = find_gaps(asked[1].ids, asked[0].ids)
    assert len(gaps) == 3
    alike = gaps[0].here + sum(gap.alike for gap in gaps)
    lost = sum(finding.lost["radix", 16] for finding in findings)
    assert linter.caches["radix", 16].reused + lost == alike // 16 * 16


def test_memory_is_bounded():
    recent = Recent(num_tokens=500)
    rng = random.Random(3)
    for number in range(200):
        text = "".join(rng.choices("abcdefgh", k=60))
        recent.nearest(encoder()(number, {"prompt": text}))
    assert recent.size <= 500 and len(recent._asked) <= 9
    assert len(recent._holders) <= 500


def test_it_finds_whom_a_request_resembles_not_whom_it_begins_like():
    recent = Recent(10_000)
    texts = [f"At 09:41:07. {RULES}", "At 09:41:08. " + RULES.upper(), "Hello there."]
    for number, text in enumerate(texts):
        recent.nearest(encoder()(number, {"prompt": text}))
    near = recent.nearest(encoder()(9, {"prompt": f"At 09:41:08. {RULES}"}))
    assert near.number == 0


# ---- Rewriting -----------------------------------------------------------------------


def letters(body):
    text = json.dumps(body).replace("\\n", " ")
    return Counter(letter for letter in text if letter.isalnum())


def test_each_finding_counts_a_request_once():
    """Also those whose value cannot be moved."""
    bodies = []
    for i in range(8):
        gaps = " ".join(["a", *[f"{' ' * i}b"] * 2])
        bodies.append(chat(f"{gaps} {RULES} Please {'note ' * i}: {RULES}"))
    findings = lint(bodies, page_size=1)[1]
    counts = {finding.cause: finding.requests for finding in findings}
    assert counts == {"white space": 7, "text put in or left out": 7}


@pytest.mark.parametrize(
    "name", ["time", "date", "uuid", "hex", "counter", "number", "tools"]
)
def test_what_is_moved_is_not_lost(name):
    bodies = json.loads(json.dumps(PLANTED[name][0]))
    _, findings = lint(bodies)
    before = [letters(body) for body in bodies]
    for body in bodies:
        rewrite(body, findings)
    assert [letters(body) for body in bodies] == before
    linter, left = lint(bodies)
    assert findings[0].moved == len(bodies)
    assert not [each for each in left if each.path != "messages[1].content"]
    reused = linter.caches["radix", 16].reused / linter.tokens
    assert reused > 0.6


def test_a_sentence_goes_behind_the_question():
    body = chat(f"It is 09:41 now. {RULES}")
    _, findings = lint([chat(f"It is 09:4{i} now. {RULES}") for i in range(3)])
    rewrite(body, findings)
    system, user = (message["content"] for message in body["messages"])
    assert system == RULES and user == "Where is the exit?\nIt is 09:41 now."


def test_answers_and_json_stay_where_they_are():
    """An assistant's words are not moved, nor is a value that is no line."""
    said = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": RULES},
    ]
    bodies = []
    for i in range(4):
        turns = json.loads(json.dumps(said))
        turns[1]["content"] = f"It is 09:4{i} now. {RULES}"
        bodies.append({"messages": turns})
    before = json.dumps(bodies)
    _, findings = lint(bodies)
    for body in bodies:
        rewrite(body, findings)
    assert json.dumps(bodies) == before and findings[0].moved == 0


# ---- A live run ----------------------------------------------------------------------


@pytest.fixture
def model(talker):  # noqa: F811
    (talker / "chat_template.jinja").write_text(MARKED, encoding="utf-8")
    return talker


def word_log(number=12, seed=0):
    rng = random.Random(seed)
    rules = " ".join(f"w{20 + i}" for i in range(40))
    for _ in range(number):
        stamp, name = rng.randrange(6, 20), rng.randrange(60, 64)
        user = f"w{name} w{rng.randrange(70, 99)}"
        yield chat(f"w5{stamp % 3} {rules}" if rng.random() < 0.5 else rules, user)


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_a_live_run_finds_the_same(index, model, command, tmp_path):  # noqa: F811
    """The log through `LLM.chat` on real (tiny) weights: the same cached tokens."""
    bodies = list(word_log())
    llm = LLM(model, num_pages=64, page_size=4, index=index, device="cpu")
    one = SamplingParams(max_tokens=1, temperature=0)
    live = [llm.chat(body["messages"], one)[0].num_cached_tokens for body in bodies]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(b) + "\n" for b in bodies), encoding="utf-8")
    options = ("--model", model, "--page-size", 4, "--index", index)
    code, out, _ = command("explain", log, *options, "--capacity", 256, "--json")
    told = json.loads(out)
    assert code == 0 and told["caches"][0]["reused"] == sum(live) > 100
    assert told["prompt_tokens"] == llm.stats()["queried_tokens"]
    cache = CacheOnly(index, 4, 256)
    made = Encoder(lambda: (llm.tokenizer, llm.template))
    assert live == [cache.play(made(0, body).ids) for body in bodies]


# ---- The command ---------------------------------------------------------------------


@pytest.fixture
def explain(command, monkeypatch, tmp_path):  # noqa: F811
    """Run the command with `Letters` on a log with these bytes, text, or bodies."""
    parts = (Letters(), ChatTemplate(WITH_TOOLS))
    monkeypatch.setattr(command_explain, "load_parts", lambda model: parts)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(log, *options):
        if isinstance(log, list):
            log = "".join(json.dumps(each) + "\n" for each in log)
        path = tmp_path / "log.jsonl"
        path.write_bytes(log if isinstance(log, bytes) else log.encode())
        return command("explain", path, *options)

    return run


def test_a_report_for_people_has_no_colours_in_a_file(explain, monkeypatch):
    code, out, err = explain(PLANTED["time"][0])
    assert code == 0 and err == "" and "\x1b" not in out
    assert "1. messages[0].content" in out and "a time or date, in 5 requests" in out
    assert "if moved (radix, hash)" in out
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = explain(PLANTED["time"][0])[1]
    assert "\x1b[1;33ma time or date" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;33m" not in explain(PLANTED["time"][0])[1]


def test_one_is_said_as_one(explain):
    log = [{"prompt": f"It is 09:4{i}. You are a guide in a museum."} for i in (1, 2)]
    out = explain(log)[1]
    assert out.startswith("2 requests, ")
    assert "a time or date, in 1 request\n" in out
    told = [command_explain.counted(i, "token") for i in (0, 1, 1200)]
    assert told == ["0 tokens", "1 token", "1,200 tokens"]


def test_the_example_of_the_readme_shows_a_loss(command):  # noqa: F811
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^minivllm (explain .*)$", readme, re.M)
    code, out, _ = command(*shlex.split(line, comments=True), "--json")
    lost = json.loads(out)["findings"][0]["lost"]
    assert code == 0 and [x["tokens"] for x in lost if x["page_size"] == 16] == [16] * 2


def test_json_has_every_count(explain):
    code, out, _ = explain(PLANTED["time"][0], "--json", "--page-size", "1,16,4K")
    told = json.loads(out)
    assert code == 0 and told["schema_version"] == 1 and told["requests"] == 6
    assert len(told["caches"]) == 6 and told["capacity"] == 2**20
    finding = told["findings"][0]
    assert finding["path"] == "messages[0].content" and finding["moved"] == 6
    lost = {(row["index"], row["page_size"]): row["tokens"] for row in finding["lost"]}
    assert lost["radix", 16] == lost["hash", 16] > lost["radix", 4096] == 0
    by_name = {(row["index"], row["page_size"]): row for row in told["caches"]}
    row = by_name["hash", 16]
    assert row["reused"] + 0.8 * lost["hash", 16] < row["reused_after"]


def test_no_fault_says_so(explain):
    code, out, _ = explain([chat(RULES)] * 3)
    assert code == 0 and "no field breaks reuse" in out


FORMS = {
    "openai": json.dumps(chat(RULES)),
    "batch": json.dumps({"custom_id": "1", "method": "POST", "body": chat(RULES)}),
    "proxy": json.dumps({"request": chat(RULES), "status": 200}),
    "messages": json.dumps(chat(RULES)["messages"]),
    "tuning": json.dumps(
        {"messages": [*chat(RULES)["messages"], {"role": "assistant", "content": "x"}]}
    ),
    "sharegpt": json.dumps(
        {
            "conversations": [
                {"from": "system", "value": RULES},
                {"from": "human", "value": "Where is the exit?"},
                {"from": "gpt", "value": "x"},
            ]
        }
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_one_request_in_many_formats(form, explain):
    told = json.loads(explain(f"{FORMS[form]}\n" * 2, "--json")[1])
    size = len(encoder()(1, chat(RULES)).ids)
    assert (told["requests"], told["prompt_tokens"]) == (2, 2 * size)
    assert told["bad_lines"] == []


def test_more_formats(explain):
    tokens = {"timestamp": 0, "prompt_token_ids": [1, 2, 3], "output_length": 1}
    blocks = {"timestamp": 0, "input_length": 600, "hash_ids": [7, 8]}
    for log, tokens_ in (
        ("a plain line\nanother one\n", 23),
        (['"a JSON text"'], 13),
        ([{"prompt": "abc"}, {"text": "de"}, [1, 2]], 7),
        ([tokens, tokens], 6),
        ([blocks | {"output_length": 1}] * 2, 1200),
        (json.dumps([json.loads(FORMS["sharegpt"])] * 2, indent=1), 2 * 340),
    ):
        code, out, err = explain(log, "--json")
        assert code == 0, err
        told = json.loads(out)
        assert told["bad_lines"] == [] and abs(told["prompt_tokens"] - tokens_) < 30


def test_one_request_over_several_lines(explain):
    """A file that is one JSON value, as an editor shows it; and one that is cut off."""
    text = json.dumps(chat(RULES), indent=1)
    told = json.loads(explain(text, "--json")[1])
    assert told["requests"] == 1 and told["bad_lines"] == []
    cut = text[: len(text) // 2]
    code, _, err = explain(cut)
    assert code == 2 and "not JSON" in err, "its lines were taken for prompts"
    told = json.loads(explain("{\n" + FORMS["openai"] + "\n", "--json")[1])
    assert told["requests"] == 1 and len(told["bad_lines"]) == 1
    told = json.loads(
        explain('{"prompt": "a",\n"b"\nwords\n{"prompt": "c"}', "--json")[1]
    )
    assert told["requests"] == 2 and len(told["bad_lines"]) == 2


def test_what_could_not_be_moved_is_left(explain):
    """A prompt of one line may end inside of a sentence: nothing is put there."""
    log = [{"prompt": f"It is 09:4{i}:00 now. {RULES}"} for i in range(4)]
    told = json.loads(explain(log, "--json")[1])
    finding = told["findings"][0]
    assert finding["moved"] == 0 and finding["remedy"].startswith("left: ")
    out = explain(log)[1]
    assert "left: it is no line or sentence" in out and "if moved" not in out


def test_a_rewritten_conversation_moves_in_each_of_its_requests(explain, tmp_path):
    """And leaves what was said before as it was."""
    log = []
    for i in range(3):
        texts = [f"It is 09:4{i} now. {RULES}", f"Who {i}?", "I.", "When?"]
        who = ("system", "human", "gpt", "human")
        turns = [{"from": w, "value": t} for w, t in zip(who, texts, strict=True)]
        log.append({"conversations": turns})
    told = json.loads(explain(log, "--json", "--rewrite", tmp_path / "out")[1])
    lines = map(json.loads, (tmp_path / "out").read_text("utf-8").splitlines())
    first, second = [[m["content"] for m in line["messages"]] for line in lines][:2]
    assert told["findings"][0]["moved"] == told["requests"] == 6
    assert first == [RULES, "Who 0?\nIt is 09:40 now."]
    assert second == [RULES, "Who 0?", "I.", "When?\nIt is 09:40 now."]


def test_a_mark_of_byte_order_is_no_text(explain):
    text = "\ufeff" + FORMS["openai"] + "\n"
    told = json.loads(explain(text, "--json")[1])
    assert told["prompt_tokens"] == len(encoder()(1, chat(RULES)).ids)


def test_a_conversation_is_a_request_for_each_question(explain):
    turns = [{"from": who, "value": who * 20} for who in ("human", "gpt") * 3]
    told = json.loads(explain([{"conversations": turns}], "--json")[1])
    assert told["requests"] == 3 and told["findings"] == []


@pytest.mark.parametrize(
    ("log", "named"),
    [
        ("", "there is no request in it"),
        ("\n \n", "there is no request in it"),
        (bytes(range(256)) * 8, "line 1: "),
        ('{"question": "x"}\n', "none of messages, conversations, prompt"),
        ("{not json\n", "this is not JSON"),
        ('{"messages": []}\n', "none of"),
        ("[" * 100_000 + "\n", "line 1: "),
    ],
)
def test_a_log_that_cannot_be_read_is_one_line(log, named, explain):
    code, out, err = explain(log)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert named in err and "log.jsonl" in err and "Traceback" not in err


def test_bad_lines_are_told_and_kept(explain, tmp_path):
    good = [json.dumps(body) for body in PLANTED["time"][0]]
    bad = ["{", '{"messages": [{"role": "ghost", "content": "x"}]}', '{"x": 1}', "7"]
    lines = [*good[:3], *bad, *good[3:]]
    code, out, _ = explain("\n".join(lines), "--json", "--rewrite", tmp_path / "out")
    told = json.loads(out)
    assert code == 0 and told["requests"] == 6
    assert [row["line"] for row in told["bad_lines"]] == [4, 5, 6, 7]
    written = (tmp_path / "out").read_text("utf-8").splitlines()
    assert len(written) == 10 and written[3:7] == bad
    assert "ghost" in told["bad_lines"][1]["fault"]
    code, out, _ = explain("\n".join(lines))
    assert "line 4: this is not JSON" in out and "could not be read: 4" in out


def test_odd_lines_do_not_end_it(explain, tmp_path):
    """Content in parts, none at all, other types, bytes, salts and ids out of range."""
    parts = [{"type": "text", "text": f"It is 09:41 now. {RULES}"}]
    odd = [
        {"messages": [{"role": "system", "content": parts}, *chat("")["messages"][1:]]},
        {"messages": [{"role": "assistant", "tool_calls": [1]}, {"role": "user"}]},
        {"messages": ["Hi"]},
        {"messages": [{"role": "user", "content": "x"}], "tools": "abc"},
        {"prompt": "x", "cache_salt": {"a": []}},
        {"prompt_token_ids": [-1, 2]},
        {"prompt_token_ids": [2**70]},
        {"prompt": ""},
        {"prompt": "\ud800"},
    ]
    lines = [json.dumps(each).encode() for each in [*PLANTED["time"][0], *odd]]
    lines.insert(3, b"\xff\xfe not text")
    options = ("--json", "--rewrite", tmp_path / "out")
    code, out, err = explain(b"\n".join(lines), *options)
    assert code == 0 and err == "", err
    told = json.loads(out)
    assert {row["line"] for row in told["bad_lines"]} >= {4, 9, 10, 12, 13, 14, 15}
    written = (tmp_path / "out").read_bytes().splitlines()
    assert len(written) == len(lines) and written[3] == lines[3]
    assert json.loads(written[7]) == odd[0] and json.loads(written[-1]) == odd[-1]
    assert told["findings"][0]["moved"] == 6
    assert told["caches"][0]["refused"] == 0


def test_the_rewritten_log_is_what_was_promised(explain, tmp_path):
    """Explained again it reuses `reused_after`, and the fault is gone."""
    for name in ("time", "tools", "uuid"):
        wrapped = [{"custom_id": "x", "body": body} for body in PLANTED[name][0]]
        told = json.loads(explain(wrapped, "--json", "--rewrite", tmp_path / "out")[1])
        text = (tmp_path / "out").read_text("utf-8")
        again = json.loads(explain(text, "--json")[1])
        assert all(json.loads(line)["custom_id"] == "x" for line in text.splitlines())
        assert again["findings"] == [] and again["requests"] == 6
        for one, other in zip(told["caches"], again["caches"], strict=True):
            assert one["reused_after"] == other["reused"]


def test_a_huge_line(explain):
    code, out, _ = explain([{"prompt": "x" * 300_000}, {"prompt": "x" * 9}], "--json")
    assert code == 0 and json.loads(out)["prompt_tokens"] == 300_009


def test_a_prompt_that_never_fits_is_counted(explain):
    log = [{"prompt": "x" * 100}, {"prompt": "x" * 9}]
    told = json.loads(
        explain(log, "--capacity", "64", "--page-size", "1,16,32", "--json")[1]
    )
    refused = {row["page_size"]: row["refused"] for row in told["caches"][:3]}
    assert refused == {1: 1, 16: 1, 32: 1}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--page-size", "0"), "at least 1"),
        (("--page-size", "x"), "a size is a whole number"),
        (("--index", "b-tree"), "index must be one of"),
        (("--capacity", "8", "--page-size", "16"), "no page of 16"),
        (("--capacity", "1K,2K"), "one --capacity"),
        (("--rewrite", "/no/such/place"), "--rewrite"),
        (("--rewrite", f"{__file__}/x"), "--rewrite"),
    ],
)
def test_a_bad_option_is_one_line(options, named, explain):
    code, out, err = explain([chat(RULES)], *options)
    assert (code, out, err.count("\n")) == (2, "", 1) and named in err


def test_places_that_are_no_log(command, explain, tmp_path):  # noqa: F811
    for place in (tmp_path, tmp_path / "none.jsonl"):
        code, out, err = command("explain", place)
        assert (code, out, err.count("\n")) == (2, "", 1) and str(place) in err
    read, write = os.pipe()
    code, out, err = command("explain", f"/dev/fd/{read}")
    assert (code, out) == (2, "") and "read twice" in err
    os.close(read), os.close(write)
    code, _, err = explain([chat(RULES)], "--rewrite", tmp_path / "log.jsonl")
    assert code == 2 and "--rewrite would write" in err


def test_without_a_tokenizer_only_ids_can_be_read(explain, monkeypatch):
    monkeypatch.setattr(command_explain, "load_parts", lambda model: (None, None))
    code, _, err = explain([chat(RULES)])
    assert code == 2 and "no tokenizer" in err and err.count("\n") == 1
    assert explain([{"prompt_token_ids": [1, 2]}])[0] == 0
    assert explain([{"prompt_token_ids": [1, 2]}, chat(RULES)])[0] == 2
    monkeypatch.setattr(command_explain, "load_parts", lambda model: (Letters(), None))
    code, _, err = explain([chat(RULES)])
    assert code == 2 and "no chat template" in err
    with pytest.raises(Missing):
        encoder(template=None)(1, chat(RULES))


def test_a_model_that_is_not_there(command, tmp_path):  # noqa: F811
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt": "x"}\n', encoding="utf-8")
    code, _, err = command("explain", log, "--model", tmp_path / "none")
    assert code == 2 and "no model at" in err and err.count("\n") == 1


# ---- Two prompts ---------------------------------------------------------------------


def test_two_texts(command, explain):  # noqa: F811
    texts = [f"It is 09:41:0{i} now. {RULES}" for i in (7, 8)]
    told = json.loads(command("explain", *texts, "--json", "--page-size", "1,16")[1])
    assert told["common"]["tokens"] == told["common"]["characters"] == 13
    assert [side["text"][1] for side in told["common"]["sides"]] == ["7", "8"]
    assert told["findings"][0]["cause"] == "a time or date"
    assert [row["reused"] for row in told["caches"]] == [13, 0, 13, 0]
    code, out, _ = command("explain", *texts)
    assert code == 0 and "13 tokens in common, 13 characters" in out


def test_two_files_of_chats(command, explain, tmp_path):  # noqa: F811
    for name, tools in (("a", TOOLS), ("b", TOOLS[::-1])):
        (tmp_path / f"{name}.json").write_text(json.dumps(chat(RULES, tools=tools)))
    pair = tmp_path / "a.json", tmp_path / "b.json"
    told = json.loads(command("explain", *pair, "--json")[1])
    assert told["findings"][0]["path"] == "tools"
    same = json.loads(command("explain", pair[0], pair[0], "--json")[1])
    assert same["findings"] == [] and same["caches"][0]["reused"] > 400


def test_two_texts_that_have_nothing_in_common_are_no_fault(command, explain):  # noqa: F811
    pair = "Write a poem on the sea.", "Who were the kings of Rome?"
    assert json.loads(command("explain", *pair, "--json")[1])["findings"] == []
    assert "no field breaks reuse" in command("explain", *pair)[1]


def test_a_pair_tells_what_costs_nothing(command, explain):  # noqa: F811
    told = json.loads(command("explain", "abc 17", "abc 18", "--json")[1])
    assert told["findings"][0]["cause"] == "a number"
    assert {row["tokens"] for row in told["findings"][0]["lost"]} == {0}


@pytest.mark.parametrize(
    "pair", [("a", "none.txt"), ("", "b"), ("a", "b", "c"), ("x", "/tmp")]
)
def test_a_bad_pair_is_one_line(pair, command, explain):  # noqa: F811
    code, out, err = command("explain", *pair)
    assert (code, out, err.count("\n")) == (2, "", 1)
