"""Specs: page bytes, merging by rule, and fields that nothing drops."""

import copy
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from enum import Enum

import msgspec
import pytest
import torch

from tests.v1.spec_samples import (
    ATTENTION_SAMPLES,
    LATENT,
    PACKED,
    SAMPLES,
    config,
    full,
    in_format,
    sample_id,
    sliding,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpecKind,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SpecMergeError,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    get_kv_quant_mode,
    is_quantized_kv_cache,
    kv_cache_uses_per_token_head_scales,
    replace_as,
)
from vllm.v1.kv_formats import all_formats, by_name

every_sample = pytest.mark.parametrize("spec", SAMPLES, ids=sample_id)
every_attention_sample = pytest.mark.parametrize(
    "spec", ATTENTION_SAMPLES, ids=sample_id
)


# --- page bytes -----------------------------------------------------------------------

# head size, heads: bf16, fp8, int8, int4, nvfp4, k8v4, 4bit_nc, k3v4_nc, 3bit_nc
PAGES_OF_16 = {
    (64, 1): (4096, 2048, 2176, 1152, 1152, 1600, 1120, 992, 864),
    (64, 8): (32768, 16384, 17408, 9216, 9216, 12800, 8960, 7936, 6912),
    (96, 8): (49152, 24576, 25600, 13312, 13824, 18944, 13056, 11520, 9984),
    (128, 1): (8192, 4096, 4224, 2176, 2304, 3136, 2144, 1888, 1632),
    (128, 8): (65536, 32768, 33792, 17408, 18432, 25088, 17152, 15104, 13056),
    (256, 8): (131072, 65536, 66560, 33792, 36864, 49664, 33536, 29440, 25344),
}
COLUMNS = (
    "bfloat16",
    "fp8",
    "int8_per_token_head",
    "int4_per_token_head",
    "nvfp4",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
)


@pytest.mark.parametrize(("head_size", "heads"), PAGES_OF_16)
def test_pages_of_every_format_have_the_known_bytes(head_size: int, heads: int) -> None:
    pages = tuple(
        in_format(name, head_size=head_size, num_kv_heads=heads).page_size_bytes
        for name in COLUMNS
    )
    assert pages == PAGES_OF_16[head_size, heads]


@pytest.mark.parametrize("spec_class", [FullAttentionSpec, SlidingWindowSpec])
@pytest.mark.parametrize("name", COLUMNS)
def test_packing_does_not_depend_on_the_spec_class(
    name: str, spec_class: type[FullAttentionSpec]
) -> None:
    extra = {"sliding_window": 128} if spec_class is SlidingWindowSpec else {}
    spec = in_format(name, spec_class, **extra)
    assert spec.page_size_bytes == in_format(name).page_size_bytes
    assert spec.real_page_size_bytes == spec.unpadded_page_size_bytes


@pytest.mark.parametrize("fmt", all_formats(), ids=lambda f: f.name)
def test_packing_twice_changes_nothing(fmt) -> None:
    sizes = {"head_size": 576, "head_size_v": 0} if fmt.latent else {}
    kind = MLAAttentionSpec if fmt.latent else FullAttentionSpec
    once = in_format(fmt.name, kind, **sizes)
    assert once.packed(fmt, torch.bfloat16) == once


def test_dense_specs_publish_nothing() -> None:
    spec = in_format("bfloat16", packed=False)
    assert spec.packed(by_name("bfloat16")) is spec
    assert not spec.is_packed


def test_v_head_size_follows_k_unless_given() -> None:
    assert full().head_size_v == 64
    assert full(head_size_v=32).page_size_bytes == 16 * 2 * (64 + 32) * 4
    latent = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )
    assert latent.head_size_v == 0
    assert latent.page_size_bytes == 16 * 1152


