# Exported from chapters/14_llm.py (2d05ef40): edit the chapter.
"""The command line: what all commands share, and `minivllm generate`."""

import json
import os
import platform
import sys
import tomllib
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, fields
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from inspect import Parameter, signature
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from packaging.requirements import Requirement

from minivllm.options import CHOICES, SAMPLING, EngineOptions, documented
from minivllm.request import SamplingParams

SCHEMA_VERSION = 1  # of every JSON output

app = typer.Typer(
    name="minivllm",
    help="An LLM inference engine that reuses work.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, no bars.")]
Trace = Annotated[
    Path | None,
    typer.Option(help="Write what happened, and when, to this file (for Perfetto)."),
]

if TYPE_CHECKING:  # not otherwise: a command that asks for help needs no torch
    from minivllm.llm import LLM


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Let a TOML file give the defaults. `ValueError` names the file and the key."""
    takers: dict[Any, Any] = {p.name: p for p in context.command.params}
    if "stop" in takers:  # a stop string may hold spaces
        takers["stop"].split_envvar_value = lambda text: text.strip("\n").split("\n")
    if path is None or context.resilient_parsing:
        return path
    try:
        given = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    known = {"model", *(name for name, *_ in documented())}
    values = {key.replace("-", "_"): value for key, value in given.items()}
    if len(values) < len(given):
        raise ValueError(f"{path}: one key twice, with - and with _")
    if unknown := [key for key in given if key.replace("-", "_") not in known]:
        offered = ", ".join(sorted(known))
        raise ValueError(f"{path}: unknown key {unknown[0]!r} (known: {offered})")
    context.default_map = {}
    for name in takers.keys() & values.keys():
        value = values[name]  # as text, so that it is read as on the command line
        if takers[name].multiple and not isinstance(value, list):
            value = [value]
        plain = [str(v) for v in value] if isinstance(value, list) else str(value)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, list | dict):
                raise ValueError(f"{path}: {name} cannot be {each!r}")
        try:
            takers[name].process_value(context, plain)
        except typer.TyperException as error:
            raise ValueError(f"{path}: {name}: {error.message}") from None
        context.default_map[name] = plain
    return path


CONFIG = typer.Option(
    help="A TOML file of options. They may also be set as MINIVLLM_PAGE_SIZE=32.",
    callback=read_config,
    envvar="MINIVLLM_CONFIG",
    show_envvar=False,
    is_eager=True,
    expose_value=False,
)
MODEL = "smollm2, a folder, a .gguf file or a hub id."
Command = Callable[..., None]


def with_options(
    leave_out: Container[str] = (), **defaults: Any
) -> Callable[[Command], Command]:
    """Let a command's `**options` take model, sampling and engine, and `--config`.

    `defaults` are those of this command where they are not the usual ones.
    """

    def decorate(command: Command) -> Command:
        signed = signature(command)
        own = [p for p in signed.parameters.values() if p.kind != p.VAR_KEYWORD]
        own.append(_parameter("config", Path | None, None, CONFIG))
        rows = [("model", str, "smollm2", MODEL), *documented()]
        for name, kind, usual, words in rows:
            if name not in leave_out:
                default = defaults.get(name, usual)
                own.append(_parameter(name, kind, default, _option(name, words)))
        public = signed.replace(parameters=own)
        command.__signature__ = public  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in own}
        return command

    return decorate


def _option(name: str, words: str) -> Any:
    offered = CHOICES.get(name, ())
    return typer.Option(
        help=words,
        envvar=f"MINIVLLM_{name.upper()}",
        show_envvar=False,
        autocompletion=lambda incomplete: [
            c for c in offered if c.startswith(incomplete)
        ],
    )


def _parameter(name: str, kind: Any, default: Any, option: Any) -> Parameter:
    annotation = Annotated[kind, option]
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def sampling_of(options: dict[str, Any]) -> SamplingParams:
    """The part of a command's options that says how to sample."""
    return SamplingParams(**{n: options[n] for n in SAMPLING if n in options})


