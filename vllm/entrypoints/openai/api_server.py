"""The HTTP application: routes, authentication, start and stop."""

import argparse
import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.http_server import HttpServer
from vllm.entrypoints.openai.disconnect import until_disconnect
from vllm.entrypoints.openai.errors import install_error_handlers
from vllm.entrypoints.openai.middleware import (
    ApiKeyMiddleware,
    BodySizeMiddleware,
    LoadMiddleware,
    RequestIdMiddleware,
)
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from vllm.entrypoints.openai.protocol_base import checked_request_id
from vllm.entrypoints.openai.serving import ServingContext
from vllm.entrypoints.openai.serving_chat import ChatServer, encoded_chat
from vllm.entrypoints.openai.serving_completion import CompletionServer
from vllm.entrypoints.openai.start_checks import check_tls
from vllm.exceptions import EngineDeadError, VLLMValidationError
from vllm.logger import init_logger
from vllm.transformers_utils.chat_template import load_chat_template
from vllm.utils.network_utils import listen_on
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.version import __version__

logger = init_logger(__name__)

# For streams that are ended with finish reason "abort" to say so.
_LAST_WORDS_S = 2
router = APIRouter()


def _context(request: Request) -> ServingContext:
    return request.app.state.context


async def _answer(raw: Request, work: Any) -> Response:
    """Runs a request's work; a client that goes away aborts it."""
    result = await until_disconnect(raw, work)
    if result is None:
        return Response(status_code=499)
    if isinstance(result, AsyncIterator):
        return StreamingResponse(result, media_type="text/event-stream")
    return JSONResponse(result.model_dump())


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, raw: Request) -> Response:
    _adopt_request_id(body, raw)
    return await _answer(raw, raw.app.state.completions.create(body))


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, raw: Request) -> Response:
    _adopt_request_id(body, raw)
    return await _answer(raw, raw.app.state.chat.create(body))


def _adopt_request_id(body: Any, raw: Request) -> None:
    """An X-Request-Id header becomes the request's id."""
    if header := raw.headers.get("x-request-id"):
        body.request_id = checked_request_id(header, "X-Request-Id")


@router.get("/v1/models")
async def list_models(raw: Request) -> JSONResponse:
    return JSONResponse(_context(raw).models().model_dump())


@router.get("/v1/models/{name:path}")
async def show_model(name: str, raw: Request) -> JSONResponse:
    context = _context(raw)
    context.check_model(name)
    card = next(card for card in context.models().data if card.id == name)
    return JSONResponse(card.model_dump())


# One route answers all methods, so that 405 can name them; those above it are for the
# schema, where every method needs an id of its own.
@router.get("/health")
@router.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
async def health(raw: Request) -> Response:
    """Empty 200 while the engine lives, 503 afterwards."""
    await _context(raw).engine.check_health()
    return Response(status_code=200)


@router.get("/ping")
@router.post("/ping")
@router.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)
async def ping(raw: Request) -> Response:
    return await health(raw)


@router.get("/version")
async def version() -> JSONResponse:
    return JSONResponse({"version": __version__})


@router.get("/metrics")
async def metrics() -> Response:
    return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)


@router.get("/load")
async def load(raw: Request) -> JSONResponse:
    return JSONResponse({"server_load": raw.app.state.in_flight})


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, raw: Request) -> JSONResponse:
    context = _context(raw)
    context.check_model(body.model)
    answer = await context.threads.run(_tokenized, context, body)
    return JSONResponse(answer.model_dump())


def _tokenized(context: ServingContext, body: TokenizeRequest) -> TokenizeResponse:
    if body.messages is not None:
        ids = encoded_chat(context, body)[1]
    else:
        ids = context.encode(body.prompt or "", body.add_special_tokens is not False)
    strings = None
    if body.return_token_strs:
        strings = context.tokenizer.convert_ids_to_tokens(ids)
    return TokenizeResponse(
        count=len(ids),
        max_model_len=context.max_model_len,
        tokens=ids,
        token_strs=strings,
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, raw: Request) -> JSONResponse:
    context = _context(raw)
    context.check_model(body.model)
    text = await context.threads.run(_detokenized, context, body.tokens)
    return JSONResponse(DetokenizeResponse(prompt=text).model_dump())


def _detokenized(context: ServingContext, tokens: list[int]) -> str:
    vocab = context.vllm_config.model_config.get_vocab_size()
    for token in tokens:
        if not 0 <= token < vocab:
            raise VLLMValidationError(
                f"token id {token} is outside the vocabulary (0 to {vocab - 1})",
                parameter="tokens",
            )
    return context.tokenizer.decode(tokens)


async def reset_prefix_cache(raw: Request) -> Response:
    """Forgets all cached prefixes (development mode)."""
    done = await _context(raw).engine.reset_prefix_cache()
    return Response(status_code=200 if done is not False else 409)


async def server_info(raw: Request) -> JSONResponse:
    """The configuration as text (development mode)."""
    return JSONResponse({"vllm_config": str(_context(raw).vllm_config)})


