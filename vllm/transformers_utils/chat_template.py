"""Renders chat messages into a prompt with the model's Jinja template.

Knows templates and message shapes; refuses to know HTTP and sampling.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# A value with one of these is a template itself, not the path of one.
_JINJA_MARKS = ("{{", "{%", "{#", "\n")


def load_chat_template(value: str | Path | None) -> str | None:
    """The template text for a path or for the text itself; None stays None.

    Raises ValueError when the value is neither a readable file nor Jinja.
    """
    if value is None:
        return None
    text = str(value)
    if not isinstance(value, Path) and any(mark in text for mark in _JINJA_MARKS):
        return text
    path = Path(text).expanduser()
    if not path.is_file():
        raise ValueError(
            f"chat template {text!r} is neither a file nor a Jinja template; pass the "
            "path of a .jinja file or the template itself (--chat-template)"
        )
    return path.read_text(encoding="utf-8")


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of a conversation; encode it without adding special tokens.

    `chat_template` overrides the tokenizer's own. Text parts of a message's content
    are joined by newlines. Raises ValueError, in one line, when the model has no
    template, flags contradict each other, a part is no text, or the template refuses
    the messages.
    """
    if chat_template is None and not tokenizer.chat_template:
        raise ValueError(
            "the model has no chat template: pass --chat-template, or use "
            "/v1/completions with a plain prompt"
        )
    if continue_final_message and add_generation_prompt:
        raise ValueError(
            "add_generation_prompt and continue_final_message exclude each other: set "
            "add_generation_prompt to false to continue the last message"
        )
    conversation = [flatten_content(message) for message in messages]
    if not conversation:
        raise ValueError("messages is empty: expected at least one message")
    try:
        return str(
            tokenizer.apply_chat_template(
                conversation,
                chat_template=chat_template,
                tools=tools,
                documents=documents,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **dict(chat_template_kwargs or {}),
            )
        )
    except Exception as error:  # Jinja, and whatever a template raises
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the chat template refuses these messages ({reason}): check roles, their "
            "order and chat_template_kwargs"
        ) from error


def flatten_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its content as one string, which every template understands.

    A missing or null content becomes "" (an assistant message with tool calls).
    """
    if "role" not in message:
        raise ValueError(f"message {dict(message)!r} has no role: expected one")
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence):
        raise ValueError(
            f"message content of type {type(content).__name__} is not supported: "
            "expected a string or a list of text parts"
        )
    return {**message, "content": "\n".join(_text_of(part) for part in content)}


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        for key in ("text", "refusal"):
            if isinstance(part.get(key), str):
                return str(part[key])
        kind = part.get("type", "unknown")
        raise ValueError(
            f"content part of type {kind!r} is not supported by this model: expected "
            'parts like {"type": "text", "text": "..."}'
        )
    raise ValueError(f"content part {part!r} is not supported: expected a text part")
