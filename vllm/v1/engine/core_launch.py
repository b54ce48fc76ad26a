"""Starts an engine core in a process of its own, and ends it.

Knows processes, pipes and addresses. Refuses to know messages after the first.
"""

import contextlib
import multiprocessing
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import zmq

from vllm import envs
from vllm.config import VllmConfig
from vllm.utils.network_utils import get_open_zmq_ipc_path, remove_ipc_path
from vllm.utils.signals import signals_held_back
from vllm.v1.engine.core_proc import ReadyMessage, run_engine_core

_STOP_GRACE_S = 10.0
# A core that still starts has nothing to end: it may be in the middle of a long read.
_STOP_GRACE_AT_START_S = 3.0


class CoreProcess:
    """The process, the sockets to it, and the lifeline that it watches.

    `close` may be called at any time and more than once.
    """

    def __init__(self) -> None:
        self.addresses = [get_open_zmq_ipc_path() for _ in range(2)]
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket] = []
        self._process: BaseProcess | None = None
        self._lifeline: Connection | None = None
        self._is_ready = False

    @property
    def process(self) -> BaseProcess:
        if self._process is None:
            raise RuntimeError("the engine core was never started")
        return self._process

    def open(self, kind: int, index: int) -> zmq.Socket:
        """A socket bound to address `index`: 0 to the core, 1 from it."""
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(self.addresses[index])
        return socket

    def start(
        self, vllm_config: VllmConfig, executor_class: type | None, log_stats: bool
    ) -> None:
        """Starts the core and waits until it is ready; fills the sizes that it decided
        into `vllm_config`.

        Raises the core's own message, as ValueError where asking for something else
        helps and as RuntimeError otherwise.
        """
        context = multiprocessing.get_context("spawn")
        ready, ready_child = context.Pipe(duplex=False)
        parent_child, self._lifeline = context.Pipe(duplex=False)
        self._process = context.Process(
            target=run_engine_core,
            name="EngineCore",
            args=(
                vllm_config,
                executor_class,
                log_stats,
                *self.addresses,
                ready_child,
                parent_child,
            ),
            # A daemonic process may have no children of its own.
            daemon=vllm_config.parallel_config.world_size == 1,
        )
        # Starting the tracker, which every process has once, would unblock signals.
        resource_tracker.ensure_running()
        # Ctrl-C reaches the whole process group: the front-end decides what it means.
        with signals_held_back():
            self._process.start()
        ready_child.close()
        parent_child.close()
        with contextlib.closing(ready):
            message = self._await_ready(ready)
        if message.error is not None:
            self._process.join(_STOP_GRACE_S)
            kind = ValueError if message.is_user_error else RuntimeError
            raise kind(message.error)
        self._is_ready = True
        vllm_config.model_config.max_model_len = message.report["max_model_len"]
        for name, value in message.report["cache"].items():
            setattr(vllm_config.cache_config, name, value)

    def _await_ready(self, ready: Connection) -> ReadyMessage:
        timeout = envs.VLLM_ENGINE_READY_TIMEOUT_S
        found: list[Any] = wait([ready, self.process.sentinel], timeout)
        if ready in found:
            with contextlib.suppress(EOFError):
                return msgspec.msgpack.decode(ready.recv_bytes(), type=ReadyMessage)
        if not found:
            raise RuntimeError(
                f"the engine core was not ready after {timeout} s: give it more time "
                "with VLLM_ENGINE_READY_TIMEOUT_S, or look into its log above"
            )
        self.process.join(_STOP_GRACE_S)
        raise RuntimeError(
            f"the engine core ended while it started ({self.exit_text()}): its own "
            "message is in the log above"
        )

    def exit_text(self) -> str:
        """How the process ended, in words."""
        code = self.process.exitcode
        if code is not None and code < 0:
            hint = ", perhaps for lack of memory" if code == -9 else ""
            return f"killed by signal {-code}{hint}"
        return f"exit code {code}"

    def close(self) -> None:
        """Ends the process, politely first, and takes the sockets away."""
        if self._lifeline is not None:
            self._lifeline.close()  # the core leaves when it sees this
        if self._process is not None:
            self._stop(self._process)
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()
        for address in self.addresses:
            remove_ipc_path(address)

    def _stop(self, process: BaseProcess) -> None:
        if process.pid is None:
            return  # starting it failed
        acts = [process.terminate, process.kill]
        grace = _STOP_GRACE_AT_START_S
        if self._is_ready:  # it ignores SIGTERM, and leaves with the lifeline
            acts, grace = [lambda: None, process.kill], _STOP_GRACE_S
        for act in acts:
            act()
            process.join(grace)
            if process.exitcode is not None:
                return
