"""Questions and answers between engines, beside the transfers: msgpack over ZeroMQ.

Knows messages and sockets. What is asked about is another module's matter.
"""

import threading
from collections.abc import Callable
from itertools import count
from socket import gaierror, gethostbyname
from typing import Any

import msgspec
import zmq

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.leases import Claim, Standing
from vllm.logger import init_logger

logger = init_logger(__name__)

#: Raised with every change of the messages below.
PROTOCOL = 2
_POLL_MS = 100
_LINGER_MS = 200


class Meet(msgspec.Struct, tag="meet"):
    """Who are you? `engine_id` is whom the asker expects."""

    engine_id: str
    rank: int
    protocol: int = PROTOCOL


class Met(msgspec.Struct, tag="met"):
    """One rank of an engine. `model` and `fingerprint` say what its pages mean, `runs`
    where they lie: (address, bytes, stride) in the order of its page table."""

    engine_id: str
    model: str
    fingerprint: dict[str, Any]
    tp_size: int
    agent: bytes
    memory: str
    device: int
    num_blocks: int
    runs: list[tuple[int, int, int]]


class Renew(msgspec.Struct, tag="renew"):
    """We still want these pages of these requests."""

    claims: list[Claim]


class Held(msgspec.Struct, tag="held"):
    """How these claims stand, in their order; what is held is so for `lease_s` seconds
    more."""

    standings: list[Standing]
    lease_s: float


class Release(msgspec.Struct, tag="release"):
    """`rank` has read the pages of a request; None: nobody wants them."""

    claim: Claim
    rank: int | None


class Released(msgspec.Struct, tag="released"):
    """`was_held`: the pages were what they had been, until this very question."""

    was_held: bool


class Refused(msgspec.Struct, tag="refused"):
    """The question cannot be answered; `reason` is for people."""

    reason: str


Question = Meet | Renew | Release
Answer = Met | Held | Released | Refused

_encode = msgspec.msgpack.encode
_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(Answer)


def address_of(host: str, port: int) -> str:
    """The ZeroMQ address of a host by name or number."""
    try:
        found = host if ":" in host else gethostbyname(host)
    except (gaierror, UnicodeError) as error:
        raise ValueError(f"host {host!r} is not known: {error}") from error
    return f"tcp://[{found}]:{port}" if ":" in found else f"tcp://{found}:{port}"


class SideChannelServer:
    """Answers questions in a thread of its own, whatever the engine computes."""

    def __init__(
        self, host: str, port: int, answer: Callable[[Question], Answer]
    ) -> None:
        """Port 0 takes any free one. zmq.ZMQError when the port is in use."""
        self._answer = answer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = _LINGER_MS
        self._socket.ipv6 = ":" in host
        try:
            if port:
                self._socket.bind(address_of(host, port))
            else:
                port = self._socket.bind_to_random_port(
                    address_of(host, 0).rpartition(":")[0]
                )
        except BaseException:
            self._context.destroy()
            raise
        self.port = port
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, name="kv-side-channel", daemon=True
        )
        self._thread.start()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if self._socket.poll(_POLL_MS):
                self._reply(self._socket.recv_multipart())
        self._socket.close()

    def _reply(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            logger.warning("side channel: a message of %d frames", len(frames))
            return
        sender, number, body = frames
        answer: Answer
        try:
            answer = self._answer(_questions.decode(body))
        except Exception as error:
            logger.warning("side channel: a question is refused: %s", error)
            answer = Refused(str(error))
        self._socket.send_multipart([sender, number, _encode(answer)])

    def close(self) -> None:
        """May be called twice."""
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=_LINGER_MS)


class SideChannelLink:
    """Asks one engine. Never blocks; belongs to one thread."""

    def __init__(self, context: zmq.Context[Any], host: str, port: int) -> None:
        """ValueError for a place where no engine can be."""
        address = address_of(host, port)
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = _LINGER_MS
        self._socket.ipv6 = "[" in address
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ValueError(f"{address} cannot be connected to: {error}") from error
        self._numbers = count()

    def ask(self, question: Question) -> int:
        """Sends a question; its answer comes under this number, if it comes."""
        number = next(self._numbers)
        try:
            self._socket.send_multipart(
                [number.to_bytes(8, "big"), _encode(question)], zmq.NOBLOCK
            )
        except zmq.Again:
            logger.debug("side channel: the other side takes nothing")
        return number

    def take_answers(self) -> dict[int, Answer]:
        """Those that came since the last call."""
        found: dict[int, Answer] = {}
        while self._socket.poll(0):
            frames = self._socket.recv_multipart()
            try:
                number, body = frames
                found[int.from_bytes(number, "big")] = _answers.decode(body)
            except (ValueError, msgspec.DecodeError) as error:
                logger.warning("side channel: an answer cannot be read: %s", error)
        return found

    def close(self) -> None:
        self._socket.close()
