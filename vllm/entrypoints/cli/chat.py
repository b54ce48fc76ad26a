"""`vllm chat`: a conversation with a running server."""

import argparse

from vllm.entrypoints.cli.client import Client, add_client_arguments
from vllm.utils.argparse_utils import FlexibleArgumentParser


def add_arguments(parser: FlexibleArgumentParser) -> None:
    add_client_arguments(parser)
    parser.add_argument("--system-prompt", default=None, help="first message")


def run(args: argparse.Namespace) -> int:
    client = Client(args)
    messages = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})
    if args.quick is not None:
        _say(client, messages, args.quick)
        return 0
    print(f"Talking to {client.model}. End with an empty line or Ctrl-D.")
    while True:
        try:
            text = input("> ")
        except EOFError:
            return 0
        if not text.strip():
            return 0
        _say(client, messages, text)


def _say(client: Client, messages: list[dict[str, str]], text: str) -> None:
    """Sends a message and prints the answer as it comes; both join the conversation."""
    messages.append({"role": "user", "content": text})
    answer = ""
    for choice in client.stream("/chat/completions", {"messages": messages}):
        piece = choice["delta"].get("content") or ""
        answer += piece
        print(piece, end="", flush=True)
    print()
    messages.append({"role": "assistant", "content": answer})
