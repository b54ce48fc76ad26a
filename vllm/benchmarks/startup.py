"""`vllm bench startup`: seconds from a fresh process to an engine that is ready."""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time

from tqdm.auto import tqdm

from vllm.benchmarks.workload import summary
from vllm.utils.argparse_utils import FlexibleArgumentParser, at_least
from vllm.v1.kv_formats.mode import CACHE_DTYPES

_READY = "vllm bench startup: ready"
_CODE = f"""
import sys
from vllm import LLM
llm = LLM(sys.argv[1], kv_cache_dtype=sys.argv[2])
print({_READY!r}, flush=True)
"""


def add_arguments(parser: FlexibleArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="model to load")
    parser.add_argument(
        "--kv-cache-dtype", choices=CACHE_DTYPES, default="auto", help="KV format"
    )
    parser.add_argument("--runs", type=at_least(1), default=5, help="counted runs")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    seconds, cpu_seconds = [], []
    for _ in tqdm(range(args.runs), desc="starts"):
        cpu_start = _cpu_seconds_of_children()
        seconds.append(_seconds_to_ready([args.model, args.kv_cache_dtype]))
        cpu_seconds.append(_cpu_seconds_of_children() - cpu_start)
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    figures = {
        "seconds": summary(seconds),
        "cpu_seconds": summary(cpu_seconds),
        "peak_memory_mib": peak_kib / 1024,
    }
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        print(
            f"start-up: median {figures['seconds']['median']:.2f} s "
            f"({figures['cpu_seconds']['median']:.2f} s of CPU time) over "
            f"{args.runs} processes, peak memory {figures['peak_memory_mib']:.0f} MiB"
        )
    return 0


def _seconds_to_ready(arguments: list[str]) -> float:
    """Until a fresh process says that its engine is ready; waits for its end too."""
    start = time.perf_counter()
    command = [sys.executable, "-c", _CODE, *arguments]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        ready = any(line.strip() == _READY for line in process.stdout)
        seconds = time.perf_counter() - start
        process.communicate()
        if process.returncode or not ready:
            errors.seek(0)
            why = (errors.read().splitlines() or ["it said nothing"])[-1]
            raise ValueError(f"no engine of {arguments[0]} is ready: {why}")
    return seconds


def _cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
