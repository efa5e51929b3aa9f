# Exported from chapters/17_log.py (7a0eae3d): edit the chapter.
"""Logs of requests, in the formats that people have, as bodies of OpenAI's API."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm.workloads import LineReader

Body = dict[str, Any]  # messages and perhaps tools, or a prompt, as text or token ids
FORMATS = "messages, conversations, prompt, text, prompt_token_ids or hash_ids"
SPEAKERS = {"human": "user", "user": "user", "system": "system", "tool": "tool"}


def bodies_of(value: Any, traces: LineReader) -> list[Body]:
    """The requests in one JSON value. `ValueError` if there is none that we know."""
    if isinstance(value, str):
        return [{"prompt": value}]
    if isinstance(value, list) and value:
        if all(type(each) is int for each in value):
            return [{"prompt_token_ids": value}]
        if all(isinstance(each, dict) and "role" in each for each in value):
            return [{"messages": value}]
        return [body for each in value for body in bodies_of(each, traces)]
    if isinstance(value, dict):
        for wrapper in ("body", "request"):  # batch files, and logs of a proxy
            if isinstance(value.get(wrapper), dict):
                return bodies_of(value[wrapper], traces)
        if found := _requests_in(value, traces):
            return found
    raise ValueError(f"none of {FORMATS}: {json.dumps(value)[:40]}")


def _requests_in(value: Body, traces: LineReader) -> list[Body]:
    if isinstance(turns := value.get("conversations"), list):
        return list(_turns(turns))
    if isinstance(value.get("messages"), list) and value["messages"]:
        return [value]
    if "hash_ids" in value:
        request = traces.read(value, "")
        return [{"prompt_token_ids": request.token_ids().tolist()}]
    prompt = value.get("prompt", value.get("prompt_token_ids", value.get("text")))
    if isinstance(prompt, str):
        value["prompt"] = prompt
        return [value]
    ids = isinstance(prompt, list) and all(type(each) is int for each in prompt)
    if prompt and ids:
        return [value | {"prompt_token_ids": prompt}]
    return []


def _turns(turns: list[Any]) -> Iterator[Body]:
    """ShareGPT keeps a conversation in one record: a request for each question."""
    messages = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise ValueError("a turn of conversations has from and value")
        role = SPEAKERS.get(str(turn.get("from")), "assistant")
        messages.append({"role": role, "content": turn["value"]})
        if role == "user":
            yield {"messages": [dict(message) for message in messages]}


@dataclass
class Line:
    """A line of a log, the requests in it, or what is wrong with it."""

    number: int
    raw: bytes
    value: Any = None
    bodies: list[Body] = field(default_factory=list)
    fault: str = ""

    def written(self) -> Iterator[str]:
        """The line again, with whatever was changed in its bodies."""
        parts = [self.value]
        if isinstance(self.value, dict):
            parts += [self.value.get("body"), self.value.get("request")]
        if all(any(body is part for part in parts) for body in self.bodies):
            yield json.dumps(self.value, ensure_ascii=False)
        else:  # it had another format, or several requests
            yield from (json.dumps(body, ensure_ascii=False) for body in self.bodies)


def read_log(path: Path) -> Iterator[Line]:
    """The lines of a log, one at a time; a bad one has a `fault` and no bodies.

    A file whose first line is no JSON has a prompt on each line. A file that is one
    JSON value over several lines, a list or a request, is read whole.
    """
    traces, plain = LineReader(), None
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            line = Line(number, raw)
            try:
                text = raw.decode("utf-8-sig").strip()
                if "\0" in text:
                    raise ValueError("this is not text")
                if plain is None and text in ("[", "{"):
                    plain = False
                    yield from _whole(path, traces)
                    return
                line.value = text if plain else _value(text, plain is None)
                plain = line.value is text if plain is None else plain
                line.bodies = bodies_of(line.value, traces)
            except UnicodeDecodeError:
                line.fault = "this is not text in UTF-8"
            except json.JSONDecodeError as error:
                plain, line.fault = False, f"this is not JSON: {error}"
            except (ValueError, TypeError, RecursionError) as error:
                line.fault = str(error)
            yield line


def _value(text: str, may_be_plain: bool) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        if may_be_plain and text[:1] not in ("{", "["):
            return text
        raise
    other = isinstance(value, str | list | dict) or not may_be_plain
    return value if other else text


def _whole(path: Path, traces: LineReader) -> Iterator[Line]:
    whole = json.loads(path.read_text("utf-8-sig"))
    values = whole if isinstance(whole, list) else [whole]
    for number, value in enumerate(values, 1):
        raw = json.dumps(value, ensure_ascii=False).encode()
        try:
            yield Line(number, raw, value, bodies_of(value, traces))
        except (ValueError, TypeError) as error:
            yield Line(number, raw, fault=str(error))
