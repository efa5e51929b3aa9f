"""The load generator: open loop, every failure counted, against a server of faults."""

import asyncio
import json
import queue
import random
import re
import socket
import threading
import time
from contextlib import contextmanager
from itertools import combinations, pairwise, product
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench_serve import (
    Call,
    EventReader,
    LoadPlan,
    Mix,
    Reply,
    Server,
    count_faults,
    due_times,
    figures,
    find_server,
    load_server,
    make_serve_rows,
    percentile,
    read_calls,
    read_url,
    run_rounds,
    send_all,
)
from minivllm.command_bench import serve_table

# ---- A server that does whatever it is told ------------------------------------------

HEAD = "HTTP/1.1 {}\r\nContent-Type: {}\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 4},
}


class Stub:
    """Answers as `mode` says. `bodies` are those it was sent; `came_s` when."""

    def __init__(self, mode="good", model="stub", delay_s=0.0, models=True) -> None:
        self.mode, self.model, self.delay_s = mode, model, delay_s
        self.models = models
        self.bodies: list[dict] = []
        self.came_s: list[float] = []
        self.num_connections = 0
        self.turn = asyncio.Lock()  # one worker

    async def serve(self, reader, writer) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = re.search(rb"content-length: (\d+)", head.lower())
                content = await reader.readexactly(int(size[1]) if size else 0)
                if head.startswith(b"GET"):
                    self.list_models(writer)
                else:
                    await self.answer(head, json.loads(content), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def list_models(self, writer) -> None:
        listed = {"object": "list", "data": [{"id": self.model}]}
        self.whole(writer, "200 OK" if self.models else "404 Not Found", listed)

    def whole(self, writer, status, content, kind="application/json") -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        writer.write(HEAD.format(status, kind).encode())
        self.chunk(writer, text.encode())
        writer.write(b"0\r\n\r\n")

    def chunk(self, writer, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def answer(self, head, body, writer) -> None:
        self.bodies.append(body)
        self.came_s.append(time.monotonic())
        mode = self.mode(len(self.bodies)) if callable(self.mode) else self.mode
        if body["model"] != self.model:
            missing = {"error": {"message": f"no model {body['model']}"}}
            self.whole(writer, "404 Not Found", missing)
            return
        async with self.turn:
            await asyncio.sleep(self.delay_s)
        if mode == "500":
            self.whole(writer, "500 Oops", {"error": {"message": "out of pages"}})
        elif mode == "html":
            self.whole(writer, "502 Bad Gateway", "<h1>no</h1>", "text/html")
        elif mode == "no stream":
            told = {"choices": [{"text": "abc", "finish_reason": "stop"}]}
            self.whole(writer, "200 OK", told | {"usage": USAGE})
        elif mode == "not json":
            self.whole(writer, "200 OK", "surprise")
        else:
            await self.stream(b"/chat/" in head, mode, writer)

    async def stream(self, chat, mode, writer) -> None:
        writer.write(HEAD.format("200 OK", "text/event-stream; charset=utf-8").encode())
        if mode == "malformed":
            self.chunk(writer, b"data: {not json\n\n")
            return
        if mode == "no text":
            self.chunk(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
            return
        for i, word in enumerate(("né", "\u2028", "✓")):
            part = {"delta": {"content": word}} if chat else {"text": word}
            end = "stop" if i == 2 and mode != "no end" else None
            choice = part | {"index": 0, "finish_reason": end}
            if mode == "error event" and i == 1:
                choice, data = None, {"error": {"message": "evicted"}}
            else:
                data = {"choices": [choice]}
            text = f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
            if i == 0:
                text = b": keep-alive\n\n" + text
            for cut in (text[:-9], text[-9:-4], text[-4:]):  # inside of letters too
                self.chunk(writer, cut)
                await writer.drain()
                await asyncio.sleep(0.002)
            if mode == "dropped" and i == 1:
                writer.transport.abort()
                raise ConnectionError
        if mode != "no usage":
            last = {"choices": [], "usage": USAGE}
            self.chunk(writer, f"data: {json.dumps(last)}\n\n".encode())
        if mode != "no end":
            self.chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


@contextmanager
def running(stub: Stub):
    """The stub on a free port, in a thread of its own; its address."""
    ready: queue.Queue = queue.Queue()

    async def main() -> None:
        server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
        stop = asyncio.Event()
        port = server.sockets[0].getsockname()[1]
        ready.put((port, asyncio.get_running_loop(), stop))
        await stop.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    port, loop, stop = ready.get()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def ask(mode, number=1, chat=False, timeout_s=5.0, **stub):
    """The replies to some calls at once."""
    given = (
        {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    )
    with running(Stub(mode, **stub)) as url:
        server = find_server(url, max_tokens=3)
        return load_server(server, [Call(0.0, given)] * number, timeout_s)


# ---- The protocol --------------------------------------------------------------------


@given(
    st.lists(st.text(min_size=1), min_size=1, max_size=5),
    st.lists(st.integers(1, 9), min_size=1),
    st.sampled_from(("\n", "\r\n", "\r")),
)
def test_events_survive_any_cut(texts, cuts, end):
    """Bytes cut anywhere, any line end, comments between: the same data."""
    datas = [json.dumps(text, ensure_ascii=False) for text in texts]
    lines = [f": hello{end}{end}data: {data}{end}id: 3{end}{end}" for data in datas]
    stream, reader, found = "".join(lines).encode(), EventReader(), []
    i = 0
    while i < len(stream):
        size = cuts[i % len(cuts)]
        found += reader.feed(stream[i : i + size])
        i += size
    found += reader.feed(b"\n")  # a last lone \r may have been half of a \r\n
    assert [json.loads(data) for data in found] == texts


def test_data_of_several_lines_and_without_a_space():
    reader = EventReader()
    found = list(reader.feed(b"data:a\ndata:  b\n\n\n\ndata: c\n"))
    assert found == ["a\n b"] and list(reader.feed(b"\n")) == ["c"]
    halves = EventReader()  # a \r\n that is cut is one line end, not two
    assert not [*halves.feed(b"data: a\r"), *halves.feed(b"\ndata: b\r\n")]
    assert list(halves.feed(b"\r\n")) == ["a\nb"]


@pytest.mark.parametrize("chat", [False, True])
def test_a_good_stream(chat):
    (reply,) = ask("good", chat=chat)
    assert not reply.fault and reply.finished and reply.streamed
    assert len(reply.pieces_s) == 3 and reply.pieces_s == sorted(reply.pieces_s)
    counts = (reply.prompt_tokens, reply.cached_tokens, reply.output_tokens)
    assert counts == (7, 4, 3)
    assert 0 < reply.ttft_s < reply.done_s


def test_what_is_sent():
    stub = Stub()
    with running(stub) as url:
        server = find_server(url, max_tokens=3, temperature=0)
        load_server(server, [Call(0.0, {"prompt": "x", "max_tokens": 9})], 5)
    (body,) = stub.bodies
    assert body == {
        "model": "stub",
        "prompt": "x",
        "max_tokens": 9,  # the call's own wins
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


FAULTS = {
    "500": "HTTP 500: out of pages",
    "html": "HTTP 502",
    "dropped": "connection dropped",
    "malformed": "malformed answer",
    "not json": "malformed answer",
    "error event": "error event: evicted",
    "no end": "the stream ended without its end",
}


@pytest.mark.parametrize("mode", FAULTS)
def test_every_fault_has_its_name(mode):
    (reply,) = ask(mode)
    assert reply.fault == FAULTS[mode] and reply.ttft_s is None and reply.done_s > 0


def test_a_call_that_takes_too_long():
    (reply,) = ask("good", delay_s=1.0, timeout_s=0.2)
    assert reply.fault == "no end after 0.2 s" and reply.done_s < 0.9


def test_a_server_without_usage_has_no_token_figures():
    (reply,) = ask("no usage")
    assert not reply.fault and reply.cached_tokens is None
    told = figures([reply])
    assert "ttft_s p50" in told and not [name for name in told if "token" in name]


def test_a_server_that_ignores_stream_has_no_ttft():
    (reply,) = ask("no stream")
    assert not reply.fault and not reply.streamed and reply.output_tokens == 3
    told = figures([reply])
    assert "ttft_s p50" not in told and told["e2e_s p50"] > 0


def test_an_answer_without_text_is_no_fault_and_has_no_ttft():
    (reply,) = ask("no text")
    assert not reply.fault and reply.ttft_s is None


def test_connections_are_used_again():
    stub = Stub()
    with running(stub) as url:
        server = find_server(url)
        calls = [Call(0.1 * i, {"prompt": "x"}) for i in range(4)]
        assert not any(reply.fault for reply in load_server(server, calls, 5))
    assert stub.num_connections == 2  # one asked for the models


# ---- Open loop -----------------------------------------------------------------------


def test_a_slow_server_does_not_slow_the_arrivals():
    """Ten calls, 20 ms apart, to one worker that takes 100 ms: all are sent in time."""
    stub = Stub(delay_s=0.1)
    with running(stub) as url:
        server = find_server(url)
        calls = [Call(0.02 * i, {"prompt": "x"}) for i in range(10)]
        replies = load_server(server, calls, 10)
    assert stub.came_s[-1] - stub.came_s[0] < 0.5  # in a closed loop: 0.9 s and more
    assert replies[-1].ttft_s > 0.7  # counted from when it was due
    assert all(0 <= r.sent_s - r.due_s < 0.2 for r in replies)


def test_ttft_counts_from_when_a_call_was_due():
    """A generator that is late itself does not flatter the server."""
    late = Reply(due_s=1.0, sent_s=3.0, pieces_s=[3.5])
    assert late.ttft_s == 2.5 and figures([late])["lag_s p99"] == 2.0


def test_poisson_moments_have_their_rate_and_no_memory():
    moments = due_times("poisson", 20_000, 5.0, random.Random(1))
    assert moments == sorted(moments) and len(moments) == 20_000
    assert abs(moments[-1] / 20_000 - 0.2) < 0.005
    gaps = sorted(b - a for a, b in pairwise(moments))
    assert abs(gaps[len(gaps) // 2] - log(2) / 5) < 0.005  # exponential, not even
    assert due_times("burst", 3, 5.0, random.Random(1)) == [0.0] * 3
    again = due_times("poisson", 9, 5.0, random.Random("a"))
    assert again == due_times("poisson", 9, 5.0, random.Random("a"))


def test_one_failure_stops_nobody():
    async def ask(call, reply, now):
        if call.due_s == 0:
            raise RuntimeError("mine alone")
        reply.pieces_s.append(now())

    calls = [Call(0.0), Call(0.01)]
    bad, good = asyncio.run(send_all(calls, ask))
    assert bad.fault == "RuntimeError: mine alone" and not good.fault


# ---- What is sent --------------------------------------------------------------------


def test_a_round_is_the_same_for_all_servers_and_new_each_time():
    plan = LoadPlan(num_calls=5, mix=Mix(shared_words=30, own_words=4), seed=3)
    first, again, second = plan.calls(0), plan.calls(0), plan.calls(1)
    assert first == again and first != second
    texts = [call.body["prompt"].split() for call in [*first, *second]]
    assert len({tuple(words[:30]) for words in texts}) == 1
    assert len({tuple(words[30:]) for words in texts}) == 10
    assert {len(words) for words in texts} == {34}


def test_calls_from_a_file(tmp_path):
    path = tmp_path / "calls.jsonl"
    lines = [
        {"prompt": "late", "timestamp": 1500, "max_tokens": 4},
        {"messages": [{"role": "user", "content": "x"}]},
        {"prompt_token_ids": [1, 2], "output_length": 5, "timestamp": 20},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    calls = read_calls(path)
    assert [call.due_s for call in calls] == [0.0, 0.02, 1.5]
    assert calls[1].body == {"prompt": [1, 2], "max_tokens": 5}
    assert LoadPlan("trace", fixed=calls, same=True).calls(7) == calls
    timed = LoadPlan("burst", fixed=calls, same=True).calls(0)
    assert [c.due_s for c in timed] == [0, 0, 0]
    assert [c.body for c in timed] == [c.body for c in calls]


FILE = [
    Call(0.0, {"prompt": "You are a guide. When?"}),
    Call(0.5, {"prompt": "You are a guide. Where?", "max_tokens": 3}),
    Call(1.0, {"prompt": [5, 6, 7, 8]}),
    Call(1.5, {"prompt": [5, 6, 7, 9]}),
    Call(
        2.0, {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user"}]}
    ),
    Call(
        2.5,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    ),
    Call(3.0, {"messages": [{"role": "user", "content": None}]}),
]


def shared(one, other):
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def said(call):
    """A text, or token ids, with which a prompt begins."""
    body = call.body
    content = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    return content[0]["text"] if isinstance(content[0], dict) else content


@pytest.mark.parametrize("arrivals", ["trace", "burst"])
def test_prompts_of_a_file_begin_in_another_way_in_each_round(arrivals):
    """With earlier rounds they share nothing, among themselves what they shared."""
    plan = LoadPlan(arrivals, fixed=FILE)
    rounds = [plan.calls(number) for number in range(4)]
    assert rounds == [plan.calls(number) for number in range(4)]
    for one, other in combinations(rounds, 2):
        for a, b in product(one, other):
            assert not shared(said(a), said(b)), "known from another round"
    for calls in rounds:
        assert shared(said(calls[0]), said(calls[1])) >= len("You are a guide. Whe")
        assert sorted(calls[2].body["prompt"]) == [5, 6, 7, 8]
        assert said(calls[0]).endswith("guide. When?")
        assert said(calls[4]).endswith("Be kind.") and calls[1].body["max_tokens"] == 3
        assert calls[5].body["messages"][0]["content"][1:] == [
            {"type": "text", "text": "a"}
        ]
        if arrivals == "trace":
            assert [c.due_s for c in calls] == [c.due_s for c in FILE]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a", "messages": [1]}',
        *("{}", "[]", "{", '{"prompt": ""}', '{"prompt": 7}', '{"prompt": [1, "a"]}'),
        *('{"messages": ["Hi"]}', '{"messages": {"role": "user"}}'),
        '{"prompt": "x", "timestamp": NaN}',
        '{"prompt": "x", "timestamp": -1}',
        '{"prompt": "x", "timestamp": null}',
        '{"prompt": "x", "max_tokens": 0}',
        '{"prompt": "x", "max_tokens": "many"}',
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "calls.jsonl"
    path.write_text(f'{{"prompt": "x"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"calls\.jsonl:2: "):
        read_calls(path)


@pytest.mark.parametrize(
    "wrong",
    [{"arrivals": "often"}, {"arrivals": "trace"}, {"rate": 0.0}, {"num_calls": 0}],
)
def test_a_plan_that_cannot_be_sent(wrong):
    with pytest.raises(ValueError):
        LoadPlan(**wrong)


def test_addresses():
    assert (
        read_url("http://h:8000") == read_url("http://h:8000/v1/") == "http://h:8000/v1"
    )
    assert read_url("https://h/api/v1") == "https://h/api/v1"
    for wrong in (
        "",
        "localhost:8000",
        "ftp://h",
        "http://",
        "http://h/?a=1",
        "http://a b",
    ):
        with pytest.raises(ValueError, match="is not an address"):
            read_url(wrong)


# ---- Figures, rounds, rows -----------------------------------------------------------


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(values, share):
    found = percentile(values, share)
    assert found in values
    assert sum(v <= found for v in values) >= share * len(values) - 1e-9
    assert sum(v < found for v in values) < share * len(values)


def replies_with(*ttfts, fault=""):
    return [
        Reply(0.0, 0.0, [t, t + 0.1], t + 0.1, 10, 5, 2, fault=fault) for t in ttfts
    ]


def test_figures_of_a_round():
    told = figures(replies_with(1.0, 2.0, 3.0) + replies_with(9.0, fault="HTTP 500"))
    assert told["ttft_s p50"] == 2.0 and told["ttft_s p99"] == 3.0
    assert told["itl_s p50"] == pytest.approx(0.1)
    assert told["requests/s"] == pytest.approx(3 / 3.1)
    assert told["output tokens/s"] == pytest.approx(6 / 3.1)
    assert (told["prompt tokens"], told["cached tokens"]) == (30, 15)
    assert told["failed"] == 1
    assert set(figures(replies_with(1.0, fault="x"))) == {
        "failed",
        "lag_s p50",
        "lag_s p90",
        "lag_s p99",
    }


def test_rounds_take_turns_and_warm_ups_are_apart():
    order = []

    def load(name, number):
        order.append((name, number))
        factor = 2.0 if name == "b" else 1.0
        return replies_with(factor * (number + 1))

    loads = {name: lambda number, name=name: load(name, number) for name in "ab"}
    rounds, warm = run_rounds(loads, repeats=3, warmups=1)
    assert order == [(n, i) for i in range(4) for n in ("ab", "ba")[i % 2]]
    assert [len(x["a"]) for x in (rounds, warm)] == [3, 1]
    rows = {(r.server, r.figure): r for r in make_serve_rows(rounds)}
    own, other = rows["a", "ttft_s p50"], rows["b", "ttft_s p50"]
    assert (own.median, own.low, own.high) == (3.0, 2.0, 4.0)  # without the first
    assert other.values == (4.0, 6.0, 8.0)
    assert (other.ratio, other.ratio_low, other.ratio_high) == (2.0, 2.0, 2.0)


def test_a_figure_that_a_round_lacks_is_left_out_and_failures_are_counted():
    rounds = {
        "a": [replies_with(1.0), replies_with(1.0)],
        "b": [replies_with(1.0), replies_with(1.0, 2.0, fault="HTTP 500")],
    }
    rows = [(r.server, r.figure) for r in make_serve_rows(rounds)]
    assert ("a", "ttft_s p50") in rows and ("b", "ttft_s p50") not in rows
    assert ("b", "lag_s p50") in rows
    assert count_faults(rounds["b"]) == {"HTTP 500": 2}


@pytest.mark.parametrize("who", ["a", "b"])
def test_beside_failures_there_is_no_ratio(who):
    """A server that fails the slow calls has the better percentiles of the others."""
    rounds = {name: [replies_with(1.0, 2.0) for _ in range(3)] for name in "ab"}
    assert all(r.ratio for r in make_serve_rows(rounds) if "ttft_s" in r.figure)
    rounds[who][1] = replies_with(1.0) + replies_with(2.0, fault="HTTP 500")
    rows = make_serve_rows(rounds)
    assert {r.ratio for r in rows if r.server == "b"} == {None}
    failed = {r.server: r.values for r in rows if r.figure == "failed"}
    assert failed == {"a": (0, 0, 0), "b": (0, 0, 0)} | {who: (0, 1, 0)}
    servers = {name: Server("http://x/v1", "m") for name in "ab"}
    lines = list(serve_table(servers, rows, rounds, {"a": [], "b": []}))
    assert lines[3].split()[0] == "failed" and not any(
        "(" in line for line in lines[3:]
    )
    assert f"{who}: 1 of 6 calls failed: HTTP 500" in lines


# ---- The command ---------------------------------------------------------------------


def command(*arguments, capsys):
    """Exit code, stdout, stderr."""
    from minivllm.cli import main

    with pytest.raises(SystemExit) as end:
        main(["bench", "serve", *map(str, arguments)])
    told = capsys.readouterr()
    return int(end.value.code or 0), told.out, told.err


QUICK = ["--requests", 4, "--rate", 200, "--repeats", 2, "--max-tokens", 3]


def test_two_servers_in_one_run(capsys, tmp_path):
    record, svg = tmp_path / "r.json", tmp_path / "r.svg"
    fast, slow = Stub(), Stub(delay_s=0.2)
    with running(fast) as one, running(slow) as other:
        code, out, _ = command(
            *("--base-url", one, "--compare-url", f"{other}/v1", *QUICK),
            *("--record", record, "--svg", svg),
            capsys=capsys,
        )
    assert code == 0, out
    told = json.loads(record.read_text("utf-8"))
    assert told["schema_version"] == 1 and told["command"].startswith("minivllm bench")
    assert told["calls"] == {"base": 8, "compare": 8}
    assert told["faults"] == {"base": {}, "compare": {}}
    rows = {(r["server"], r["figure"]): r for r in told["rows"]}
    assert rows["compare", "ttft_s p50"]["ratio"] > 1.2
    assert rows["base", "cached tokens"]["values"] == [16, 16]
    assert len(fast.bodies) == len(slow.bodies) == 1 + 3 * 4  # a question, three rounds
    # What is sent 5 ms apart may arrive in another order: the same calls, in any.
    sent = [sorted(b["prompt"] for b in server.bodies) for server in (fast, slow)]
    assert sent[0] == sent[1] and len(set(sent[0])) == 1 + 3 * 4
    assert "ttft_s p99" in out and "ratio" in out
    assert svg.read_text("utf-8").startswith("<svg")


def test_failures_are_told_and_end_in_code_1(capsys):
    mode = lambda number: "500" if number % 3 == 0 else "good"  # noqa: E731
    with running(Stub(mode)) as url:
        code, out, err = command("--base-url", url, *QUICK, "--json", capsys=capsys)
    told = json.loads(out)
    assert code == 1
    assert told["faults"]["base"] == {"HTTP 500: out of pages": 3}
    assert told["faults_in_warmups"]["base"] == {"HTTP 500: out of pages": 1}
    assert "base: 3 of 8 calls failed: HTTP 500: out of pages" in err
    assert "so there is no ratio" in err
    failed = next(row for row in told["rows"] if row["figure"] == "failed")
    assert sum(failed["values"]) == 3


@pytest.mark.parametrize("same", [False, True])
def test_a_file_of_prompts_is_said_to_be_the_same_or_not(same, capsys, tmp_path):
    path, stub = tmp_path / "calls.jsonl", Stub()
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n', encoding="utf-8")
    options = ("--prompts", path, *QUICK, "--json", *["--same-prompts"] * same)
    with running(stub) as url:
        _, out, err = command("--base-url", url, *options, capsys=capsys)
    told = json.loads(out)
    sent = [body["prompt"] for body in stub.bodies[1:]]
    assert len(set(sent)) == (2 if same else 6) and len(sent) == 6
    assert told["same_prompts"] is same
    assert ("--same-prompts" in told["command"]) is same
    assert ("the same prompts in each round" in err) is same


@pytest.mark.parametrize("chat", [False, True])
def test_the_check_of_a_server_warms_no_call(chat, capsys):
    """Not even with `--warmups 0`: it sends next to nothing, none of the load."""
    stub = Stub()
    options = (*QUICK, "--warmups", 0, *["--chat"] * chat)
    with running(stub) as url:
        assert command("--base-url", url, *options, capsys=capsys)[0] == 0
    check, *sent = stub.bodies
    assert len(json.dumps(check.get("messages", check.get("prompt")))) < 40
    assert ("messages" in check) is chat and check["max_tokens"] == 1
    assert len(sent) == 2 * 4 and check not in sent


def test_a_server_that_does_not_stream_is_told(capsys):
    with running(Stub("no stream")) as url:
        code, out, _ = command("--base-url", url, *QUICK, capsys=capsys)
    assert (
        code == 0
        and "without streaming" in out
        and "ttft" not in out.lower().replace("no ttft", "")
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_what_is_refused_before_anything_is_measured(capsys, tmp_path):
    """One line, exit code 2."""
    with running(Stub()) as url, running(Stub(models=False)) as unlisted:
        nobody = f"http://127.0.0.1:{free_port()}"
        cases = {
            ("--base-url", "localhost:8000"): "is not an address",
            ("--base-url", nobody): "nobody answers at",
            ("--base-url", url, "--compare-url", nobody): "nobody answers at",
            ("--base-url", url, "--model", "x"): "HTTP 404: no model x",
            ("--base-url", unlisted): "give --model",
            ("--base-url", url, "--arrivals", "often"): "arrivals must be one of",
            ("--base-url", url, "--arrivals", "trace"): "--prompts FILE",
            ("--base-url", url, "--repeats", 0): "must be above 0",
            ("--base-url", url, "--prompts", tmp_path / "no.jsonl"): "no.jsonl",
            ("--base-url", url, "--svg", tmp_path): "--svg: ",
        }
        for arguments, words in cases.items():
            code, out, err = command(*arguments, capsys=capsys)
            assert code == 2 and not out, arguments
            assert words in err and err.count("\n") == 1, err
        code, *_ = command(
            "--base-url", unlisted, "--model", "stub", *QUICK, capsys=capsys
        )
        assert code == 0


def test_a_key_is_sent_and_never_recorded(capsys, tmp_path):
    heads = []
    stub = Stub()
    plain = stub.answer

    async def answer(head, body, writer):
        heads.append(head)
        await plain(head, body, writer)

    stub.answer = answer
    with running(stub) as url:
        _, out, err = command(
            *("--base-url", url, *QUICK, "--api-key", "s3cret", "--json"), capsys=capsys
        )
    assert all(b"uthorization: Bearer s3cret" in head for head in heads) and heads
    assert "s3cret" not in out + err


def test_without_the_client_one_line_says_how_to_get_it(monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "httpx2", None)
    code, _, err = command("--base-url", "http://localhost:1", capsys=capsys)
    assert code == 2 and "pip install 'minivllm[bench]'" in err


def test_a_server_is_found_by_its_first_model():
    with running(Stub(model="mine")) as url:
        assert find_server(url) == Server(f"{url}/v1", "mine", "", {})
