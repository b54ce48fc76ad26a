"""`vllm bench throughput`: tokens per second of an offline batch."""

import argparse
import json
import time

from vllm.benchmarks.workload import Workload, add_workload_arguments, summary
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def add_arguments(parser: FlexibleArgumentParser) -> None:
    add_workload_arguments(parser, num_prompts=32, input_len=128, output_len=128)
    parser.add_argument("--runs", type=int, default=3, help="counted runs")
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    load = Workload(
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        prefix_len=args.prefix_len,
    )
    llm = LLM(**vars(EngineArgs.from_cli_args(args)))
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=load.output_len)
    prompts = load.prompts(llm.model_config.get_vocab_size())
    seconds = []
    for i in range(args.runs + 1):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate(prompts, params)
        if i:  # the first run warms up
            seconds.append(time.perf_counter() - start)
    median = summary(seconds)["median"]
    figures = {
        "seconds": seconds,
        "requests_per_s": load.num_prompts / median,
        "output_tokens_per_s": load.num_prompts * load.output_len / median,
        "total_tokens_per_s": load.num_prompts
        * (load.input_len + load.output_len)
        / median,
        "kv_cache_dtype": args.kv_cache_dtype,
    }
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:22} {value}")
    return 0
