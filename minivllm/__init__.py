# Exported from chapters/14_llm.py (451733eb): edit the chapter.
"""minivllm: a small inference engine that reuses work, exported from a book."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.request import CompletionOutput, RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "minivllm.llm",
    "CompletionOutput": "minivllm.request",
    "RequestOutput": "minivllm.request",
    "SamplingParams": "minivllm.request",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, imported yet or not."""
    return sorted({*globals(), *_HOMES})
