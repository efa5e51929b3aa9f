# Exported from chapters/14_llm.py (c8b74006): edit the chapter.
"""The composition root: from names to a running engine, behind vLLM's three lines."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from html import escape
from importlib import import_module
from numbers import Integral
from pathlib import Path
from typing import Any, Self, cast

import torch
from tokenizers import Tokenizer

from minivllm.chat import Message, as_conversations, load_template
from minivllm.engine import Engine, Limits
from minivllm.events import Observer, both, ignore
from minivllm.loader import DEFAULT_MODEL, load_model, open_checkpoint
from minivllm.model import Decoder, ModelConfig
from minivllm.options import EngineOptions, assemble, read_options
from minivllm.progress import progress_bar
from minivllm.request import RequestOutput, SamplingParams, TokenIds, encode_ids
from minivllm.runner import Backend, ModelRunner
from minivllm.sampling import Sampler
from minivllm.timeline import Timeline, check_place
from minivllm.tokenizer import TextWriter, load_tokenizer, tokenizer_ends


def choose_device(name: str) -> torch.device:
    """The device of that name, or the best there is for "auto". Raises `ValueError`."""
    if name == "auto":
        mps = torch.backends.mps.is_available()
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used here: {reason}") from None
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """float32 on a CPU, else bfloat16, unless a name asks for something."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """The kernels of that name, or for "auto" the fastest that can be used here."""
    if name == "torch":
        return Backend()
    module = f"minivllm.kernels_{'numba' if name == 'auto' else name}"
    try:
        return cast(Backend, import_module(module).backend(device, dtype))
    except (ImportError, ValueError) as error:
        if name == "auto":
            return Backend()
        raise ValueError(f"kernels={name!r} cannot be used here: {error}") from None


def choose_num_pages(
    config: ModelConfig, page_size: int, device: torch.device, dtype: torch.dtype
) -> int:
    """Pages in 4/5 of a GPU's free memory, or 1/4 of main memory up to 1 GiB."""
    if device.type == "cuda":
        budget = int(0.8 * torch.cuda.mem_get_info(device)[0])
    else:
        budget = min(2**30, _main_memory_bytes() // 4)
    return max(1, budget // (page_size * config.kv_bytes_per_token(dtype.itemsize)))


def _main_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 4 * 2**30


Prompt = str | TokenIds


class LLM:
    """A model and an engine around it, for use from Python.

    `model` is `smollm2`, a folder, a .gguf file or a hub id; options are those of
    `EngineOptions`, and vLLM's names for them. The observer is told of every transition
    (see `EventLog`). `trace` names a file for a `Timeline`, written when the LLM is
    closed, or when Python ends. `progress` False draws no bars. `ValueError` names a
    fault.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        observer: Observer = ignore,
        trace: str | Path | None = None,
        progress: bool = True,
        **options: Any,
    ) -> None:
        self.options = chosen = read_options(options)
        if trace is not None:
            check_place(Path(trace), "trace")
        self.model, self.progress = model, progress
        checkpoint = open_checkpoint(model)
        device = choose_device(chosen.device)
        dtype = choose_dtype(chosen.dtype, device)
        backend = choose_backend(chosen.kernels, device, dtype)
        decoder = load_model(checkpoint, device, dtype, progress, backend.empty)
        self.config = config = decoder.config
        self.tokenizer: Tokenizer | None = load_tokenizer(checkpoint)
        self.template = load_template(checkpoint)
        ends = config.eos_token_ids | tokenizer_ends(checkpoint, self.tokenizer)
        num_pages = chosen.num_pages or choose_num_pages(
            config, chosen.page_size, device, dtype
        )
        runner = self._runner(decoder, num_pages, backend)
        limits = Limits(config.vocab_size, config.max_context, ends)
        observer = both(observer, self._start_trace(trace))
        parts = (chosen, num_pages, runner, limits, observer, self._decode)
        writers = self.tokenizer and partial(TextWriter, self.tokenizer)
        self._engine: Engine | None = assemble(*parts, writers=writers)

    def _start_trace(self, trace: str | Path | None) -> Observer:
        self._end_trace: Callable[[], object] = lambda: None
        if trace is None:
            return ignore
        timeline = Timeline()
        self._end_trace = weakref.finalize(self, timeline.write, Path(trace))
        return timeline

    def _runner(
        self, decoder: Decoder, num_pages: int, backend: Backend
    ) -> ModelRunner:
        size, sampler = self.options.page_size, Sampler(self.options.seed)
        try:
            return ModelRunner(decoder, num_pages, size, sampler, backend)
        except (
            RuntimeError,
            MemoryError,
            OverflowError,
            ValueError,
            TypeError,
        ) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{num_pages} pages of {size} tokens do not fit in memory, "
                f"lower num_pages or page_size: {reason}"
            ) from None

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode([*token_ids], skip_special_tokens=False))

    @property
    def engine(self) -> Engine:
        """The engine at work. Raises `ValueError` once the LLM is closed."""
        if self._engine is None:
            raise ValueError("this LLM is closed and its memory freed: make a new one")
        return self._engine

    def close(self) -> None:
        """End whatever runs, free the weights and the K/V memory, write the trace."""
        self._end_all()
        self._engine = None
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where there is no CUDA
        self._end_trace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> dict[str, int]:
        """Pages by state, queue lengths and counters."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all published pages. False, and no change, while a request runs."""
        return self.engine.reset_prefix_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
    ) -> Outputs:
        """Continue every prompt; outputs come in the order of the prompts.

        One `SamplingParams` for all, or one for each. Raises `ValueError` before
        anything is submitted if any prompt cannot run. `use_tqdm` (vLLM's name): a
        progress bar, on a terminal only, for what takes more than a second.
        """
        batch = as_prompts(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        ids = [self._encode(prompt) for prompt in batch]
        return self._answer(texts, ids, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> Outputs:
        """Answer a conversation, or each of several; else as `generate`."""
        chats = as_conversations(messages)
        texts = [self.chat_text(chat, add_generation_prompt) for chat in chats]
        ids = [self._encode(text, special=False) for text in texts]
        return self._answer(texts, ids, sampling_params, use_tqdm)

    def chat_text(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> str:
        """What the model's chat template makes of a conversation."""
        if self.template is None:
            raise ValueError(f"{self.model} has no chat template: use generate")
        return self.template.render(messages, add_generation_prompt)

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> Stream:
        """The output so far, after each step that adds to it; the last is finished.

        The prompt may be a conversation. Closing the iterator aborts the request.
        """
        text = prompt if isinstance(prompt, str) else None
        if text is None and isinstance(next(iter(_plain(prompt)), None), Mapping):
            text = self.chat_text(cast(Sequence[Message], prompt))
            ids = self._encode(text, special=False)
        else:
            ids = self._encode(cast(Prompt, prompt))
        [checked] = _params_for(1, params)
        wanted = [(ids, checked)]
        self._check(wanted)  # now, and not when the first output is asked for
        return (replace(output, prompt=text) for output in self._steps(wanted, []))

    def _answer(
        self,
        texts: Sequence[str | None],
        ids: Sequence[TokenIds],
        given: Params,
        use_tqdm: bool,
    ) -> Outputs:
        requests = list(zip(ids, _params_for(len(ids), given), strict=True))
        self._check(requests)
        names: list[str] = []
        finished: dict[str, RequestOutput] = {}
        bar = progress_bar("requests", len(ids), use_tqdm and self.progress)
        with bar as advance, closing(self._steps(requests, names)) as steps:
            for output in steps:
                if output.finished:
                    finished[output.request_id] = output
                    advance(1)
        pairs = zip(texts, names, strict=True)
        return Outputs(replace(finished[name], prompt=text) for text, name in pairs)

    def _encode(self, prompt: Prompt, special: bool = True) -> TokenIds:
        if not isinstance(prompt, str):
            return encode_ids(prompt)
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give token ids, not text")
        try:
            ids: list[int] = self.tokenizer.encode(
                prompt, add_special_tokens=special
            ).ids
        except TypeError:  # text that is not Unicode, such as a broken argument
            raise ValueError(f"the prompt is not valid text: {prompt!r}") from None
        return ids

    def _check(self, requests: Requests) -> None:
        if self.engine.has_unfinished():
            raise ValueError(
                "the engine has unfinished requests (submitted to it, a stream, or "
                "another thread's generate): finish, close or abort them first"
            )
        for token_ids, params in requests:
            self.engine.check(token_ids, params)

    def _steps(self, requests: Requests, names: list[str]) -> Stream:
        """Submit, and step until all are done; if it is closed, nothing goes on."""
        try:
            for token_ids, params in requests:
                names.append(self.engine.submit(token_ids, params))
            while self.engine.has_unfinished():
                yield from self.engine.step()
        finally:
            self._end_all()

    def _end_all(self) -> None:
        if (engine := self._engine) is not None:
            for name in engine.unfinished():
                engine.abort(name)

    def __repr__(self) -> str:
        return _lines(self._rows())

    def _repr_html_(self) -> str:
        return _table(self._rows(), "row")

    def _rows(self) -> list[tuple[object, ...]]:
        if self._engine is None:
            return [(self.model, "closed")]
        plain, told = EngineOptions(), self.stats()
        names = (each.name for each in fields(EngineOptions))
        chosen = [(n, getattr(self.options, n)) for n in names]
        unusual = [pair for pair in chosen if pair[1] != getattr(plain, pair[0])]
        counts = [(n.replace("_", " "), f"{told[n]:,}") for n in SUMMARY]
        return [("model", self.model), *unusual, *counts]


Params = SamplingParams | Sequence[SamplingParams] | None
Requests = Sequence[tuple[TokenIds, SamplingParams]]
Stream = Generator[RequestOutput, None, None]


def _params_for(num_prompts: int, given: Params) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * num_prompts
    alone = isinstance(given, str) or not isinstance(given, Sequence)
    several: list[Any] = [given] if alone else list(given)
    for each in several:
        if not isinstance(each, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, not {each!r}")
    if len(several) != num_prompts:
        raise ValueError(f"{len(several)} SamplingParams for {num_prompts} prompts")
    return several


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several -> a list. Raises `ValueError` for anything else."""
    prompts = _plain(prompts)
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], Integral)):
        return [prompts]
    batch = [_plain(prompt) for prompt in prompts]
    for prompt in batch:
        if not isinstance(prompt, str) and not all(
            isinstance(i, Integral) for i in prompt
        ):
            raise ValueError("a prompt is text or a list of integers, the token ids")
    return batch


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists; `ValueError` for what is neither text nor a list."""
    if hasattr(value, "tolist") and not isinstance(value, Integral):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):
        kind = type(value).__name__
        raise ValueError(f"a prompt is text or a list of token ids, not {kind}")
    return value


class Outputs(list[RequestOutput]):
    """The outputs of one call; a notebook shows them as a table."""

    def _rows(self) -> list[tuple[object, ...]]:
        head = ("prompt", "answer", "cached", "computed", "why", "new", "ended by")
        return [head, *(row for output in self for row in _rows_of(output))]

    def _repr_html_(self) -> str:
        return _table(self._rows(), "col")

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(_lines(self._rows()))  # IPython, where there is no HTML


def _rows_of(output: RequestOutput) -> Iterator[tuple[object, ...]]:
    size, cached = len(output.prompt_token_ids), output.num_cached_tokens
    prompt = output.prompt or f"{size} token ids"
    shown = prompt if len(prompt) <= 80 else f"{prompt[:38]} … {prompt[-38:]}"
    for each in output.outputs:
        why, new = output.reuse and output.reuse.why, len(each.token_ids)
        yield shown, each.text, cached, size - cached, why, new, each.finish_reason


def _table(rows: Sequence[Sequence[object]], headed: str) -> str:
    """HTML whose first "col" or "row" names what the others show."""
    lines = ["<table>"]
    for i, row in enumerate(rows):
        heads = len(row) if headed == "col" and i == 0 else int(headed == "row")
        cells = [escape(str(x)) for x in row]
        names = (f'<th scope="{headed}">{x}</th>' for x in cells[:heads])
        lines += ["<tr>", *names, *(f"<td>{x}</td>" for x in cells[heads:]), "</tr>"]
    return "".join([*lines, "</table>"])


def _lines(rows: Iterable[Iterable[object]]) -> str:
    shown = ([" ".join(str(x).split())[:80] for x in row] for row in rows)
    return "\n".join(map(" | ".join, shown))


SUMMARY = (
    "lookups",
    "queried_tokens",
    "cached_tokens",
    "prefill_tokens",
    "pages_total",
)
