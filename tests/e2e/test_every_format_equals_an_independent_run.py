"""The engine's logits over every KV format are those of Hugging Face over that format.

The reference is transformers' SmolLM2 whose K and V pass through `decode(encode(.))`,
with attention of its own. Two float32 programs differ by some 1e-6, which decides the
code of a value that lies halfway between two codes; one such code moves what all later
layers store, and with few bits per element two reference runs that differ by such noise
are as far from each other as from the engine (see the slow test's control). So the
reference attends to what the engine stored, after this was checked, vector by vector:
it is what the reference would have stored itself, except at ties.
"""

import pytest
import torch

from tests.e2e.format_reference import (
    MEAN_KL,
    FormatRun,
    check_engine,
    kl,
    layer_formats,
)
from tests.e2e.teacher_forcing import ForcedRun
from tests.smollm2 import MODEL, english_token_ids, hf_smollm2
from vllm import LLM
from vllm.v1.kv_formats import KVFormat, all_formats, by_name

NAMES = [fmt.name for fmt in all_formats() if not fmt.latent]
# The same bytes may have several names, such as fp8 and fp8_e4m3.
_BY_ID = {by_name(name).resolve(torch.float32).format_id: name for name in NAMES}
DISTINCT = list(_BY_ID.values())


def formats_of(name: str) -> list[KVFormat]:
    return layer_formats(by_name(name), hf_smollm2().config.num_hidden_layers)


def run_engine(name: str, token_ids: list[int], num_decoded: int) -> ForcedRun:
    print(f"\n{name}: {len(token_ids)} tokens")
    llm = LLM(
        MODEL,
        dtype="float32",
        kv_cache_dtype=name,
        kv_cache_memory_bytes="256MiB",
        max_model_len=len(token_ids) + 16,
    )
    try:
        return check_engine(llm, hf_smollm2(), formats_of(name), token_ids, num_decoded)
    finally:
        llm.shutdown()


@pytest.mark.parametrize("name", DISTINCT)
def test_logits_equal_the_reference(name: str) -> None:
    run_engine(name, list(english_token_ids()[:200]), num_decoded=9)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_reference_over_2000_tokens(name: str) -> None:
    token_ids = list(english_token_ids()[:2000])
    ours = run_engine(name, token_ids, num_decoded=64).logits
    # The control: how far the engine is from a reference that resolves ties its own
    # way, and how far that is from itself after noise of 1e-6.
    first, model, formats = token_ids[:600], hf_smollm2(), formats_of(name)
    own = FormatRun(model=model, formats=formats).logits(first)
    noisy = FormatRun(model=model, formats=formats, noise=1e-6).logits(first)
    found, control = kl(ours[:600], own).mean().item(), kl(noisy, own).mean().item()
    print(f"  own ties: mean KL {found:.1e}; the reference from itself {control:.1e}")
    assert found <= max(3 * control, MEAN_KL)
