"""Says in words what is wrong with pages: which bytes, and whose they are instead.

Knows states by prefix and layer. Guesses at causes only where the bytes show them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm.testing.kv_connector.states import AttentionStates, picks


@dataclass(frozen=True, kw_only=True)
class Read:
    """What a layer reads for one request: positions `first` to `end` of its tokens.

    `names` are those of the prefixes at all positions; positions in `loaded` came from
    the connector.
    """

    request_id: str
    block_ids: list[int]
    names: list[int]
    first: int
    end: int
    loaded: range


def spans(positions: Sequence[int]) -> str:
    """Runs of ascending numbers: "3-5, 9"."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in runs)


def _bad_tokens(
    found: list[torch.Tensor], expected: list[torch.Tensor]
) -> torch.Tensor:
    bad = [(a != b).flatten(1).any(1) for a, b in zip(found, expected, strict=True)]
    return torch.stack(bad).any(0)


def wrong_states(
    layer: str,
    states: AttentionStates,
    index_of: dict[str, int],
    read: Read,
    requests: Callable[[], Iterator[tuple[str, list[int]]]],
) -> str | None:
    """What is wrong with the states that a layer reads, None when nothing is.

    `index_of` numbers the layers; `requests` gives the prefixes of every request.
    """
    part = slice(read.first, read.end)
    found = [p[part] for p in states.read(read.block_ids, read.end)]
    names = read.names[part]
    expected = states.expected(picks(names, index_of[layer]))
    bad = _bad_tokens(found, expected)
    if not bool(bad.any()):
        return None
    at = bad.nonzero().flatten().tolist()
    positions = [read.first + i for i in at]
    origin = _origin(positions, read.loaded)
    found, expected = [p[at] for p in found], [p[at] for p in expected]
    cause = (
        _other_layer(layer, states, index_of, [names[i] for i in at], found)
        or _other_tokens(layer, states, index_of, found, requests)
        or _part_of_a_block(states, positions, read.loaded)
        or _other_bytes(states, found, expected)
    )
    return (
        f"layer {layer} reads wrong states of request {read.request_id} for tokens "
        f"{spans(positions)} ({origin}): {cause}"
    )


def _origin(positions: list[int], loaded: range) -> str:
    inside = [position in loaded for position in positions]
    if all(inside):
        return (
            f"loaded by the connector, which promised tokens {loaded[0]}-{loaded[-1]}"
        )
    if any(inside):
        return "some loaded by the connector, some computed here"
    return "computed here: they were overwritten, or their blocks were given away"


def _other_layer(
    layer: str,
    states: AttentionStates,
    index_of: dict[str, int],
    names: list[int],
    found: list[torch.Tensor],
) -> str | None:
    for other, index in index_of.items():
        if other == layer:
            continue
        theirs = states.expected(picks(names, index))
        if not bool(_bad_tokens(found, theirs).any()):
            return (
                f"they are the states of layer {other}. Do the layer, or its KV cache "
                "group, and the block go together?"
            )
    return None


def _other_tokens(
    layer: str,
    states: AttentionStates,
    index_of: dict[str, int],
    found: list[torch.Tensor],
    requests: Callable[[], Iterator[tuple[str, list[int]]]],
) -> str | None:
    first = [plane[:1] for plane in found]
    for request_id, names in requests():
        theirs = states.expected(picks(names, index_of[layer]))
        for position in range(len(names)):
            one = [plane[position : position + 1] for plane in theirs]
            if not bool(_bad_tokens(first, one).any()):
                return (
                    f"the first of them is the state of token {position} of request "
                    f"{request_id}. Which block was read or written, and was it still "
                    "its own?"
                )
    return None


def _part_of_a_block(
    states: AttentionStates, positions: list[int], loaded: range
) -> str | None:
    """A load that ends within a block, of a format whose states are torn apart."""
    rest = loaded.stop % states.block_size
    if len(states.parts) == 1 or not rest or positions[0] < loaded.stop - rest:
        return None
    return (
        f"the load ends {rest} tokens into a block of {states.block_size}. The bytes "
        "of one state do not lie together in this format: a part of the states of a "
        "block cannot be copied, only whole blocks can"
    )


def _other_bytes(
    states: AttentionStates, found: list[torch.Tensor], expected: list[torch.Tensor]
) -> str:
    parts, is_right = [], False
    for place, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        columns = (mine != theirs).any(0).any(0)
        if not bool(columns.any()):
            is_right = True
            continue
        bad, width = columns.nonzero().flatten().tolist(), columns.numel()
        whole = f" of plane {place}" if len(found) > 1 else ""
        parts.append(f"bytes {spans(bad)} of the {width} bytes{whole} of a state")
        is_right |= not columns[0]
    text = f"{', and '.join(parts)} are none that this engine stored"
    if not is_right:
        return f"{text}. Were they ever written?"
    return (
        f"{text}, while the first ones are right. A state may have more bytes than its "
        "head size and dtype say: copy page_size_bytes of the spec, or the rows of "
        "page_table"
    )
