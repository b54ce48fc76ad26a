"""Page planning: one way from raw to packed, and the worked tables of alignment."""

from dataclasses import replace

import pytest
import torch

from tests.v1.spec_samples import Backend, Multiple, in_format
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_formats import all_formats, by_name
from vllm.v1.page_planning import (
    LayerPages,
    align_heterogeneous,
    align_hybrid,
    bytes_per_token,
    largest_kernel_block_within,
    packed_spec,
    smallest_kernel_block,
)

BF16 = torch.bfloat16


def layer(name: str, *, backend: Backend | None = None, **changes) -> LayerPages:
    fmt = by_name(name)
    return LayerPages(
        layer_name=f"layer.{name}",
        backend=backend or Backend(name),
        raw_spec=in_format(name, packed=False, **changes),
        fmt=fmt,
        model_dtype=BF16,
    )


# --- raw to packed --------------------------------------------------------------------


@pytest.mark.parametrize("fmt", all_formats(), ids=lambda f: f.name)
def test_the_probe_of_every_format_equals_the_layer_page(fmt) -> None:
    sizes = dict(head_size=576, head_size_v=0, num_kv_heads=1) if fmt.latent else {}
    kind = MLAAttentionSpec if fmt.latent else SlidingWindowSpec
    sizes |= {} if fmt.latent else {"sliding_window": 256}
    raw = in_format(fmt.name, kind, packed=False, **sizes)
    if fmt.opaque:  # published by name, in the layer
        raw = raw.packed(fmt, BF16)
    backend = Backend(fmt.name)
    packed = packed_spec(backend, raw, fmt, "a", BF16)
    per_token = bytes_per_token(backend, raw, fmt, "a", BF16)
    assert per_token * raw.block_size == packed.page_size_bytes
    heads = raw.num_kv_heads
    assert per_token == fmt.bytes_per_token(heads, raw.head_size, raw.head_size_v, BF16)
    assert packed_spec(backend, packed, fmt, "a", BF16) == packed
    assert backend.hook_calls == 3


def test_packing_marks_blocks_as_strided_unless_the_backend_objects() -> None:
    raw, fmt = in_format("bfloat16", packed=False), by_name("bfloat16")
    assert packed_spec(Backend(), raw, fmt).indexes_kv_by_block_stride
    dense_only = Backend(indexes_kv_by_block_stride=False)
    assert packed_spec(dense_only, raw, fmt) == raw
    asked = Backend(indexes_kv_by_block_stride=lambda: False)
    assert packed_spec(asked, raw, fmt) == raw


class ForgetfulBackend(Backend):
    """Has no hook."""

    def customize_spec(self, spec):
        return spec


@pytest.mark.parametrize(
    "name", ["int8_per_token_head", "nvfp4", "turboquant_3bit_nc", "fp8_ds_mla"]
)
def test_a_forgotten_hook_is_loud(name: str) -> None:
    fmt = by_name(name)
    kind = dict(spec_class=MLAAttentionSpec, head_size=576, num_kv_heads=1)
    raw = in_format(name, packed=False, **(kind if fmt.latent else {}))
    with pytest.raises(ValueError, match="customize_spec") as caught:
        packed_spec(ForgetfulBackend(name), raw, fmt, "model.3.attn", BF16)
    for word in ("'model.3.attn'", "SAMPLE", fmt.format_id, fmt.mode.name):
        assert word in str(caught.value)


def test_a_dense_layer_handed_to_a_packed_format_is_loud() -> None:
    dense = in_format("bfloat16", packed=False)
    fmt = by_name("turboquant_4bit_nc")
    with pytest.raises(ValueError, match="mode NONE"):
        packed_spec(Backend(fmt.name), dense, fmt, "model.0.attn", BF16)


def test_compressed_states_share_their_bytes_among_tokens() -> None:
    fmt = by_name("bfloat16")
    raw = MLAAttentionSpec(
        block_size=256, num_kv_heads=1, head_size=512, dtype=BF16, compress_ratio=4
    )
    assert bytes_per_token(Backend(), raw, fmt) == 256


