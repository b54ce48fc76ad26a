"""`vllm complete`: continues texts on a running server."""

import argparse

from vllm.entrypoints.cli.client import Client, add_client_arguments
from vllm.utils.argparse_utils import FlexibleArgumentParser, at_least


def add_arguments(parser: FlexibleArgumentParser) -> None:
    add_client_arguments(parser)
    parser.add_argument(
        "--max-tokens", type=at_least(1), default=64, help="tokens to add"
    )


def run(args: argparse.Namespace) -> int:
    client = Client(args)
    if args.quick is not None:
        _complete(client, args.quick, args.max_tokens)
        return 0
    while True:
        try:
            text = input("> ")
        except EOFError:
            return 0
        if not text:
            return 0
        _complete(client, text, args.max_tokens)


def _complete(client: Client, prompt: str, max_tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens}
    for choice in client.stream("/completions", body):
        print(choice["text"], end="", flush=True)
    print()
