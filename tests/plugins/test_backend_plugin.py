"""An attention backend of another distribution, installed and named on the command
line, is loaded in every process, priced as it says, and serves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from tests.e2e.tiny import SIZES, engine, greedy, prompts_of, save_tiny, vocabulary
from tests.platforms.test_block_size import Layer, StateLayer, config, settled
from tests.plugins import planes_plugin
from tests.plugins.planes_plugin import PlanesBackend
from tests.remote_server import RemoteServer
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.kv_formats import by_name
from vllm.v1.page_planning import packed_spec

SOURCE = Path(planes_plugin.__file__)
HEADS, SIZE, FLOAT = 2, 16, 4
# Two planes of 2 heads x 16 numbers and a mark; dense pages take 2 x 2 x 16 numbers.
PER_TOKEN = 2 * (HEADS * SIZE + 1) * FLOAT


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as an installer leaves it: a module, and its distribution's metadata."""
    site = tmp_path_factory.mktemp("site")
    (site / "vllm_planes.py").write_text(SOURCE.read_text())
    info = site / "vllm_planes-1.0.dist-info"
    info.mkdir()
    metadata = "Metadata-Version: 2.1\nName: vllm-planes\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata)
    entry = "[vllm.general_plugins]\nplanes = vllm_planes:register\n"
    (info / "entry_points.txt").write_text(entry)
    return site


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers that see everything, two with a window of 20 tokens."""
    folder = tmp_path_factory.mktemp("qwen2")
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
    save_tiny(Qwen2Config(**SIZES, vocab_size=vocabulary(), **window), folder)
    return folder


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    with engine(folder) as llm:
        return greedy(llm, prompts_of([7, 40, 90]), 8)


@pytest.fixture
def registered() -> Iterator[None]:
    planes_plugin.register()
    yield
    AttentionBackendEnum.CUSTOM.clear_override()


def test_every_probe_prices_pages_as_it_publishes_them() -> None:
    """A recurrent state of 20,000 bytes takes the page of 152 tokens of 132 bytes."""
    asked = config(heads=HEADS, head_size=SIZE)
    per_token = CpuPlatform.per_token_page_bytes(asked, PlanesBackend, torch.float32)
    assert per_token == PER_TOKEN
    in_bfloat16 = PER_TOKEN // 2
    state = StateLayer()
    state.spec = MambaSpec(1, ((5000,),), (torch.float32,))
    own = Layer(PlanesBackend, heads=HEADS, head_size=SIZE)
    cache = settled(state, own)
    assert cache.block_size == 160  # 152 in steps of 16
    assert cache.mamba_page_size_padded == 160 * in_bfloat16
    dense = Layer(CPUAttentionBackend, heads=HEADS, head_size=SIZE, window=64)
    packed = Layer(PlanesBackend, "fp8", heads=HEADS, head_size=SIZE)
    cache = settled(dense, packed)  # 66 bytes a token beside 128
    assert cache.skip_page_size_padded == cache.block_size * 66


def test_a_built_in_backend_may_not_publish_another_shape() -> None:
    class Built(PlanesBackend):
        pass

    Built.__module__ = "vllm.v1.attention.backends.planes"
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32
    )
    dense = by_name("auto").resolve(torch.float32)
    assert packed_spec(PlanesBackend, spec, dense).page_size_bytes == 16 * PER_TOKEN
    with pytest.raises(ValueError, match=r"customize_spec published 2 head slots of"):
        packed_spec(Built, spec, dense)


def test_its_own_shape_is_honoured_by_planner_and_worker(
    registered: None, folder: Path, wanted: list[list[int]]
) -> None:
    with engine(folder, attention_backend="CUSTOM") as llm:
        assert greedy(llm, prompts_of([7, 40, 90]), 8) == wanted
        core: Any = llm.llm_engine.engine_core.engine_core
        plan = core.kv_cache_config
        caches = core.model_executor.driver_worker.model_runner.kv_caches
        for spec in plan.layer_specs().values():
            assert spec.page_size_bytes == PER_TOKEN * spec.block_size
        for cache in caches.values():
            assert cache.shape[1:] == (2, 16, HEADS * SIZE + 1)
        # Its bytes are no format's: their name says whose they are.
        (name,) = set(plan.layer_formats.values())
        assert name == "float32:cells by tests.plugins.planes_plugin.PlanesBackend"


def test_a_server_finds_it_among_the_installed_plugins(
    installed: Path, folder: Path, wanted: list[list[int]]
) -> None:
    arguments = ["--attention-backend", "CUSTOM", "--dtype", "float32"]
    arguments += ["--kv-cache-memory-bytes", "16MiB"]
    path = {"PYTHONPATH": f"{installed}:{Path.cwd()}"}
    prompt = prompts_of([7, 40, 90])[1]
    with RemoteServer(str(folder), arguments, env=path) as server:
        client = server.client()
        answer = client.completions.create(
            model=str(folder),
            prompt=prompt,
            max_tokens=8,
            temperature=0.0,
            logprobs=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        tokens = answer.choices[0].model_extra["token_ids"]
    assert tokens == wanted[1]
