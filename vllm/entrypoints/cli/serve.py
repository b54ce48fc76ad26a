"""`vllm serve MODEL`."""

import argparse
import asyncio

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.api_server import run_server
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def add_arguments(parser: FlexibleArgumentParser) -> None:
    make_arg_parser(parser)


def run(args: argparse.Namespace) -> int:
    if args.model_tag and args.model and args.model_tag != args.model:
        raise ValueError(
            f"two models given, {args.model_tag!r} and --model {args.model!r}: leave "
            "one out"
        )
    args.model = args.model_tag or args.model or AsyncEngineArgs.model
    asyncio.run(run_server(args))
    return 0