# --- kernel blocks --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "per_token", "budget", "block"),
    [
        ([16, 32, 64], 4096, 73728, 16),
        ([16, 32, 64], 4096, 131072, 32),
        ([16, 32, 64], 4096, 1, 16),
        ([16, 32, 64], 4096, None, 16),
        ([16, 32, 64], 0, 73728, 16),
        ([Multiple(16)], 4096, 1 << 30, 16),
        ([Multiple(1), 32], 1, 1000, 32),
        ([], 4096, 73728, 48),
    ],
)
def test_largest_kernel_block_that_fits(sizes, per_token, budget, block) -> None:
    assert largest_kernel_block_within(sizes, per_token, budget, 48) == block


def test_smallest_kernel_block_suits_all_backends() -> None:
    backends = [Backend(sizes=(64, 128)), Backend(sizes=(Multiple(16),))]
    assert smallest_kernel_block(backends) == 64
    assert smallest_kernel_block([Backend(sizes=(16,), min_block_alignment=128)]) == 128
    assert smallest_kernel_block([Backend(sizes=(16,)), Backend(sizes=(48, 32))]) == 32
    assert smallest_kernel_block([]) == 1


# --- unlike attention pages -----------------------------------------------------------

# head size, format, its bytes per token, dense bytes per token, block, shared page
HETEROGENEOUS = [
    (64, "nvfp4", 576, 2048, 64, 36864),
    (128, "nvfp4", 1152, 4096, 64, 73728),
    (256, "nvfp4", 2304, 8192, 64, 147456),
    (128, "fp8", 2048, 4096, 32, 65536),
    (128, "int8_per_token_head", 2112, 4096, 32, 67584),
    (128, "turboquant_4bit_nc", 1072, 4096, 64, 68608),
]


@pytest.mark.parametrize(
    ("head_size", "name", "primary", "dense", "block", "page"), HETEROGENEOUS
)
@pytest.mark.parametrize("dense_first", [True, False])
def test_the_block_grows_until_a_dense_block_fits_the_page(
    head_size, name, primary, dense, block, page, dense_first
) -> None:
    packed_layer = layer(name, head_size=head_size)
    dense_layer = layer("bfloat16", head_size=head_size)
    assert packed_layer.bytes_per_token == primary
    assert dense_layer.bytes_per_token == dense
    layers = [packed_layer] * 3 + [dense_layer]
    shared = align_heterogeneous(layers[::-1] if dense_first else layers, 16)
    assert shared is not None
    assert (shared.block_size, shared.page_bytes) == (block, page)
    assert largest_kernel_block_within([16], dense, page, 16) * dense <= page


def test_a_state_may_ask_for_a_larger_shared_page() -> None:
    layers = [layer("nvfp4"), layer("bfloat16")]
    shared = align_heterogeneous(layers, 16, min_page_bytes=100_000)
    assert shared is not None
    assert shared.block_size == 96
    assert shared.page_bytes >= 100_000


def test_like_layers_keep_their_block() -> None:
    assert align_heterogeneous([layer("nvfp4")] * 2, 16) is None
    assert align_heterogeneous([], 16) is None


# --- attention beside recurrent states ------------------------------------------------

STATE = 3 * 8192 * 2 + 32 * 128 * 128 * 2
# format, bytes per token, block, page, percent
HYBRID = [
    ("bfloat16", 2048, 544, 1114112, 1.493),
    ("fp8", 1024, 1072, 1097728, 0.0),
    ("nvfp4", 576, 1920, 1105920, 0.746),
    ("int8_per_token_head", 1040, 1056, 1098240, 0.047),
    ("int4_per_token_head", 528, 2080, 1098240, 0.047),
    ("turboquant_k8v4", 776, 1424, 1105024, 0.665),
    ("turboquant_4bit_nc", 524, 2096, 1098304, 0.052),
    ("turboquant_k3v4_nc", 460, 2400, 1104000, 0.571),
    ("turboquant_3bit_nc", 396, 2784, 1102464, 0.431),
]


