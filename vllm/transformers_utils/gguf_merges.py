"""Which two tokens make a third: the merges of a vocabulary that lists none.

A vocabulary of 262,144 tokens has two million places where a token can be cut in two.
Halves are looked up by hashes, many at once, and then compared character by character.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

# Odd, so that powers have inverses modulo 2^64.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
_MASK = (1 << 64) - 1
# Tokens looked at together: what is computed of them stays in a cache, and its memory
# serves the next ones.
_TOKENS_AT_ONCE = 1 << 13

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


class _Text:
    """Tokens one after another, as code points; hashes of any part of them."""

    def __init__(self, tokens: Sequence[str]) -> None:
        text = "".join(tokens)
        # Lone surrogates are code points like any other here.
        raw = text.encode("utf-32-le", "surrogatepass")
        self.points = np.frombuffer(raw, np.uint32)
        self.lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self.ends = np.cumsum(self.lengths)
        self.starts = self.ends - self.lengths
        size = len(self.points) + 1
        weighted = self.points.astype(np.uint64) + np.uint64(1)
        # From the first power on: the hash of one character must fill 64 bits, too.
        weighted *= _powers(_BASE, size)[1:]
        self._sums = np.zeros(size, np.uint64)
        np.cumsum(weighted, out=self._sums[1:])
        self._inverses = _powers(_INVERSE, size)

    def hashes(self, begins: Ints, ends: Ints) -> Hashes:
        """Equal for equal parts [begin, end), wherever they are."""
        return (self._sums[ends] - self._sums[begins]) * self._inverses[begins]

    def equal(self, begins: Ints, others: Ints, lengths: Ints) -> npt.NDArray[np.bool_]:
        """Whether parts of these lengths are equal, character by character."""
        pair = np.repeat(np.arange(len(lengths)), lengths)
        offset = np.arange(len(pair)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        differs = (
            self.points[begins[pair] + offset] != self.points[others[pair] + offset]
        )
        return np.bincount(pair[differs], minlength=len(lengths)) == 0


def ways_to_merge(
    tokens: Sequence[str], wanted: npt.NDArray[np.bool_]
) -> tuple[Ints, Ints, Ints]:
    """Ids (whole, left, right) of every token that is `wanted` and is two tokens, one
    after the other. Of equal tokens the last one counts as a half."""
    text = _Text(tokens)
    find = _Finder(text)
    parts = [
        _ways_of(text, find, ids)
        for ids in _in_parts(np.flatnonzero(wanted), _TOKENS_AT_ONCE)
    ]
    whole, left, right = (np.concatenate(x) for x in zip(*parts, strict=True))
    return whole, left, right


def _in_parts(ids: Ints, size: int) -> Iterator[Ints]:
    """At least one part."""
    for start in range(0, max(1, len(ids)), size):
        yield ids[start : start + size]


def _ways_of(text: _Text, find: "_Finder", ids: Ints) -> tuple[Ints, Ints, Ints]:
    # Places inside a token: before its second character to before its last one.
    inside = np.maximum(text.lengths[ids] - 1, 0)
    whole = np.repeat(ids, inside)
    before = np.repeat(np.cumsum(inside) - inside, inside)
    cuts = text.starts[whole] + 1 + np.arange(len(whole)) - before

    left = find.ids(text.starts[whole], cuts)
    whole, cuts, left = (x[left >= 0] for x in (whole, cuts, left))
    right = find.ids(cuts, text.ends[whole])
    whole, left, right = (x[right >= 0] for x in (whole, left, right))
    return whole, left, right


class _Finder:
    """Finds the token that a part of the text is."""

    def __init__(self, text: _Text) -> None:
        self._text = text
        hashes = text.hashes(text.starts, text.ends)
        order = np.argsort(hashes, kind="stable")
        # The last of equal ones, as a dict keeps it.
        last = np.append(hashes[order][1:] != hashes[order][:-1], True)
        self._ids = order[last]
        known = hashes[self._ids]
        # Nothing is above the one that ends them.
        self._hashes = np.append(known, np.uint64(_MASK))
        self._ids = np.append(self._ids, 0)
        # Where hashes begin that start with so many bits; four times as many as tokens.
        bits = max(1, len(known).bit_length() + 1)
        self._shift = np.uint64(64 - bits)
        heads = (known >> self._shift).astype(np.int64)
        self._first = np.searchsorted(heads, np.arange(1 << bits))

    def ids(self, begins: Ints, ends: Ints) -> Ints:
        """-1 where there is none."""
        text = self._text
        hashes = text.hashes(begins, ends)
        at = self._at(hashes)
        ids = self._ids[at]
        lengths = ends - begins
        found = (self._hashes[at] == hashes) & (text.lengths[ids] == lengths)
        (places,) = np.nonzero(found)
        same = text.equal(begins[places], text.starts[ids[places]], lengths[places])
        found[places] = same
        return np.where(found, ids, -1)

    def _at(self, hashes: Hashes) -> Ints:
        """The place of the first known hash that is not below each."""
        at = self._first[(hashes >> self._shift).astype(np.int64)]
        (below,) = np.nonzero(self._hashes[at] < hashes)
        while below.size:
            at[below] += 1
            below = below[self._hashes[at[below]] < hashes[below]]
        return at


def _powers(base: int, count: int) -> Hashes:
    """base^0, base^1, … modulo 2^64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)
