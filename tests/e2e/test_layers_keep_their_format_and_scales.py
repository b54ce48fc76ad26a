"""Each layer stores its own format with its own scales, in every path, and what is out
of a format's range stays finite."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests.e2e.format_reference import check_engine, layer_formats
from tests.e2e.tiny import SIZES, engine, prompts_of, save_tiny, vocabulary
from vllm import LLM
from vllm.logger import _log_once
from vllm.v1.kv_formats import KVFormat, KVScales, all_formats, by_name

LAYERS = 6
NUM_TOKENS, NUM_DECODED = 75, 8
SERVED = [fmt for fmt in all_formats() if not fmt.latent]
PACKED = [fmt for fmt in SERVED if fmt.mode.is_quantized]
SCALED = [fmt for fmt in SERVED if fmt.per_tensor_scales]
SCALES = [KVScales(k=0.25 + 0.1 * i, v=0.5 + 0.3 * i) for i in range(LAYERS)]
IDS = {"ids": lambda fmt: fmt.name}


def save_llama(folder: Path, change: Callable[[dict], None] = lambda _: None) -> None:
    sizes = SIZES | {"num_hidden_layers": LAYERS, "head_dim": 32}
    save_tiny(LlamaConfig(**sizes, vocab_size=vocabulary()), folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def hf_model(folder: Path) -> torch.nn.Module:
    from_disk = LlamaConfig.from_pretrained(folder)
    model = save_tiny(from_disk, folder.parent / "unchanged")
    weights = load_file(folder / "model.safetensors")
    known = {name: t for name, t in weights.items() if "scale" not in name}
    model.load_state_dict(known, strict=False)
    return model.eval()


def add_scales(tensors: dict[str, torch.Tensor]) -> None:
    for i, scales in enumerate(SCALES):
        at = f"model.layers.{i}.self_attn"
        tensors[f"{at}.k_proj.k_scale"] = torch.tensor(scales.k)
        tensors[f"{at}.v_proj.v_scale"] = torch.tensor(scales.v)


def enlarge(tensors: dict[str, torch.Tensor]) -> None:
    """K and V of some 1,000 that give the attention of K and V of some 2."""
    for name, tensor in tensors.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[name] = tensor * 500
        elif name.endswith(("q_proj.weight", "o_proj.weight")):
            tensors[name] = tensor / 500


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "llama"
    save_llama(folder)
    return folder


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scaled") / "llama"
    save_llama(folder, add_scales)
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "llama"
    save_llama(folder, enlarge)
    return folder


def cache_dtypes(llm: LLM) -> list[str]:
    (found,) = llm.apply_model(
        lambda model: [
            layer.self_attn.attn.kv_cache_dtype for layer in model.model.layers
        ]
    )
    return found


def tokens() -> list[int]:
    return prompts_of([NUM_TOKENS])[0]


@pytest.mark.parametrize("fmt", PACKED, **IDS)
def test_skipped_layers_stay_dense(plain: Path, fmt: KVFormat) -> None:
    skipped = {0, 3}
    formats = [by_name("auto") if i in skipped else fmt for i in range(LAYERS)]
    # A list of one's own is taken as it is; "none" turns off the default one.
    skip = ["none", *map(str, skipped)]
    with engine(plain, kv_cache_dtype=fmt.name, kv_cache_dtype_skip_layers=skip) as llm:
        assert cache_dtypes(llm) == [one.name for one in formats]
        check_engine(llm, hf_model(plain), formats, tokens(), NUM_DECODED)


@pytest.mark.parametrize("fmt", PACKED, **IDS)
def test_none_packs_every_layer(plain: Path, fmt: KVFormat) -> None:
    with engine(
        plain, kv_cache_dtype=fmt.name, kv_cache_dtype_skip_layers=["none"]
    ) as llm:
        assert cache_dtypes(llm) == [fmt.name] * LAYERS
        check_engine(llm, hf_model(plain), [fmt] * LAYERS, tokens(), NUM_DECODED)


@pytest.mark.parametrize("fmt", SCALED, **IDS)
def test_scales_of_each_layer_apply_to_writes_and_reads(
    scaled: Path, fmt: KVFormat
) -> None:
    with engine(scaled, kv_cache_dtype=fmt.name) as llm:
        formats = [fmt] * LAYERS
        model = hf_model(scaled)
        check_engine(llm, model, formats, tokens(), NUM_DECODED, scales=SCALES)


@pytest.mark.parametrize("fmt", SERVED, **IDS)
def test_large_keys_and_values_stay_finite(large: Path, fmt: KVFormat) -> None:
    with engine(large, kv_cache_dtype=fmt.name) as llm:
        formats = layer_formats(fmt, LAYERS)
        run = check_engine(llm, hf_model(large), formats, tokens(), NUM_DECODED)
    assert run.logits.isfinite().all()
    assert max(key.abs().max() for key, _ in run.states) > 440


@pytest.mark.parametrize("fmt", SERVED, **IDS)
def test_a_checkpoint_without_scales_is_told_once(
    plain: Path, scaled: Path, fmt: KVFormat
) -> None:
    """Only for formats that need some, and only where there are none."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore
    logging.getLogger("vllm").addHandler(handler)
    try:
        for folder, expected in ((scaled, 0), (plain, int(fmt.per_tensor_scales))):
            _log_once.cache_clear()
            said.clear()
            with engine(folder, kv_cache_dtype=fmt.name):
                assert sum("has no k_scale" in line for line in said) == expected
    finally:
        logging.getLogger("vllm").removeHandler(handler)
