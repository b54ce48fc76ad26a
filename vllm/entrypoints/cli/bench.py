"""`vllm bench …`: one subcommand per measurement of `vllm.benchmarks`."""

import argparse

from vllm.utils.argparse_utils import FlexibleArgumentParser, HelpWithDefaults
from vllm.utils.import_utils import resolve

# name -> (what it measures, the module with its `add_arguments` and `run`)
_BENCHMARKS = {
    "throughput": ("tokens per second, offline", "vllm.benchmarks.throughput"),
    "latency": ("time of one batch", "vllm.benchmarks.latency"),
    "step": ("a decode step, planned and eager", "vllm.benchmarks.step"),
    "serve": ("a running server under load", "vllm.benchmarks.serve"),
    "attention": ("attention kernels per format", "vllm.benchmarks.attention"),
    "kv-accuracy": ("what formats do to predictions", "vllm.benchmarks.kv_accuracy"),
    "kv-core": ("blocks, hashes and scheduling, CPU time", "vllm.benchmarks.kv_core"),
    "kv-transfer": (
        "KV blocks to memory, disk and back",
        "vllm.benchmarks.kv_transfer",
    ),
    "startup": ("time until an engine is ready", "vllm.benchmarks.startup"),
}


def add_arguments(parser: FlexibleArgumentParser) -> None:
    commands = parser.add_subparsers(
        dest="benchmark", metavar="benchmark", required=True
    )
    for name, (help_text, module) in _BENCHMARKS.items():
        sub = commands.add_parser(
            name,
            help=help_text,
            description=help_text,
            formatter_class=HelpWithDefaults,
        )
        resolve(f"{module}:add_arguments")(sub)


def run(args: argparse.Namespace) -> int:
    return resolve(f"{_BENCHMARKS[args.benchmark][1]}:run")(args)
