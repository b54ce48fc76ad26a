"""FLASHINFER attends to what its format stores, through a stand-in for the package that
does what its documentation says: which pages, views, scales and plans it is given."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.cuda.conftest import emulated, emulation
from tests.v1.attention.flashinfer.stand_in import StandIn
from tests.v1.attention.paged_batch import Case, PagedBatch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends import flashinfer, flashinfer_impl
from vllm.v1.attention.backends.flashinfer import FlashInferBackend, Kernels
from vllm.v1.attention.backends.flashinfer_impl import FlashInferImpl, cache_views
from vllm.v1.attention.ops import cuda_kernels, flashinfer_calls
from vllm.v1.kv_formats import KVScales, by_name
from vllm.v1.kv_formats.casts import saturate

__all__ = ["emulated", "emulation"]  # fixtures

HOPPER, BLACKWELL = DeviceCapability(9, 0), DeviceCapability(10, 0)
CAPABILITIES = {"fa2": HOPPER, "trtllm-gen": BLACKWELL}
NAMES = FlashInferBackend.supported_kv_cache_dtypes
SCALES = KVScales(k=0.75, v=1.25)
PREFILL = [(5, 5), (37, 37), (2, 18)]
DECODE = [(1, 1), (1, 16), (1, 17), (1, 70)]
MIXED = [(1, 33), (1, 2), (9, 50), (20, 20), (1, 35)]  # decodes first, as reordered
BATCHES = {"prefill": PREFILL, "decode": DECODE, "mixed": MIXED}


class Platform:
    capability = HOPPER

    def get_device_capability(self) -> DeviceCapability:
        return self.capability


def by_the_format(pages: torch.Tensor, *arguments: Any) -> None:
    slots, key, value, fmt, scales = arguments
    fmt.store(pages, slots, key, value, scales)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(flashinfer_calls, "resolve", stand_in)
    return stand_in


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, package: StandIn) -> Iterator[Any]:
    """`on(capability)`: the backend on such a device; writes go through the formats,
    unless the backend's own kernels are asked for."""
    platform = Platform()
    monkeypatch.setattr(flashinfer, "current_platform", platform)
    monkeypatch.setattr(flashinfer_impl, "current_platform", platform)
    monkeypatch.setattr(FlashInferBackend, "unavailable_reason", lambda: None)
    monkeypatch.setattr(flashinfer_impl, "_WORKSPACE_BYTES", 1 << 20)
    flashinfer_impl.workspace_of.cache_clear()

    def choose(capability: DeviceCapability, own_stores: bool = False) -> None:
        platform.capability = capability
        if not own_stores:
            monkeypatch.setattr(flashinfer_impl, "_store_of", lambda f: by_the_format)

    yield choose
    flashinfer_impl.workspace_of.cache_clear()


def check(case: Case) -> PagedBatch:
    batch = PagedBatch(case, FlashInferBackend)
    fmt = batch.impl.format
    if batch.impl.kernels is Kernels.TRTLLM and fmt.mode.is_quantized:
        # These kernels take queries of 8 bits.
        narrow = [saturate(q, torch.float8_e4m3fn) for q in batch.queries]
        batch.queries = [q.to(case.dtype) for q in narrow]
    found = batch.run()
    torch.testing.assert_close(found.double(), batch.expected(), rtol=4e-3, atol=4e-3)
    return batch


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("capability", CAPABILITIES.values(), ids=CAPABILITIES)
def test_every_format_attends_to_what_it_stores(
    on: Any, capability: DeviceCapability, name: str, requests: list[tuple[int, int]]
) -> None:
    on(capability)
    check(Case(requests, name, dtype=torch.float16, scales=SCALES, group=3))


@pytest.mark.parametrize("name", ["auto", "fp8", "nvfp4", "fp8_per_token_head"])
@pytest.mark.parametrize("capability", CAPABILITIES.values(), ids=CAPABILITIES)
@pytest.mark.parametrize(("head_size", "block_size"), [(128, 32), (256, 64)])
def test_sizes_and_windows(
    on: Any,
    capability: DeviceCapability,
    name: str,
    head_size: int,
    block_size: int,
) -> None:
    on(capability)
    case = Case(
        MIXED,
        name,
        dtype=torch.float16,
        head_size=head_size,
        block_size=block_size,
        num_kv_heads=1,
        sliding_window=19,
    )
    check(case)


