"""`vllm bench kv-transfer`: KV pages to memory, to disk and back, and what that saves.

Two questions: how fast blocks move, against a plain copy of as many bytes; and how long
a prompt takes to its first token when it is computed, and when its blocks come from
host memory or from disk. Every time comes with the tokens, which must be equal, and
with the CPU time of all threads, which other programs disturb less.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from ctypes import memmove
from pathlib import Path
from typing import Any

import torch

from vllm.benchmarks.workload import Workload, summary
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.llm import LLM
from vllm.inputs import TokensPrompt
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser, at_least
from vllm.utils.mem_constants import MiB_bytes

# Enough to leave the caches of a CPU.
_MOST_BYTES = 256 * MiB_bytes
_NUM_TOKENS = 8
_WARM_TOKENS = 512

# Seconds by the clock, and of CPU time.
_Times = tuple[float, float]


def add_arguments(parser: FlexibleArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="model to measure")
    add("--input-len", type=at_least(1), default=4096, help="tokens of a prompt")
    add(
        "--runs", type=at_least(1), default=3, help="prompts, and repetitions of copies"
    )
    add("--folder", default=None, help="where the disk tier is; by default temporary")
    add("--json", action="store_true", help="print JSON")
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    if args.folder is not None and not Path(args.folder).is_dir():
        raise ValueError(f"--folder {args.folder}: expected a folder that exists")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        figures = measure(EngineArgs.from_cli_args(args), args, Path(folder))
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        _print(figures)
    return 0


def _print(figures: dict[str, Any]) -> None:
    print(f"{figures['block_bytes']:,} bytes a block of {figures['block_size']} tokens")
    plain = figures["bytes_per_second"]["memcpy"]
    for name, speed in figures["bytes_per_second"].items():
        print(f"{name:12} {speed / 1e9:6.2f} GB/s  {speed / plain:5.2f} of memcpy")
    for name, seconds in figures["first_token_seconds"].items():
        cpu = figures["first_token_cpu_seconds"][name]["median"]
        print(
            f"first token of {figures['input_len']} tokens, {name:10} "
            f"{1e3 * seconds['median']:8.1f} ms ({1e3 * cpu:.1f} ms of CPU time)"
        )
    if not figures["equal_tokens"]:
        print("the tokens differ: these times mean nothing")


def measure(
    engine: EngineArgs, args: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """All figures: bytes per second, seconds to the first token, and whether the tokens
    were equal wherever the blocks came from."""
    load = Workload(num_prompts=args.runs, input_len=args.input_len, output_len=1)
    llm = _start(engine, args, folder)
    prompts = load.prompts(llm.model_config.get_vocab_size())
    warm_len = min(args.input_len, _WARM_TOKENS)
    warm = Workload(num_prompts=1, input_len=warm_len, output_len=1, seed=1)
    _seconds(llm, warm.prompts(llm.model_config.get_vocab_size())[0])
    times: dict[str, list[_Times]] = {"computed": [], "memory": [], "disk": []}
    for prompt in prompts:
        times["computed"].append(_seconds(llm, prompt))
        _end_transfers(llm)
    computed = [_tokens(llm, prompt) for prompt in prompts]
    for prompt in prompts:
        llm.reset_prefix_cache()
        times["memory"].append(_seconds(llm, prompt, hits=args.input_len - 1))
    from_memory = [_tokens(llm, prompt) for prompt in prompts]
    _end_transfers(llm)
    figures = _copies(llm, args.runs)
    llm.shutdown()

    llm = _start(engine, args, folder)
    _seconds(llm, warm.prompts(llm.model_config.get_vocab_size())[0])
    for prompt in prompts:
        times["disk"].append(_seconds(llm, prompt, hits=args.input_len - 1))
    from_disk = [_tokens(llm, prompt) for prompt in prompts]
    llm.shutdown()
    return {
        **figures,
        "input_len": args.input_len,
        "first_token_seconds": {
            name: summary([wall for wall, _ in found]) for name, found in times.items()
        },
        "first_token_cpu_seconds": {
            name: summary([cpu for _, cpu in found]) for name, found in times.items()
        },
        "equal_tokens": computed == from_memory == from_disk,
    }


def _start(engine: EngineArgs, args: argparse.Namespace, folder: Path) -> LLM:
    """An engine with both tiers; they hold all prompts of the measurement."""
    settings = vars(engine) | {
        "max_model_len": args.input_len + 2 * _NUM_TOKENS,
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "num_cpu_blocks": 2 * (args.runs + 2) * (args.input_len // 16 + 2),
                "disk_path": str(folder),
            },
        },
    }
    return LLM(**settings)


def _core(llm: LLM) -> Any:
    core: Any = llm.llm_engine.engine_core
    return core.engine_core


def _end_transfers(llm: LLM) -> None:
    core = _core(llm)
    while core.has_work():
        core.step()
        time.sleep(0.001)


def _generate(llm: LLM, prompt: TokensPrompt, num_tokens: int) -> Any:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output


def _timed(act: Callable[[], Any]) -> tuple[Any, _Times]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = act()
    return result, (time.perf_counter() - wall, time.process_time() - cpu)


def _seconds(llm: LLM, prompt: TokensPrompt, hits: int = 0) -> _Times:
    """Time to the first token. RuntimeError where less than `hits` tokens, but for a
    block, came from a tier: the time would be another's."""
    output, seconds = _timed(lambda: _generate(llm, prompt, 1))
    block_size = _core(llm).scheduler.block_size
    if (output.num_cached_tokens or 0) <= hits - block_size:
        raise RuntimeError(
            f"{output.num_cached_tokens} of {hits} tokens came from a tier: give the "
            "KV cache more memory (--kv-cache-memory-bytes)"
        )
    return seconds


