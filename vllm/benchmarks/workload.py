"""Synthetic requests of fixed lengths, the engines that run them offline, and the
figures that every benchmark reports."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.llm import LLM
from vllm.inputs import TokensPrompt
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser, at_least
from vllm.utils.mem_constants import MiB_bytes

# Ordinary tokens only: the first ids of most vocabularies are control tokens.
_FIRST_ID = 1000


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`num_prompts` prompts of `input_len` tokens, `prefix_len` of them shared."""

    num_prompts: int
    input_len: int
    output_len: int
    prefix_len: int = 0
    # Memory of the KV cache that the workload is about; None: what was asked for.
    pool_bytes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prefix_len > self.input_len:
            raise ValueError(
                f"--prefix-len {self.prefix_len} is above --input-len "
                f"{self.input_len}: expected a part of the prompt, or all of it"
            )

    def check_fits(self, max_model_len: int) -> None:
        """Raises ValueError where a request is longer than a sequence may be.

        A limit of -1 is not known before the KV cache is.
        """
        longest = self.input_len + self.output_len
        if 0 < max_model_len < longest:
            raise ValueError(
                f"{self}: requests of {longest} tokens are longer than --max-model-len "
                f"{max_model_len}: lower --input-len or --output-len"
            )

    def __str__(self) -> str:
        shared = f", {self.prefix_len} of them shared" if self.prefix_len else ""
        return (
            f"{self.num_prompts} x {self.input_len} tokens in{shared}, "
            f"{self.output_len} out"
        )

    def prompts(self, vocab_size: int) -> list[TokensPrompt]:
        """Random token ids, equal for equal seeds."""
        rng = random.Random(self.seed)
        ids = range(min(_FIRST_ID, vocab_size // 2), vocab_size)
        shared = rng.choices(ids, k=self.prefix_len)
        own = self.input_len - self.prefix_len
        return [
            TokensPrompt(prompt_token_ids=shared + rng.choices(ids, k=own))
            for _ in range(self.num_prompts)
        ]

    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=self.output_len
        )


def offline_engine(args: EngineArgs) -> LLM:
    return LLM(**asdict(args) | {"disable_log_stats": True})


# One letter each: a single stream, a batch, long contexts, prompts only, one prefix.
# `d2` is `d` for models of short contexts; `pool` asks what fits into little memory.
NAMED = {
    "a": Workload(num_prompts=1, input_len=32, output_len=256),
    "b": Workload(num_prompts=32, input_len=128, output_len=128),
    "c": Workload(num_prompts=8, input_len=2048, output_len=128),
    "d": Workload(num_prompts=4, input_len=4096, output_len=1),
    "d2": Workload(num_prompts=2, input_len=2048, output_len=1),
    "e": Workload(num_prompts=32, input_len=1056, output_len=32, prefix_len=1024),
    "pool": Workload(
        num_prompts=64, input_len=896, output_len=128, pool_bytes=128 * MiB_bytes
    ),
}


def add_workload_arguments(
    parser: FlexibleArgumentParser, num_prompts: int, input_len: int, output_len: int
) -> None:
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="model to measure")
    add("--num-prompts", type=at_least(1), default=num_prompts, help="requests")
    add("--input-len", type=at_least(1), default=input_len, help="tokens of a prompt")
    add("--output-len", type=at_least(1), default=output_len, help="tokens to generate")
    add(
        "--prefix-len",
        type=at_least(0),
        default=0,
        help="tokens that all prompts share",
    )
    add("--json", action="store_true", help="print JSON")


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, mean and the 99th percentile, in the unit of the values."""
    if not values:
        return {"median": 0.0, "mean": 0.0, "p99": 0.0}
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "mean": statistics.fmean(ordered),
        "p99": ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))],
    }
