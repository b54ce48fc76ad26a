"""Decode steps of the Triton backends may be captured: what a launch reads keeps its
place and is read again at every replay."""

from pathlib import Path

import pytest
from transformers import Qwen2Config

from tests.e2e.tiny import SIZES, engine, greedy, prompts_of, save_tiny, vocabulary
from tests.triton.host_backend import HostTriton, HostTurboQuant, registered
from vllm.v1.kv_formats import by_name

GRAPHS = "tests.v1.worker.graph_worker.GraphWorker"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer that sees everything, one with a window of 20 tokens."""
    folder = tmp_path_factory.mktemp("qwen2")
    sizes = SIZES | {"hidden_size": 128, "vocab_size": vocabulary()}
    sizes["num_hidden_layers"] = 2
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    save_tiny(Qwen2Config(**sizes, **window), folder)
    return folder


@pytest.mark.parametrize("name", ["auto", "turboquant_4bit_nc"])
def test_replayed_tokens_are_the_eager_ones(folder: Path, name: str) -> None:
    backend = HostTurboQuant if by_name(name).mode.is_turboquant else HostTriton
    prompts = prompts_of([5, 23])
    how = {"kv_cache_dtype": name, "kv_cache_dtype_skip_layers": ["none"]}
    with engine(folder, **how, attention_backend="REFERENCE") as llm:
        wanted = greedy(llm, prompts, 4)
    with registered(backend) as custom:
        how |= {"attention_backend": custom, "worker_cls": GRAPHS, "max_num_seqs": 3}
        with engine(folder, **how) as llm:
            core = llm.llm_engine.engine_core.engine_core
            graphs = core.model_executor.driver_worker.model_runner.graphs
            found = greedy(llm, prompts, 4)
            replays = {size: g.replays for size, g in graphs._graphs.items()}
    assert found == wanted
    assert replays == {1: 0, 2: 3, 3: 0}
