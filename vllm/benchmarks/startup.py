"""`vllm bench startup`: seconds from a fresh process to an engine that is ready."""

import argparse
import json
import resource
import subprocess
import sys
import time

from tqdm.auto import tqdm

from vllm.benchmarks.workload import summary
from vllm.utils.argparse_utils import FlexibleArgumentParser, at_least
from vllm.v1.kv_formats.mode import CACHE_DTYPES

_CODE = "import sys; from vllm import LLM; LLM(sys.argv[1], kv_cache_dtype=sys.argv[2])"


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
        start, cpu_start = time.perf_counter(), _cpu_seconds_of_children()
        command = [sys.executable, "-c", _CODE, args.model, args.kv_cache_dtype]
        done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            why = (done.stderr.splitlines() or ["it said nothing"])[-1]
            raise ValueError(f"no engine of {args.model} is ready: {why}")
        seconds.append(time.perf_counter() - start)
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


def _cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
