"""How a front-end reaches an engine core: in this process, or in one of its own.

Knows processes and sockets. Refuses to know text and callers.
"""

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import zmq

from vllm.config import VllmConfig
from vllm.exceptions import EngineDeadError
from vllm.utils.signals import termination_as_exception
from vllm.v1.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityOutput,
)
from vllm.v1.engine.core import EngineCore, check_classes
from vllm.v1.engine.core_launch import CoreProcess
from vllm.v1.engine.core_proc import DEAD, UtilityCall
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

# How long messages of a process that has ended may still be on their way.
_LAST_WORDS_S = 0.2
_CONNECT_POLL_MS = 20


class EngineCoreClient(ABC):
    """What front-ends ask of a core. `call` runs a utility and returns its result."""

    @staticmethod
    def make_client(
        vllm_config: VllmConfig,
        executor_class: type | None = None,
        log_stats: bool = True,
        multiprocess_mode: bool = False,
        asyncio_mode: bool = False,
    ) -> "EngineCoreClient":
        """Starts a core and waits until it is ready; fills the sizes that it decided
        into `vllm_config`. Raises ValueError or RuntimeError, with the core's own
        message, when it cannot start."""
        if asyncio_mode:
            return AsyncMPClient(vllm_config, executor_class, log_stats)
        if multiprocess_mode:
            return SyncMPClient(vllm_config, executor_class, log_stats)
        return InprocClient(vllm_config, executor_class, log_stats)

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Sends a request. Raises EngineDeadError when the core is gone."""

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests without further news."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """The next news; blocks in the clients that wait for another process."""

    @abstractmethod
    def call(self, method: str, *args: Any) -> Any:
        """Runs a utility of the core."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stops the core. May be called twice."""


class InprocClient(EngineCoreClient):
    """The core lives here; `get_output` is a step."""

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type | None, log_stats: bool
    ) -> None:
        self.engine_core = EngineCore(vllm_config, executor_class, log_stats)

    def add_request(self, request: EngineCoreRequest) -> None:
        self.engine_core.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self.engine_core.abort_requests(request_ids)

    def get_output(self) -> EngineCoreOutputs:
        core = self.engine_core
        outputs, model_ran = core.step()
        if not model_ran and core.has_work():
            time.sleep(core.transfer_wait_s)
        return outputs.get(0) or EngineCoreOutputs()

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.engine_core, method)(*args)

    def shutdown(self) -> None:
        self.engine_core.shutdown()


