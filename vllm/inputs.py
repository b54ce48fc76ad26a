"""The forms in which a caller may give one prompt."""

from typing import Any, TypeAlias, TypedDict

from typing_extensions import NotRequired


class TextPrompt(TypedDict):
    """A prompt as text. `cache_salt` keeps its cached prefix apart from other salts."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is its text where the caller knows it."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType: TypeAlias = str | list[int] | TextPrompt | TokensPrompt | dict[str, Any]
