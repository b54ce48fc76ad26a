"""The engine core in a process of its own, behind two ZeroMQ sockets.

One loop: take messages, step, send news; it sleeps while there is nothing to do. Leaves
when its parent is gone.
"""

import contextlib
import gc
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import zmq

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.plugins import load_general_plugins
from vllm.v1.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityOutput,
)
from vllm.v1.engine.core import UTILITIES, EngineCore
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

logger = init_logger(__name__)

# First frame of every message from the core.
NEWS, DEAD = b"\x00", b"\x01"
# How long the last messages may take to leave when the core goes.
_LINGER_MS = 2000


class ReadyMessage(msgspec.Struct):
    """The outcome of start-up. `error` is the text for the user, `is_user_error` says
    that asking for something else would help; `report` is EngineCore.ready_report()."""

    error: str | None = None
    is_user_error: bool = False
    report: dict[str, Any] = {}


class UtilityCall(msgspec.Struct, array_like=True):
    """A call of one of the core's utilities."""

    call_id: int
    method: str
    args: list[Any]


class EngineCoreProc:
    """Serves an EngineCore to one front-end."""

    def __init__(
        self, core: EngineCore, input_address: str, output_address: str
    ) -> None:
        self.core = core
        self._zmq = zmq.Context()
        self._input = self._zmq.socket(zmq.PULL)
        self._output = self._zmq.socket(zmq.PUSH)
        for socket in (self._input, self._output):
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._input.connect(input_address)
        self._output.connect(output_address)
        self._encoder = MsgpackEncoder()
        self._request_decoder = MsgpackDecoder(EngineCoreRequest)
        self._abort_decoder = MsgpackDecoder(list[str])
        self._call_decoder = MsgpackDecoder(UtilityCall)

    def run(self, stop_fds: list[int]) -> None:
        """Serves until one of `stop_fds` becomes readable (or its other end closes)."""
        poller = zmq.Poller()
        poller.register(self._input, zmq.POLLIN)
        for fd in stop_fds:
            poller.register(fd, zmq.POLLIN)
        model_ran = True
        while True:
            ready = dict(poller.poll(self._poll_ms(model_ran)))
            if any(fd in ready for fd in stop_fds):
                return
            if self._input in ready:
                self._receive_all()
            if self.core.has_work():
                outputs, model_ran = self.core.step()
                if (news := outputs.get(0)) is not None:
                    self._send(news)

    def _poll_ms(self, model_ran: bool) -> float | None:
        """How long to wait for messages: without limit when there is nothing to do, not
        at all when there is, and a little when transfers are all that is under way."""
        if not self.core.has_work():
            return None
        return 0 if model_ran else 1000 * self.core.transfer_wait_s

    def _receive_all(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                kind, *frames = self._input.recv_multipart(flags=zmq.NOBLOCK)
                try:
                    self._handle(EngineCoreRequestType(kind), frames)
                except (ValueError, msgspec.MsgspecError) as error:
                    logger.error("message dropped: %s", error)

    def _handle(self, kind: EngineCoreRequestType, frames: list[bytes]) -> None:
        if kind == EngineCoreRequestType.ADD:
            self.core.add_request(self._request_decoder.decode(frames))
        elif kind == EngineCoreRequestType.ABORT:
            self.core.abort_requests(self._abort_decoder.decode(frames))
        else:
            self._call(self._call_decoder.decode(frames))

    def _call(self, call: UtilityCall) -> None:
        answer = UtilityOutput(call.call_id)
        try:
            if call.method not in UTILITIES:
                raise ValueError(
                    f"unknown utility {call.method!r}: expected one of "
                    f"{', '.join(sorted(UTILITIES))}"
                )
            answer.result = getattr(self.core, call.method)(*call.args)
        except Exception as error:
            logger.exception("utility %s failed", call.method)
            answer.failure_message = str(error) or type(error).__name__
        self._send(EngineCoreOutputs(utility_output=answer))

    def _send(self, news: EngineCoreOutputs) -> None:
        try:
            frames = self._encoder.encode(news)
        except TypeError as error:
            if (answer := news.utility_output) is None:
                raise
            answer.result, answer.failure_message = None, str(error)
            frames = self._encoder.encode(news)
        self._output.send_multipart([NEWS, *frames])

    def send_dead(self, reason: str) -> None:
        """Tells the front-end that no more news will come."""
        self._output.send_multipart([DEAD, reason.encode()])

    def close(self) -> None:
        """Closes the sockets once the last messages have left."""
        self._input.close(linger=0)
        self._output.close()
        self._zmq.term()


def run_engine_core(
    vllm_config: VllmConfig,
    executor_class: type | None,
    log_stats: bool,
    input_address: str,
    output_address: str,
    ready: Connection,
    parent: Connection,
) -> None:
    """The main function of the core's process.

    Sends a ReadyMessage through `ready`; `parent` closes when the front-end is gone.
    """
    # Ctrl-C reaches the whole process group: the front-end decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    encode = msgspec.msgpack.encode
    try:
        load_general_plugins()  # what they register, each process has for itself
        core = EngineCore(vllm_config, executor_class, log_stats)
    except Exception as error:
        is_user_error = isinstance(error, ValueError)
        if not is_user_error:
            logger.exception("the engine core failed to start")
        text = str(error) or type(error).__name__
        ready.send_bytes(encode(ReadyMessage(error=text, is_user_error=is_user_error)))
        sys.exit(1)
    # What start-up made lives as long as this process: collections, which stop a step
    # for as long as they walk over objects, need not visit it.
    gc.freeze()
    proc = EngineCoreProc(core, input_address, output_address)
    stop_read, stop_write = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(stop_write, b"x"))
    try:
        ready.send_bytes(encode(ReadyMessage(report=core.ready_report())))
        ready.close()
        proc.run([parent.fileno(), stop_read])
    except Exception as error:
        logger.exception("the engine core failed")
        proc.send_dead(f"{type(error).__name__}: {error}")
        sys.exit(1)
    finally:
        core.shutdown()
        proc.close()
