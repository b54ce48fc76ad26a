"""Every cache dtype, block size and head size serves right logits, or is refused in one
line before any weight is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from tests.e2e.format_reference import check_engine, layer_formats
from tests.e2e.tiny import SIZES, engine, greedy, prompts_of, save_tiny, vocabulary
from vllm.platforms import current_platform
from vllm.v1.kv_formats import KVFormat, all_formats, by_name
from vllm.v1.worker import gpu_model_runner

LAYERS = 6
NUM_TOKENS, NUM_DECODED = 75, 8
FORMATS = all_formats()
SERVED = [fmt for fmt in FORMATS if not fmt.latent]
IDS = {"ids": lambda value: getattr(value, "name", str(value))}


def config_of(head_size: int) -> LlamaConfig:
    sizes = SIZES | {"num_hidden_layers": LAYERS, "head_dim": head_size}
    return LlamaConfig(**sizes, vocab_size=vocabulary())


class Models:
    """Tiny Llamas by head size, written once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[int, torch.nn.Module] = {}

    def get(self, head_size: int) -> tuple[Path, torch.nn.Module]:
        folder = self._root / str(head_size)
        if head_size not in self._models:
            self._models[head_size] = save_tiny(config_of(head_size), folder)
        return folder, self._models[head_size]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("llamas"))


def check(models: Models, head_size: int, fmt: KVFormat, **settings: int) -> None:
    folder, model = models.get(head_size)
    (token_ids,) = prompts_of([NUM_TOKENS])
    with engine(folder, kv_cache_dtype=fmt.name, **settings) as llm:
        check_engine(llm, model, layer_formats(fmt, LAYERS), token_ids, NUM_DECODED)


@contextmanager
def refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def load(**_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(gpu_model_runner, "get_model", load)
    with pytest.raises(ValueError) as caught:
        yield
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fmt", SERVED, **IDS)
def test_a_served_format_gives_right_logits(models: Models, fmt: KVFormat) -> None:
    check(models, 32, fmt)


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.latent], **IDS)
def test_a_format_for_latents_is_refused(
    models: Models, fmt: KVFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = models.get(32)
    with refused_before_loading(monkeypatch), engine(folder, kv_cache_dtype=fmt.name):
        pass


@pytest.mark.parametrize("head_size", [20, 72, 80])
@pytest.mark.parametrize("fmt", SERVED, **IDS)
def test_unusual_head_sizes(
    models: Models, fmt: KVFormat, head_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = models.get(head_size)
    try:
        fmt.check_head_size(head_size, head_size)
    except ValueError:
        with (
            refused_before_loading(monkeypatch),
            engine(folder, kv_cache_dtype=fmt.name),
        ):
            pass
    else:
        check(models, head_size, fmt)


@pytest.mark.parametrize("dtype", current_platform.supported_dtypes, ids=str)
@pytest.mark.parametrize("fmt", SERVED, **IDS)
def test_every_model_dtype_meets_every_cache_dtype(
    models: Models, fmt: KVFormat, dtype: torch.dtype
) -> None:
    folder, _ = models.get(32)
    with engine(folder, dtype=dtype, kv_cache_dtype=fmt.name) as llm:
        prompts = prompts_of([5, 40])
        miss = greedy(llm, prompts, 4)
        assert all(len(row) == 4 for row in miss)


@pytest.mark.parametrize("block_size", [1, 8, 17, 24, 32, 48, 256])
@pytest.mark.parametrize("name", ["auto", "turboquant_3bit_nc"])
def test_block_sizes(
    models: Models, name: str, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if block_size % 16 == 0:
        check(models, 32, by_name(name), block_size=block_size)
        return
    folder, _ = models.get(32)
    settings = {"kv_cache_dtype": name, "block_size": block_size}
    with refused_before_loading(monkeypatch), engine(folder, **settings):
        pass


@pytest.mark.parametrize("block_size", [0, -16])
def test_sizes_that_are_none(models: Models, block_size: int) -> None:
    with pytest.raises(ValueError), engine(models.get(32)[0], block_size=block_size):
        pass


@pytest.mark.parametrize("name", ["fp9", "FP8", "turboquant", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(
    models: Models, name: str
) -> None:
    with (
        pytest.raises(ValueError, match="turboquant_4bit_nc"),
        engine(models.get(32)[0], kv_cache_dtype=name),
    ):
        pass
