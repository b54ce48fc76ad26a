"""ASGI middleware: API keys, request ids, the size of bodies and the number of requests
in flight."""

import secrets
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def route_path(scope: Scope) -> str:
    """The path of a request without the server's own root path."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


class HttpMiddleware:
    """Sees requests over HTTP; what else comes through ASGI passes it by."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self.handle if scope["type"] == "http" else self.app
        await handle(scope, receive, send)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class ApiKeyMiddleware(HttpMiddleware):
    """Answers 401 to /v1 requests that carry none of the keys."""

    def __init__(self, app: ASGIApp, keys: list[str]) -> None:
        super().__init__(app)
        self.keys = [key.encode() for key in keys]

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._guarded(scope):
            response = JSONResponse({"error": "Unauthorized"}, status_code=401)
            await response(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _guarded(self, scope: Scope) -> bool:
        path = route_path(scope)
        if not path.startswith("/v1") or scope["method"] == "OPTIONS":
            return False
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        known = [secrets.compare_digest(given.encode(), key) for key in self.keys]
        return scheme.lower() != "bearer" or not any(known)


class RequestIdMiddleware(HttpMiddleware):
    """Answers with the X-Request-Id of the request, or a new one."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = Headers(scope=scope).get("x-request-id") or secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


# To read and check JSON takes up to 0.2 s per MiB, in which nobody else is answered.
MAX_BODY_BYTES = 32 << 20
# Lists and objects take longest: 2 us each.
MAX_BRACKETS = 1 << 19


class BodySizeMiddleware(HttpMiddleware):
    """Answers 413 to bodies above the limits, whether their length is stated or not."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        stated = Headers(scope=scope).get("content-length", "")
        received = int(stated) if stated.isascii() and stated.isdigit() else 0
        brackets = 0

        async def receive_some() -> Message:
            # A body that is known to be too long is not read.
            nonlocal received, brackets
            if received <= MAX_BODY_BYTES:
                message = await receive()
                body = message.get("body", b"")
                if not stated:
                    received += len(body)
                brackets += body.count(b"[") + body.count(b"{")
                if brackets > MAX_BRACKETS:
                    raise HTTPException(
                        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                        f"the body has more than {MAX_BRACKETS:,} opening brackets and "
                        "braces: send several requests",
                    )
                if received <= MAX_BODY_BYTES:
                    return message
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has more than {MAX_BODY_BYTES:,} bytes: send several "
                "requests",
            )

        await self.app(scope, receive_some, send)


# What watches a server is no load: monitors ask these all the time.
_NO_LOAD = frozenset({"/load", "/health", "/ping", "/metrics", "/version"})


class LoadMiddleware(HttpMiddleware):
    """Counts requests in flight in `state.in_flight`, but for those of monitors."""

    def __init__(self, app: ASGIApp, state: Any) -> None:
        super().__init__(app)
        self.state = state

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if route_path(scope) in _NO_LOAD:
            await self.app(scope, receive, send)
            return
        self.state.in_flight += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.state.in_flight -= 1