# states, bytes per state, alignment -> page
ALIGNED = [
    (64, 584, 576, 37440),
    (64, 132, 576, 8640),
    (64, 68, 576, 4608),
    (2, 584, 576, 1728),
    (64, 528, 512, 33792),
    (4, 2048 * 4, 576, 32832),  # states of a compressor over 4 tokens
    (8, 1024 * 4, 576, 32832),  # and over 128
]


@pytest.mark.parametrize(("states", "content", "alignment", "page"), ALIGNED)
def test_latent_pages_are_padded_to_their_alignment(
    states: int, content: int, alignment: int, page: int
) -> None:
    common = dict(
        block_size=states,
        num_kv_heads=1,
        head_size=content,
        dtype=torch.uint8,
        alignment=alignment,
    )
    for spec in (
        MLAAttentionSpec(**common),
        SlidingWindowMLASpec(**common, sliding_window=128),
    ):
        assert spec.unpadded_page_size_bytes == states * content
        assert spec.page_size_bytes == page
        larger = replace(spec, block_size=4 * states)
        assert larger.page_size_bytes % alignment == 0
        assert larger.page_size_bytes >= larger.unpadded_page_size_bytes
        again = larger.copy_with_new_block_size(states)
        assert again.page_size_bytes == page


def test_compressed_layers_store_one_state_for_several_tokens() -> None:
    spec = MLAAttentionSpec(
        block_size=256,
        num_kv_heads=1,
        head_size=584,
        dtype=torch.uint8,
        compress_ratio=128,
        alignment=576,
    )
    assert (spec.storage_block_size, spec.page_size_bytes) == (2, 1728)
    with pytest.raises(ValueError, match="raise the block size"):
        _ = replace(spec, block_size=64, page_size_padded=None).page_size_bytes


def test_padding_below_the_states_is_refused() -> None:
    assert full(page_size_padded=20000).page_size_bytes == 20000
    with pytest.raises(AssertionError, match="100 bytes"):
        _ = full(page_size_padded=100).page_size_bytes
    mamba = MambaSpec(16, ((4,),), (torch.float32,), page_size_padded=8)
    with pytest.raises(ValueError, match="8 bytes"):
        _ = mamba.page_size_bytes


# --- memory of one request ------------------------------------------------------------


def test_full_layers_keep_all_tokens_of_their_rank() -> None:
    spec = full()
    assert spec.max_memory_usage_bytes(config(1000)) == 63 * spec.page_size_bytes
    assert spec.max_memory_usage_bytes(config(1000, dcp=2)) == 32 * spec.page_size_bytes
    assert spec.max_num_blocks_per_req(config(dcp=2), 1000) == 32


def test_window_layers_keep_a_window_and_what_is_in_flight() -> None:
    spec = sliding(sliding_window=1024)
    assert spec.max_admission_blocks_per_request(8192, 131072) == 577
    assert spec.max_memory_usage_bytes(config(131072)) == 577 * spec.page_size_bytes
    assert (
        replace(spec, extra_retained_tokens=2).max_admission_blocks_per_request(
            8192, 131072
        )
        == 578
    )
    assert spec.max_admission_blocks_per_request(8192, 160) == 11
    with pytest.raises(AssertionError, match="decode_context_parallel_size"):
        spec.max_memory_usage_bytes(config(dcp=2))


def test_chunked_layers_keep_a_chunk_and_what_is_in_flight() -> None:
    spec = ChunkedLocalAttentionSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.float32,
        attention_chunk_size=8192,
    )
    assert spec.max_memory_usage_bytes(config(1 << 20)) == 1024 * spec.page_size_bytes


def test_cross_attention_keeps_the_encoder_tokens_and_encoders_nothing() -> None:
    cross = CrossAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32
    )
    assert cross.max_memory_usage_bytes(config()) == 64 * cross.page_size_bytes
    encoder = EncoderOnlyAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32
    )
    assert encoder.max_memory_usage_bytes(config()) == 0


