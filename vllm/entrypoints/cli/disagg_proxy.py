"""`vllm disagg-proxy --prefill URL --decode URL`."""

import argparse
import asyncio
from functools import partial

import uvicorn
from uvicorn.config import LOG_LEVELS

from vllm.entrypoints.disagg.proxy import build_app
from vllm.entrypoints.http_server import HttpServer
from vllm.utils.argparse_utils import FlexibleArgumentParser, text
from vllm.utils.network_utils import listen_on

# How long running requests have to end when the proxy is stopped.
_SHUTDOWN_S = 5


def add_arguments(parser: FlexibleArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--prefill",
        nargs="+",
        required=True,
        metavar="URL",
        help="servers that compute prompts, used in turn",
    )
    add(
        "--decode",
        nargs="+",
        required=True,
        metavar="URL",
        help="servers that go on from there, used in turn",
    )
    add(
        "--host",
        type=text,
        default="127.0.0.1",
        help="address to listen on (0.0.0.0: all)",
    )
    add("--port", type=int, default=8000, help="port to listen on (0: any free one)")
    add(
        "--uvicorn-log-level",
        choices=list(LOG_LEVELS),
        default="warning",
        help="log level of the HTTP loop",
    )


def run(args: argparse.Namespace) -> int:
    app = build_app(args.prefill, args.decode)
    sock = listen_on(args.host, args.port)
    try:
        host, port = sock.getsockname()[:2]
        ready = (
            f"The proxy is ready on http://{host}:{port} (prompts go to "
            f"{', '.join(args.prefill)}, what follows to {', '.join(args.decode)})"
        )
        config = uvicorn.Config(
            app,
            log_level=args.uvicorn_log_level,
            access_log=False,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
        server = HttpServer(config, partial(print, ready, flush=True))
        asyncio.run(server.serve(sockets=[sock]))
    finally:
        sock.close()
    return 0
