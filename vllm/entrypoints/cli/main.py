"""The command `vllm`: finds the subcommand and imports only what that one needs."""

import signal
import sys
from collections.abc import Sequence

from vllm.exceptions import EngineDeadError
from vllm.utils.argparse_utils import FlexibleArgumentParser, HelpWithDefaults
from vllm.utils.import_utils import resolve
from vllm.utils.signals import Terminated, signals_as_exceptions
from vllm.version import __version__

# name -> (what it does, where its `add_arguments(parser)` and `run(args)` live)
_COMMANDS = {
    "serve": (
        "serve a model over the OpenAI-compatible HTTP API",
        "vllm.entrypoints.cli.serve",
    ),
    "chat": ("talk to a running server", "vllm.entrypoints.cli.chat"),
    "complete": ("complete texts on a running server", "vllm.entrypoints.cli.complete"),
    "kv-plan": (
        "show what the KV cache of a model costs in each format",
        "vllm.entrypoints.cli.kv_plan",
    ),
    "disagg-proxy": (
        "send prompts to prefill servers and what follows to decode servers",
        "vllm.entrypoints.cli.disagg_proxy",
    ),
    "bench": ("measure speed and accuracy", "vllm.entrypoints.cli.bench"),
    "collect-env": (
        "print versions and hardware for a report",
        "vllm.entrypoints.cli.collect_env",
    ),
}

# A server that is asked to end and ends has done all that was wanted of it.
_SERVERS = ("serve", "disagg-proxy")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status.

    A ValueError is the user's to mend: it is printed as one line, without a traceback.
    So are SIGINT, with status 130, and SIGTERM, with status 0 for a server and 143
    otherwise.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if word in _COMMANDS), None)
    try:
        with signals_as_exceptions():
            return _run(command, words)
    except (ValueError, EngineDeadError) as error:
        status, last_words = 1, f"error: {_one_line(error)}"
    except KeyboardInterrupt:
        status, last_words = 128 + signal.SIGINT, "interrupted"
    except Terminated as error:
        status = 0 if command in _SERVERS else int(str(error))
        last_words = "terminated"
    print(f"vllm {command}: {last_words}", file=sys.stderr)
    return status


def _run(command: str | None, words: list[str]) -> int:
    parser = _parser(command)
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help()
        return 0
    return resolve(f"{_COMMANDS[args.command][1]}:run")(args) or 0


def _parser(command: str | None) -> FlexibleArgumentParser:
    """The parser; only the chosen command's options are loaded."""
    parser = FlexibleArgumentParser(
        prog="vllm", description="Serve language models from packed KV caches."
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, (help_text, module) in _COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=help_text,
            description=help_text,
            formatter_class=HelpWithDefaults,
        )
        if name == command:
            resolve(f"{module}:add_arguments")(sub)
    return parser


def _one_line(error: Exception) -> str:
    """The message of an error; pydantic's, which span lines, without their preamble."""
    details = getattr(error, "errors", None)
    if not callable(details):
        return str(error)
    parts = []
    for item in details():
        where = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        parts.append(f"{where}: {message}" if where else message)
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
