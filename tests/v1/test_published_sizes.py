"""Every size that is used was published: a backend with an odd packing is asked at each
place that prices pages, and a place that forgets to ask is noticed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from tests.e2e.tiny import SIZES, engine, greedy, prompts_of, save_tiny, vocabulary
from tests.platforms.test_block_size import Layer, StateLayer, config, settled
from tests.v1.odd_format import NAME, OddBackend, registered
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention, attention
from vllm.platforms.cpu import CpuPlatform
from vllm.v1 import page_planning
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.worker import layer_specs

# Of a layer with 2 KV heads of 16 elements: 6 head slots of 4 x 16 + 1 bytes.
HEADS, SIZE = 2, 16
SLOTS, CELL = 6, 65
ODD = SLOTS * CELL  # 390 bytes a token; bfloat16 takes 128, plain fp8 64
BF16_DENSE, F32_DENSE = 128, 256


@pytest.fixture(autouse=True, scope="module")
def odd_backend() -> Iterator[type[OddBackend]]:
    with registered() as backend:
        yield backend


def odd_layer(**changes: Any) -> Layer:
    return Layer(OddBackend, NAME, **{"heads": HEADS, "head_size": SIZE, **changes})


def dense_layer(**changes: Any) -> Layer:
    sizes = {"heads": HEADS, "head_size": SIZE, "window": 64}
    return Layer(CPUAttentionBackend, **{**sizes, **changes})


# --- the four probes ------------------------------------------------------------------


def check_the_platforms_question() -> None:
    asked = config(cache_dtype=NAME, heads=HEADS, head_size=SIZE)
    assert CpuPlatform.per_token_page_bytes(asked, OddBackend) == ODD
    dense = CpuPlatform.per_token_page_bytes(asked, OddBackend, torch.bfloat16, "auto")
    assert dense == BF16_DENSE


def check_heterogeneous_alignment() -> None:
    """16 tokens of the odd layers take 6,240 bytes: 48.75 dense tokens, in 16s."""
    for layers in (
        [dense_layer(), odd_layer(), odd_layer()],  # the first one is skipped
        [odd_layer(), odd_layer(), dense_layer()],
    ):
        cache = settled(*layers)
        assert cache.block_size == 64
        assert cache.skip_page_size_padded == 64 * BF16_DENSE


def check_hybrid_alignment() -> None:
    """A state of 20,000 bytes fits 51.3 odd tokens, in 16s."""
    state = StateLayer()
    state.spec = MambaSpec(1, ((5000,),), (torch.float32,))
    cache = settled(state, odd_layer())
    assert cache.block_size == 64
    assert cache.mamba_page_size_padded == 64 * ODD


def check_the_window_probe() -> None:
    """Kernel blocks of 16, 32 or 64 tokens in pages of 15,000 bytes: 12,480 fit."""
    cfg = VllmConfig(cache_config=CacheConfig(cache_dtype=NAME))
    cfg.cache_config.skip_page_size_padded = 15_000
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(cfg):
        patch.setattr(OddBackend, "sizes", [16, 32, 64])
        windowed = Attention(
            4,
            SIZE,
            1.0,
            num_kv_heads=HEADS,
            per_layer_sliding_window=9,
            prefix="model.layers.0.attn",
            attn_backend=OddBackend,
        )
        spec = windowed.get_kv_cache_spec(cfg)
    assert (spec.block_size, spec.page_size_padded) == (32, 15_000)


PROBES = [
    check_the_platforms_question,
    check_heterogeneous_alignment,
    check_hybrid_alignment,
    check_the_window_probe,
]


@pytest.mark.parametrize("check", PROBES)
def test_each_probe_uses_what_was_published(check: Callable[[], None]) -> None:
    check()


# --- planner and worker ---------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers that see everything, two with a window of 20 tokens."""
    folder = tmp_path_factory.mktemp("qwen2")
    sizes = SIZES | {"vocab_size": vocabulary(), "num_hidden_layers": 4}
    qwen = Qwen2Config(
        **sizes, use_sliding_window=True, sliding_window=20, max_window_layers=2
    )
    save_tiny(qwen, folder)
    return folder