@pytest.mark.parametrize(
    ("mode", "blocks", "rows"), [("none", 3, 3), ("align", 4, 258), ("all", 258, 258)]
)
def test_recurrent_states_by_cache_mode(mode: str, blocks: int, rows: int) -> None:
    spec = MambaSpec(
        block_size=16,
        shapes=((3, 8), (2, 4, 4)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode=mode,
        num_speculative_blocks=2,
    )
    assert spec.page_size_bytes == 3 * 8 * 2 + 2 * 4 * 4 * 4
    assert spec.max_memory_usage_bytes(config()) == blocks * spec.page_size_bytes
    assert spec.max_num_blocks_per_req(config(), 4096) == rows


# --- merging --------------------------------------------------------------------------


@every_sample
def test_merging_a_spec_with_itself_gives_it_back(spec) -> None:
    assert type(spec).merge([spec, spec]) == spec
    assert spec.merge([spec, copy.deepcopy(spec)]) == spec
    assert spec.merge([spec]) == spec


OTHER_VALUE = {
    bool: lambda v: not v,
    int: lambda v: v * 2,
    str: lambda v: v + "x",
    tuple: lambda v: v[:1],
    torch.dtype: lambda v: torch.float8_e4m3fn,
    KVQuantMode: lambda v: KVQuantMode.FP8_PER_TENSOR,
}


@every_sample
def test_merging_specs_that_differ_in_a_field_follows_its_rule(spec) -> None:
    for f in fields(spec):
        value = getattr(spec, f.name)
        unknown = isinstance(value, Enum) and type(value) not in OTHER_VALUE
        if value is None or unknown:
            continue
        if f.name == "model_version":
            other = replace(spec, model_version=None)
        elif f.name in ("block_size", "compress_ratio", "shapes"):
            changes = {f.name: OTHER_VALUE[type(value)](value)}
            if f.name == "shapes":
                changes["dtypes"] = spec.dtypes[:1]
            other = replace(spec, **changes)
        else:
            other = replace(spec, **{f.name: OTHER_VALUE[type(value)](value)})
        if f.metadata.get("merge") == "any":
            assert getattr(spec.merge([spec, other]), f.name) is True
            continue
        with pytest.raises(SpecMergeError, match="differs") as caught:
            spec.merge([spec, other])
        assert isinstance(caught.value, AssertionError)
        assert isinstance(caught.value, ValueError)
        named = str(caught.value)
        assert f.name in named or "dtypes" in named or "page_size_padded" in named


@every_sample
def test_specs_of_two_classes_do_not_merge(spec) -> None:
    for other in SAMPLES:
        if type(other) is not type(spec):
            with pytest.raises(AssertionError, match=type(spec).__name__):
                spec.merge([spec, other])


def test_a_recorded_window_merges_with_none_but_not_with_another() -> None:
    plain, one, two = full(), full(sliding_window=1), full(sliding_window=2)
    assert FullAttentionSpec.merge([plain, one, one]).sliding_window == 1
    with pytest.raises(ValueError, match=r"sliding_window differs \(1, 2\)"):
        FullAttentionSpec.merge([plain, one, two])
    with pytest.raises(AssertionError, match="sliding_window and attention_chunk_size"):
        FullAttentionSpec.merge([one, full(attention_chunk_size=8)])


def test_merging_nothing_is_an_error() -> None:
    with pytest.raises(SpecMergeError):
        FullAttentionSpec.merge([])


# --- fields survive -------------------------------------------------------------------


@every_sample
def test_specs_survive_pickle_and_copies(spec) -> None:
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert copy.deepcopy(spec) == spec
    assert hash(copy.deepcopy(spec)) == hash(spec)
    assert replace(spec) == spec


def _encode(value: object) -> object:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise NotImplementedError(type(value))


def _decode(kind: type, value: str) -> object:
    return getattr(torch, value)


@every_attention_sample
def test_specs_survive_msgpack(spec) -> None:
    wire = msgspec.msgpack.Encoder(enc_hook=_encode).encode(spec)
    decoder = msgspec.msgpack.Decoder(type(spec), dec_hook=_decode)
    assert decoder.decode(wire) == spec


@every_attention_sample
def test_packing_survives_a_new_block_size(spec) -> None:
    new = spec.copy_with_new_block_size(spec.block_size * 2)
    for name in (
        "num_head_slots",
        "state_content_bytes",
        "kv_quant_mode",
        "head_size_v",
    ):
        assert getattr(new, name) == getattr(spec, name)
    assert new.page_size_bytes >= new.unpadded_page_size_bytes
    assert type(new).merge([new, new]) == new


def test_promotion_keeps_common_fields() -> None:
    local = SlidingWindowSpec(**PACKED, sliding_window=32, head_size_v=96)
    promoted = replace_as(local, FullAttentionSpec, drop=("extra_retained_tokens",))
    for f in fields(local):
        if f.name != "extra_retained_tokens":
            assert getattr(promoted, f.name) == getattr(local, f.name)
    latent = SlidingWindowMLASpec(**LATENT, sliding_window=32)
    kept = replace_as(latent, MLAAttentionSpec, drop=("extra_retained_tokens",))
    assert kept.alignment == latent.alignment
    assert kept.kv_quant_mode == latent.kv_quant_mode
    with pytest.raises(TypeError, match="extra_retained_tokens"):
        replace_as(local, FullAttentionSpec)


def test_invariants_hold_without_assert_statements() -> None:
    script = """
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SpecMergeError
kw = dict(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
a, b = FullAttentionSpec(**kw), FullAttentionSpec(**{**kw, "num_kv_heads": 4})
try:
    FullAttentionSpec.merge([a, b])
    raise SystemExit("merged")
except SpecMergeError as error:
    if "num_kv_heads" not in str(error):
        raise SystemExit("field not named")
for spec in (FullAttentionSpec(**kw, page_size_padded=1),
             MambaSpec(16, ((4,),), (torch.float32,), 1)):
    try:
        spec.page_size_bytes
        raise SystemExit("short padding passed")
    except ValueError:
        pass
"""
    subprocess.run([sys.executable, "-O", "-c", script], check=True)


# --- kinds, windows, modes ------------------------------------------------------------

KINDS = {
    FullAttentionSpec: KVCacheSpecKind.FULL_ATTENTION,
    MLAAttentionSpec: KVCacheSpecKind.MLA_ATTENTION,
    HiddenStateCacheSpec: KVCacheSpecKind.MLA_ATTENTION,
    RSWASpec: KVCacheSpecKind.FULL_ATTENTION,
    SinkFullAttentionSpec: KVCacheSpecKind.SINK_FULL_ATTENTION,
    ChunkedLocalAttentionSpec: KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION,
    SlidingWindowSpec: KVCacheSpecKind.SLIDING_WINDOW,
    SlidingWindowMLASpec: KVCacheSpecKind.SLIDING_WINDOW_MLA,
    MambaSpec: KVCacheSpecKind.MAMBA,
    EncoderOnlyAttentionSpec: KVCacheSpecKind.ENCODER_ONLY_ATTENTION,
    CrossAttentionSpec: KVCacheSpecKind.CROSS_ATTENTION,
}


@every_sample
def test_kind_of_a_layer(spec) -> None:
    assert get_kv_cache_spec_kind(spec) is KINDS[type(spec)]


def test_kind_of_a_uniform_group() -> None:
    def kind(**specs):
        return get_kv_cache_spec_kind(UniformTypeKVCacheSpecs(16, specs))

    latent = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=576, dtype=torch.uint8
    )
    assert kind(a=sliding(), b=sliding(head_size=32)) is KVCacheSpecKind.SLIDING_WINDOW
    assert kind(a=full(), b=latent) is KVCacheSpecKind.FULL_ATTENTION
    assert kind(a=full(), b=sliding()) is KVCacheSpecKind.UNKNOWN


