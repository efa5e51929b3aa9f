# Exported from chapters/15_measuring.py (4dc17a82): edit the chapter.
"""`minivllm bench engine`: steps beside transformers, and where their time goes."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from minivllm.batch import Chunk
from minivllm.bench import Trial, compare, measure
from minivllm.bench_reuse import (
    backend_of,
    decoder_of,
    load_transformers,
    make_prompt,
    spread_of,
)
from minivllm.engine import Engine
from minivllm.options import assemble, read_options
from minivllm.request import SamplingParams

if TYPE_CHECKING:  # not otherwise: a command that asks for help needs no torch
    from minivllm.llm import LLM
    from minivllm.runner import ModelRunner

PAGE = 16
STEPS = 3  # of a reading: a single one still feels what was done before it


@dataclass(frozen=True)
class Sizes:
    """How much is measured: requests in a step, tokens, readings of each."""

    batches: tuple[int, ...] = (1, 8, 16)
    context: int = 494
    shared: int = 480
    prefill: int = 512
    repeats: int = 7

    @property
    def num_steps(self) -> int:
        """Output tokens that leave room for all readings."""
        return STEPS * (self.repeats + 3) + max(self.batches) + 2


QUICK = Sizes((1, 2), context=40, shared=32, prefill=48, repeats=1)


@dataclass(frozen=True)
class EngineRow:
    """Our step and another, in seconds; `ratio`: how many times as long that takes."""

    dtype: str
    load: str
    num_requests: int
    own_s: dict[str, Any]
    against: str
    other_s: dict[str, Any]
    ratio: dict[str, Any]


def make_engine(llm: "LLM", num_requests: int, num_tokens: int, index: str) -> Engine:
    """A cold engine with room for so many requests of so many tokens."""
    from minivllm.runner import ModelRunner

    options = read_options({"index": index, "page_size": PAGE, "single_flight": "none"})
    num_pages = num_requests * -(-num_tokens // PAGE)
    runner = ModelRunner(decoder_of(llm), num_pages, PAGE, backend=backend_of(llm))
    return assemble(options, num_pages, runner, llm.engine.limits)


def submit(engine: Engine, prompt: Sequence[int], max_tokens: int) -> None:
    """A request that ends by its length."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.submit(list(prompt), params)


