"""`vllm bench kv-accuracy`: what each KV format does to a model's predictions.

Feeds the same real text to the engine once per format and compares the predictions with
those over a dense cache. The text is read as a prompt, so its K and V pass through the
format exactly as in serving: attention reads stored bytes only.
"""

import argparse
import gc
import importlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tqdm.auto import tqdm

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.llm import LLM
from vllm.inputs import TokensPrompt
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser, at_least
from vllm.utils.mem_constants import MiB_bytes
from vllm.v1.kv_formats import all_formats
from vllm.v1.kv_formats.mode import CACHE_DTYPES

# Real English on every machine: Python's own help topics.
_TEXT_MODULE = "pydoc_data.topics"
_TEXT_TOPICS = ("assignment", "class", "function", "import", "exprlists", "try", "with")
# Rows whose softmax is compared at a time: 128 x 49,152 fp32 is 25 MB.
_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """One format against a dense cache. KL is of the format from dense, in nats."""

    cache_dtype: str
    bytes_per_token: float
    perplexity: float
    mean_kl: float
    max_kl: float
    top1_agreement: float


def english_text() -> str:
    """Some 60,000 characters of English prose about Python."""
    topics = importlib.import_module(_TEXT_MODULE).topics
    return "\n".join(topics[name] for name in _TEXT_TOPICS)


@contextmanager
def recorded_logits(llm: LLM) -> Iterator[list[torch.Tensor]]:
    """Collects, as float32, the logits [T, vocab] of prompt positions whose logprobs
    are asked for and of what is sampled from.

    Only for an engine whose core runs in this process.
    """
    recorded: list[torch.Tensor] = []

    def tap(worker: Any) -> Any:
        runner = worker.model_runner
        inner = runner.prompt_logprobs.compute_logits, runner.sampler
        of_prompt, sampler = inner

        def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
            logits = of_prompt(hidden)
            recorded.append(logits.float().clone())
            return logits

        def sample(logits: torch.Tensor, *args: Any) -> Any:
            recorded.append(logits.float().clone())
            return sampler(logits, *args)

        runner.prompt_logprobs.compute_logits, runner.sampler = compute_logits, sample
        runner.keeps_logits = True
        return runner, inner

    ((runner, inner),) = llm.collective_rpc(tap)
    try:
        yield recorded
    finally:
        runner.prompt_logprobs.compute_logits, runner.sampler = inner
        runner.keeps_logits = False


def prompt_logits(llm: LLM, token_ids: list[int]) -> torch.Tensor:
    """Logits [T, vocab] of a prompt at each of its positions, in its order."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with recorded_logits(llm) as recorded:
        prompt = TokensPrompt(prompt_token_ids=token_ids)
        llm.generate([prompt], params, use_tqdm=False)
    # Prompt positions come chunk by chunk; the last one's logits are the sampler's.
    return torch.cat(recorded)


def compare(
    cache_dtype: str,
    bytes_per_token: float,
    logits: torch.Tensor,
    dense: torch.Tensor,
    token_ids: list[int],
) -> Accuracy:
    """Figures of one format; both logits [T, vocab] are of the same tokens."""
    targets = torch.tensor(token_ids[1:])
    nll, kls, same = 0.0, [], 0
    for start in range(0, len(targets), _ROWS):
        rows = slice(start, min(start + _ROWS, len(targets)))
        ours = logits[rows].log_softmax(-1)
        theirs = dense[rows].log_softmax(-1)
        nll -= ours.gather(1, targets[rows, None]).sum().item()
        kls.append((theirs.exp() * (theirs - ours)).sum(-1))
        same += (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
    kl = torch.cat(kls).clamp_min(0)
    return Accuracy(
        cache_dtype=cache_dtype,
        bytes_per_token=bytes_per_token,
        perplexity=math.exp(nll / len(targets)),
        mean_kl=kl.mean().item(),
        max_kl=kl.max().item(),
        top1_agreement=same / len(targets),
    )


def bytes_per_token(llm: LLM) -> float:
    """Bytes that one token takes in the caches of all layers."""
    (specs,) = llm.collective_rpc("get_kv_cache_spec")
    return sum(spec.page_size_bytes / spec.block_size for spec in specs.values())


def measure(
    engine_args: EngineArgs, num_tokens: int, cache_dtypes: list[str]
) -> list[Accuracy]:
    """Runs the dense cache and then each format over the same tokens."""
    dense, token_ids = None, []
    rows = []
    for name in tqdm(["auto", *cache_dtypes], desc="formats"):
        llm = LLM(**asdict(replace(engine_args, kv_cache_dtype=name)))
        if dense is None:
            text_ids = llm.get_tokenizer().encode(english_text())
            token_ids = text_ids[: min(num_tokens, llm.model_config.max_model_len - 1)]
        logits = prompt_logits(llm, token_ids)
        dense = logits if dense is None else dense
        rows.append(compare(name, bytes_per_token(llm), logits, dense, token_ids))
        llm.shutdown()
        del llm
        gc.collect()
    return rows


def add_arguments(parser: FlexibleArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="model to measure")
    parser.add_argument(
        "--num-tokens", type=at_least(2), default=2000, help="tokens of text"
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=CACHE_DTYPES,
        default=None,
        help="KV formats; default: all",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    engine_args = EngineArgs.from_cli_args(args)
    if engine_args.kv_cache_memory_bytes is None:
        engine_args.kv_cache_memory_bytes = 512 * MiB_bytes
    names = args.formats or [f.name for f in all_formats() if not f.latent]
    rows = measure(engine_args, args.num_tokens, [n for n in names if n != "auto"])
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    print(
        f"{'format':22} {'bytes/token':>12} {'perplexity':>11} {'mean KL':>10} "
        f"{'max KL':>9} {'top-1':>7}"
    )
    for row in rows:
        print(
            f"{row.cache_dtype:22} {row.bytes_per_token:12,.0f} {row.perplexity:11.4f} "
            f"{row.mean_kl:10.2e} {row.max_kl:9.2e} {row.top1_agreement:7.2%}"
        )
    return 0
