# Exported from chapters/14_llm.py. Edit the chapter, not this file.
"""The command line: `minivllm generate`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, NoReturn

import typer

SCHEMA_VERSION = 1  # of every JSON output

app = typer.Typer(
    name="minivllm",
    help="An LLM inference engine that reuses work.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def root() -> None:
    """An LLM inference engine that reuses work."""


@app.command()
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
    seed: Annotated[int | None, typer.Option(help="Seed of each request.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the text here.")] = None,
    index: Annotated[str, typer.Option(help="radix, hash or none.")] = "radix",
    publish: Annotated[str, typer.Option(help="step or finish.")] = "step",
    single_flight: Annotated[str, typer.Option(help="none.")] = "none",
    grouping: Annotated[str, typer.Option(help="arrival.")] = "arrival",
    admission: Annotated[
        str, typer.Option(help="optimistic or reserve.")
    ] = "optimistic",
    eviction: Annotated[str, typer.Option(help="lru, lfu or fifo.")] = "lru",
    page_size: Annotated[int, typer.Option(help="Tokens in a page.")] = 16,
    num_pages: Annotated[int | None, typer.Option(help="Pages of K/V memory.")] = None,
    max_running: Annotated[int, typer.Option(help="Requests in a step.")] = 64,
    max_batch_tokens: Annotated[int, typer.Option(help="Tokens in a step.")] = 2048,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16, float16.")
    ] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line.")
    ] = False,
) -> None:
    """Continue one or more prompts."""
    from minivllm.llm import LLM
    from minivllm.request import SamplingParams

    params = SamplingParams(max_tokens, temperature, top_k, top_p, seed=seed, stop=stop)
    llm = LLM(
        model,
        index=index,
        publish=publish,
        single_flight=single_flight,
        grouping=grouping,
        admission=admission,
        eviction=eviction,
        page_size=page_size,
        num_pages=num_pages,
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        device=device,
        dtype=dtype,
    )
    for output in llm.generate(prompt, params):
        show(asdict(output), as_json)
        if output.outputs[0].finish_reason == "error":
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a foreseeable fault is one line on stderr and exit code 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
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
