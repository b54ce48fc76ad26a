"""GGUF weights equal an independent reading, and give Hugging Face's logits."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.model_executor.families import FAMILIES, engine_config, hf_model
from tests.model_executor.paged import PagedRunner
from tests.smollm2 import gguf_names, hf_smollm2
from tests.transformers_utils.gguf_files import write_gguf
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.gguf_loader import hf_name, unpaired_rows
from vllm.transformers_utils.tokenizer import get_tokenizer

Q4_1 = gguf.GGMLQuantizationType.Q4_1
TYPES = ["F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16"]
IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]


def paired_rows(x: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Q and K of Llama models."""
    rows = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:])
    return rows.swapaxes(1, 2).reshape(x.shape)


def test_names_agree_with_the_gguf_packages_table() -> None:
    for arch in ("llama", "qwen2", "qwen3"):
        for theirs, name in gguf_names(arch, 2).items():
            assert hf_name(name) == theirs


def test_rope_factors_are_no_weights() -> None:
    for name in ("rope_freqs.weight", "rope_factors_long.weight"):
        assert hf_name(name) is None
    assert hf_name("blk.0.ffn_gate_inp.weight") == "blk.0.ffn_gate_inp.weight"


@pytest.mark.parametrize("shape", [(24, 5), (24,)])
def test_unpairing_undoes_the_converters_row_order(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = unpaired_rows(torch.from_numpy(paired_rows(x, 3).copy()), 3)
    assert torch.equal(found, torch.from_numpy(x))


def exported(model: torch.nn.Module, path: Path, arch: str, **how: Any) -> Path:
    """Writes a Hugging Face model as its converter would."""
    config = model.config
    names = gguf_names(arch, config.num_hidden_layers)
    tensors = {}
    for name, param in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = param.numpy()
        if arch == "llama" and ".q_proj." in name:
            data = paired_rows(data, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            data = paired_rows(data, config.num_key_value_heads)
        tensors[names[name]] = np.ascontiguousarray(data)
    head_dim = getattr(config, "head_dim", None)
    values = {
        ".block_count": config.num_hidden_layers,
        ".context_length": config.max_position_embeddings,
        ".rope.freq_base": float(config.rope_parameters["rope_theta"]),
        ".attention.key_length": head_dim,
        ".attention.value_length": head_dim,
    }
    return write_gguf(path / "m.gguf", arch=arch, tensors=tensors, values=values, **how)


@pytest.mark.parametrize(
    ("family", "arch"),
    [
        ("llama", "llama"),
        ("llama-tied", "llama"),
        ("llama-biases", "llama"),
        ("llama-head-dim", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
@torch.inference_mode()
def test_an_exported_model_gives_the_same_logits(
    family: str, arch: str, tmp_path: Path
) -> None:
    assert family in FAMILIES
    model = hf_model(family)
    config = engine_config(exported(model, tmp_path, arch))
    runner = PagedRunner(get_model(vllm_config=config), config, len(IDS))
    expected = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(runner.step(IDS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", TYPES)
def test_every_block_format_is_what_the_gguf_package_decodes(
    kind: str, tmp_path: Path
) -> None:
    model = hf_model("qwen2")  # whose rows are not reordered
    quantized = gguf.GGMLQuantizationType[kind]
    path = exported(model, tmp_path, "qwen2", quantized=quantized)
    ours = get_model(vllm_config=engine_config(path))
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    parts = [
        gguf.quants.dequantize(stored[f"blk.1.ffn_{p}.weight"].data, quantized)
        for p in ("gate", "up")
    ]
    expected = torch.from_numpy(np.concatenate(parts).astype(np.float32))
    found = ours.model.layers[1].mlp.gate_up_proj.dense_weight()
    assert torch.equal(found, expected)


def test_rope_factors_change_the_rotation(tmp_path: Path) -> None:
    model = hf_model("llama")
    factors = np.linspace(1, 4, 8).astype(np.float32)
    path = exported(model, tmp_path, "llama")
    reader = gguf.GGUFReader(path)
    tensors = {t.name: np.array(t.data) for t in reader.tensors}
    del reader
    tensors["rope_freqs.weight"] = factors
    values = {".block_count": 3, ".context_length": 128, ".rope.freq_base": 1e4}
    path = write_gguf(path, tensors=tensors, values=values)
    config = engine_config(path)
    runner = PagedRunner(get_model(vllm_config=config), config, len(IDS))
    model.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(runner.step(IDS), expected, rtol=1e-4, atol=1e-4)


def test_a_split_file_says_how_to_merge_it(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", values={"split.count": 2})
    with pytest.raises(ValueError, match="merge"):
        get_model(vllm_config=engine_config(path))


def test_a_gguf_that_lacks_a_tensor_names_it(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=r"missing.*m\.gguf"):
        get_model(vllm_config=engine_config(path))


PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return",
]


@torch.inference_mode()
def test_smollm2_gives_hugging_faces_next_tokens() -> None:
    smollm2_hf = hf_smollm2()
    config = engine_config("smollm2-135m")
    ours = get_model(vllm_config=config)
    embedding = ours.model.embed_tokens.dense_weight()
    assert torch.equal(embedding, smollm2_hf.model.embed_tokens.weight)
    tokenizer = get_tokenizer(config.model_config.source)
    for text in PROMPTS:
        ids = tokenizer(text).input_ids
        found = PagedRunner(ours, config, len(ids)).step(ids)
        expected = smollm2_hf(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
