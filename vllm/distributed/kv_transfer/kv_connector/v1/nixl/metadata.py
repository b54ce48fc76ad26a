"""What a request's `kv_transfer_params` say, and what the two sides tell each other.

Knows names of fields. Knows nothing of blocks' content and of sockets.
"""

import hashlib
from array import array
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import Rows
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.leases import Claim
from vllm.exceptions import VLLMValidationError
from vllm.utils.text_utils import short_repr, shorten

#: Stands for a block that a group does not keep.
NO_BLOCK = -1
#: The field of a request that holds all this.
PARAMETER = "kv_transfer_params"
_MOST = 2**31 - 1
_LONGEST_HOST = 253  # characters of a name in DNS
_WISHES = ("do_remote_prefill", "do_remote_decode", "do_remote_release")
_DIGEST_BYTES = 16


def prompt_digest(request: Any, num_tokens: int) -> str | None:
    """A name of what the first `num_tokens` tokens were computed from; None where no
    token says it."""
    if request.prompt_embeds is not None:
        return None
    lora = request.lora_request
    media = [
        (item.identifier, item.mm_position.offset)
        for item in request.mm_features
        if item.mm_position.offset < num_tokens
    ]
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    state.update(array("q", request.all_token_ids[:num_tokens]).tobytes())
    state.update(repr((media, None if lora is None else lora.lora_name)).encode())
    return state.hexdigest()


@dataclass(frozen=True, kw_only=True)
class RemotePrefill:
    """Pages of a prompt in another engine.

    `block_ids` are by group and position, NO_BLOCK where none is kept; they hold the
    first `num_tokens` tokens of the prompt that `prompt_hash` names.
    """

    engine_id: str
    request_id: str
    host: str
    port: int
    tp_size: int
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    prompt_hash: str | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """What two requests that want the same pages have in common."""
        return (*self.claim, self.engine_id, self.host, str(self.port))

    @property
    def name(self) -> str:
        """The request in the log, which shows no more than it needs of what came."""
        return shorten(self.request_id, 200)

    @property
    def claim(self) -> Claim:
        """What the other engine is asked for."""
        return self.request_id, self._pages

    @property
    def refusal(self) -> str:
        """What to say when the other engine holds other pages under this name."""
        return (
            "kv_transfer_params are not those that the engine on "
            f"{self.host}:{self.port} has answered; it holds other pages for that "
            "request: pass them on unchanged"
        )

    @cached_property
    def _pages(self) -> str:
        """A digest of all that says which bytes are meant and what they mean. The
        engine that holds the pages has the same one only for what it has told."""
        facts = (self.engine_id, self.tp_size, self.num_tokens, self.prompt_hash)
        state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        state.update(repr((facts, [len(ids) for ids in self.block_ids])).encode())
        for ids in self.block_ids:
            state.update(np.array(ids, dtype="<i4").tobytes())
        return state.hexdigest()

    def to_params(self) -> dict[str, Any]:
        """The answer of the prefill engine, which is the decode engine's question."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_block_ids": [list(ids) for ids in self.block_ids],
            "remote_num_tokens": self.num_tokens,
            "remote_prompt_hash": self.prompt_hash,
            "tp_size": self.tp_size,
        }

    @classmethod
    def from_params(cls, params: dict[str, Any]) -> "RemotePrefill":
        """The reverse. ValueError naming the field that is missing or unfit."""
        groups = _get(params, "remote_block_ids", list)
        if groups and isinstance(groups[0], int):
            groups = [groups]  # of a single group
        for group in groups:
            if not isinstance(group, list) or not all(map(_is_block_id, group)):
                raise _unfit("remote_block_ids", groups, "lists of block ids")
        return cls(
            engine_id=_text(params, "remote_engine_id"),
            request_id=_text(params, "remote_request_id"),
            host=_host(params),
            port=_whole(params, "remote_port", 1, 65535),
            tp_size=_whole(params, "tp_size", 1, _MOST),
            num_tokens=_whole(params, "remote_num_tokens", 0, _MOST),
            block_ids=tuple(tuple(group) for group in groups),
            prompt_hash=_optional_text(params, "remote_prompt_hash"),
        )


def _get(params: dict[str, Any], name: str, kind: type) -> Any:
    value = params.get(name)
    if type(value) is not kind:
        raise _unfit(name, value, kind.__name__)
    return value


def check_wishes(params: dict[str, Any]) -> None:
    """ValueError for a wish that is neither true nor false."""
    for name in _WISHES:
        if not isinstance(params.get(name, False), (bool, type(None))):
            raise VLLMValidationError(
                f"kv_transfer_params have {name} {short_repr(params[name])}: expected "
                "true or false",
                parameter=PARAMETER,
            )


def _is_block_id(value: Any) -> bool:
    return type(value) is int and NO_BLOCK <= value <= _MOST


def _text(params: dict[str, Any], name: str) -> str:
    value = _get(params, name, str)
    if not value or not value.isprintable() or " " in value:
        raise _unfit(name, value, "a name")
    return value


def _host(params: dict[str, Any]) -> str:
    host = _text(params, "remote_host")
    if len(host) > _LONGEST_HOST:
        raise _unfit("remote_host", host, f"at most {_LONGEST_HOST} characters")
    return host


def _optional_text(params: dict[str, Any], name: str) -> str | None:
    return None if params.get(name) is None else _get(params, name, str)


def _whole(params: dict[str, Any], name: str, low: int, high: int) -> int:
    value = _get(params, name, int)
    if not low <= value <= high:
        raise _unfit(name, value, f"from {low} to {high}")
    return value


def _unfit(name: str, value: Any, expected: str) -> ValueError:
    return VLLMValidationError(
        f"kv_transfer_params have {name} {short_repr(value)}: expected {expected}, as "
        "the prefill engine answered",
        parameter=PARAMETER,
    )


@dataclass(frozen=True, kw_only=True)
class LoadOrder:
    """Blocks of a request to read, by group: ours, and those of `remote`. `refusal`:
    why the other engine does not let them be read, if so; this load fails at once."""

    request_id: str
    remote: RemotePrefill
    local_block_ids: tuple[tuple[int, ...], ...]
    remote_block_ids: tuple[tuple[int, ...], ...]
    refusal: str | None = None

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.local_block_ids))


@dataclass
class NixlConnectorMetadata(KVConnectorMetadata):
    """Loads to start, and requests whose pages nobody reads any more."""

    loads: list[LoadOrder] = field(default_factory=list)
    sent: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class NixlAgentMetadata(KVConnectorHandshakeMetadata):
    """How one worker's pages can be read, and what they are."""

    agent: bytes
    rows: Rows
    fingerprint: dict[str, Any]
