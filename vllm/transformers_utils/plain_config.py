"""A model config that states every key itself, as those made from GGUF files do.

Reads like a transformers config and refuses to fill in what is not stated. The config
classes of transformers take 1.8 s to import; a model that says everything needs none.
"""

from typing import Any


class PlainConfig:
    """Keys as attributes; a key that is not stated raises AttributeError."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    def get_text_config(self, decoder: bool = False) -> "PlainConfig":
        """Itself: only models of text are stated so."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """The keys, as they were stated."""
        return dict(self.__dict__)

    def __repr__(self) -> str:
        return f"PlainConfig({self.__dict__})"