def test_only_window_specs_report_a_window() -> None:
    window = get_kv_cache_spec_sliding_window
    assert window(sliding(sliding_window=7)) == 7
    assert window(full(sliding_window=7)) is None
    group = {
        "a": sliding(sliding_window=7),
        "b": sliding(sliding_window=7, head_size=8),
    }
    assert window(UniformTypeKVCacheSpecs(16, group)) == 7
    group["c"] = sliding(sliding_window=8)
    assert window(UniformTypeKVCacheSpecs(16, group)) is None


def test_one_definition_of_quantised() -> None:
    for fmt in all_formats():
        assert get_kv_quant_mode(fmt.name) is fmt.mode
        assert is_quantized_kv_cache(fmt.name) == (fmt.mode is not KVQuantMode.NONE)
    assert kv_cache_uses_per_token_head_scales("int4_per_token_head")
    assert not kv_cache_uses_per_token_head_scales("fp8")


# --- uniform groups and the plan ------------------------------------------------------


def test_uniform_groups_take_layers_of_unlike_pages() -> None:
    specs = {"a": full(), "b": full(head_size=32), "c": full(head_size=32)}
    group = UniformTypeKVCacheSpecs.from_specs(specs)
    assert group is not None
    assert group.page_size_bytes == sum(s.page_size_bytes for s in specs.values())
    assert group.get_page_sizes() == [8192, 16384]
    assert group.get_num_layer_tuples() == 2
    assert group.max_memory_usage_pages(config()) == 256
    assert group.max_num_blocks_per_req(config(), 4096) == 256
    assert group.copy_with_new_block_size(32).page_size_bytes == 2 * 32768
    with pytest.raises(TypeError):
        hash(group)


