"""The order of the axes in memory changes no token; an order that does not fit the
format or the backend ends the start, by name."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.e2e.tiny import SIZES, engine, greedy, prompts_of, save_tiny, vocabulary
from vllm.v1.kv_cache_layout import DEFAULT_LAYOUTS
from vllm.v1.kv_formats import all_formats

LAYOUTS = [layout.name for layout in DEFAULT_LAYOUTS]
FORMATS = [fmt.name for fmt in all_formats() if not fmt.latent]
# One side of a block must lie together: codes of all heads, then scales of all heads.
WHOLE_SIDES = ("nvfp4", "nvfp4_4over6")
PROMPTS = prompts_of([5, 37])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    sizes = SIZES | {"vocab_size": vocabulary(), "num_hidden_layers": 2}
    save_tiny(LlamaConfig(**sizes, head_dim=16), folder)
    return folder


def tokens(folder: Path, name: str, layout: str, **settings: Any) -> list[list[int]]:
    how = {"kv_cache_dtype": name, "attention_backend": "REFERENCE", **settings}
    how |= {"kv_cache_dtype_skip_layers": ["none"], "kv_cache_memory_bytes": "2MiB"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
        with engine(folder, **how) as llm:
            core = llm.llm_engine.engine_core.engine_core
            assert core.kv_cache_config.kv_cache_layout == layout
            return greedy(llm, PROMPTS, 4)


def test_there_are_six() -> None:
    assert sorted(LAYOUTS) == [
        *("BHLNC", "BLHNC", "BLNHC"),
        *("LBHNC", "LBNHC", "LHBNC"),
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_every_order_gives_the_same_tokens_or_is_refused(
    folder: Path, name: str
) -> None:
    wanted = tokens(folder, name, "LBHNC")
    for layout in LAYOUTS:
        if name in WHOLE_SIDES and not layout.endswith("HNC"):
            with pytest.raises(ValueError, match=f"VLLM_KV_CACHE_LAYOUT={layout}"):
                tokens(folder, name, layout)
        elif layout != "LBHNC":
            assert tokens(folder, name, layout) == wanted, layout


@pytest.mark.parametrize("layout", [*LAYOUTS, "NHD", "NCHW"])
def test_a_backend_takes_its_own_orders_only(folder: Path, layout: str) -> None:
    """The host's kernels read pages head by head."""
    settings = {"attention_backend": "CPU_ATTN"}
    if layout == "LBHNC":
        assert tokens(folder, "auto", layout, **settings)
        return
    with pytest.raises(ValueError, match="VLLM_KV_CACHE_LAYOUT"):
        tokens(folder, "auto", layout, **settings)


@pytest.mark.parametrize(
    ("alias", "backend", "layout"),
    [
        ("HND", "CPU_ATTN", "LBHNC"),
        ("HND", "REFERENCE", "LBHNC"),
        ("NHD", "REFERENCE", "LBNHC"),
    ],
)
def test_old_names_mean_the_orders_of_today(
    folder: Path, alias: str, backend: str, layout: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_KV_CACHE_LAYOUT", alias)
        with engine(folder, attention_backend=backend) as llm:
            core = llm.llm_engine.engine_core.engine_core
            assert core.kv_cache_config.kv_cache_layout == layout
