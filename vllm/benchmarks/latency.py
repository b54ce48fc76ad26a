"""`vllm bench latency`: how long one batch takes from start to end."""

import argparse
import json
import time

from tqdm.auto import tqdm

from vllm.benchmarks.workload import Workload, add_workload_arguments, summary
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser, at_least


def add_arguments(parser: FlexibleArgumentParser) -> None:
    add_workload_arguments(parser, num_prompts=8, input_len=32, output_len=128)
    parser.add_argument("--runs", type=at_least(1), default=10, help="counted runs")
    parser.add_argument("--warmup", type=at_least(0), default=2, help="runs before")
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    load = Workload(
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        prefix_len=args.prefix_len,
    )
    engine_args = EngineArgs.from_cli_args(args)
    load.check_fits(engine_args.create_engine_config().model_config.max_model_len)
    llm = LLM(**vars(engine_args))
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=load.output_len)
    prompts = load.prompts(llm.model_config.get_vocab_size())
    seconds = []
    for i in tqdm(range(args.warmup + args.runs), desc="runs"):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        if i >= args.warmup:
            seconds.append(time.perf_counter() - start)
    figures = {"seconds": summary(seconds), "runs": len(seconds)}
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        print(
            f"latency of {load.num_prompts} x ({load.input_len} in, {load.output_len} "
            f"out): median {figures['seconds']['median']:.3f} s, "
            f"p99 {figures['seconds']['p99']:.3f} s over {len(seconds)} runs"
        )
    return 0
