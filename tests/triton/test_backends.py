"""The Triton backends over whole batches: what they store is what they attend to, and
an engine on them gives the tokens of the reference."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from tests.e2e.tiny import SIZES, engine, greedy, prompts_of, save_tiny, vocabulary
from tests.model_executor.deepseek import deepseek_model
from tests.model_executor.families import saved
from tests.triton.attention_cases import DEVICE
from tests.triton.host_backend import (
    HostTriton,
    HostTritonMLA,
    HostTurboQuant,
    registered,
)
from tests.v1.attention.paged_batch import Case, PagedBatch
from tests.v1.worker.test_decode_graphs import WORKER, runner_of
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.kv_formats import KVScales, by_name

on_host = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU runs the kernels here")
BACKENDS = [TritonAttentionBackend, TurboQuantAttentionBackend]
CLAIMS = [
    (backend, name)
    for backend in BACKENDS
    for name in backend.supported_kv_cache_dtypes
]
MIXED = [(1, 40), (5, 5), (1, 1), (9, 33)]
# Of the largest output. A stored norm may round to the neighbouring float16.
TOLERANCE = 1e-5
NORM_TOLERANCE = 3e-3


@on_host
@pytest.mark.parametrize(("backend", "name"), CLAIMS)
def test_what_is_stored_is_attended_to(
    backend: type[AttentionBackend], name: str
) -> None:
    batch = PagedBatch(Case(MIXED, name, scales=KVScales(k=0.75, v=1.25)), backend)
    out, expected = batch.run().double(), batch.expected().double()
    has_norm = by_name(name).mode.is_turboquant
    error = (out - expected).abs().max() / expected.abs().max()
    assert error <= (NORM_TOLERANCE if has_norm else TOLERANCE)


@on_host
@pytest.mark.parametrize("causal", [True, False])
def test_everything_a_layer_may_ask_for_reaches_the_kernel(causal: bool) -> None:
    case = Case(
        MIXED,
        "int8_per_token_head",
        head_size=48,
        sliding_window=9,
        soft_cap=3.0,
        sinks=True,
        causal=causal,
    )
    batch = PagedBatch(case, TritonAttentionBackend)
    out, expected = batch.run().double(), batch.expected()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "backend",
    [*BACKENDS, TritonMLABackend, FlashMLASparseBackend],
    ids=lambda backend: backend.get_name(),
)
def test_facts_are_those_of_the_kernels(backend: type[AttentionBackend]) -> None:
    assert backend.supports_compute_capability(DeviceCapability(8, 0))
    assert not backend.supports_compute_capability(DeviceCapability(7, 5))
    assert backend.unavailable_reason() is None
    if not backend.is_mla():
        assert backend.supports_head_size(512) and not backend.supports_head_size(576)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"attn_type": "encoder_only"}, "expected decoder"),
        ({"kv_cache_dtype": "nvfp4"}, "nvfp4 has no Triton attention kernel"),
        ({"sinks": torch.zeros(3)}, "one logit for each of 2 heads"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_kernels_do_not_do_is_refused(asked: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TritonAttentionBackend.get_impl_cls()(2, 64, 0.125, **asked)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    sizes = SIZES | {"vocab_size": vocabulary(), "num_hidden_layers": 2}
    save_tiny(LlamaConfig(**sizes), folder)
    return folder


@on_host
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (HostTriton, "auto"),
        (HostTriton, "int4_per_token_head"),
        (HostTurboQuant, "turboquant_3bit_nc"),
    ],
)
def test_an_engine_gives_the_tokens_of_the_reference(
    llama: Path, backend: type[AttentionBackend], name: str
) -> None:
    """A prompt in two chunks beside another, decode, then a hit of the prefix cache."""
    prompts = prompts_of([21, 34])
    how = {
        "kv_cache_dtype": name,
        "max_num_batched_tokens": 32,
        "kv_cache_dtype_skip_layers": ["none"],
    }
    tokens = []
    with registered(backend) as custom:
        for asked in ("REFERENCE", custom):
            with engine(llama, attention_backend=asked, **how) as llm:
                first = greedy(llm, prompts, 3)
                tokens.append((first, greedy(llm, [prompts[1] + first[1]], 1)))
    assert tokens[0] == tokens[1]


@on_host
def test_latents_in_captured_decode_steps(tmp_path: Path) -> None:
    """Three requests pad to a captured batch of four; replays read lengths and tables
    where they lie."""
    folder = saved(deepseek_model("v2-real-latent"), tmp_path)
    prompts = [list(range(3, 20)), [5, 9], [7]]
    how = {
        "kv_cache_dtype": "fp8_ds_mla",
        "skip_tokenizer_init": True,
        "max_num_seqs": 4,
    }
    with engine(folder, attention_backend="CPU_MLA", **how) as llm:
        wanted = greedy(llm, prompts, 3)
    with (
        registered(HostTritonMLA) as custom,
        engine(folder, attention_backend=custom, **how, worker_cls=WORKER) as llm,
    ):
        found = greedy(llm, prompts, 3)
        assert runner_of(llm).graphs._graphs[4].replays == 2
    assert found == wanted


@on_host
def test_heads_in_captured_decode_steps(llama: Path) -> None:
    prompts = prompts_of([18, 3, 1])
    how = {"kv_cache_dtype": "int8_per_token_head", "max_num_seqs": 4}
    with engine(llama, attention_backend="REFERENCE", **how) as llm:
        wanted = greedy(llm, prompts, 3)
    with (
        registered(HostTriton) as custom,
        engine(llama, attention_backend=custom, **how, worker_cls=WORKER) as llm,
    ):
        found = greedy(llm, prompts, 3)
        assert runner_of(llm).graphs._graphs[4].replays == 2
    assert found == wanted
