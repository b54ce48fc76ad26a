"""What an output grammar is called. None is built in."""

from abc import ABC


class StructuredOutputGrammar(ABC):  # noqa: B024  # plugins say what one can do
    """Base of compiled grammars, for type annotations of code from elsewhere."""
