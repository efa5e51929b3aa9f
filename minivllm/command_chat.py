# Exported from chapters/14_llm.py (55adcbf7): edit the chapter.
"""The command `minivllm chat`: a conversation that streams."""

import json
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minivllm.cli import (
    SCHEMA_VERSION,
    AsJson,
    Trace,
    open_llm,
    sampling_of,
    with_options,
)
from minivllm.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from minivllm.llm import LLM


def add_to(root: typer.Typer) -> None:
    """Add this module's command to the command line."""
    root.command()(chat)


@with_options(max_tokens=512, temperature=0.3)
def chat(
    system: Annotated[
        str | None, typer.Option(help="What the model is told first.")
    ] = None,
    as_json: AsJson = False,
    trace: Trace = None,
    **options: Any,
) -> None:
    """Talk with the model; or answer the lines of stdin, one turn each."""
    params = sampling_of(options)
    if params.n > 1:
        raise ValueError("a chat has one answer: --n must be 1")
    with open_llm(options, as_json, trace) as llm:
        talk(llm, params, system, as_json)


def talk(llm: "LLM", params: SamplingParams, system: str | None, as_json: bool) -> None:
    """Turn by turn; a turn that cannot run ends a script, not a person's chat."""
    start = [{"role": "system", "content": system}] if system else []
    history = list(start)
    by_hand = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    for line in typed_lines() if by_hand else map(str.strip, sys.stdin):
        if line == "/exit":
            return
        if line == "/clear":
            history = list(start)
        elif line:
            history.append({"role": "user", "content": line})
            try:
                text = answer(llm, history, params, as_json)
                history.append({"role": "assistant", "content": text})
            except ValueError as error:
                if not by_hand:
                    raise
                typer.echo(f"{error} (/clear starts anew)", err=True)
                history.pop()


def typed_lines() -> Iterator[str]:
    """What a person types, up to Ctrl-D; Ctrl-C drops the line."""
    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  # arrow keys and history for `input`
    typer.echo("/exit or Ctrl-D ends, /clear forgets, Ctrl-C stops.", err=True)
    while True:
        try:
            line = input("> ")
        except KeyboardInterrupt:
            line = ""
            typer.echo()
        except EOFError:
            typer.echo()
            return
        yield line.strip()


def answer(
    llm: "LLM", history: list[dict[str, str]], params: SamplingParams, as_json: bool
) -> str:
    """Print an answer as it grows, and what it cost; return its text."""
    output, text, reason = None, "", "abort"
    with closing(llm.stream(history, params)) as stream:
        try:
            for output in stream:
                new = output.outputs[0]
                if not as_json:
                    typer.echo(new.text[len(text) :], nl=False)
                text, reason = new.text, new.finish_reason or reason
        except KeyboardInterrupt:
            pass
    tell_turn(output, text, reason, as_json)
    return text


def tell_turn(
    output: RequestOutput | None, text: str, reason: str, as_json: bool
) -> None:
    """The end of a turn: its counts; for a machine the text as well."""
    size = len(output.prompt_token_ids) if output else 0
    cached = output.num_cached_tokens if output else 0
    new = len(output.outputs[0].token_ids) if output else 0
    if as_json:
        counts = {"prompt_tokens": size, "cached_tokens": cached, "output_tokens": new}
        turn = {"text": text, "finish_reason": reason, **counts}
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION} | turn))
        return
    typer.echo()
    told = f"  ({size} prompt tokens, {cached} of them cached; {new} new; {reason})"
    typer.echo(told, err=True)