def open_llm(
    options: dict[str, Any], as_json: bool, trace: Path | None = None
) -> "LLM":
    """The model and the engine that a command's options describe."""
    chosen = {each.name: options[each.name] for each in fields(EngineOptions)}
    EngineOptions(**chosen)
    from minivllm.llm import LLM  # torch begins here

    return LLM(options["model"], trace=trace, progress=not as_json, **chosen)


@app.callback()
def root() -> None:
    """An LLM inference engine that reuses work."""


@app.command()
@with_options()
def generate(
    prompt: Annotated[
        list[str], typer.Option(help="Text to continue; repeat for more.")
    ],
    as_json: AsJson = False,
    trace: Trace = None,
    **options: Any,
) -> None:
    """Continue one or more prompts."""
    params = sampling_of(options)
    with open_llm(options, as_json, trace) as llm:
        outputs = llm.generate(prompt, params)
        for output in outputs:
            metrics = {"ttft_s": output.metrics.ttft_s, "e2e_s": output.metrics.e2e_s}
            told = {"metrics": metrics, "why": output.reuse and str(output.reuse)}
            show(asdict(output) | told, as_json)
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
    told = output["why"] or f"{size} prompt tokens, {cached} of them cached"
    print(f"  ({told})", file=sys.stderr)


@app.command()
def env(as_json: AsJson = False) -> None:
    """What is installed, which device would be used, what is missing."""
    packages, missing = installed()
    device, faults = place()
    report = {
        "minivllm": import_module("minivllm").__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **device,
        "packages": packages,
        "settings": {n: v for n, v in os.environ.items() if n.startswith("MINIVLLM_")},
        "missing": [*missing, *faults, *unknown_settings()],
    }
    if as_json:
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION} | report))
        return
    for name, value in report.items():
        pairs = value.items() if isinstance(value, dict) else None
        lines = [f"{n} {v}" for n, v in pairs] if pairs is not None else value
        shown = ", ".join(lines) if isinstance(lines, list) else value
        typer.echo(f"{name}: {shown or 'none'}")


def installed() -> tuple[dict[str, str | None], list[str]]:
    """Required packages with their versions, and a line for each that is not right."""
    found: dict[str, str | None] = {}
    missing = []
    for text in requires("minivllm") or []:
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            found[wanted.name] = there = version(wanted.name)
        except PackageNotFoundError:
            found[wanted.name] = there = None
        if there is None or not wanted.specifier.contains(there, prereleases=True):
            missing.append(f"{wanted.name}{wanted.specifier}: pip install it")
    return found, missing


def place() -> tuple[dict[str, Any], list[str]]:
    """The device that `auto` takes, how it computes, and faults on the way there."""
    from minivllm.loader import LoadError, find_model

    told: dict[str, Any] = {}
    faults = []
    try:
        import torch

        from minivllm.llm import choose_device, choose_dtype

        device = choose_device("auto")
        told["device"] = device.type
        told["dtype"] = str(choose_dtype("auto", device)).removeprefix("torch.")
        told["threads"] = torch.get_num_threads()
        told["cpu"] = torch.backends.cpu.get_cpu_capability()
    except (ImportError, ValueError) as error:
        faults.append(str(error))
    try:
        told["smollm2"] = find_model("smollm2").name
    except LoadError as error:
        faults.append(str(error))
    return told, faults


def unknown_settings() -> list[str]:
    """Variables that look like ours, and that nothing reads."""
    known = {"MODEL", "CONFIG", *(name.upper() for name, *_ in documented())}
    names = [n for n in os.environ if n.startswith("MINIVLLM_")]
    unread = [n for n in names if n.removeprefix("MINIVLLM_") not in known]
    return [f"{name}: no option has this name" for name in unread]


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
        code = app(given or ["--help"], prog_name="minivllm", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except typer.TyperException as error:
        name = getattr(getattr(error, "param", None), "envvar", None)
        source = f" ({name} is set)" if os.environ.get(str(name)) else ""
        _fail(error.format_message() + source)
    except (ValueError, OSError) as error:
        _fail(str(error))
    sys.exit(code or 0)


def _fail(message: str) -> NoReturn:
    print("minivllm:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