def _tokens(llm: LLM, prompt: TokensPrompt) -> list[int]:
    return list(_generate(llm, prompt, _NUM_TOKENS).outputs[0].token_ids)


# --- copies ---------------------------------------------------------------------------


def _copies(llm: LLM, runs: int) -> dict[str, Any]:
    """Bytes per second of blocks of the first KV cache group, there and back."""
    core = _core(llm)
    worker = core.model_executor.driver_worker.model_runner.connector.connector.worker
    mover, memory, store = worker.mover, worker.memory, worker.store
    size = mover.block_bytes[0]
    num_blocks = min(mover.num_blocks - 1, worker.num_slots, _MOST_BYTES // size)
    source = torch.ones(num_blocks * size, dtype=torch.uint8)
    target = torch.ones_like(source)
    names = [f"{index:064x}-0" for index in range(num_blocks)]

    def each(act: Callable[[int], Any]) -> Callable[[], None]:
        def acts() -> None:
            for index in range(num_blocks):
                act(index)

        return acts

    # Nothing of the engine is needed any more: its pages may be written.
    ways: dict[str, Callable[[], Any]] = {
        "memcpy": lambda: memmove(target.data_ptr(), source.data_ptr(), source.numel()),
        "save": each(lambda i: mover.read(0, i, memory[i])),
        "load": each(lambda i: mover.write(0, i, memory[i])),
        "disk write": each(lambda i: store.write(names[i], memory[i, :size])),
        "disk read": each(lambda i: store.read(names[i])),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs + 1):
        for name, act in ways.items():
            _, (wall, cpu) = _timed(act)
            # What waits for nothing is measured without what other programs take.
            times[name].append(wall if name.startswith("disk") else cpu)
    num_bytes = num_blocks * size
    return {
        "block_bytes": size,
        "block_size": core.scheduler.block_size,
        "copied_bytes": num_bytes,
        # The first of each touches memory for the first time.
        "bytes_per_second": {
            name: num_bytes / summary(found[1:])["median"]
            for name, found in times.items()
        },
    }
