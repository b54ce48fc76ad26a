"""Which regular expressions are followed to the letter.

Knows their escapes and classes. Refuses to know grammars: an expression that passes
still has to compile.
"""

import re

from vllm.utils.text_utils import short_repr

# Escaped characters and classes of a regular expression, where "(?=" is plain text. A
# class that is not closed reaches to the end: to look for another one behind each "["
# would take time that grows as the square of the length.
_LITERAL = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)", re.DOTALL)
_LOOKAROUND = re.compile(r"\(\?<?[=!]")


def check_regex(pattern: str) -> None:
    """ValueError for a regular expression with assertions, which are not enforced."""
    found = _LOOKAROUND.search(_LITERAL.sub("", pattern))
    if found:
        raise ValueError(
            f"regular expression {short_repr(pattern)} holds {found[0]!r}: looking "
            "ahead or behind is not enforced here; remove it"
        )
