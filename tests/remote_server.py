"""A real `vllm serve` in its own process, for tests that talk HTTP to it."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

from openai import AsyncOpenAI, OpenAI

T = TypeVar("T")
READY = re.compile(r"is ready on (https?://[\w.:\[\]]+)")


class RemoteCommand:
    """A subcommand of `vllm` that serves on a free port; `url` is known once it has
    said that it is ready."""

    def __init__(
        self,
        words: Sequence[str],
        env: dict[str, str] | None = None,
        timeout: float = 120.0,
    ) -> None:
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.cli.main"),
                *(*words, "--port", "0"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        )
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.url = self._wait_ready(timeout)
        except BaseException:
            self.stop()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._queue.put(line)
        self._queue.put(None)

    def _wait_ready(self, timeout: float) -> str:
        while True:
            line = self._queue.get(timeout=timeout)
            if line is None:
                raise RuntimeError("server ended:\n" + self.log)
            if match := READY.search(line):
                return match[1]

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def client(self, **kwargs: object) -> OpenAI:
        options = {"api_key": "-", "max_retries": 0, **kwargs}
        return OpenAI(base_url=f"{self.url}/v1", **options)  # type: ignore[arg-type]

    def async_client(self, **kwargs: object) -> AsyncOpenAI:
        options = {"api_key": "-", "max_retries": 0, **kwargs}
        return AsyncOpenAI(base_url=f"{self.url}/v1", **options)  # type: ignore[arg-type]

    def stop(self) -> int:
        """Asks the server to end and returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class RemoteServer(RemoteCommand):
    """`vllm serve`."""

    def __init__(
        self,
        model: str,
        args: Sequence[str] = (),
        env: dict[str, str] | None = None,
        timeout: float = 120.0,
    ) -> None:
        super().__init__(["serve", model, *args], env, timeout)
