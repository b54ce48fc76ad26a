"""An HTTP server that ends in good order, however often it is told to.

Knows signals and requests under way. Refuses to know what they ask for.
"""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from types import FrameType

import uvicorn
from starlette.types import Message, Receive, Scope, Send

from vllm.entrypoints.openai.errors import json_response
from vllm.entrypoints.openai.middleware import HttpMiddleware

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# For requests that are told to end to say so.
_LAST_WORDS_S = 0.5


class HttpServer(uvicorn.Server):
    """The first SIGINT or SIGTERM stops it: requests under way go on for as long as the
    configuration says. A further one cancels them.

    `on_ready` is called once, when it listens and heeds signals; `on_stop` at every
    signal, with whether it is a further one. When serving has ended both signals are
    ignored: what then is put away is not interrupted.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_ready: Callable[[], None],
        on_stop: Callable[[bool], None] | None = None,
    ) -> None:
        config.app = _Ending(config.app)  # type: ignore[arg-type]
        super().__init__(config)
        self._on_ready, self._on_stop = on_ready, on_stop
        self._is_told = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def heed(_: int, __: FrameType | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._stop, loop)

        in_main_thread = threading.current_thread() is threading.main_thread()
        numbers = _SIGNALS if in_main_thread else ()
        for number in numbers:
            signal.signal(number, heed)
        try:
            yield
        finally:
            for number in numbers:
                signal.signal(number, signal.SIG_IGN)

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        is_again, self._is_told = self._is_told, True
        self.should_exit = True
        if self._on_stop is not None:
            self._on_stop(is_again)
        if is_again:
            loop.call_later(_LAST_WORDS_S, self._cancel_all)

    def _cancel_all(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()


class _Ending(HttpMiddleware):
    """Tells clients, where it still can, that the server has ended their request. The
    log need not tell it with a traceback for each."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, send_on)
        except asyncio.CancelledError:
            if not has_begun:
                ended = json_response(
                    "the server is being stopped", HTTPStatus.SERVICE_UNAVAILABLE
                )
                await ended(scope, receive, send)
