"""Which regular expressions are followed to the letter.

Knows their escapes and classes. Refuses to know grammars: an expression that passes
still has to compile.
"""

import re
from collections.abc import Sequence

from vllm.utils.text_utils import short_repr

# Escaped characters and classes of a regular expression, where "(?=" is plain text. A
# class that is not closed reaches to the end: to look for another one behind each "["
# would take time that grows as the square of the length.
_LITERAL = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)", re.DOTALL)
_LOOKAROUND = re.compile(r"\(\?<?[=!]")
_PIECE = re.compile(
    r"\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|(?P<open>\()|(?P<close>\))"
    r"|(?P<mark>[|*+?])|" + _LITERAL.pattern + "|.",
    re.DOTALL,
)
# Ends a text where the library compiles it.
_NUL = re.compile(r"\\(?:0(?!\d)|x00|u0000|u\{0+\})")
# The library writes counted repetitions out before it compiles them.
_MOST_WRITTEN_OUT = 1 << 14
_UNCOUNTED = 10**9  # sizes are not counted beyond this


def check_regex(pattern: str) -> None:
    """ValueError for a regular expression with assertions, which are not enforced, or
    with a NUL character outside of a class, which would end what is generated."""
    found = _LOOKAROUND.search(_LITERAL.sub("", pattern))
    if found:
        raise ValueError(
            f"regular expression {short_repr(pattern)} holds {found[0]!r}: looking "
            "ahead or behind is not enforced here; remove it"
        )
    if nul := _nul_outside_of_classes(pattern):
        raise ValueError(
            f"regular expression {short_repr(pattern)} holds {nul!r}, a NUL character, "
            "which no text can have here; remove it"
        )
    check_together([pattern])


def _nul_outside_of_classes(pattern: str) -> str | None:
    for piece in _LITERAL.finditer(pattern):
        if piece[0][0] == "\\" and (nul := _NUL.match(pattern, piece.start())):
            return nul[0]
    return None


def check_together(patterns: Sequence[str]) -> None:
    """ValueError for expressions that take long to compile, one after another."""
    size = sum(map(written_out, patterns))
    if size > _MOST_WRITTEN_OUT:
        largest = short_repr(max(patterns, key=written_out))
        others = len(patterns) - 1
        also = f" and {others} others together have" if others else " has"
        raise ValueError(
            f"regular expression {largest}{also} {size:,} characters and classes once "
            "repetitions are written out, expected at most "
            f"{_MOST_WRITTEN_OUT:,}: repeat less, or without a limit"
        )


def written_out(pattern: str) -> int:
    """Characters and classes of an expression whose counted repetitions are written
    out: 6 of "(ab){3}"."""
    outer: list[int] = []  # sizes before each open group
    size = last = 0  # of the group so far, and of its last part
    for piece in _PIECE.finditer(pattern):
        kind = piece.lastgroup
        if kind == "open":
            outer.append(size)
            size = last = 0
        elif kind == "close" and outer:
            last = size
            size += outer.pop()
        elif kind in ("least", "most"):
            digits = piece["most"] or piece["least"]
            times = max(1, int(digits)) if len(digits) < 10 else _UNCOUNTED
            size = min(size + last * (times - 1), _UNCOUNTED)
            last = min(last * times, _UNCOUNTED)
        elif kind != "mark":
            size, last = size + 1, 1
    return size + sum(outer)
