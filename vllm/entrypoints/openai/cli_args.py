"""Command-line options of the HTTP server; the engine's own come from its arguments."""

import argparse

from uvicorn.config import LOG_LEVELS

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.start_checks import text_list
from vllm.utils.argparse_utils import (
    FlexibleArgumentParser,
    at_least,
    text,
)


def add_server_args(parser: FlexibleArgumentParser) -> None:
    """Adds where to listen, whom to let in, and how answers look."""
    flag = argparse.BooleanOptionalAction
    group = parser.add_argument_group("server")
    add = group.add_argument
    add(
        "--host",
        type=text,
        default="127.0.0.1",
        help="address to listen on (0.0.0.0: all)",
    )
    add("--port", type=int, default=8000, help="port to listen on (0: any free one)")
    add(
        "--api-key",
        nargs="+",
        type=text,
        default=None,
        help="keys that /v1 requests must carry",
    )
    add("--allowed-origins", type=text_list, default=["*"], help="CORS origins, JSON")
    add("--allowed-methods", type=text_list, default=["*"], help="CORS methods, JSON")
    add("--allowed-headers", type=text_list, default=["*"], help="CORS headers, JSON")
    add("--allow-credentials", action=flag, default=False, help="CORS credentials")
    add("--ssl-keyfile", default=None, help="TLS key")
    add("--ssl-certfile", default=None, help="TLS certificate")
    add("--ssl-ca-certs", default=None, help="TLS authorities")
    add(
        "--shutdown-timeout",
        type=at_least(0),
        default=5,
        help="seconds that running requests have to end when the server is stopped",
    )
    add("--root-path", default=None, help="path prefix behind a proxy")
    add("--chat-template", default=None, help="template file, or the template itself")
    add(
        "--trust-request-chat-template",
        action=flag,
        default=False,
        help="take chat templates from requests; one can run for ever",
    )
    add(
        "--return-tokens-as-token-ids",
        action=flag,
        default=False,
        help="show tokens in logprobs as token_id:N",
    )
    add(
        "--enable-prompt-tokens-details",
        action=flag,
        default=False,
        help="report cached tokens in usage",
    )
    add(
        "--enable-force-include-usage",
        action=flag,
        default=False,
        help="end every stream with a usage chunk",
    )
    add(
        "--enable-request-id-headers",
        action=flag,
        default=False,
        help="answer with X-Request-Id",
    )
    add("--disable-fastapi-docs", action=flag, default=False, help="no /docs")
    add(
        "--uvicorn-log-level",
        choices=list(LOG_LEVELS),
        default="warning",
        help="log level of the HTTP loop",
    )
    add(
        "--disable-uvicorn-access-log",
        action=flag,
        default=False,
        help="no line per HTTP request",
    )


def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """Adds the model, the server's options and the engine's."""
    add = parser.add_argument
    model = f"model to serve; {AsyncEngineArgs.model} if none is named"
    add("model_tag", nargs="?", type=text, default=None, help=model)
    add("--model", type=text, default=None, help=model)
    add_server_args(parser)
    return AsyncEngineArgs.add_cli_args(parser)
