"""Texts for people, of bounded length.

Knows characters. Knows nothing of what is told.
"""

import reprlib

#: Characters of a value in a message.
_VALUE_LENGTH = 100
#: Characters of a message: room for a few values, and for the words around them.
_MESSAGE_LENGTH = 2000


def short_repr(value: object) -> str:
    """`repr` of a value in at most 100 characters; "..." stands for what is left out.

    The time it takes is bounded too, whatever the value holds.
    """
    form = reprlib.Repr()
    form.maxlevel = 3
    form.maxstring = form.maxlong = form.maxother = _VALUE_LENGTH
    form.maxlist = form.maxtuple = form.maxdict = form.maxset = 12
    try:
        text = form.repr(value)
    except ValueError:  # of a number with too many digits to be printed
        text = f"<{type(value).__name__}>"
    return shorten(text, _VALUE_LENGTH)


def shorten(text: str, length: int = _MESSAGE_LENGTH) -> str:
    """The beginning and the end of a text that has more than `length` characters."""
    if len(text) <= length:
        return text
    tail = length // 4
    return f"{text[: length - tail - 3]}...{text[-tail:]}"


def is_unicode(text: str) -> bool:
    """Says whether a text can be sent as UTF-8: it holds no half of a surrogate
    pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
