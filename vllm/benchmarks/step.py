"""`vllm bench step`: one decode step, planned and eager, beside a read of the weights.

Every step of a running batch is computed both ways over the same cache, so the figures
are paired; logits are compared as well. Time of sampling and scheduling is left out.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from vllm.benchmarks.workload import Workload, summary
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser, at_least
from vllm.utils.huge_pages import HugePages
from vllm.v1.attention.ops import cpu_kernels

Times = dict[str, list[tuple[float, float]]]


def add_arguments(parser: FlexibleArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="model to measure")
    add(
        "--batches", type=at_least(1), nargs="+", default=[1, 8, 32], help="batch sizes"
    )
    add(
        "--context",
        type=at_least(1),
        default=256,
        help="tokens in the cache of a request",
    )
    add("--steps", type=at_least(1), default=32, help="steps that are measured")
    add("--json", action="store_true", help="print JSON")
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    # The measured steps have `context` tokens in the middle of them.
    input_len = args.context - args.steps // 2
    if input_len < 1:
        raise ValueError(
            f"--context {args.context} is too short for --steps {args.steps}: expected "
            f"at least {args.steps // 2 + 1}, or fewer steps"
        )
    engine_args = EngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config()
    most = config.scheduler_config.max_num_seqs
    if max(args.batches) > most:
        raise ValueError(
            f"--batches {max(args.batches)}: expected at most --max-num-seqs {most}"
        )
    loads = [
        Workload(num_prompts=batch, input_len=input_len, output_len=args.steps + 1)
        for batch in args.batches
    ]
    for load in loads:
        load.check_fits(config.model_config.max_model_len)
    llm = LLM(**vars(engine_args))
    (worker,) = llm.collective_rpc(lambda worker: worker)
    runner = worker.model_runner
    weights = torch.zeros(_weight_bytes(runner.model), dtype=torch.uint8)
    found = []
    for load in loads:
        figures = _measure(llm, runner, load, load.num_prompts, weights)
        found.append({"batch": load.num_prompts, "context": args.context, **figures})
        if not args.json:
            print(_line(found[-1]), flush=True)
    if args.json:
        threads, size = torch.get_num_threads(), weights.numel()
        print(json.dumps({"threads": threads, "weights": size, "steps": found}))
    return 0


def _weight_bytes(model: torch.nn.Module) -> int:
    """Of all linear layers and experts, each counted once, as a step reads them."""
    sizes = {}
    for module in model.modules():
        packed = getattr(module, "packed", None)
        if packed is not None and hasattr(packed, "data"):
            sizes[packed.data.data_ptr()] = packed.data.nbytes
    return max(sum(sizes.values()), 1 << 20)


def _measure(
    llm: LLM, runner: Any, load: Workload, batch: int, weights: torch.Tensor
) -> dict[str, Any]:
    """Medians by way of computing, and the largest relative difference of logits."""
    times: Times = {"planned": [], "eager": [], "read": []}
    errors: list[float] = []
    inner = runner._run_model
    copy = HugePages(cpu_kernels.advise_huge_pages).empty(weights.shape, weights.dtype)
    copy.copy_(weights)

    def both(step: Any) -> Any:
        if step.num_tokens != batch or step.num_reqs != batch:
            return inner(step)
        last = torch.from_numpy(step.last_tokens)

        def eager() -> torch.Tensor:
            return runner._compute_logits(
                runner.model(step.input_ids, step.positions)[last]
            )

        expected = _timed(times["eager"], eager)
        _timed(times["read"], lambda: cpu_kernels.read_all(copy))
        if runner.plan is None:
            return inner(step)
        found = _timed(times["planned"], lambda: inner(step))
        runner.keeps_logits = True
        logits = inner(step)[1].logits.float()
        runner.keeps_logits = False
        error = (logits - expected.float()).abs().max()
        errors.append(float(error / expected.float().abs().max()))
        return found

    runner._run_model = both
    try:
        params = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=load.output_len
        )
        llm.reset_prefix_cache()
        llm.generate(
            load.prompts(llm.model_config.get_vocab_size()), params, use_tqdm=False
        )
    finally:
        del runner._run_model
    figures: dict[str, Any] = {"difference": max(errors, default=None)}
    for way, seen in times.items():
        figures[f"{way}_s"] = summary([wall for wall, _ in seen])["median"]
        figures[f"{way}_cpu_s"] = summary([cpu for _, cpu in seen])["median"]
    return figures


def _timed(into: list[tuple[float, float]], run: Callable[[], Any]) -> Any:
    """Runs it; notes wall time and the process's CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    into.append((time.perf_counter() - wall, time.process_time() - cpu))
    return result


def _line(figures: dict[str, Any]) -> str:
    ways = ", ".join(
        f"{way} {figures[f'{way}_s'] * 1e3:.2f} ({figures[f'{way}_cpu_s'] * 1e3:.2f})"
        for way in ("planned", "eager", "read")
    )
    difference = figures["difference"]
    equal = "no plan" if difference is None else f"logits differ by {difference:.1e}"
    return (
        f"batch {figures['batch']}, context {figures['context']}: wall (CPU) ms "
        f"a step: {ways}; {equal}"
    )