class NoModel:
    """Computes nothing: contexts are drawn, for time does not depend on the numbers."""

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Token 0 for each chunk that samples."""
        return [0 if chunk.samples else None for chunk in chunks]


def decoding(
    llm: "LLM", sizes: Sizes, num_requests: int, index: str = "none"
) -> Engine:
    """An engine in the middle: all prompts are done, each step is one token of each.

    They begin alike and end differently; with an index they share what is alike.
    """
    num_tokens = sizes.context + sizes.num_steps
    engine = make_engine(llm, num_requests, num_tokens, index)
    runner, engine.runner = engine.runner, NoModel()
    prompt = list(make_prompt(llm, sizes.context))
    for i in range(num_requests):
        own = [(token + i) % llm.config.vocab_size for token in prompt[sizes.shared :]]
        submit(engine, [*prompt[: sizes.shared], *own], sizes.num_steps)
        engine.step()
    for layer in cast("ModelRunner", runner).memory:
        layer.keys.normal_()
        layer.values.normal_()
    engine.runner = runner
    return engine


class Peer:
    """transformers, step by step, with its own cache."""

    def __init__(self, llm: "LLM", model: str, sizes: Sizes) -> None:
        self.model, self.sizes = load_transformers(model, llm), sizes
        self.prompt = list(make_prompt(llm, max(sizes.context, sizes.prefill)))
        warnings.filterwarnings("ignore", "`past_key_values`", FutureWarning)

    def forward(self, ids: Any, cache: Any) -> Any:
        """One pass; the ids of the largest logits, as a tensor [requests, 1]."""
        import torch

        with torch.inference_mode():
            out = self.model(ids, past_key_values=cache, logits_to_keep=1)
            best = out.logits[:, -1].argmax(-1, keepdim=True)
            best.tolist()  # waits for a GPU
            return best

    def new_cache(self) -> Any:
        """The cache that `generate` uses."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def decoding(self, num_requests: int) -> Callable[[], float]:
        """A step of so many requests, all with the same context."""
        import torch

        cache, device = self.new_cache(), self.model.device
        prompt = torch.tensor([self.prompt[: self.sizes.context]], device=device)
        ids = [self.forward(prompt, cache).expand(num_requests, 1)]
        cache.batch_repeat_interleave(num_requests)

        def step() -> float:
            ids[0] = self.forward(ids[0], cache)
            return num_requests

        return step

    def prefill(self) -> float:
        """One prompt, in one pass."""
        import torch

        prompt = torch.tensor(
            [self.prompt[: self.sizes.prefill]], device=self.model.device
        )
        self.forward(prompt, self.new_cache())
        return self.sizes.prefill

    def mixed(self, jobs: Sequence[tuple[int, int]]) -> float:
        """A static batch, filled up on the left, until the longest answer ends."""
        import torch

        longest, steps = (max(column) for column in zip(*jobs, strict=True))
        ids = torch.zeros((len(jobs), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, (length, _) in enumerate(jobs):
            ids[i, longest - length :] = torch.tensor(self.prompt[:length])
            mask[i, longest - length :] = 1
        self.model.generate(
            ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            do_sample=False,
            max_new_tokens=steps,
            pad_token_id=0,
        )
        return sum(answer for _, answer in jobs)


def mixed_jobs(sizes: Sizes) -> list[tuple[int, int]]:
    """Prompt and answer lengths, evenly spread; the long answers are not the last."""
    number = max(sizes.batches)
    answers = sorted(range(number), key=lambda i: i * 7 % number)
    return [
        (max(2, sizes.context * (i + 1) // number), 1 + 64 * (j + 1) // number)
        for i, j in enumerate(answers)
    ]


def mixing(llm: "LLM", sizes: Sizes, prompt: Sequence[int]) -> Callable[[], float]:
    """The same jobs in our engine, without a cache between them."""
    jobs = mixed_jobs(sizes)
    num_tokens = max(length + answer for length, answer in jobs)
    engine = make_engine(llm, len(jobs), num_tokens, "none")

    def run() -> float:
        for length, answer in jobs:
            submit(engine, prompt[:length], answer)
        while engine.has_unfinished():
            engine.step()
        return sum(answer for _, answer in jobs)

    return run


def prefilling(llm: "LLM", prompt: Sequence[int]) -> Callable[[], float]:
    """One prompt, until its first token; nothing is known from the last time."""
    engine = make_engine(llm, 1, len(prompt) + 1, "none")

    def run() -> float:
        submit(engine, prompt, 1)
        engine.step()
        return len(prompt)

    return run


class EngineBench:
    """All measurements on one loaded model; rows come as they are measured."""

    def __init__(self, llm: "LLM", model: str, sizes: Sizes) -> None:
        self.llm, self.sizes = llm, sizes
        self.peer = Peer(llm, model, sizes)
        self.dtype = str(decoder_of(llm).embed_tokens.weight.dtype)[6:]

    def rows(self) -> Iterator[EngineRow]:
        """Steps of each size, a prompt, a shared prefix, a job of mixed lengths."""
        llm, sizes, peer = self.llm, self.sizes, self.peer
        for number in sizes.batches:
            other = peer.decoding(number)
            yield self._row("decode", number, decoding(llm, sizes, number).step, other)
        prompt = peer.prompt[: sizes.prefill]
        yield self._row("prefill", 1, prefilling(llm, prompt), peer.prefill)
        most = max(sizes.batches)
        shared, apart = (decoding(llm, sizes, most, i).step for i in ("radix", "none"))
        yield self._row("shared prefix", most, shared, apart, "unshared")
        own = mixing(llm, sizes, peer.prompt)
        other = partial(peer.mixed, mixed_jobs(sizes))
        repeats = 1 + sizes.repeats // 4
        yield self._row("mixed lengths", most, own, other, repeats=repeats, warmups=0)

    def _row(
        self,
        load: str,
        number: int,
        own: Callable[[], Any],
        other: Callable[[], Any],
        against: str = "transformers",
        repeats: int = 0,
        warmups: int = 2,
    ) -> EngineRow:
        steps = 1 if load in ("prefill", "mixed lengths") else STEPS
        trials = {"own": _trial(own, steps), "other": _trial(other, steps)}
        found = measure(trials, repeats or self.sizes.repeats, warmups)
        ratio = compare(found["other"], found["own"])
        mine, theirs = (spread_of(found[name].values) for name in ("own", "other"))
        shown = spread_of(ratio.values)
        return EngineRow(self.dtype, load, number, mine, against, theirs, shown)

    def breakdowns(self) -> list[dict[str, Any]]:
        """Where the steps of each size go, in seconds, medians of several steps."""
        found = []
        for number in self.sizes.batches:
            engine = decoding(self.llm, self.sizes, number)
            parts = parts_of_steps(engine, self.sizes.repeats + 2)
            facts = {"dtype": self.dtype, "kernels": self.llm.options.kernels}
            found.append({**facts, "num_requests": number, "parts": parts})
        return found


def _trial(work: Callable[[], Any], num_ops: int) -> Trial:
    def run() -> float:
        for _ in range(num_ops):
            work()
        return 0.0

    return Trial(run, num_ops=num_ops)


class Stopwatch:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def wrap(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work, timed."""

        def timed(*given: Any) -> Any:
            start_s = time.perf_counter()
            result = work(*given)
            self.seconds[name] += time.perf_counter() - start_s  # type: ignore[assignment]
            return result

        return timed


@contextmanager
def watched(runner: "ModelRunner", watch: Stopwatch) -> Iterator[None]:
    """While it lasts, the parts of a runner's steps tell what they take."""
    places: list[tuple[Any, str, str]] = _places(runner)
    places += [(runner, "sampler", "sampling"), (runner, "run", "pass")]
    kept = [(owner, name, vars(owner).get(name)) for owner, name, _ in places]
    for owner, name, part in places:
        setattr(owner, name, watch.wrap(part, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, old in kept:
            delattr(owner, name) if old is None else setattr(owner, name, old)


def _places(runner: "ModelRunner") -> list[tuple[Any, str, str]]:
    """Where the work of layers is done: owner, attribute, part of a step."""
    from minivllm import model

    head = runner.model.head
    places: list[tuple[Any, str, str]] = [(head, "multiply", "head")]
    if runner.backend.run is not model.run_layers:
        return places  # kernels have a clock of their own
    products = (part for part in runner.model.products() if part is not head)
    modules = list(runner.model.layers.modules())
    norms = [module for module in modules if isinstance(module, model.RMSNorm)]
    places += [(part, "multiply", "products") for part in products]
    places += [(layer, "forward", "attention") for layer in runner.memory]
    places += [(norm, "forward", "norms") for norm in norms]
    return [*places, (model, "rotate", "rotation"), (model, "gated", "gates")]


def parts_of_steps(engine: Engine, num_steps: int) -> dict[str, float]:
    """Seconds of each part of a step: medians; the first step is left out."""
    runner, steps = cast("ModelRunner", engine.runner), []
    watch = Stopwatch()
    taken = getattr(runner.backend.run, "take_seconds", dict)
    with watched(runner, watch):
        for _ in range(num_steps):
            watch.seconds.clear()
            taken()
            watch.wrap("step", engine.step)()
            steps.append({**watch.seconds, **taken()})
    for step in steps:
        step["scheduling and cache"] = step.pop("step") - step["pass"]
        rest = step.pop("pass") - sum(
            step[name] for name in step.keys() - {"pass", "scheduling and cache"}
        )
        step["Python"] = rest
    return {name: median(step[name] for step in steps[1:]) for name in steps[0]}
