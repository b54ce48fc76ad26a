"""One address before prefill servers and decode servers.

A request goes to a prefill server first, for one token, whose answer says where the KV
pages of the prompt are; then to a decode server, with that. Knows HTTP and JSON. Knows
nothing of tokens, pages and engines.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import anyio
import httpx
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from vllm.entrypoints.disagg.server_url import server_url
from vllm.entrypoints.openai.disconnect import until_disconnect
from vllm.entrypoints.openai.errors import error_response, install_error_handlers
from vllm.entrypoints.openai.middleware import BodySizeMiddleware
from vllm.logger import init_logger

logger = init_logger(__name__)
router = APIRouter()

# Fields that shape an answer which nobody reads, or that need more than one token.
_NOT_FOR_PREFILL = (
    "echo",
    "logprobs",
    "prompt_logprobs",
    "response_format",
    "return_token_ids",
    "stop",
    "stop_token_ids",
    "stream_options",
    "structured_outputs",
    "top_logprobs",
)
_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Headers of a request that the servers behind see.
_FORWARDED = ("authorization", "x-request-id")
_CONNECT_TIMEOUT_S = 5.0
_HEALTH_TIMEOUT_S = 5.0
# Idle connections are dropped before a server does: none is used while it closes.
_KEEPALIVE_S = 2.0
# How long a prompt that nobody waits for may still be computed.
_GRACE_S = 1.0


class Unreachable(Exception):
    """No server of a kind can be talked to."""


class Servers:
    """Servers of one kind, each first in its turn."""

    def __init__(self, kind: str, urls: list[str]) -> None:
        """ValueError for none, for what is no URL of a server and for one given
        twice."""
        if not urls:
            raise ValueError(f"no {kind} server is given: pass --{kind} URL")
        self.kind = kind
        self.urls: list[str] = []
        for text in urls:
            url = server_url(text, f"--{kind}")
            if url in self.urls:
                raise ValueError(
                    f"--{kind} names {url} twice: servers take turns, name each once"
                )
            self.urls.append(url)
        self._turn = 0

    def in_turn(self) -> list[str]:
        """All of them, to be tried in this order."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self.urls)
        return self.urls[turn:] + self.urls[:turn]


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The request that computes the same prompt and keeps its KV pages."""
    changed = {k: v for k, v in body.items() if k not in _NOT_FOR_PREFILL}
    changed |= {
        "stream": False,
        "n": 1,
        "max_tokens": 1,
        "min_tokens": 0,
        "kv_transfer_params": dict(_REMOTE_DECODE),
    }
    if "max_completion_tokens" in body:
        changed["max_completion_tokens"] = 1
    return changed


def is_for_decode_alone(body: dict[str, Any]) -> bool:
    """Says whether a decode server needs nothing of a prefill server: it computes every
    token itself where prompt logprobs are wanted, and a prefill server's answer speaks
    of one prompt only."""
    prompt = body.get("prompt")
    is_batch = isinstance(prompt, list) and (
        len(prompt) != 1
        if prompt and isinstance(prompt[0], (str, list))
        else not prompt
    )
    scores = body.get("prompt_logprobs") is not None or (
        body.get("echo") and body.get("logprobs") is not None
    )
    return bool(is_batch or scores or body.get("max_tokens") == 0)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A POST to whichever server it is sent to."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class DisaggProxy:
    """Carries requests between the two kinds of servers."""

    def __init__(
        self, prefill: Servers, decode: Servers, client: httpx.AsyncClient
    ) -> None:
        self.prefill, self.decode, self.client = prefill, decode, client
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, raw: Request, body: dict[str, Any]) -> Response:
        """The answer of a decode server, or the error of either."""
        call = _Call(
            path=raw.url.path,
            headers={k: raw.headers[k] for k in _FORWARDED if k in raw.headers},
            body=body,
        )
        params = None
        if not is_for_decode_alone(body):
            computing = asyncio.ensure_future(self._compute_prompt(call))
            try:
                found = await asyncio.shield(computing)
            except asyncio.CancelledError:
                self._start(self._abandon(computing, call))
                raise
            if isinstance(found, Response):
                return found
            params = found
            call = replace(call, body={**body, "kv_transfer_params": params})
        decoded = None
        try:
            decoded = await self._open(self.decode, call)
            return await _answer_of(decoded, bool(body.get("stream")))
        finally:
            if params and (decoded is None or decoded.status_code != HTTPStatus.OK):
                self._start(self._let_go(params, call))

    async def _compute_prompt(self, call: _Call) -> Response | dict[str, Any] | None:
        """What a prefill server says of the pages of a prompt, or its refusal."""
        computed = await self._open(
            self.prefill, replace(call, body=prefill_body(call.body))
        )
        try:
            text = await computed.aread()
        finally:
            await _close(computed)
        if computed.status_code != HTTPStatus.OK:
            return _copy(computed, text)
        params: dict[str, Any] | None = computed.json().get("kv_transfer_params")
        if params is None:
            logger.warning_once(
                "a prefill server answers without kv_transfer_params: prompts are "
                "computed twice. Start it with --kv-transfer-config"
            )
        return params

    # --- clients that go away ---------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begins what no client waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _abandon(self, computing: asyncio.Future[Any], call: _Call) -> None:
        """Ends the computation of a prompt. One that is about to end anyway is waited
        for: only its answer says which pages are to be let go."""
        await asyncio.wait({computing}, timeout=_GRACE_S)
        computing.cancel()
        (found,) = await asyncio.gather(computing, return_exceptions=True)
        if isinstance(found, dict):
            await self._let_go(found, call)

    async def _let_go(self, params: dict[str, Any], call: _Call) -> None:
        """Has a decode server say that nobody reads some pages: their request was
        refused, or its client has gone."""
        release = {"do_remote_prefill": False, "do_remote_release": True}
        body = {"prompt": [0], "max_tokens": 1, "kv_transfer_params": params | release}
        if call.body.get("model") is not None:
            body["model"] = call.body["model"]
        try:
            response = await self._open(
                self.decode, replace(call, path="/v1/completions", body=body)
            )
            await response.aread()
            await response.aclose()
        except (Unreachable, httpx.TransportError) as error:
            logger.warning("KV pages of a prefill server wait: %s", error)

    # --- servers ----------------------------------------------------------------------

    async def _open(self, servers: Servers, call: _Call) -> httpx.Response:
        """The response of the first server that gives any, its body unread.

        Raises Unreachable when none does.
        """
        problems = []
        for url in servers.in_turn():
            request = self.client.build_request(
                "POST", f"{url}{call.path}", json=call.body, headers=call.headers
            )
            try:
                return await self.client.send(request, stream=True)
            except httpx.TransportError as error:
                problem = f"{url}: {type(error).__name__} {error}"
                logger.warning("%s server %s", servers.kind, problem)
                problems.append(problem)
        raise Unreachable(
            f"no {servers.kind} server can be reached ({'; '.join(problems)})"
        )

    async def models(self, headers: dict[str, str]) -> Response:
        """What a decode server serves."""
        for url in self.decode.in_turn():
            try:
                found = await self.client.get(f"{url}/v1/models", headers=headers)
            except httpx.TransportError:
                continue
            return _copy(found, found.content)
        raise Unreachable("no decode server can be reached")

    async def health(self) -> list[str]:
        """Kinds of which no server is healthy."""
        found: dict[str, list[bool]] = {}

        async def ask(kind: str, url: str) -> None:
            try:
                response = await self.client.get(
                    f"{url}/health", timeout=_HEALTH_TIMEOUT_S
                )
                is_good = response.status_code == HTTPStatus.OK
            except httpx.TransportError:
                is_good = False
            found.setdefault(kind, []).append(is_good)

        async with anyio.create_task_group() as group:
            for servers in (self.prefill, self.decode):
                for url in servers.urls:
                    group.start_soon(ask, servers.kind, url)
        return [kind for kind, states in sorted(found.items()) if not any(states)]


async def _close(response: httpx.Response) -> None:
    """Closes a response even if its client has gone: the server behind then aborts."""
    with anyio.CancelScope(shield=True):
        await response.aclose()


async def _answer_of(decoded: httpx.Response, is_stream: bool) -> Response:
    """The answer as it comes, or when it is whole."""
    if is_stream and decoded.status_code == HTTPStatus.OK:
        return StreamingResponse(_relay(decoded), media_type="text/event-stream")
    try:
        return _copy(decoded, await decoded.aread())
    finally:
        await _close(decoded)


def _copy(response: httpx.Response, text: bytes) -> Response:
    kind = response.headers.get("content-type", "application/json")
    return Response(text, status_code=response.status_code, media_type=kind)


async def _relay(response: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a stream; one that breaks off ends with an error."""
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    except httpx.TransportError as error:
        broken = error_response(
            f"the decode server broke off: {type(error).__name__} {error}",
            HTTPStatus.INTERNAL_SERVER_ERROR,
        )
        yield f"data: {broken.model_dump_json()}\n\ndata: [DONE]\n\n".encode()
    finally:
        await _close(response)


