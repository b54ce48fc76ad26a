"""Models whose layers differ: two kinds of KV cache groups give Hugging Face's tokens.

Tiny Gemma 3: four windowed layers, two that attend to everything, prompts shorter and
longer than the window. The quantised reference is Hugging Face's own attention over
keys and values that went through the format's round trip.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig
from transformers.models.gemma3 import modeling_gemma3

from tests.e2e.tiny import (
    SIZES,
    engine,
    greedy,
    hf_greedy,
    prompts_of,
    save_tiny,
    vocabulary,
)
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.kv_plan import plan_without_weights
from vllm.v1.kv_formats import all_formats, by_name

WINDOW = 24
LENGTHS = [5, 21, 70, 130]
NUM_TOKENS = 12
FORMATS = [fmt.name for fmt in all_formats() if not fmt.latent]
PACKED = [n for n in FORMATS if by_name(n).mode.is_quantized]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("tiny_gemma3")
    sizes = SIZES | {"vocab_size": vocabulary(), "num_hidden_layers": 6, "head_dim": 32}
    config = Gemma3TextConfig(
        **sizes,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        sliding_window_pattern=3,
    )
    return folder, save_tiny(config, folder)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_of(LENGTHS)


@pytest.fixture(scope="module")
def expected(
    saved: tuple[Path, torch.nn.Module], prompts: list[list[int]]
) -> list[list[int]]:
    return hf_greedy(saved[1], prompts, NUM_TOKENS)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"disable_hybrid_kv_cache_manager": True},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 32},
        {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 48},
        {"block_size": 32},
    ],
    ids=str,
)
def test_tokens_equal_hugging_face_on_a_miss_and_on_a_hit(
    saved: tuple[Path, torch.nn.Module],
    prompts: list[list[int]],
    expected: list[list[int]],
    settings: dict[str, Any],
) -> None:
    with engine(saved[0], **settings) as llm:
        assert greedy(llm, prompts, NUM_TOKENS) == expected
        assert greedy(llm, prompts, NUM_TOKENS) == expected


@contextmanager
def stored_as(name: str) -> Iterator[None]:
    """Hugging Face's attention over keys and values as the format stores them."""
    plain = modeling_gemma3.eager_attention_forward
    fmt = by_name(name)

    def attend(
        module: Any,
        query: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: Any,
        **kw: Any,
    ) -> Any:
        k, v = fmt.roundtrip(key[0].transpose(0, 1), value[0].transpose(0, 1))
        k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        return plain(module, query, k, v, *rest, **kw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_gemma3, "eager_attention_forward", attend)
        yield


@pytest.mark.parametrize("name", PACKED)
def test_both_kinds_of_layers_read_what_the_format_stores(
    saved: tuple[Path, torch.nn.Module], prompts: list[list[int]], name: str
) -> None:
    few = prompts[1:3]
    with stored_as(name):
        wanted = hf_greedy(saved[1], few, 6)
    settings: dict[str, Any] = {"kv_cache_dtype": name}
    settings["kv_cache_dtype_skip_layers"] = ["none"]
    found = []
    for off in (False, True):
        with engine(saved[0], disable_hybrid_kv_cache_manager=off, **settings) as llm:
            found.append(greedy(llm, few, 6))
            pages = {
                group.kv_cache_spec.page_size_bytes // group.kv_cache_spec.block_size
                for group in core(llm).kv_cache_config.kv_cache_groups
            }
        assert len(pages) == 1  # a windowed token takes what every other takes
    assert found[0] == found[1] == wanted


def core(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core


def test_the_report_of_tokens_is_the_sum_over_both_kinds(
    saved: tuple[Path, torch.nn.Module],
) -> None:
    length, blocks = 256, 1024
    settings = {"num_gpu_blocks_override": blocks, "max_num_batched_tokens": 64}
    with engine(saved[0], enable_prefix_caching=False, **settings) as llm:
        groups = core(llm).kv_cache_config.kv_cache_groups
        assert [len(group.layer_names) for group in groups] == [2, 2, 2]
        cache = llm.llm_engine.cache_config
        # A request: every block of the full layers; in each group of windowed ones the
        # window and a step of 64 tokens, on blocks that need not start with them.
        windowed = -(-(WINDOW - 1 + 64) // 16) + 1
        need = length // 16 + 2 * windowed
        assert cache.kv_cache_max_concurrency == pytest.approx(blocks / need)
        assert cache.kv_cache_size_tokens == int(length * blocks / need)


@pytest.mark.parametrize(
    ("skip", "dense"),
    [
        (["sliding_window"], {0, 1, 3, 4}),
        (["5", "sliding_window"], {0, 1, 3, 4, 5}),
        (["1-3", "0"], {0, 1, 2, 3}),
        (["0,4-5"], {0, 4, 5}),
    ],
    ids=str,
)
def test_layers_that_are_named_stay_dense(
    saved: tuple[Path, torch.nn.Module],
    prompts: list[list[int]],
    skip: list[str],
    dense: set[int],
) -> None:
    settings = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": skip}
    with engine(saved[0], **settings) as llm:
        formats = core(llm).kv_cache_config.layer_formats
        found = {i for i, name in enumerate(formats) if "fp8" not in formats[name]}
        assert found == dense
        miss = greedy(llm, prompts, 4)
        assert greedy(llm, prompts, 4) == miss


@pytest.mark.parametrize("skip", [["none", "sliding_window"], ["none", "0", "5"]])
@pytest.mark.parametrize("name", PACKED)
def test_no_page_is_padded_to_twice_its_size(
    saved: tuple[Path, torch.nn.Module], name: str, skip: list[str]
) -> None:
    args = EngineArgs(
        model=str(saved[0]),
        kv_cache_dtype=name,
        kv_cache_dtype_skip_layers=skip,
        kv_cache_memory_bytes=16 << 20,
    )
    for group in plan_without_weights(args).groups:
        used = group.head_slots * group.num_states * group.state_bytes
        assert used <= group.page_bytes < 2 * used


@pytest.mark.parametrize("garbage", [0x7F, 0xFF])
@pytest.mark.parametrize("name", ["fp8", "int8_per_token_head", "turboquant_4bit_nc"])
def test_mixed_pages_stay_finite_when_recycled_pages_hold_garbage(
    saved: tuple[Path, torch.nn.Module],
    prompts: list[list[int]],
    name: str,
    garbage: int,
) -> None:
    """Windowed layers dense, full ones packed, in one pool. A page passes from one kind
    to the other with whatever bits it held: NaN in one dtype or the other."""
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "kv_cache_dtype": name,
        "kv_cache_dtype_skip_layers": ["none", "sliding_window"],
        "num_gpu_blocks_override": 64,
        "max_num_batched_tokens": 32,
    }
    with engine(saved[0], **settings) as llm:
        clean = [greedy(llm, [prompt], 6)[0] for prompt in prompts]
        config = core(llm).kv_cache_config
        assert len(set(config.layer_formats.values())) == 2
        assert llm.reset_prefix_cache()
        runner = core(llm).model_executor.driver_worker.model_runner
        for cache in runner.kv_caches.values():
            cache.view(torch.uint8).fill_(garbage)
        for _ in range(3):  # more tokens than the pool holds
            again = [greedy(llm, [prompt], 6)[0] for prompt in prompts]
            assert again == clean