class MPClient(EngineCoreClient):
    """A core in a process of its own. What both of its kinds share."""

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type | None, log_stats: bool
    ) -> None:
        check_classes(vllm_config, executor_class)
        self.vllm_config = vllm_config
        self.dead_reason: str | None = None
        self.is_closed = False
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._next_call_id = 0
        self.core_process = CoreProcess()
        # At exit it comes before multiprocessing waits for the core to end.
        self._finalizer = Finalize(self, self.core_process.close, exitpriority=0)
        with termination_as_exception():
            try:
                self._input = self.core_process.open(zmq.PUSH, 0)
                self._output = self.core_process.open(zmq.PULL, 1)
                self.core_process.start(vllm_config, executor_class, log_stats)
            except BaseException:
                self.shutdown()
                raise

    @property
    def process(self) -> BaseProcess:
        return self.core_process.process

    @property
    def is_dead(self) -> bool:
        """Says whether the core is gone, by report or because its process ended."""
        return self.dead_reason is not None or not self.process.is_alive()

    def dead_error(self) -> EngineDeadError:
        """The error that waiting callers get."""
        if self.dead_reason is None:
            self.dead_reason = "the client was shut down"
            if not self.is_closed:
                self.process.join(1.0)
                how = self.core_process.exit_text()
                self.dead_reason = f"its process ended ({how})"
        return EngineDeadError(f"the engine core has stopped: {self.dead_reason}")

    def _send(self, kind: EngineCoreRequestType, message: Any) -> None:
        if self.is_closed or self.is_dead:
            raise self.dead_error()
        frames = [kind.value, *self._encoder.encode(message)]
        while True:
            try:
                self._input.send_multipart(frames, flags=zmq.NOBLOCK)
                return
            except zmq.Again:  # nobody is connected: not yet, or not any more
                if self.is_dead:
                    raise self.dead_error() from None
                self._input.poll(_CONNECT_POLL_MS, zmq.POLLOUT)

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(EngineCoreRequestType.ADD, request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids and not self.is_closed and not self.is_dead:
            self._send(EngineCoreRequestType.ABORT, request_ids)

    def _send_call(self, method: str, args: tuple[Any, ...]) -> int:
        self._next_call_id += 1
        message = UtilityCall(self._next_call_id, method, list(args))
        self._send(EngineCoreRequestType.UTILITY, message)
        return self._next_call_id

    def _decode(self, frames: list[bytes]) -> EngineCoreOutputs:
        """The news in a message; EngineDeadError when it says that there is no more."""
        kind, *payload = frames
        if kind == DEAD:
            self.dead_reason = payload[0].decode()
            raise self.dead_error()
        return self._decoder.decode(payload)

    def shutdown(self) -> None:
        self.is_closed = True
        self._finalizer()


def _result(answer: UtilityOutput) -> Any:
    if answer.failure_message is not None:
        raise RuntimeError(answer.failure_message)
    return answer.result


class SyncMPClient(MPClient):
    """For callers without an event loop: `get_output` blocks for the next news."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._unread: list[EngineCoreOutputs] = []
        super().__init__(*args, **kwargs)

    def _receive(self) -> EngineCoreOutputs:
        poller = zmq.Poller()
        poller.register(self._output, zmq.POLLIN)
        poller.register(self.process.sentinel, zmq.POLLIN)
        if self._output in dict(poller.poll()) or self._output.poll(0):
            return self._decode(self._output.recv_multipart())
        raise self.dead_error()

    def get_output(self) -> EngineCoreOutputs:
        return self._unread.pop(0) if self._unread else self._receive()

    def call(self, method: str, *args: Any) -> Any:
        call_id = self._send_call(method, args)
        while True:
            news = self._receive()
            if (answer := news.utility_output) is None:
                self._unread.append(news)
            elif answer.call_id == call_id:
                return _result(answer)


class AsyncMPClient(MPClient):
    """For an event loop: `get_output_async` and `call_async` wait without blocking it.

    Sending never waits. Messages are read as they come, whoever waits for what.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: asyncio.Queue[EngineCoreOutputs | EngineDeadError] = (
            asyncio.Queue()
        )
        self._calls: dict[int, asyncio.Future[Any]] = {}
        super().__init__(*args, **kwargs)

    def _watch(self) -> None:
        """Has the running loop read our socket and notice the end of the process."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop, self._inbox = loop, asyncio.Queue()
        loop.add_reader(self._output.getsockopt(zmq.FD), self._drain)
        loop.add_reader(self.process.sentinel, self._on_exit)
        self._drain()

    def _unwatch(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._output.getsockopt(zmq.FD))
            loop.remove_reader(self.process.sentinel)

    def _drain(self) -> None:
        # The socket's descriptor tells of changes only: read until nothing is left.
        with contextlib.suppress(zmq.Again):
            while not self._output.closed:
                frames = self._output.recv_multipart(flags=zmq.NOBLOCK)
                try:
                    self._sort(self._decode(frames))
                except EngineDeadError as error:
                    self._end(error)

    def _sort(self, news: EngineCoreOutputs) -> None:
        answer = news.utility_output
        if answer is None:
            self._inbox.put_nowait(news)
            return
        call = self._calls.pop(answer.call_id, None)
        if call is None or call.done():
            return
        try:
            call.set_result(_result(answer))
        except RuntimeError as error:
            call.set_exception(error)

    def _on_exit(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.process.sentinel)
        loop.call_later(_LAST_WORDS_S, self._after_exit)

    def _after_exit(self) -> None:
        self._drain()
        if self._loop is not None:
            self._end(self.dead_error())

    def _end(self, error: EngineDeadError) -> None:
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        self._calls.clear()
        self._inbox.put_nowait(error)

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next news of requests. Raises EngineDeadError when the core is gone,
        after everything that it had sent."""
        self._watch()
        news = await self._inbox.get()
        if isinstance(news, EngineDeadError):
            self._inbox.put_nowait(news)  # for whoever asks next
            raise news
        return news

    async def call_async(self, method: str, *args: Any) -> Any:
        """Runs a utility of the core. Raises RuntimeError with its message on
        failure."""
        self._watch()
        call = asyncio.get_running_loop().create_future()
        self._calls[self._send_call(method, args)] = call
        return await call

    def get_output(self) -> EngineCoreOutputs:
        raise RuntimeError(
            "an asynchronous client has no get_output: await the other one"
        )

    def call(self, method: str, *args: Any) -> Any:
        raise RuntimeError("an asynchronous client has no call: await call_async")

    def shutdown(self) -> None:
        self._unwatch()
        super().shutdown()
