"""Makes an engine say given tokens, and notes its logits and what its cache stores."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm import LLM, SamplingParams
from vllm.v1.kv_formats import KVScales, by_name

States = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(kw_only=True)
class ForcedRun:
    """What one request over `token_ids` left behind.

    `logits` [T - first, vocab] are those of positions `first` … T - 1, and `states` the
    decoded K and V [T, heads, size] of every layer, as its pages hold them.
    """

    first: int
    num_cached_tokens: int = 0
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    states: States = field(default_factory=list)


def forced_run(
    llm: LLM, token_ids: list[int], prompt_len: int, *, whole_prompt: bool
) -> ForcedRun:
    """Reads `prompt_len` tokens as a prompt and generates the rest of `token_ids`.

    With `whole_prompt` every prompt position's logits are asked for, so the prefix
    cache is not read; otherwise the first logits are those of the last prompt token.
    """
    run = ForcedRun(first=0 if whole_prompt else prompt_len - 1)
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=len(token_ids) - prompt_len + 1,
        prompt_logprobs=0 if whole_prompt else None,
    )
    with _forced(llm, token_ids, prompt_len, run):
        (output,) = llm.generate([token_ids[:prompt_len]], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids)[:-1] == token_ids[prompt_len:]
    assert run.logits.shape[0] == len(token_ids) - run.first
    run.num_cached_tokens = output.num_cached_tokens
    return run


@contextmanager
def _forced(
    llm: LLM, token_ids: list[int], prompt_len: int, run: ForcedRun
) -> Iterator[None]:
    """Inside, logits after the prompt say `token_ids`; the engine's own are noted."""
    (worker,) = llm.collective_rpc(lambda worker: worker)
    runner = worker.model_runner
    prompt_logits, sample = runner._compute_logits, runner._run_sampler
    rows, position = [], run.first

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        return noted(prompt_logits(hidden))

    def run_sampler(logits: torch.Tensor, greedy: Any, step: Any) -> Any:
        return sample(noted(logits), None, step)

    def noted(logits: torch.Tensor) -> torch.Tensor:
        nonlocal position
        rows.append(logits.float().clone())
        position += logits.shape[0]  # of the token that these logits predict
        if position < prompt_len:
            return logits
        if position == len(token_ids):
            run.states = stored_states(worker, len(token_ids))
            return logits
        forced = torch.zeros_like(logits)
        forced[-1, token_ids[position]] = 1.0
        return forced

    runner.prompt_logprobs.compute_logits = compute_logits
    runner._run_sampler, runner.keeps_logits = run_sampler, True
    try:
        yield
    finally:
        runner.prompt_logprobs.compute_logits = prompt_logits
        del runner._run_sampler  # the class's own method shows again
        runner.keeps_logits = False
    run.logits = torch.cat(rows)


def stored_states(worker: Any, num_tokens: int) -> States:
    """Decoded K and V of the one running request, layer by layer, from the pages."""
    runner = worker.model_runner
    (request,) = runner.requests.values()
    layers = worker.vllm_config.compilation_config.static_forward_context
    blocks = {
        name: ids
        for ids, group in zip(
            request.block_ids, runner.kv_cache_config.kv_cache_groups, strict=True
        )
        for name in group.layer_names
    }
    states = []
    for name, layer in layers.items():
        size = runner.kv_cache_config.layer_specs()[name].block_size
        pages = layer.kv_cache
        parts = size // pages.shape[2]  # kernel blocks in a block
        ids = torch.tensor(blocks[name])[:, None] * parts + torch.arange(parts)
        states.append(
            by_name(layer.kv_cache_dtype)
            .resolve(pages.dtype)
            .load(
                pages.view(torch.uint8),
                ids.flatten(),
                num_tokens,
                layer.head_size,
                layer.head_size_v,
                torch.float32,
                KVScales(k=layer._k_scale_float, v=layer._v_scale_float),
            )
        )
    return states