@pytest.mark.parametrize(
    "specs",
    [
        {},
        {"a": full(), "b": full(block_size=32)},
        {"a": full(), "b": sliding()},
        {"a": sliding(), "b": sliding(sliding_window=2)},
    ],
)
def test_layers_of_two_kinds_or_blocks_are_not_uniform(specs) -> None:
    assert UniformTypeKVCacheSpecs.from_specs(specs) is None


def test_latent_window_layers_count_as_window_layers_only_after_them() -> None:
    latent = SlidingWindowMLASpec(
        block_size=16,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.uint8,
        sliding_window=1,
    )
    plain = sliding()
    is_uniform = UniformTypeKVCacheSpecs.is_uniform_type
    assert is_uniform({"a": plain, "b": latent})
    assert not is_uniform({"a": latent, "b": plain})


def _plan(specs: dict, **extra) -> KVCacheConfig:
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(16, specs))
    return KVCacheConfig(1, [], [group], **extra)


def test_mixed_formats_and_states_need_zeroing() -> None:
    dense, packed = in_format("bfloat16"), in_format("turboquant_4bit_nc")
    mamba = MambaSpec(16, ((4,),), (torch.float32,))
    assert not _plan({"a": dense, "b": dense}).needs_kv_cache_zeroing
    assert _plan({"a": dense, "b": packed}).has_mixed_precision_kv_cache
    assert _plan({"a": mamba}).has_mamba_layers
    assert _plan({"a": mamba}).needs_kv_cache_zeroing


def test_formats_of_one_mode_are_told_apart_by_id() -> None:
    fp8 = in_format("fp8_e4m3")
    ids = {"a": "fp8_e4m3:cells", "b": "fp8_e5m2:cells"}
    assert not _plan({"a": fp8, "b": fp8}).has_mixed_precision_kv_cache
    assert _plan({"a": fp8, "b": fp8}, layer_formats=ids).has_mixed_precision_kv_cache


def test_a_tensor_names_its_layers_either_way() -> None:
    assert KVCacheTensor(size=1, shared_by=["a"]).layer_names == ["a"]
    assert KVCacheTensor(
        size=1, layers=["a", "b"], layer_stride=64, block_stride=128
    ).layer_names == ["a", "b"]
