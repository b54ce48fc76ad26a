"""Whether a fast engine says what the plain one says.

Records the logits that a measured engine samples from, has an eager engine read the
same tokens as a prompt, and compares the two at every generated position. The eager
engine stores its cache in the same format, so what differs is the way of computing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vllm.entrypoints.llm import LLM
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One request of a run: its tokens, and logits [O, V] of every output token."""

    prompt_token_ids: list[int]
    output_token_ids: list[int]
    logits: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Equality:
    """`tokens_equal`: share of output tokens that the eager engine would have chosen
    after the same predecessors (1.0: both generate the same text). KL in nats, of the
    measured distribution from the eager one."""

    num_tokens: int
    tokens_equal: float
    mean_kl: float
    max_kl: float


@contextmanager
def recorded_samples(llm: LLM, num_requests: int) -> Iterator[dict[str, list[Any]]]:
    """By request id, the logits [V] of each sampled token, for the first requests that
    come. Only for an engine whose core runs in this process."""
    rows: dict[str, list[Any]] = {}

    def tap(worker: Any) -> Any:
        runner = worker.model_runner
        inner = runner.sampler

        def sampler(logits: torch.Tensor, *args: Any) -> Any:
            for row, req_id in enumerate(runner.input_batch.req_ids):
                if req_id in rows or len(rows) < num_requests:
                    rows.setdefault(req_id, []).append(logits[row].clone())
            return inner(logits, *args)

        runner.sampler, runner.keeps_logits = sampler, True
        return runner, inner

    ((runner, inner),) = llm.collective_rpc(tap)
    try:
        yield rows
    finally:
        runner.sampler, runner.keeps_logits = inner, False


def record(
    llm: LLM, prompts: Sequence[TokensPrompt], params: SamplingParams, num_requests: int
) -> list[Recorded]:
    """Runs all prompts and keeps the first `num_requests` of them.

    RuntimeError where these get other tokens without anybody looking at the logits.
    """
    llm.reset_prefix_cache()
    with recorded_samples(llm, num_requests) as rows:
        outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=False)
    found = []
    for output in outputs:
        if output.request_id in rows:
            token_ids = list(output.outputs[0].token_ids)
            # A prompt computed in chunks is sampled from at every chunk; the last
            # rows are those of its tokens.
            logits = torch.stack(rows[output.request_id][-len(token_ids) :])
            found.append(
                Recorded(
                    prompt_token_ids=list(output.prompt_token_ids or ()),
                    output_token_ids=token_ids,
                    logits=logits,
                )
            )
    _check_unwatched(llm, found, params)
    return found


def _check_unwatched(
    llm: LLM, recorded: Sequence[Recorded], params: SamplingParams
) -> None:
    """A greedy engine that needs no logits may not compute them."""
    prompts = [TokensPrompt(prompt_token_ids=r.prompt_token_ids) for r in recorded]
    llm.reset_prefix_cache()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, request in zip(outputs, recorded, strict=True):
        tokens = list(output.outputs[0].token_ids)
        if tokens != request.output_token_ids:
            raise RuntimeError(
                f"without logits the engine chose the tokens {tokens}, with them "
                f"{request.output_token_ids}: expected the same"
            )


def logits_after(llm: LLM, token_ids: list[int], first: int) -> torch.Tensor:
    """Logits [T - first, V] of a prompt's positions from `first` on."""
    hidden: list[torch.Tensor] = []
    llm.reset_prefix_cache()

    def read(model: Any) -> torch.Tensor:
        hook = model.register_forward_hook(lambda _m, _args, out: hidden.append(out))
        try:
            prompt = TokensPrompt(prompt_token_ids=token_ids)
            params = SamplingParams(temperature=0, max_tokens=1)
            llm.generate([prompt], params, use_tqdm=False)
        finally:
            hook.remove()
        with torch.inference_mode():
            return model.compute_logits(torch.cat(hidden)[first:])

    (logits,) = llm.apply_model(read)
    return logits


def compare(eager: LLM, recorded: Sequence[Recorded]) -> Equality:
    """Figures over all recorded tokens. `eager` runs with enforce_eager."""
    equal, kls = 0, []
    for request in recorded:
        tokens = request.prompt_token_ids + request.output_token_ids[:-1]
        theirs = logits_after(eager, tokens, len(request.prompt_token_ids) - 1)
        chosen = torch.tensor(request.output_token_ids)
        equal += int((theirs.float().argmax(-1) == chosen).sum())
        kls.append(divergence(theirs, request.logits))
    kl = torch.cat(kls)
    return Equality(
        num_tokens=len(kl),
        tokens_equal=equal / len(kl),
        mean_kl=kl.mean().item(),
        max_kl=kl.max().item(),
    )


def divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL of `other` from `reference`, logits [T, V] both, as float32 [T]."""
    ours = reference.float().log_softmax(-1)
    theirs = other.float().log_softmax(-1)
    return (ours.exp() * (ours - theirs)).sum(-1).clamp_min(0)