@pytest.mark.parametrize(("name", "per_token", "block", "page", "percent"), HYBRID)
def test_an_attention_block_holds_a_state(
    name, per_token, block, page, percent
) -> None:
    attention = layer(name, num_kv_heads=2, head_size=256)
    assert attention.bytes_per_token == per_token
    found = align_hybrid([attention], STATE, 16, mamba_cache_mode="align")
    assert found is not None
    assert (found.block_size, found.page_bytes) == (block, page)
    assert found.mamba_block_size == block
    assert found.padding_percent == pytest.approx(percent, abs=5e-4)
    assert found.mamba_page_size_padded == (None if page == STATE else page)


@pytest.mark.parametrize(
    ("name", "block", "percent"), [("bfloat16", 1056, 0.763), ("fp8", 2096, 0.0)]
)
def test_a_float32_state_doubles_the_block(
    name: str, block: int, percent: float
) -> None:
    attention = layer(name, num_kv_heads=2, head_size=256)
    state = 3 * 8192 * 2 + 32 * 128 * 128 * 4
    found = align_hybrid([attention], state, 16)
    assert found is not None
    assert found.block_size == block
    assert found.mamba_block_size is None
    assert found.padding_percent == pytest.approx(percent, abs=5e-4)
    assert (found.mamba_page_size_padded is None) == (percent == 0)


@pytest.mark.parametrize(
    ("name", "per_token", "block"),
    [("bfloat16", 1152, 1920), ("fp8", 576, 3840), ("fp8_ds_mla", 656, 3328)],
)
def test_latent_layers_are_priced_as_published(name, per_token, block) -> None:
    fmt = by_name(name)
    raw = MLAAttentionSpec(
        block_size=16,
        num_kv_heads=1,
        head_size=576,
        dtype=fmt.storage_dtype(BF16),
        kv_quant_mode=fmt.mode,
    )
    if fmt.opaque:
        raw = raw.packed(fmt, BF16)
    backend = Backend(name, min_block_alignment=128)
    attention = LayerPages(
        layer_name="a", backend=backend, raw_spec=raw, fmt=fmt, model_dtype=BF16
    )
    assert attention.bytes_per_token == per_token
    found = align_hybrid([attention], 2_146_304, 16)
    assert found is not None
    assert found.block_size == block


def test_unlike_layers_share_a_multiple_of_their_pages() -> None:
    layers = [
        layer(name, num_kv_heads=2, head_size=256) for name in ("bfloat16", "fp8")
    ]
    found = align_hybrid(layers, STATE, 16)
    assert found is not None
    for part in layers:
        assert found.page_bytes % (16 * part.bytes_per_token) == 0


def test_a_common_multiple_never_doubles_the_page() -> None:
    layers = [layer("turboquant_4bit_nc", num_kv_heads=2, head_size=256)]
    layers.append(layer("bfloat16", num_kv_heads=2, head_size=256))
    for part in (layers, layers[::-1]):
        found = align_hybrid(part, STATE, 16)
        assert found is not None
        assert STATE <= found.page_bytes < 2 * STATE
        assert (found.block_size, found.page_bytes) == (544, 1114112)


def test_chunks_of_states_divide_the_block() -> None:
    attention = layer("bfloat16", num_kv_heads=2, head_size=256)
    found = align_hybrid(
        [attention], STATE, 16, mamba_cache_mode="all", mamba_block_size=256
    )
    assert found is not None
    assert found.block_size == found.mamba_block_size == 768
    with pytest.raises(ValueError, match="--mamba-block-size"):
        align_hybrid([attention], STATE, 16, mamba_cache_mode="all")


def test_models_without_states_or_attention_need_no_alignment() -> None:
    assert align_hybrid([], STATE, 16) is None
    assert align_hybrid([layer("bfloat16")], 0, 16) is None


def test_a_larger_block_of_the_user_is_kept() -> None:
    attention = layer("bfloat16", num_kv_heads=2, head_size=256)
    found = align_hybrid([attention], STATE, 1024)
    assert found is not None
    assert found.block_size == 1024
    assert replace(found).page_bytes == 1024 * 2048
