"""The engine's logits over every KV format are those of Hugging Face over that format.

The reference is transformers' SmolLM2 whose K and V pass through `decode(encode(.))`,
with attention of its own. Two float32 programs differ by some 1e-6, which decides the
code of a value that lies halfway between two codes; one such code moves what all later
layers store, and with few bits per element two reference runs that differ by such noise
are as far from each other as from the engine (see the slow test's control). So the
reference attends to what the engine stored, after this was checked, vector by vector:
it is what the reference would have stored itself, except at ties.
"""

from dataclasses import dataclass

import pytest
import torch

from tests.e2e.format_reference import FormatRun
from tests.e2e.teacher_forcing import ForcedRun, forced_run
from tests.smollm2 import MODEL, english_token_ids
from vllm import LLM
from vllm.v1.kv_formats import all_formats, by_name

NAMES = [fmt.name for fmt in all_formats() if not fmt.latent]
# The same bytes may have several names, such as fp8 and fp8_e4m3.
_BY_ID = {by_name(name).resolve(torch.float32).format_id: name for name in NAMES}
DISTINCT = list(_BY_ID.values())
MEAN_KL = 1e-5
LARGEST_DIFFERENCE = 1e-2
# float16 has the most ties: its steps are hardly larger than what counts as equal.
SHARE_OF_TIES = 0.05


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Both sides over the same tokens: `cold` computes all of them, `hit` takes the
    prompt from the prefix cache. Logits of the last `num_decoded` come step by step."""

    token_ids: list[int]
    num_decoded: int
    cold: ForcedRun
    hit: ForcedRun


def run_engine(name: str, num_tokens: int, num_decoded: int) -> Runs:
    token_ids = list(english_token_ids()[:num_tokens])
    prompt_len = num_tokens - num_decoded
    llm = LLM(
        MODEL,
        dtype="float32",
        kv_cache_dtype=name,
        kv_cache_memory_bytes="256MiB",
        max_model_len=num_tokens + 16,
    )
    try:
        cold = forced_run(llm, token_ids, prompt_len, whole_prompt=True)
        hit = forced_run(llm, token_ids, prompt_len, whole_prompt=False)
    finally:
        llm.shutdown()
    assert cold.num_cached_tokens == 0
    assert hit.num_cached_tokens == (prompt_len - 1) // 16 * 16
    return Runs(token_ids=token_ids, num_decoded=num_decoded, cold=cold, hit=hit)


def kl(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """KL [T] of our predictions from theirs, in nats."""
    ours, theirs = ours.log_softmax(-1), theirs.log_softmax(-1)
    return (theirs.exp() * (theirs - ours)).sum(-1).clamp_min(0)


def check(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    mean, largest = kl(ours, theirs).mean().item(), (ours - theirs).abs().max().item()
    print(f"  {what:24} mean KL {mean:.1e}, largest logit difference {largest:.1e}")
    assert mean < MEAN_KL, what
    assert largest < LARGEST_DIFFERENCE, what


def check_runs(name: str, runs: Runs) -> None:
    decoded = runs.num_decoded
    reference = FormatRun(fmt=by_name(name), stored=runs.cold.states)
    logits = reference.logits(runs.token_ids)
    print(f"{name}: {reference.flips} of {reference.num_vectors} vectors at a tie")
    assert reference.not_ties == 0
    assert reference.flips <= SHARE_OF_TIES * reference.num_vectors
    check("prefill", runs.cold.logits[:-decoded], logits[:-decoded])
    check("decode", runs.cold.logits[-decoded:], logits[-decoded:])

    start = runs.hit.num_cached_tokens
    for ours, theirs in zip(runs.hit.states, runs.cold.states, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            assert torch.equal(x[:start], y[:start])
    reference = FormatRun(fmt=by_name(name), stored=runs.hit.states, start=start)
    logits = reference.logits(runs.token_ids)[runs.hit.first - start :]
    assert reference.not_ties == 0
    check("after a prefix-cache hit", runs.hit.logits, logits)


@pytest.mark.parametrize("name", DISTINCT)
def test_logits_equal_the_reference(name: str) -> None:
    check_runs(name, run_engine(name, num_tokens=220, num_decoded=15))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_reference_over_2000_tokens(name: str) -> None:
    runs = run_engine(name, num_tokens=2000, num_decoded=64)
    check_runs(name, runs)
    # The control: how far the reference is from itself after noise of 1e-6, and how far
    # the engine is from a reference that resolves ties its own way.
    own = FormatRun(fmt=by_name(name)).logits(runs.token_ids)
    noisy = FormatRun(fmt=by_name(name), noise=1e-6).logits(runs.token_ids)
    control, found = kl(noisy, own).mean().item(), kl(runs.cold.logits, own).mean()
    print(f"  own ties: mean KL {found:.1e}; the reference from itself {control:.1e}")
    assert found <= max(3 * control, MEAN_KL)
