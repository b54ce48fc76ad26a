"""The engine core in a process of its own, behind two ZeroMQ sockets.

One loop: take messages, step, send news; it sleeps while there is nothing to do. Leaves
when its parent is gone.
"""

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import msgspec
import zmq

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.plugins import load_general_plugins
from vllm.utils.network_utils import remove_ipc_path
from vllm.utils.signals import ignore_interrupts
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
# How long a core whose front-end is gone may take to end, even inside a system call.
_ORPHAN_GRACE_S = 30.0


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

    def run(self, stop_fd: int) -> None:
        """Serves until `stop_fd` becomes readable."""
        poller = zmq.Poller()
        poller.register(self._input, zmq.POLLIN)
        poller.register(stop_fd, zmq.POLLIN)
        model_ran = True
        while True:
            ready = dict(poller.poll(self._poll_ms(model_ran)))
            if stop_fd in ready:
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
    """The main function of the core's process, which is born with SIGINT blocked.

    Sends a ReadyMessage through `ready`; `parent` closes when the front-end is gone.
    """
    ignore_interrupts()
    signal.signal(signal.SIGTERM, _leave)
    stop_read, stop_write = os.pipe()
    watch = (parent, stop_write, [input_address, output_address])
    threading.Thread(
        target=_leave_with, args=watch, name="lifeline", daemon=True
    ).start()
    try:
        load_general_plugins()  # what they register, each process has for itself
        core = EngineCore(vllm_config, executor_class, log_stats)
    except Exception as error:
        is_user_error = isinstance(error, ValueError)
        if not is_user_error:
            logger.exception("the engine core failed to start")
        text = str(error) or type(error).__name__
        _tell(ready, ReadyMessage(error=text, is_user_error=is_user_error))
        sys.exit(1)
    # Service managers send it to each process, while requests still run.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # What start-up made lives as long as this process: collections, which stop a step
    # for as long as they walk over objects, need not visit it.
    gc.freeze()
    proc = EngineCoreProc(core, input_address, output_address)
    try:
        _tell(ready, ReadyMessage(report=core.ready_report()))
        proc.run(stop_read)
    except Exception as error:
        logger.exception("the engine core failed")
        proc.send_dead(f"{type(error).__name__}: {error}")
        sys.exit(1)
    finally:
        core.shutdown()
        proc.close()


def _tell(ready: Connection, message: ReadyMessage) -> None:
    """Sends the outcome of start-up, if there still is somebody to be told."""
    with contextlib.suppress(BrokenPipeError), contextlib.closing(ready):
        ready.send_bytes(msgspec.msgpack.encode(message))


def _leave(*_: object) -> NoReturn:
    """Ends this process while it starts. What it unwinds is not interrupted again."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def _leave_with(parent: Connection, stop_fd: int, addresses: list[str]) -> None:
    """Waits for the end of the front-end, and then ends this process with the socket
    files between them: by SIGTERM while it starts, by `stop_fd` later."""
    parent.poll(None)
    for address in addresses:
        remove_ipc_path(address)
    os.write(stop_fd, b"x")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORPHAN_GRACE_S)
    os._exit(1)
