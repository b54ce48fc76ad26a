"""`vllm bench throughput`: tokens per second of offline batches.

Each format gets a fresh process, so that start-up and peak memory are its own. Beside
every speed stands how far its output is from the eager engine's: see `equality`.
"""

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from vllm.benchmarks.chart import bar_chart
from vllm.benchmarks.equality import Recorded, compare, record
from vllm.benchmarks.in_turn import TURN_COLUMNS, in_turn
from vllm.benchmarks.workload import (
    NAMED,
    Workload,
    add_workload_arguments,
    offline_engine,
    summary,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.llm import LLM
from vllm.utils.argparse_utils import FlexibleArgumentParser, at_least
from vllm.v1.kv_formats.mode import CACHE_DTYPES

_COLUMNS = (
    ("workload", "9"),
    ("kv_cache_dtype", "20"),
    ("output_tokens_per_s", "10.1f"),
    ("prompt_tokens_per_s", "10.1f"),
    ("mean_requests_in_flight", "9.1f"),
    ("startup_s", "8.2f"),
    ("peak_memory_mib", "8.0f"),
    ("tokens_equal", "8.2%"),
    ("mean_kl", "9.1e"),
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process measures."""

    engine_args: EngineArgs
    workloads: dict[str, Workload]
    runs: int
    compared_requests: int
    submitted: float  # time.time() when the process was asked for


def add_arguments(parser: FlexibleArgumentParser) -> None:
    add_workload_arguments(parser, num_prompts=32, input_len=128, output_len=128)
    add = parser.add_argument
    named = "; ".join(f"{name}: {load}" for name, load in NAMED.items())
    add(
        "--workload",
        nargs="+",
        choices=list(NAMED),
        default=None,
        help=f"named workloads instead of the lengths above ({named})",
    )
    add(
        "--formats",
        nargs="+",
        choices=CACHE_DTYPES,
        default=None,
        help="KV formats; default: --kv-cache-dtype",
    )
    add("--runs", type=at_least(1), default=3, help="counted runs")
    add(
        "--in-turn",
        action="store_true",
        help="keep the engines of all formats up and let them take turns, which "
        "compares speeds on a machine whose own drifts; nothing else is measured",
    )
    add(
        "--compare",
        type=at_least(0),
        default=2,
        help="requests whose output is compared with the eager engine's; 0: none",
    )
    add("--chart", metavar="FILE", default=None, help="write the speeds as an SVG")
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    loads, engines = _workloads(args), _engines(args)
    if args.in_turn and len(pools := _by_pool(loads)) > 1:
        raise ValueError(
            f"--in-turn --workload {' '.join(loads)}: expected workloads that share a "
            f"pool, such as {' '.join(pools[0])}"
        )
    if args.in_turn and args.chart:
        raise ValueError(f"--chart {args.chart}: not drawn of --in-turn; leave one out")
    for engine_args in engines:
        config = engine_args.create_engine_config()
        for load in loads.values():
            load.check_fits(config.model_config.max_model_len)
    if args.chart and not Path(args.chart).absolute().parent.is_dir():
        raise ValueError(f"--chart {args.chart}: expected a file in a folder there is")
    if args.in_turn:
        return _run_in_turn(args, engines, loads)
    rows = []
    for engine_args in tqdm(engines, desc="formats", disable=len(engines) == 1):
        for workloads in _by_pool(loads):
            rows += in_fresh_process(
                Job(
                    engine_args=engine_args,
                    workloads=workloads,
                    runs=args.runs,
                    compared_requests=args.compare,
                    submitted=time.time(),
                )
            )
    if args.chart:
        Path(args.chart).write_text(chart_of(rows), encoding="utf-8")
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows)
    return 0


def _run_in_turn(
    args: argparse.Namespace, engines: Sequence[EngineArgs], loads: dict[str, Workload]
) -> int:
    sized = [with_pool_of(engine_args, loads) for engine_args in engines]
    rows = in_turn(sized, loads, args.runs)
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows, TURN_COLUMNS)
    return 0


def chart_of(rows: Sequence[dict[str, Any]]) -> str:
    """Tokens per second by workload and format: of outputs, or of prompts where a
    workload has one output token each."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        # One token a request: what is measured is the prompts.
        only_prompts = row["output_tokens_per_s"] == row["requests_per_s"]
        kind = "prompt" if only_prompts else "output"
        bars = groups.setdefault(f"{row['workload']}: {kind} tokens/s", {})
        bars[row["kv_cache_dtype"]] = row[f"{kind}_tokens_per_s"]
    return bar_chart("vllm bench throughput", groups)


def _engines(args: argparse.Namespace) -> list[EngineArgs]:
    """An engine for each format."""
    engine_args = EngineArgs.from_cli_args(args)
    formats = args.formats or [args.kv_cache_dtype]
    return [replace(engine_args, kv_cache_dtype=name) for name in formats]


def _workloads(args: argparse.Namespace) -> dict[str, Workload]:
    if args.workload:
        return {name: NAMED[name] for name in args.workload}
    given = Workload(
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        prefix_len=args.prefix_len,
    )
    return {"given": given}


def _by_pool(workloads: dict[str, Workload]) -> list[dict[str, Workload]]:
    """Workloads that can share an engine: those of one pool size."""
    groups: dict[int | None, dict[str, Workload]] = {}
    for name, load in workloads.items():
        groups.setdefault(load.pool_bytes, {})[name] = load
    return list(groups.values())


def in_fresh_process(job: Job) -> list[dict[str, Any]]:
    """`measure` in a process that has run nothing before."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(measure, job).result()


def with_pool_of(args: EngineArgs, workloads: dict[str, Workload]) -> EngineArgs:
    """Engine arguments with the pool that all these workloads ask for."""
    loads = workloads.values()
    pool_bytes = next(iter(loads)).pool_bytes
    if pool_bytes is None:
        return args
    longest = max(load.input_len + load.output_len for load in loads)
    return replace(
        args,
        kv_cache_memory_bytes=pool_bytes,
        # A pool need not hold a request of the model's own length.
        max_model_len=args.max_model_len or longest,
    )


def measure(job: Job) -> list[dict[str, Any]]:
    """Figures of each workload on one engine; then on an eager one, which compares."""
    args = with_pool_of(job.engine_args, job.workloads)
    llm = offline_engine(args)
    startup = time.time() - job.submitted
    rows, recorded = [], []
    for name, load in job.workloads.items():
        rows.append({"workload": name, **_measure_one(llm, load, job.runs)})
        if job.compared_requests:
            params = load.params()
            prompts = load.prompts(llm.model_config.get_vocab_size())
            recorded.append(record(llm, prompts, params, job.compared_requests))
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    pool_mib = _pool_bytes(llm) / (1 << 20)
    for row in rows:
        row |= {
            "kv_cache_dtype": args.kv_cache_dtype,
            "dtype": str(llm.model_config.dtype).removeprefix("torch."),
            "startup_s": startup,
            "peak_memory_mib": peak_mib,
            "pool_mib": pool_mib,
        }
    llm.shutdown()
    del llm
    _compare(replace(args, enforce_eager=True), rows, recorded)
    return rows


def _measure_one(llm: LLM, load: Workload, runs: int) -> dict[str, Any]:
    """Speeds are medians over the counted runs; each begins with an empty prefix
    cache."""
    prompts = load.prompts(llm.model_config.get_vocab_size())
    seconds, cpu_seconds, mean_in_flight, most_in_flight = [], [], [], 0
    for i in tqdm(range(runs + 1), desc=str(load), leave=False):
        llm.reset_prefix_cache()
        with steps_of(llm) as steps:
            start, cpu_start = time.perf_counter(), time.process_time()
            llm.generate(prompts, load.params(), use_tqdm=False)
            taken, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        if i or not runs:  # the first run warms up
            seconds.append(taken)
            cpu_seconds.append(cpu)
            mean_in_flight.append(sum(s.requests * s.seconds for s in steps) / taken)
            most_in_flight = max(most_in_flight, *(s.requests for s in steps))
    median = summary(seconds)["median"]
    num_prompt_tokens = load.num_prompts * load.input_len
    num_output_tokens = load.num_prompts * load.output_len
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "requests_per_s": load.num_prompts / median,
        "output_tokens_per_s": num_output_tokens / median,
        "prompt_tokens_per_s": num_prompt_tokens / median,
        "total_tokens_per_s": (num_prompt_tokens + num_output_tokens) / median,
        "mean_requests_in_flight": summary(mean_in_flight)["median"],
        "max_requests_in_flight": most_in_flight,
    }


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the worker."""

    requests: int
    seconds: float


@contextmanager
def steps_of(llm: LLM) -> Iterator[list[Step]]:
    """Every step that the worker computes inside. Only for an engine whose core runs
    in this process."""
    steps: list[Step] = []

    def tap(worker: Any) -> Any:
        runner = worker.model_runner
        inner = runner.execute_model

        def execute_model(scheduled: Any) -> Any:
            start = time.perf_counter()
            output = inner(scheduled)
            steps.append(
                Step(
                    requests=len(scheduled.num_scheduled_tokens),
                    seconds=time.perf_counter() - start,
                )
            )
            return output

        runner.execute_model = execute_model
        return runner

    (runner,) = llm.collective_rpc(tap)
    try:
        yield steps
    finally:
        del runner.execute_model  # the class's own method shows again


def _pool_bytes(llm: LLM) -> int:
    (config,) = llm.collective_rpc(lambda worker: worker.model_runner.kv_cache_config)
    return sum(tensor.size for tensor in config.kv_cache_tensors)


def _compare(
    args: EngineArgs,
    rows: Sequence[dict[str, Any]],
    recorded: Sequence[Sequence[Recorded]],
) -> None:
    """Adds to each row how its output differs from an eager engine's."""
    if not recorded:
        return
    llm = offline_engine(args)
    for row, requests in zip(rows, recorded, strict=True):
        row |= asdict(compare(llm, requests))
    llm.shutdown()


def _print_table(
    rows: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str]] = _COLUMNS
) -> None:
    widths = [
        max(len(name), int(form.split(".")[0])) if "." in form else int(form)
        for name, form in columns
    ]
    print("  ".join(f"{n:>{w}}" for (n, _), w in zip(columns, widths, strict=True)))
    for row in rows:
        cells = [
            format(row[name], form) if name in row else "-" for name, form in columns
        ]
        print("  ".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))