def build_app(args: argparse.Namespace) -> FastAPI:
    """The application with its routes and middleware; `init_app_state` gives it an
    engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        stats = asyncio.create_task(_log_stats_forever(app))
        yield
        stats.cancel()

    docs = None if args.disable_fastapi_docs else "/docs"
    app = FastAPI(
        title="vLLM API",
        version=__version__,
        docs_url=docs,
        redoc_url=None,
        openapi_url="/openapi.json" if docs else None,
        root_path=args.root_path or "",
        lifespan=lifespan,
    )
    app.state.in_flight = 0
    app.include_router(router)
    if envs.VLLM_SERVER_DEV_MODE:
        app.post("/reset_prefix_cache")(reset_prefix_cache)
        app.get("/server_info")(server_info)
    install_error_handlers(app)
    _install_middleware(app, args)
    return app


def _install_middleware(app: FastAPI, args: argparse.Namespace) -> None:
    """The last one added sees a request first."""
    keys = list(args.api_key or [])
    if not keys and envs.VLLM_API_KEY:
        keys = [envs.VLLM_API_KEY]
    app.add_middleware(BodySizeMiddleware)
    app.add_middleware(LoadMiddleware, state=app.state)
    if keys:
        app.add_middleware(ApiKeyMiddleware, keys=keys)
    if args.enable_request_id_headers:
        app.add_middleware(RequestIdMiddleware)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins,
        allow_credentials=args.allow_credentials,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
    )


async def _log_stats_forever(app: FastAPI) -> None:
    while True:
        await asyncio.sleep(envs.VLLM_LOG_STATS_INTERVAL)
        await app.state.context.engine.do_log_stats()


async def init_app_state(app: FastAPI, engine: AsyncLLM, args: Any) -> None:
    """Connects an application to its engine."""
    config = engine.vllm_config
    context = ServingContext(
        engine=engine,
        vllm_config=config,
        tokenizer=engine.get_tokenizer(),
        chat_template=load_chat_template(args.chat_template),
        trust_request_chat_template=args.trust_request_chat_template,
        return_tokens_as_token_ids=args.return_tokens_as_token_ids,
        enable_prompt_tokens_details=args.enable_prompt_tokens_details,
        enable_force_include_usage=args.enable_force_include_usage,
        default_sampling=config.model_config.get_diff_sampling_param(),
    )
    app.state.context = context
    app.state.completions = CompletionServer(context)
    app.state.chat = ChatServer(context)


async def run_server(args: argparse.Namespace) -> None:
    """Serves until SIGINT or SIGTERM. Raises ValueError for what cannot be served."""
    sock = listen_on(args.host, args.port)
    try:
        load_chat_template(args.chat_template)
        check_tls(args.ssl_keyfile, args.ssl_certfile, args.ssl_ca_certs)
        engine_args = AsyncEngineArgs.from_cli_args(args)
        config = engine_args.create_engine_config()
        app = build_app(args)
        engine = AsyncLLM.from_vllm_config(
            config, disable_log_stats=engine_args.disable_log_stats
        )
        try:
            await init_app_state(app, engine, args)
            await _serve(app, sock, args)
        finally:
            engine.shutdown()
    finally:
        sock.close()


async def _serve(app: FastAPI, sock: socket.socket, args: argparse.Namespace) -> None:
    loop, engine = asyncio.get_running_loop(), app.state.context.engine

    def stop(is_again: bool) -> None:
        if is_again:
            engine.abort_all()
            return
        seconds = args.shutdown_timeout
        logger.info("stopping; running requests have %d s to end", seconds)
        loop.call_later(seconds, engine.abort_all)

    config = uvicorn.Config(
        app,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=args.shutdown_timeout + _LAST_WORDS_S,
    )
    ready = partial(_say_ready, app.state.context, sock, args)
    server = HttpServer(config, ready, stop)
    engine_watch = asyncio.create_task(_stop_when_dead(app, server))
    await server.serve(sockets=[sock])
    engine_watch.cancel()
    if app.state.context.engine.errored:
        raise EngineDeadError("the engine has stopped; its reason is above")


async def _stop_when_dead(app: FastAPI, server: uvicorn.Server) -> None:
    """Ends the server when its engine has died: a supervisor can then restart it."""
    engine = app.state.context.engine
    while not engine.errored:
        await asyncio.sleep(1.0)
    logger.error("%s; the server ends", engine.dead_error)
    await asyncio.sleep(1.0)  # lets waiting clients read their 503
    server.should_exit = True


def _say_ready(context: ServingContext, sock: socket.socket, args: Any) -> None:
    host, port = sock.getsockname()[:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    scheme = "https" if args.ssl_certfile else "http"
    body: dict[str, Any] = {
        "model": context.names[0],
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    if "temperature" not in context.default_sampling:
        body["temperature"] = 0
    key = ' -H "Authorization: Bearer $API_KEY"' if args.api_key else ""
    print(
        f"\nvLLM {__version__} is ready on {scheme}://{shown}:{port}  Try:\n\n"
        f"  curl {scheme}://{shown}:{port}/v1/chat/completions{key} \\\n"
        f"    -H 'Content-Type: application/json' \\\n"
        f"    -d '{json.dumps(body)}'\n",
        flush=True,
    )
