"""Whole engines with a connector, and how two runs of them differ."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput
from vllm.testing.kv_connector.report import Report
from vllm.testing.kv_connector.scenario import Subject
from vllm.v1.kv_formats import all_formats

NUM_TOKENS = 6
# A latent that is computed again, absorbed where it was expanded, may fall on the next
# code of a packed format, which moved logprobs by up to 7e-4.
LOGPROB_TOLERANCE = 2e-3
_MOST_SECONDS = 20.0
_LENGTHS = (5, 16, 17, 48, 70, 97)
_ALIGNED = {"mamba_cache_mode": "align"}
_EVERY_BLOCK = {"mamba_cache_mode": "all", "mamba_block_size": 16}


def engine_cases() -> list[tuple[str, dict[str, Any]]]:
    """Kind of model and settings of the engine: every format where it fits."""
    dense = [fmt.name for fmt in all_formats() if not fmt.latent]
    latent = [fmt.name for fmt in all_formats() if fmt.latent_capable]
    return [
        *[("full", {"kv_cache_dtype": name}) for name in dense],
        *[("window", {"kv_cache_dtype": n}) for n in ("auto", "fp8_e4m3", "nvfp4")],
        *[("latent", {"kv_cache_dtype": name}) for name in latent],
        *[("states", mode) for mode in (_ALIGNED, _EVERY_BLOCK)],
    ]


def random_prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    """Token ids that every tiny model knows."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 99, (n,), generator=generator).tolist() for n in lengths]


@contextmanager
def engine(folder: str, transfer: Any = None, **settings: Any) -> Iterator[LLM]:
    """An engine in this process, with a connector where `transfer` is given."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_memory_bytes": "8MiB",
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "kv_transfer_config": transfer,
    }
    llm = LLM(folder, **(defaults | settings))
    try:
        yield llm
    finally:
        llm.shutdown()


def generate(
    llm: LLM, prompts: list[list[int]], num_tokens: int = NUM_TOKENS, **params: Any
) -> list[RequestOutput]:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=1, **params
    )
    return llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
    )


def run(
    folder: str,
    prompts: list[list[int]],
    transfer: Any = None,
    num_tokens: int = NUM_TOKENS,
    **settings: Any,
) -> list[RequestOutput]:
    """The outputs of an engine that lives for these prompts only."""
    with engine(folder, transfer, **settings) as llm:
        return generate(llm, prompts, num_tokens)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def cached_of(outputs: list[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens or 0 for output in outputs]


def difference(found: list[RequestOutput], expected: list[RequestOutput]) -> str:
    """How outputs differ, in words: their tokens, or their logprobs by more than
    rounding; empty when they do not."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        mine, theirs = one.outputs[0], other.outputs[0]
        if list(mine.token_ids) != list(theirs.token_ids):
            return (
                f"prompt {number} goes on with {list(mine.token_ids)} "
                f"({mine.finish_reason}), not {list(theirs.token_ids)}"
            )
        for place, (a, b) in enumerate(
            zip(mine.logprobs or (), theirs.logprobs or (), strict=True)
        ):
            if a.keys() != b.keys():
                return f"prompt {number}, token {place}: other tokens are likely"
            gap = max(abs(a[token].logprob - b[token].logprob) for token in a)
            if gap >= LOGPROB_TOLERANCE:
                return f"prompt {number}, token {place}: a logprob is off by {gap:.1e}"
    return ""


def end_transfers(llm: LLM) -> bool:
    """Steps until no transfer is under way; False when that never comes."""
    core: Any = llm.llm_engine.engine_core
    core, deadline = core.engine_core, time.monotonic() + _MOST_SECONDS
    while core.has_work():
        if time.monotonic() > deadline:
            return False
        core.step()
        time.sleep(0.0005)
    return True


def forget_prefixes(llm: LLM) -> bool:
    """Empties the engine's own prefix cache, not the connector's; False when blocks are
    in use, or transfers do not end."""
    return end_transfers(llm) and bool(llm.reset_prefix_cache())


def check_engine(
    model: str, settings: dict[str, Any], subject: Subject, folder: Path
) -> Report:
    """Two engines in turn, each asked twice, against one without a connector."""
    report, prompts = Report(), random_prompts(_LENGTHS)
    if not subject.serves_groups:
        settings = settings | {"disable_hybrid_kv_cache_manager": True}
    alone, num_cached = run(model, prompts, **settings), 0
    for which in ("the first engine", "an engine started later"):
        with engine(model, subject.config(folder), **settings) as llm:
            for when in ("asked first", "asked again"):
                outputs = generate(llm, prompts)
                num_cached += sum(cached_of(outputs))
                if subject.expect != "blocks":
                    different = difference(outputs, alone)
                    if different:
                        report.add("wrong tokens", f"{which}, {when}: {different}")
                if not forget_prefixes(llm):
                    report.add("lost blocks", f"{which}, {when}: blocks are in use")
    if subject.expect not in ("nothing", "peer") and not num_cached:
        report.add("no hit", "no engine had a cached token, the same prompts or not")
    return report