def test_soft_caps_are_read_by_fa2(on: Any, package: StandIn) -> None:
    on(BLACKWELL)
    check(Case(MIXED, dtype=torch.float16, soft_cap=0.8))
    assert flashinfer_calls.TRTLLM_PREFILL not in package.calls
    with pytest.raises(ValueError, match="no soft caps over nvfp4"):
        PagedBatch(
            Case(MIXED, "nvfp4", dtype=torch.float16, soft_cap=0.8), FlashInferBackend
        )


def test_sinks_are_read_by_trtllm(on: Any) -> None:
    on(BLACKWELL)
    check(Case(MIXED, dtype=torch.float16, sinks=True))


def test_without_a_causal_mask_every_request_is_a_prefill(
    on: Any, package: StandIn
) -> None:
    on(HOPPER)
    check(Case(MIXED, dtype=torch.float16, causal=False))
    assert flashinfer_calls.DECODE not in package.calls


@pytest.mark.parametrize("capability", CAPABILITIES.values(), ids=CAPABILITIES)
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6"])
def test_nvfp4_written_by_the_cuda_kernel_is_read(
    on: Any, emulated: None, capability: DeviceCapability, name: str
) -> None:
    """In the arrangement of each family: interleaved for trtllm-gen, linear for fa2."""
    on(capability, own_stores=True)
    batch = check(Case(MIXED, name, dtype=torch.float16, scales=SCALES))
    assert batch.impl._store is cuda_kernels.nvfp4_store
    wanted = "cells" if capability is BLACKWELL else "linear"
    assert batch.impl.format.arrangement == wanted


@pytest.mark.parametrize("capability", CAPABILITIES.values(), ids=CAPABILITIES)
@pytest.mark.parametrize("name", ["auto", "fp8", "nvfp4", "fp8_per_token_head"])
def test_pages_written_by_triton_are_read(
    on: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capability: DeviceCapability,
    name: str,
) -> None:
    monkeypatch.setattr(cuda_kernels, "LIBRARY", tmp_path / "not_built.so")
    cuda_kernels._load.cache_clear()
    on(capability, own_stores=True)
    batch = check(Case([(1, 17), (3, 9)], name, dtype=torch.float16, scales=SCALES))
    assert batch.impl._store.__module__.endswith("triton_store")
    cuda_kernels._load.cache_clear()


# --- views ----------------------------------------------------------------------------


def test_scales_per_token_are_strided_views_of_the_pages() -> None:
    fmt = by_name("fp8_per_token_head")
    packing = fmt.packing(2, 64, 64)
    pages = torch.zeros(3, 2, 16, packing.state_bytes, dtype=torch.uint8)
    caches = cache_views(fmt, pages, 64)
    assert caches.scales is not None
    for side, scales in enumerate(caches.scales):
        assert scales.dtype == torch.float32 and scales.shape == (3, 2, 16)
        assert not scales.is_contiguous()
        scales[1, 1, 5] = 2.0
        assert fmt.layout(64, 64).view(pages, ("k_scale", "v_scale")[side]).sum() == 2.0


@pytest.mark.parametrize("arrangement", ["cells", "linear"])
def test_every_view_of_nvfp4_shares_the_pages_memory(arrangement: str) -> None:
    fmt = by_name("nvfp4").arranged(arrangement)
    packing = fmt.packing(3, 64, 64)
    pages = torch.zeros(2, packing.head_slots, 16, packing.state_bytes).byte()
    caches = cache_views(fmt, pages, 64)
    assert caches.scales is not None
    for tensor in (*caches.codes, *caches.scales):
        tensor.view(torch.uint8).fill_(1)
    assert bool((pages == 1).all())


# --- plans, groups, refusals ----------------------------------------------------------


def common_of(lengths: list[int], width: int = 8) -> CommonAttentionMetadata:
    count = len(lengths)
    starts = torch.arange(count + 1, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=count,
        num_actual_tokens=count,
        max_query_len=1,
        max_seq_len=128,
        block_table_tensor=torch.arange(count * width).int().view(count, width),
        slot_mapping=torch.arange(count),
    )


