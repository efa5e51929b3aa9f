# Exported from chapters/14_llm.py (e3422cc7): edit the chapter.
"""Every choice that the engine offers, by name, documented once."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from minivllm.engine import (
    Engine,
    Limits,
    PublishAtFinish,
    PublishEachStep,
    Publisher,
    Runner,
)
from minivllm.events import Observer, ignore
from minivllm.explain import Decode, explain, no_text
from minivllm.grouping import TIERS, LongestPrefix, SharedPrefix, check_tiers
from minivllm.prefix_cache import INDEXES, PrefixCache
from minivllm.publication import Announcements, PublishPrompt
from minivllm.radix import EVICTION
from minivllm.request import SamplingParams
from minivllm.scheduler import ADMISSIONS, ArrivalOrder, Grouping, Scheduler
from minivllm.single_flight import (
    RELEASES,
    PromptAtLeast,
    SingleFlight,
    WaitForPrefix,
)

PUBLISHERS: dict[str, type[Publisher]] = {
    "schedule": PublishEachStep,  # and announcements
    "step": PublishEachStep,
    "prompt": PublishPrompt,
    "finish": PublishAtFinish,
}
CHOICES: dict[str, tuple[str, ...]] = {
    "index": tuple(INDEXES),
    "publish": tuple(PUBLISHERS),
    "single_flight": ("none", *RELEASES),
    "grouping": ("arrival", "longest-prefix", "shared-prefix"),
    "admission": ADMISSIONS,
    "eviction": tuple(EVICTION),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kernels": ("auto", "torch", "numba"),
}


DEVICES = ("auto", "cpu", "cuda", "mps")
COUNTS = (
    "page_size",
    "num_pages",
    "max_running",
    "max_batch_tokens",
    "wait_for_prefix",
    "explain_tokens",
)


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise `ValueError` for a value that is not among the choices."""
    if value not in (offered := list(choices)):
        raise ValueError(f"{name} must be one of {', '.join(offered)}, not {value!r}")


def option(default: Any, words: str) -> Any:
    """A field with a default and a help text."""
    return field(default=default, metadata={"help": words})


@dataclass(frozen=True)
class EngineOptions:
    """Every choice of the engine. `ValueError` for a value that does not exist."""

    index: str = option("radix", "How a prefix is found.")
    publish: str = option("step", "When a page becomes visible to others.")
    single_flight: str = option(
        "prefill", "How long identical prompts wait for the first of them."
    )
    wait_for_prefix: int | None = option(
        None, "Pages being computed that are worth a wait; none: nobody waits."
    )
    grouping: str = option(
        "arrival", "Whom a step admits first; shared-prefix wants publish=schedule."
    )
    tiers: tuple[int, int] = option(
        TIERS, "The two limits of shared-prefix's tiers, in pages (blocks)."
    )
    admission: str = option("optimistic", "What must fit before a request runs.")
    eviction: str = option("lru", "Which unused page goes first.")
    page_size: int = option(16, "Tokens in a page.")
    num_pages: int | None = option(None, "Pages of K/V memory; none: what fits.")
    max_running: int = option(64, "Requests in a step, at most.")
    max_batch_tokens: int = option(2048, "New tokens in a step, at most.")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps.")
    dtype: str = option("auto", "Number format of weights and K/V.")
    kernels: str = option("auto", "Who computes a layer; numba is for CPUs.")
    seed: int = option(0, "Seed for requests that give none.")
    explain: bool = option(True, "Say why so much of a prompt was reused, no more.")
    explain_tokens: int | None = option(
        None, "Tokens to remember for that; none: twice the K/V memory."
    )

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a whole number >= 1, not {value!r}")
        shows = self.publish != "finish" or self.single_flight == "prefill"
        if self.wait_for_prefix and not shows:
            raise ValueError(
                "wait_for_prefix waits for pages, and publish='finish' shows them too "
                "late: choose another, or single_flight='prefill'"
            )
        check_tiers(self.tiers)
        if type(self.explain) is not bool:
            raise ValueError(f"explain must be True or False, not {self.explain!r}")
        if type(self.seed) is not int:
            raise ValueError(f"seed must be a whole number, not {self.seed!r}")
        if str(self.device).split(":")[0] not in DEVICES:
            offered = ", ".join(DEVICES)
            raise ValueError(f"device must be one of {offered}, not {self.device!r}")


VLLM_NAMES = {  # what vLLM's users type -> what it is called here
    "block_size": "page_size",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_batch_tokens",
}


