# Exported from chapters/14_llm.py (0c0bcce0): edit the chapter.
"""The command line: `minivllm generate`."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import cache
from importlib import import_module
from inspect import Parameter, signature
from pkgutil import iter_modules
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from minivllm.options import CHOICES, EngineOptions
from minivllm.request import SamplingParams

SCHEMA_VERSION = 1  # of every JSON output

app = typer.Typer(
    name="minivllm",
    help="An LLM inference engine that reuses work.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command's `**options` take one option for each field of `EngineOptions`."""
    hints = get_type_hints(EngineOptions)
    own = [p for p in signature(command).parameters.values() if p.kind != p.VAR_KEYWORD]
    for each in fields(EngineOptions):
        words: list[str] = [each.metadata["help"]]
        if each.name in CHOICES:
            words.append(f"One of {', '.join(CHOICES[each.name])}.")
        given = typer.Option(help=" ".join(words))
        kind = Annotated[hints[each.name], given]  # type: ignore[valid-type, name-defined]
        parameter = Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default)
        own.append(parameter.replace(annotation=kind))
    public = signature(command).replace(parameters=own)
    command.__signature__ = public  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in own}
    return command


@app.callback()
def root() -> None:
    """An LLM inference engine that reuses work."""


@app.command()
@with_engine_options
def generate(
    prompt: Annotated[
        list[str], typer.Option(help="Text to continue; repeat for more.")
    ],
    model: Annotated[
        str, typer.Option(help="smollm2, a folder, a .gguf, a hub id.")
    ] = "smollm2",
    max_tokens: Annotated[int, typer.Option(help="Output tokens at most.")] = 16,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="Keep the k likeliest tokens; 0: all.")
    ] = 0,
    top_p: Annotated[float, typer.Option(help="Keep this much probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Least share of the likeliest.")] = 0.0,
    n: Annotated[int, typer.Option(help="Continuations of each prompt.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="End the text here.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after an end token.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line.")
    ] = False,
    **options: Any,
) -> None:
    """Continue one or more prompts."""
    params = SamplingParams(
        max_tokens,
        temperature,
        top_k,
        top_p,
        min_p,
        n=n,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    EngineOptions(**options)  # a bad value is told before the model is loaded
    from minivllm.llm import LLM  # torch begins here

    outputs = LLM(model, **options).generate(prompt, params)
    for output in outputs:
        metrics = {"ttft_s": output.metrics.ttft_s, "e2e_s": output.metrics.e2e_s}
        show(asdict(output) | {"metrics": metrics}, as_json)
    if any(c.finish_reason == "error" for output in outputs for c in output.outputs):
        raise typer.Exit(1)


def show(output: dict[str, Any], as_json: bool) -> None:
    """Print one result: for a machine on one line, or for a person."""
    if as_json:
        print(json.dumps({"schema_version": SCHEMA_VERSION} | output))
        return
    size, cached = len(output["prompt_token_ids"]), output["num_cached_tokens"]
    for completion in output["outputs"]:
        print(f"{output['prompt']}{completion['text']}")
    print(f"  ({size} prompt tokens, {cached} of them cached)", file=sys.stderr)


@cache
def add_commands() -> None:
    """Let each module `command_*` of the package add its commands, once."""
    for found in iter_modules(import_module("minivllm").__path__, "minivllm."):
        if found.name.startswith("minivllm.command_"):
            import_module(found.name).add_to(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a foreseeable fault is one line on stderr and exit code 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    add_commands()
    try:
        code = app(given or ["--help"], standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except typer.TyperException as error:
        _fail(error.format_message())
    except (ValueError, OSError) as error:
        _fail(str(error))
    sys.exit(code or 0)


def _fail(message: str) -> NoReturn:
    print("minivllm:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
