# Exported from chapters/14_llm.py (eadf9858): edit the chapter.
"""From a conversation to the text that the model was trained to continue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm.loader import Checkpoint, GGUFFile, LoadError, reading
from minivllm.tokenizer import read_settings, special_tokens

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class ChatTemplate:
    """A checkpoint's Jinja program, and the special tokens that it may write."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)  # by name, as bos_token

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as text, by default up to where the answer begins.

        Raises `ValueError` for bad messages and for what the template refuses.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        conversation = [read_message(i, each) for i, each in enumerate(messages)]
        try:
            texts, _ = render_jinja_template(
                [conversation],
                tools=tools and [*tools],
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise ValueError(f"the model's chat template failed: {error}") from None
        return str(texts[0])


def as_conversations(messages: Any) -> list[Sequence[Message]]:
    """One conversation or several -> a list. Raises `ValueError` for anything else."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(
            "a conversation is a list of messages such as "
            "{'role': 'user', 'content': 'Hello'}"
        )
    if isinstance(messages[0], Sequence) and not isinstance(messages[0], str):
        return [one for each in messages for one in as_conversations(each)]
    return [messages]


def read_message(index: int, message: Any) -> dict[str, Any]:
    """A message whose content is one text; `ValueError` names what is wrong."""
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise ValueError(f"message {index} must have a role and a content, not {kind}")
    if (role := message.get("role")) not in ROLES:
        offered = ", ".join(ROLES)
        raise ValueError(f"message {index}: role must be {offered}, not {role!r}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return dict(message)
    return {**message, "content": _text_of(index, content)}


def _text_of(index: int, content: Any) -> str:
    texts: list[str] = []
    for part in content if isinstance(content, list | tuple) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise ValueError(f"message {index}: content must be text, not {part!r}")
        texts.append(text)
    return "\n".join(texts)


def load_template(checkpoint: Checkpoint) -> ChatTemplate | None:
    """The chat template of a folder or GGUF file; None where there is none."""
    if isinstance(checkpoint, GGUFFile):
        source = checkpoint.get("tokenizer.chat_template")
        if source is not None and not isinstance(source, str):
            raise LoadError(f"{checkpoint.path}: tokenizer.chat_template is no text")
    else:
        with reading(f"{checkpoint}: its chat template"):
            source = _folder_template(checkpoint)
    return ChatTemplate(source, special_tokens(checkpoint)) if source else None


def _folder_template(folder: Path) -> str | None:
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text("utf-8")
    places = ("chat_template.json", "tokenizer_config.json")
    programs = (read_settings(folder, name).get("chat_template") for name in places)
    found = next(filter(None, programs), None)
    if isinstance(found, list):
        return next((t["template"] for t in found if t["name"] == "default"), None)
    return found
