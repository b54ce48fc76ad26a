"""Names that callers import elsewhere say what the formats say."""

from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.quantization.turboquant import centroids, config
from vllm.utils import torch_utils
from vllm.v1.kv_formats import all_formats, by_name, codebook

PRESETS = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")


def _model(num_layers: int, **hybrid: object) -> SimpleNamespace:
    text = SimpleNamespace(num_hidden_layers=num_layers, **hybrid)
    return SimpleNamespace(model="m", hf_text_config=text, is_hybrid=bool(hybrid))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("head_size", [64, 72, 80, 96, 128, 256])
def test_config_sizes_come_from_the_table(preset: str, head_size: int) -> None:
    name = f"turboquant_{preset}"
    facade = config.TurboQuantConfig.from_cache_dtype(name, head_size)
    layout = by_name(name).layout(head_size, head_size)
    assert facade.slot_size_aligned == layout.nbytes
    assert facade.slot_size == facade.key_packed_size + facade.value_packed_size
    assert facade.slot_size <= facade.slot_size_aligned <= facade.slot_size + 1


def test_config_facts() -> None:
    k8v4 = config.TurboQuantConfig.from_cache_dtype("turboquant_k8v4", 128)
    assert k8v4.key_fp8 and not k8v4.norm_correction
    assert (k8v4.mse_bits, k8v4.key_mse_bits, k8v4.n_centroids) == (4, 0, 16)
    low = config.TurboQuantConfig.from_cache_dtype("turboquant_3bit_nc", 128)
    assert not low.key_fp8 and low.norm_correction
    assert (low.mse_bits, low.n_centroids, low.slot_size) == (3, 8, 102)
    default = config.TurboQuantConfig()
    assert (default.head_dim, default.seed, default.slot_size) == (128, 42, 118)
    with pytest.raises(ValueError, match="turboquant_k3v4_nc"):
        config.TurboQuantConfig.from_cache_dtype("turboquant_5bit", 128)


def test_presets_are_the_accepted_names() -> None:
    names = [fmt.name for fmt in all_formats() if fmt.mode.is_turboquant]
    assert list(config.TQ_PRESETS) == names


def test_codebooks_are_the_same_objects() -> None:
    assert centroids.get_centroids is codebook.get_centroids
    assert centroids.solve_lloyd_max is codebook.solve_lloyd_max


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        (32, ["0", "1", "30", "31"]),
        (4, ["0", "1", "2", "3"]),
        (3, ["0", "2"]),
        (1, []),
    ],
)
def test_boundary_layers(layers: int, wanted: list[str]) -> None:
    skip = config.TurboQuantConfig.get_boundary_skip_layers
    assert skip(_model(layers)) == wanted


def test_hybrid_models_have_no_boundary_layers() -> None:
    skip = config.TurboQuantConfig.get_boundary_skip_layers
    assert skip(_model(8, layer_types=["mamba", "full_attention"])) == []
    assert skip(_model(8, layers_block_type=["mamba", "hybrid"])) == []
    assert skip(_model(8, attn_type_list=[0, 1])) == []
    with pytest.raises(NotImplementedError, match="attn_type_list"):
        skip(_model(8, layer_types=["mamba"]))


def test_words_and_numbers_merge() -> None:
    merge = config.merge_skip_layers
    assert merge(["sliding_window", "7"], ["0", "31"]) == [
        "0",
        "7",
        "31",
        "sliding_window",
    ]
    assert merge(["none", "10", "9"], ["0", "31"]) == ["9", "10"]
    assert merge([], ["0", "1"]) == ["0", "1"]


def test_quantised_means_a_mode_other_than_none() -> None:
    for fmt in all_formats():
        wanted = fmt.mode.is_quantized
        assert torch_utils.is_quantized_kv_cache(fmt.name) is wanted
    assert torch_utils.is_quantized_kv_cache("turboquant_4bit_nc")
    assert not torch_utils.is_quantized_kv_cache("auto")


def test_dtype_names() -> None:
    table = torch_utils.STR_DTYPE_TO_TORCH_DTYPE
    assert table["half"] == table["float16"] == torch.float16
    assert table["fp8"] == table["nvfp4"] == torch.uint8
    assert table["fp8_inc"] == torch.float8_e4m3fn
    assert "auto" not in table
    assert torch_utils.get_dtype_size(torch.bfloat16) == 2
    to_dtype = torch_utils.kv_cache_dtype_str_to_dtype
    model = SimpleNamespace(dtype=torch.bfloat16)
    assert to_dtype("auto", model) == torch.bfloat16
    assert to_dtype("auto") == torch.float16
    assert to_dtype("int8_per_token_head", model) == torch.int8


@pytest.mark.parametrize(("head_size", "cell"), [(64, 36), (96, 54), (128, 72)])
def test_nvfp4_width(head_size: int, cell: int) -> None:
    assert torch_utils.nvfp4_kv_cache_full_dim(head_size) == cell


def test_padded_tensor() -> None:
    make = torch_utils.make_tensor_with_pad
    assert make([[1], [2, 3]], 0, torch.int64).tolist() == [[1, 0], [2, 3]]
    assert make([[1.5]], -1.0, torch.float32, max_len=3).tolist() == [[1.5, -1, -1]]
    assert make([], 0, torch.int32).shape == (0, 0)
    assert make([[]], 7, torch.int32, max_len=2, device="cpu").tolist() == [[7, 7]]
    with pytest.raises(ValueError, match="max_len=1"):
        make([[1, 2]], 0, torch.int64, max_len=1)