def test_page_lists_name_the_blocks_of_each_request() -> None:
    lists = flashinfer_impl.page_lists(common_of([1, 16, 17, 64]), 1, 4, 16)
    assert lists.starts.tolist() == [0, 1, 3, 7]
    assert lists.pages.tolist() == [8, 16, 17, 24, 25, 26, 27]
    assert lists.last_states.tolist() == [16, 1, 16]
    assert {t.dtype for t in (lists.starts, lists.pages, lists.last_states)} == {
        torch.int32
    }


def test_a_captured_batch_is_planned_again_in_its_own_buffers(
    on: Any, package: StandIn
) -> None:
    on(HOPPER)
    batch = PagedBatch(Case(DECODE, dtype=torch.float16), FlashInferBackend)
    builder = FlashInferBackend.get_builder_cls()(
        batch.spec, ["layer"], batch.vllm_config(), torch.device("cpu")
    )
    captured = builder.build_for_cudagraph_capture(common_of([1, 1]))
    wrapper = captured.parts[0].wrapper
    assert wrapper.problem.lengths == [1, 1]
    places = [buffer.data_ptr() for buffer in wrapper.buffers]
    builder.replan_for_graph(common_of([20, 33]))
    assert wrapper.problem.lengths == [20, 33]
    assert [buffer.data_ptr() for buffer in wrapper.buffers] == places
    assert wrapper.buffers[0].tolist() == [0, 2, 5]
    again = builder.build_for_cudagraph_capture(common_of([1, 1]))
    assert again.parts[0].wrapper is wrapper


def test_layers_that_differ_share_no_plan(on: Any) -> None:
    on(HOPPER)
    batch = PagedBatch(Case(DECODE, dtype=torch.float16), FlashInferBackend)
    config = batch.vllm_config()
    layers = config.compilation_config.static_forward_context
    other = PagedBatch(
        Case(DECODE, dtype=torch.float16, soft_cap=2.0), FlashInferBackend
    )
    layers["other"] = type(layers["layer"])(impl=other.impl)
    builder = FlashInferBackend.get_builder_cls()
    with pytest.raises(ValueError, match="layer, other differ in window, soft cap"):
        builder(batch.spec, ["layer", "other"], config, torch.device("cpu"))


REASONS = [
    ("nvfp4", 128, (7, 5), False, "nvfp4 needs compute capability 8.0"),
    ("fp8_per_token_head", 128, (7, 5), False, "needs compute capability 8.0"),
    ("auto", 128, (9, 0), True, "sinks over auto pages need trtllm-gen"),
    ("fp8_e5m2", 128, (10, 0), True, "sinks over fp8_e5m2 pages need trtllm-gen"),
    ("nvfp4", 512, (10, 0), False, r"trtllm-gen takes head sizes \(64, 128, 256\)"),
    ("auto", 128, (12, 2), False, "compute capability 12.2 not supported"),
    ("auto", 80, (9, 0), False, "head size 80 not supported"),
]


@pytest.mark.parametrize(("name", "size", "capability", "sink", "words"), REASONS)
def test_refusals_say_why(
    name: str, size: int, capability: tuple[int, int], sink: bool, words: str
) -> None:
    reasons = FlashInferBackend.validate_configuration(
        size,
        torch.float16,
        name,
        16,
        False,
        sink,
        False,
        False,
        False,
        DeviceCapability(*capability),
        AttentionType.DECODER,
    )
    assert any(re.search(words, reason) for reason in reasons)


@pytest.mark.parametrize(("found", "ends"), [("0.7.4", False), ("0.6.1", True)])
def test_an_older_package_is_refused_by_version(
    monkeypatch: pytest.MonkeyPatch, found: str, ends: bool
) -> None:
    monkeypatch.setattr(
        "vllm.v1.attention.backends.optional.has_module", lambda name: True
    )
    monkeypatch.setattr(flashinfer, "version", lambda name: found)
    reason = FlashInferBackend.unavailable_reason()
    assert (reason is not None) == ends
    if ends:
        assert "0.7 or newer, but 0.6.1 is installed; upgrade it or choose" in reason


def test_impls_refuse_what_the_kernels_lack(on: Any) -> None:
    on(HOPPER)
    with pytest.raises(ValueError, match="without ALiBi"):
        FlashInferImpl(4, 64, 1.0, alibi_slopes=[1.0] * 4)
    with pytest.raises(ValueError, match="not encoder_only"):
        FlashInferImpl(4, 64, 1.0, attn_type=AttentionType.ENCODER_ONLY)