def run(folder: Path, **settings: Any) -> tuple[list[list[int]], KVCacheConfig, Any]:
    """Tokens, the plan, and the cache tensors of the layers."""
    how = {"kv_cache_dtype": NAME, "attention_backend": "CUSTOM", **settings}
    with engine(folder, **how) as llm:
        tokens = greedy(llm, prompts_of([7, 40, 90]), 8)
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.model_runner
        return tokens, core.kv_cache_config, list(runner.kv_caches.values())


def check_plan_and_pages(folder: Path) -> None:
    _, plan, caches = run(folder)
    assert len(plan.kv_cache_groups) == 2
    assert {g.kv_cache_spec.page_size_bytes for g in plan.kv_cache_groups} == {16 * ODD}
    assert {t.size for t in plan.kv_cache_tensors} == {16 * ODD * plan.num_blocks}
    assert set(plan.layer_formats.values()) == {f"{NAME}:cells"}
    assert len(caches) == 4
    for cache in caches:
        assert cache.shape == (plan.num_blocks, SLOTS, 16, CELL)
        assert cache.dtype == torch.uint8


def test_plan_and_pages_have_the_published_size(folder: Path) -> None:
    check_plan_and_pages(folder)


@pytest.mark.parametrize("no_hybrid", [False, True])
def test_what_is_stored_in_odd_pages_is_read_back(
    folder: Path, no_hybrid: bool
) -> None:
    """The format is lossless, so the tokens are those of plain float32 pages."""
    settings = {"disable_hybrid_kv_cache_manager": no_hybrid}
    wanted, _, _ = run(folder, kv_cache_dtype="auto")
    found, _, _ = run(folder, **settings)
    assert found == wanted


@pytest.mark.parametrize(
    "skipped", [["0"], ["sliding_window"], ["sliding_window", "0"]]
)
def test_a_mixed_run_is_priced_layer_by_layer(folder: Path, skipped: list[str]) -> None:
    wanted, _, _ = run(folder, kv_cache_dtype="auto")
    found, plan, _ = run(folder, kv_cache_dtype_skip_layers=skipped)
    assert found == wanted
    dense = {"0"} if "0" in skipped else set()
    dense |= {"2", "3"} if "sliding_window" in skipped else set()
    for name, spec in plan.layer_specs().items():
        per_token = spec.unpadded_page_size_bytes // spec.block_size
        is_dense = name.split(".")[2] in dense
        assert per_token == (F32_DENSE if is_dense else ODD), name
    assert len({spec.page_size_bytes for spec in plan.layer_specs().values()}) == 1 or (
        len(plan.kv_cache_groups) == 1
    )


# --- a place that does not ask is noticed ---------------------------------------------


def forget(
    backend: Any, raw_spec: Any, fmt: Any, layer_name: str = "", model_dtype: Any = None
) -> Any:
    """What a place does that takes the raw spec for the packed one."""
    return raw_spec


def forget_bytes(backend: Any, raw_spec: Any, *rest: Any) -> int:
    return raw_spec.unpadded_page_size_bytes // raw_spec.block_size


SITES: list[tuple[Any, str, Any, list[Callable[..., None]]]] = [
    (page_planning, "packed_spec", forget, PROBES),
    (page_planning, "bytes_per_token", forget_bytes, PROBES[:3]),
    (attention, "bytes_per_token", forget_bytes, PROBES[3:]),
    (layer_specs, "packed_spec", forget, [check_plan_and_pages]),
]
FORGOTTEN = [
    pytest.param(module, name, stand_in, check, id=f"{name}-{check.__name__}")
    for module, name, stand_in, checks in SITES
    for check in checks
]


@pytest.mark.parametrize(("module", "name", "stand_in", "check"), FORGOTTEN)
def test_a_place_that_does_not_ask_the_hook_is_noticed(
    module: Any,
    name: str,
    stand_in: Any,
    check: Callable[..., None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, stand_in)
    needs = [folder] if check is check_plan_and_pages else []
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        check(*needs)


def test_a_hook_that_publishes_nothing_ends_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OddBackend, "customize_spec", classmethod(lambda cls, s: s))
    with pytest.raises(ValueError, match=r"CUSTOM.customize_spec published 2 head"):
        run(folder)
