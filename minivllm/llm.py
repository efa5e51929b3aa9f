# Exported from chapters/14_llm.py (6dee7186): edit the chapter.
"""The composition root: from names to a running engine, behind vLLM's three lines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from tokenizers import Tokenizer

from minivllm.engine import Limits, NoText, Writer
from minivllm.events import Observer, ignore
from minivllm.loader import DEFAULT_MODEL, load_model, open_checkpoint
from minivllm.model import Decoder, ModelConfig
from minivllm.options import assemble, read_options
from minivllm.request import RequestOutput, SamplingParams, TokenIds, encode_ids
from minivllm.runner import ModelRunner
from minivllm.sampling import Sampler
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
    (see `EventLog`). Raises `ValueError` naming the fault.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, observer: Observer = ignore, **options: Any
    ) -> None:
        self.options = chosen = read_options(options)
        checkpoint = open_checkpoint(model)
        device = choose_device(chosen.device)
        dtype = choose_dtype(chosen.dtype, device)
        decoder = load_model(checkpoint, device, dtype)
        self.config = config = decoder.config
        self.tokenizer: Tokenizer | None = load_tokenizer(checkpoint)
        ends = config.eos_token_ids | tokenizer_ends(checkpoint, self.tokenizer)
        num_pages = chosen.num_pages or choose_num_pages(
            config, chosen.page_size, device, dtype
        )
        runner = self._runner(decoder, num_pages)
        limits = Limits(config.vocab_size, config.max_context, ends)
        self.engine = assemble(
            chosen, num_pages, runner, limits, observer, writers=self._writer
        )

    def _runner(self, decoder: Decoder, num_pages: int) -> ModelRunner:
        size, sampler = self.options.page_size, Sampler(self.options.seed)
        try:
            return ModelRunner(decoder, num_pages, size, sampler)
        except (RuntimeError, MemoryError, OverflowError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{num_pages} pages do not fit in memory, lower num_pages: {reason}"
            ) from None

    def _writer(self, prompt_ids: TokenIds, params: SamplingParams) -> Writer:
        if self.tokenizer is None:
            return NoText()
        return TextWriter(self.tokenizer, prompt_ids, params)

    def stats(self) -> dict[str, int]:
        """Pages by state, queue lengths and counters."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all published pages. False, and no change, while a request runs."""
        return self.engine.reset_prefix_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs come in the order of the prompts.

        One `SamplingParams` for all, or one for each. Raises `ValueError` before
        anything is submitted if any prompt cannot run.
        """
        if self.engine.has_unfinished():
            raise ValueError(
                "the engine has unfinished requests (submitted to it, or by another "
                "thread's generate): finish or abort them first"
            )
        batch = as_prompts(prompts)
        params = self._params_for(batch, sampling_params)
        encoded = [self._encode(prompt) for prompt in batch]
        for ids, wanted in zip(encoded, params, strict=True):
            self.engine.check(ids, wanted)
        names: list[str] = []
        finished = self._run(zip(encoded, params, strict=True), names)
        return [
            replace(finished[name], prompt=prompt if isinstance(prompt, str) else None)
            for name, prompt in zip(names, batch, strict=True)
        ]

    def _params_for(
        self,
        batch: Sequence[Prompt],
        given: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or SamplingParams()] * len(batch)
        if not isinstance(given, Sequence):
            raise ValueError(f"sampling_params must be SamplingParams, not {given!r}")
        if len(given) != len(batch):
            raise ValueError(f"{len(given)} SamplingParams for {len(batch)} prompts")
        return list(given)

    def _encode(self, prompt: Prompt) -> TokenIds:
        if not isinstance(prompt, str):
            return encode_ids(prompt)
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give token ids, not text")
        try:
            ids: list[int] = self.tokenizer.encode(prompt).ids
        except TypeError:  # text that is not Unicode, such as a broken argument
            raise ValueError(f"the prompt is not valid text: {prompt!r}") from None
        return ids

    def _run(
        self, requests: Iterable[tuple[TokenIds, SamplingParams]], names: list[str]
    ) -> dict[str, RequestOutput]:
        """Submit, and step until all are done; if interrupted, nothing goes on."""
        finished: dict[str, RequestOutput] = {}
        try:
            for token_ids, params in requests:
                names.append(self.engine.submit(token_ids, params))
            while self.engine.has_unfinished():
                finished |= {o.request_id: o for o in self.engine.step() if o.finished}
        finally:
            for name in self.engine.unfinished():
                self.engine.abort(name)
        return finished


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
