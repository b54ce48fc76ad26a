"""Renders chat messages into a prompt with the model's Jinja template.

Knows templates and message shapes; refuses to know HTTP and sampling.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser

from vllm.exceptions import VLLMValidationError
from vllm.utils.text_utils import short_repr

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# A value with one of these is a template itself, not the path of one.
_JINJA_MARKS = ("{{", "{%", "{#", "\n")


def load_chat_template(value: str | Path | None) -> str | None:
    """The template text for a path or for the text itself; None stays None.

    Raises ValueError when the value is neither a readable file nor Jinja, and when the
    template cannot be parsed.
    """
    if value is None:
        return None
    text = str(value)
    if not isinstance(value, Path) and any(mark in text for mark in _JINJA_MARKS):
        return _parsed(text, short_repr(text))
    path = Path(text).expanduser()
    if not path.is_file():
        raise ValueError(
            f"chat template {text!r} is neither a file nor a Jinja template; pass the "
            "path of a .jinja file or the template itself (--chat-template)"
        )
    try:
        found = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"chat template {text!r} cannot be read ({error}): expected a text file in "
            "UTF-8 (--chat-template)"
        ) from error
    return _parsed(found, repr(text))


class _Generation(Extension):
    """The tag by which templates mark what an assistant said; it changes no text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _parsed(template: str, shown: str) -> str:
    """The template, which is valid Jinja. `shown` names it in the ValueError."""
    # The tags and filters that transformers renders templates with.
    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    try:
        environment.compile(template)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"chat template {shown} is not valid Jinja (line {error.lineno}: "
            f"{' '.join(str(error.message).split())}): correct it (--chat-template)"
        ) from error
    return template


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
    are joined by newlines, and the arguments of tool calls are parsed. Raises
    ValueError, in one line, when the model has no template, flags contradict each
    other, a part is no text, tool calls are not shown, or the template refuses the
    messages; as VLLMValidationError where one field is at fault.
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
    variables = dict(chat_template_kwargs or {})
    _check_variables(tokenizer, variables)
    conversation = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        conversation.append(_with_parsed_calls(flatten_content(message, where), where))
    if not conversation:
        raise ValueError("messages is empty: expected at least one message")

    def render(conversation: list[dict[str, Any]]) -> str:
        return str(
            tokenizer.apply_chat_template(
                conversation,
                chat_template=chat_template,
                tools=tools,
                documents=documents,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        )

    try:
        text = render(conversation)
    except Exception as error:  # Jinja, and whatever a template raises
        raise ValueError(_why(error)) from error
    for i, message in enumerate(conversation):
        if not message.get("tool_calls"):
            continue
        bare = [{**m} for m in conversation]
        del bare[i]["tool_calls"]
        try:
            shown = render(bare) != text
        except Exception:
            shown = True
        if not shown:
            raise VLLMValidationError(
                f"messages[{i}].tool_calls: the chat template does not show tool calls "
                "to the model; leave them out, or pass a --chat-template that does",
                parameter=f"messages[{i}].tool_calls",
            )
    return text


def _why(error: Exception) -> str:
    reason = " ".join(str(error).split())
    if isinstance(error, TemplateSyntaxError):
        return (
            f"the chat template is not valid Jinja (line {error.lineno}: {reason}): "
            "correct it"
        )
    # What `raise_exception` of a template raises is of this very class.
    if type(error) is TemplateError:
        what = f"refuses these messages ({reason})"
    else:
        what = f"fails on these messages ({type(error).__name__}: {reason})"
    return (
        f"the chat template {what}: check roles, their order and chat_template_kwargs"
    )


def _check_variables(
    tokenizer: "PreTrainedTokenizerBase", variables: Mapping[str, Any]
) -> None:
    """Variables of a template may not be what the rendering itself is told."""
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    taken = {"messages", "self", *own}
    for name in variables:
        if name in taken:
            raise VLLMValidationError(
                f"chat_template_kwargs cannot set {name!r}, which is given by the "
                "request itself: expected further variables of the chat template",
                parameter="chat_template_kwargs",
            )


def flatten_content(
    message: Mapping[str, Any], where: str = "message"
) -> dict[str, Any]:
    """The message with its content as one string, which every template understands.

    A missing or null content becomes "" (an assistant message with tool calls). `where`
    names the message in errors.
    """
    if "role" not in message:
        raise VLLMValidationError(
            f"{where} {short_repr(dict(message))} has no role: expected one",
            parameter=f"{where}.role",
        )
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, str):
        return dict(message)
    where = f"{where}.content"
    if not isinstance(content, Sequence):
        raise VLLMValidationError(
            f"{where} of type {type(content).__name__} is not supported: expected a "
            "string or a list of text parts",
            parameter=where,
        )
    texts = [_text_of(part, f"{where}[{i}]") for i, part in enumerate(content)]
    return {**message, "content": "\n".join(texts)}


_TEXT_OF_PART = {"text": "text", "input_text": "text", "refusal": "refusal"}


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise VLLMValidationError(
            f"{where} of type {type(part).__name__} is not supported: expected a part "
            'like {"type": "text", "text": "..."}',
            parameter=where,
        )
    kind = part.get("type")
    if kind is None and len(part) == 1:
        kind = next(iter(part))
    field = _TEXT_OF_PART.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise VLLMValidationError(
            f"{where}: a part of type {short_repr(kind)} is not supported by this text "
            "model; expected type 'text'",
            parameter=where,
        )
    text = part.get(field)
    if not isinstance(text, str):
        got = f"got {short_repr(text)}" if field in part else "it is missing"
        raise VLLMValidationError(
            f"{where}.{field} must be a string; {got}", parameter=f"{where}.{field}"
        )
    return text


def _with_parsed_calls(message: dict[str, Any], where: str) -> dict[str, Any]:
    """The message with the arguments of its tool calls as objects, as templates expect
    them; OpenAI's clients send them as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    where = f"{where}.tool_calls"
    if not isinstance(calls, list):
        raise VLLMValidationError(
            f"{where} must be a list, got {short_repr(calls)}", parameter=where
        )
    parsed = [_parsed_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]
    return {**message, "tool_calls": parsed}


def _parsed_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise VLLMValidationError(
            f"{where} must hold a function with a name, got {short_repr(call)}",
            parameter=where,
        )
    where = f"{where}.function.arguments"
    given = arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise VLLMValidationError(
            f"{where} must be a JSON object, got {short_repr(given)}", parameter=where
        )
    return {**call, "function": {**function, "arguments": arguments}}