# --- routes ---------------------------------------------------------------------------


@router.post("/v1/completions")
@router.post("/v1/chat/completions")
async def generate(raw: Request) -> Response:
    try:
        body = json.loads(await raw.body())
    except ValueError as error:
        raise ValueError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    response = await until_disconnect(raw, raw.app.state.proxy.answer(raw, body))
    return Response(status_code=499) if response is None else response


@router.get("/v1/models")
async def list_models(raw: Request) -> Response:
    headers = {k: raw.headers[k] for k in _FORWARDED if k in raw.headers}
    return await raw.app.state.proxy.models(headers)


@router.get("/health")
async def health(raw: Request) -> Response:
    """Empty 200 while a server of each kind is healthy, 503 otherwise."""
    missing = await raw.app.state.proxy.health()
    if missing:
        raise Unreachable(f"no {' and no '.join(missing)} server is healthy")
    return Response(status_code=200)


def build_app(prefill: list[str], decode: list[str]) -> FastAPI:
    """The application over servers given by URL. ValueError, naming the option, when
    either is empty or an URL is of no use."""
    kinds = Servers("prefill", prefill), Servers("decode", decode)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=64,
            keepalive_expiry=_KEEPALIVE_S,
        )
        async with httpx.AsyncClient(
            timeout=timeout, limits=limits, trust_env=False
        ) as client:
            app.state.proxy = DisaggProxy(*kinds, client)
            yield

    app = FastAPI(title="vLLM disaggregation proxy", lifespan=lifespan)
    app.include_router(router)
    app.add_middleware(BodySizeMiddleware)
    install_error_handlers(app)

    @app.exception_handler(Unreachable)
    async def on_unreachable(_: Request, error: Unreachable) -> JSONResponse:
        body = error_response(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
        return JSONResponse(body.model_dump(), status_code=body.error.code)

    return app
