"""`vllm bench throughput --in-turn`: formats compared where the machine's speed drifts.

Every format has a process of its own; all of them stay up and run one after another,
forwards in one round and backwards in the next. A ratio is taken between neighbours in
time, and the median of a format's ratios is what it is worth beside the first one.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

from tqdm.auto import tqdm

from vllm.benchmarks.workload import Workload, offline_engine, summary
from vllm.engine.arg_utils import EngineArgs

TURN_COLUMNS = (
    ("workload", "9"),
    ("kv_cache_dtype", "20"),
    ("output_tokens_per_s", "10.1f"),
    ("prompt_tokens_per_s", "10.1f"),
    ("times_first", "9.3f"),
)


def in_turn(
    engines: Sequence[EngineArgs],
    workloads: dict[str, Workload],
    rounds: int,
) -> list[dict[str, Any]]:
    """A row per workload and engine: seconds of every round, medians of speeds, and of
    how many times as fast as the first engine it is."""
    rows = []
    with ExitStack() as up:
        runs = [up.enter_context(_process(args)) for args in engines]
        for name, load in tqdm(workloads.items(), desc="workloads"):
            seconds = _rounds_of(runs, load, rounds)
            for args, taken in zip(engines, seconds, strict=True):
                row = {"workload": name, "kv_cache_dtype": args.kv_cache_dtype}
                rows.append(row | _speeds(load, taken, seconds[0]))
    return rows


def _rounds_of(
    runs: Sequence[Callable[[Workload], float]], load: Workload, rounds: int
) -> list[list[float]]:
    """Seconds by engine and round, after a round that warms up."""
    seconds: list[list[float]] = [[] for _ in runs]
    for i in tqdm(range(rounds + 1), desc=str(load), leave=False):
        order = range(len(runs)) if i % 2 else reversed(range(len(runs)))
        for engine in order:
            taken = runs[engine](load)
            if i:
                seconds[engine].append(taken)
    return seconds


def _speeds(
    load: Workload, seconds: Sequence[float], first: Sequence[float]
) -> dict[str, Any]:
    median = summary(seconds)["median"]
    ratios = [a / b for a, b in zip(first, seconds, strict=True)]
    return {
        "seconds": list(seconds),
        "output_tokens_per_s": load.num_prompts * load.output_len / median,
        "prompt_tokens_per_s": load.num_prompts * load.input_len / median,
        "times_first": summary(ratios)["median"],
    }


@contextmanager
def _process(args: EngineArgs) -> Iterator[Callable[[Workload], float]]:
    """What runs a workload on an engine that stays up inside, and says how long it
    took."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_run_what_is_asked, args=(theirs, args), daemon=True
    )
    process.start()
    theirs.close()

    def answer() -> float:
        try:
            seconds: float = ours.recv()
        except EOFError:
            raise RuntimeError(
                f"the engine of --kv-cache-dtype {args.kv_cache_dtype} ended; its own "
                "message stands above"
            ) from None
        return seconds

    def run(load: Workload) -> float:
        ours.send(load)
        return answer()

    try:
        answer()  # it is ready
        yield run
    finally:
        ours.close()
        process.join()


def _run_what_is_asked(asked: Connection, args: EngineArgs) -> None:
    llm = offline_engine(args)
    asked.send(0.0)
    while True:
        try:
            load = asked.recv()
        except EOFError:
            break
        prompts = load.prompts(llm.model_config.get_vocab_size())
        llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate(prompts, load.params(), use_tqdm=False)
        asked.send(time.perf_counter() - start)
    llm.shutdown()