def read_options(given: Mapping[str, Any]) -> EngineOptions:
    """Options by our names or vLLM's; `ValueError` for unknown or double ones."""
    options = dict(given)
    if (caching := options.pop("enable_prefix_caching", True)) not in (True, False):
        raise ValueError(
            f"enable_prefix_caching must be True or False, not {caching!r}"
        )
    if not caching and options.setdefault("index", "none") != "none":
        raise ValueError("enable_prefix_caching=False and an index: give one")
    for theirs, ours in VLLM_NAMES.items():
        if theirs in options:
            if ours in options:
                raise ValueError(f"{theirs} and {ours} are the same option: give one")
            options[ours] = options.pop(theirs)
    known = {each.name for each in fields(EngineOptions)}
    if unknown := sorted(set(options) - known):
        offered = ", ".join(sorted(known))
        raise ValueError(f"unknown option {unknown[0]!r} (known: {offered})")
    return EngineOptions(**options)


# Fields of `SamplingParams` that a command line can give, and their help. `seed` is the
# engine's, and `logit_bias`, a table of token ids, is given from Python.
SAMPLING = {
    "max_tokens": "Output tokens at most.",
    "temperature": "0 is greedy; higher is more varied.",
    "top_k": "Draw from the k likeliest tokens; 0: all.",
    "top_p": "Draw from the likeliest tokens with this much probability.",
    "min_p": "Least probability of a token, as a share of the likeliest.",
    "repetition_penalty": "Above 1: tokens that were there before become unlikelier.",
    "presence_penalty": "Taken from the logit of each token that was generated.",
    "frequency_penalty": "The same, for each time it was generated.",
    "n": "Continuations of each prompt.",
    "stop": "End the text before this; repeat for more (a variable has one a line).",
    "stop_token_ids": "End after this token; repeat for more.",
    "ignore_eos": "Go on after the model's own end tokens.",
    "logprobs": "Report this many likely tokens beside each chosen one.",
    "prompt_logprobs": "The same for the tokens of the prompt.",
}
LISTS = {"stop": list[str] | None, "stop_token_ids": list[int] | None}


def documented() -> Iterator[tuple[str, Any, Any, str]]:
    """Name, type, default and help of each option: sampling first, then the engine."""
    hints = get_type_hints(SamplingParams) | LISTS
    for each in fields(SamplingParams):
        if words := SAMPLING.get(each.name):
            yield each.name, hints[each.name], each.default, words
    hints = get_type_hints(EngineOptions)
    for each in fields(EngineOptions):
        words = each.metadata["help"]
        if each.name in CHOICES:
            words += f" One of {', '.join(CHOICES[each.name])}."
        yield each.name, hints[each.name], each.default, words


def assemble(
    options: EngineOptions,
    num_pages: int,
    runner: Runner,
    limits: Limits,
    observer: Observer = ignore,
    decode: Decode = no_text,
    **seams: Any,
) -> Engine:
    """The engine that the options describe; `seams` are passed on to `Engine`.

    `decode` makes text of token ids, for explanations.
    """
    cache = PrefixCache(
        num_pages, options.page_size, options.index, options.eviction, observer
    )
    announces = options.publish == "schedule" and options.index != "none"
    scheduler = Scheduler(
        cache,
        options.max_running,
        options.max_batch_tokens,
        options.admission,
        _grouping(options, cache, observer),
        announcer=Announcements(options.page_size) if announces else None,
        observer=observer,
    )
    if options.wait_for_prefix and options.index != "none":
        scheduler.grouping = WaitForPrefix(scheduler, options.wait_for_prefix)
    publisher = PUBLISHERS[options.publish]()
    release = options.single_flight if options.index != "none" else "none"
    engine = Engine(
        runner,
        scheduler,
        limits,
        publisher=PromptAtLeast(publisher) if release == "prefill" else publisher,
        coordinator=None if release == "none" else SingleFlight(release),
        observer=observer,
        **seams,
    )
    if options.explain:
        explain(engine, options.publish, decode, options.explain_tokens)
    return engine


def _grouping(
    options: EngineOptions, cache: PrefixCache, observer: Observer
) -> Grouping:
    if options.grouping == "longest-prefix":
        return LongestPrefix(cache.find)
    if options.grouping == "shared-prefix":
        size, tiers = options.page_size, options.tiers
        return SharedPrefix(cache.find, size, tiers, observer=observer)
    return ArrivalOrder()
