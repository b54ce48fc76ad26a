"""Every backend of this build: what it publishes, what it refuses, how it says so."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from vllm.utils.import_utils import has_module
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
    checked_kv_cache_shape,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_formats import KVQuantMode, all_formats, by_name
from vllm.v1.page_planning import packed_spec

BACKENDS = [m.get_class() for m in AttentionBackendEnum if m.is_importable()]
CLAIMS = [
    pytest.param(backend, name, id=f"{backend.get_name()}-{name}")
    for backend in BACKENDS
    for name in backend.supported_kv_cache_dtypes
]
SHAPES = [(8, 128), (1, 64), (3, 256)]


def raw_spec(backend, fmt, heads=8, head_size=128, model_dtype=torch.bfloat16, **extra):
    """What a layer returns; the layer itself publishes formats that go by name."""
    cls = MLAAttentionSpec if backend.is_mla() else FullAttentionSpec
    spec = cls(
        block_size=16,
        num_kv_heads=1 if backend.is_mla() else heads,
        head_size=576 if backend.is_mla() else head_size,
        dtype=fmt.storage_dtype(model_dtype),
        kv_quant_mode=fmt.mode,
        **extra,
    )
    return spec.packed(fmt) if fmt.opaque and backend.is_mla() else spec


def test_the_build_has_the_backends_it_promises():
    assert {backend.get_name() for backend in BACKENDS} >= {
        "REFERENCE",
        "CPU_ATTN",
        "TRITON_ATTN",
        "FLASHINFER",
        "TURBOQUANT",
        "FLASH_ATTN",
        "CPU_MLA",
        "TRITON_MLA",
        "FLASHMLA_SPARSE",
    }
    for backend in BACKENDS:
        assert AttentionBackendEnum[backend.get_name()].get_class() is backend


@pytest.mark.parametrize(("backend", "name"), CLAIMS)
@pytest.mark.parametrize(("heads", "head_size"), SHAPES)
def test_the_hook_publishes_what_the_format_packs(backend, name, heads, head_size):
    fmt = by_name(name)
    raw = raw_spec(backend, fmt, heads, head_size)
    spec = packed_spec(backend, raw, fmt)
    packing = fmt.packing(
        raw.num_kv_heads, raw.head_size, raw.head_size_v, torch.bfloat16
    )
    assert spec.num_heads == packing.head_slots
    assert spec.state_content_size_bytes == packing.state_bytes
    unchanged = ("block_size", "dtype", "head_size", "head_size_v", "page_size_padded")
    assert all(getattr(spec, f) == getattr(raw, f) for f in unchanged)


@pytest.mark.parametrize(("backend", "name"), CLAIMS)
def test_the_hook_applied_twice_changes_nothing(backend, name):
    spec = backend.customize_spec(raw_spec(backend, by_name(name)))
    assert backend.customize_spec(spec) is spec


@pytest.mark.parametrize(("backend", "name"), CLAIMS)
def test_dense_and_plain_fp8_specs_pass_through_untouched(backend, name):
    fmt = by_name(name)
    if fmt.mode in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR):
        spec = raw_spec(backend, fmt)
        assert backend.customize_spec(spec) is spec


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
@pytest.mark.parametrize("fmt", all_formats(), ids=lambda f: f.name)
def test_a_published_spec_is_never_published_over(backend, fmt):
    spec = replace(raw_spec(backend, fmt), num_head_slots=5, state_content_bytes=7)
    assert backend.customize_spec(spec) is spec


@pytest.mark.parametrize(("backend", "name"), CLAIMS)
def test_packing_does_not_depend_on_the_kind_of_spec(backend, name):
    if backend.is_mla():
        return
    fmt = by_name(name)
    full = backend.customize_spec(raw_spec(backend, fmt))
    window = SlidingWindowSpec(
        block_size=16,
        num_kv_heads=8,
        head_size=128,
        dtype=full.dtype,
        kv_quant_mode=fmt.mode,
        sliding_window=64,
    )
    assert backend.customize_spec(window).page_size_bytes == full.page_size_bytes


@pytest.mark.parametrize(("backend", "name"), CLAIMS)
@pytest.mark.parametrize(("heads", "head_size"), SHAPES)
def test_the_shape_of_a_cache_has_the_published_bytes(backend, name, heads, head_size):
    fmt = by_name(name)
    spec = packed_spec(backend, raw_spec(backend, fmt, heads, head_size), fmt)
    shape = checked_kv_cache_shape(backend, spec, 5, 8, name)
    assert shape[0] == 5
    tensor = torch.empty(shape, dtype=spec.dtype, device="meta")
    assert tensor.nbytes == 5 * spec.page_size_bytes // 2
    if not backend.is_mla():
        assert shape == backend.get_kv_cache_shape(5, 8, heads, head_size, name)


def test_a_forgotten_hook_is_loud():
    class Forgetful(TritonAttentionBackend):
        customize_spec = AttentionBackend.customize_spec

    fmt = by_name("int4_per_token_head")
    with pytest.raises(ValueError, match=r"layer.7.*TRITON_ATTN.customize_spec"):
        packed_spec(Forgetful, raw_spec(Forgetful, fmt), fmt, "layer.7")


def test_an_overridden_shape_of_other_bytes_is_loud():
    class Wasteful(TritonAttentionBackend):
        @staticmethod
        def get_kv_cache_shape(
            num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"
        ):
            return 2, num_blocks, block_size, num_kv_heads, head_size + 1

    spec = raw_spec(Wasteful, by_name("auto"))
    with pytest.raises(ValueError, match=r"get_kv_cache_shape.*publishes 65536"):
        checked_kv_cache_shape(Wasteful, spec, 4, 16)


@pytest.mark.parametrize("name", ["turboquant_4bit_nc", "turboquant_3bit_nc"])
def test_narrower_values_shape_the_cache(name):
    turboquant = AttentionBackendEnum.TURBOQUANT.get_class()
    fmt = by_name(name)
    spec = packed_spec(turboquant, raw_spec(turboquant, fmt, head_size_v=64), fmt)
    shape = checked_kv_cache_shape(turboquant, spec, 3, 16, name)
    assert shape == (3, 8, 16, spec.state_content_size_bytes)
    assert turboquant.get_kv_cache_shape(3, 16, 8, 128) == (3, 8, 16, 134)


def test_an_overridden_shape_of_equal_bytes_is_honoured():
    class KeysFirst(TritonAttentionBackend):
        @staticmethod
        def get_kv_cache_shape(
            num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"
        ):
            return 2, num_blocks, block_size, num_kv_heads, head_size

    spec = raw_spec(KeysFirst, by_name("auto"))
    assert checked_kv_cache_shape(KeysFirst, spec, 4, 16) == (2, 4, 16, 8, 128)


@pytest.mark.parametrize("package", ["triton", "flashinfer", "flash_attn", "flash_mla"])
def test_publishing_imports_no_kernel_package(package):
    code = (
        f"import sys; sys.modules['{package}'] = None\n"
        "from tests.v1.attention.test_backends import BACKENDS, raw_spec\n"
        "from vllm.v1.kv_formats import by_name\n"
        "for b in BACKENDS:\n"
        "  for n in b.supported_kv_cache_dtypes:\n"
        "    b.customize_spec(raw_spec(b, by_name(n)))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def question(backend, **changes):
    mla = backend.is_mla()
    asked = {
        "head_size": 576 if mla else 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": backend.supported_kv_cache_dtypes[0],
        "block_size": None,
        "use_mla": mla,
        "has_sink": False,
        "use_sparse": backend.is_sparse(),
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": None,
        "attn_type": AttentionType.DECODER,
    }
    return backend.validate_configuration(**{**asked, **changes})


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
def test_reasons_are_collected_and_worded(backend):
    usual = question(backend)
    reason = backend.unavailable_reason()
    assert usual == ([reason] if reason else [])
    many = question(
        backend, dtype=torch.float64, use_per_head_quant_scales=True, block_size=17
    )
    assert "model dtype float64 not supported" in many
    assert "scales per head not supported" in many
    assert len(many) >= len(usual) + 2


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
def test_an_impl_exists_or_its_absence_is_explained(backend):
    reason = backend.unavailable_reason()
    if reason is None:
        assert backend.get_impl_cls()
        return
    with pytest.raises(ValueError, match=r"install it or choose|choose "):
        backend.get_impl_cls()
    assert backend.get_name() in reason
    for package in backend.required_packages:
        assert has_module(package) or package in reason


@pytest.mark.parametrize(
    ("name", "sizes", "alignment"),
    [
        ("FLASH_ATTN", [MultipleOf(16)], 1),
        ("TRITON_ATTN", [MultipleOf(16)], 1),
        ("CPU_ATTN", [MultipleOf(16)], 1),
        ("FLASHINFER", [16, 32, 64], 1),
        ("TURBOQUANT", [16, 32, 64, 128], 1),
        ("TRITON_MLA", [MultipleOf(16)], 128),
        ("FLASHMLA_SPARSE", [64], 128),
        ("CPU_MLA", [MultipleOf(16)], 128),
    ],
)
def test_kernels_take_the_known_block_sizes(name, sizes, alignment):
    backend = AttentionBackendEnum[name].get_class()
    assert backend.get_supported_kernel_block_sizes() == sizes
    assert backend.min_block_alignment == alignment


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
def test_block_sizes_follow_from_kernel_sizes(backend):
    sizes = backend.get_supported_kernel_block_sizes()
    for size in sizes:
        base = size.base if isinstance(size, MultipleOf) else size
        assert backend.supports_block_size(base)
        assert backend.supports_block_size(3 * base)
    preferred = backend.get_preferred_block_size(16)
    assert backend.supports_block_size(preferred)
    assert preferred == (16 if backend.supports_block_size(16) else min(sizes))
    assert not backend.supports_block_size(17) or MultipleOf(1) in sizes


def test_host_kernels_require_head_major_pages():
    cpu = AttentionBackendEnum.CPU_ATTN.get_class()
    assert cpu.layout_declaration().layouts == (KVCacheLayout.LBHNC,)
    assert cpu.get_required_kv_cache_layout() == "LBHNC"
    assert AttentionBackendEnum.TRITON_ATTN.get_class().supported_kv_cache_layouts == ()


class Minimal(AttentionBackend):
    """A backend from outside that states nothing but what it must."""

    @staticmethod
    def get_name() -> str:
        return "MINIMAL"

    @staticmethod
    def get_impl_cls():
        return object


def test_a_minimal_backend_works_by_default():
    spec = raw_spec(Minimal, by_name("auto"))
    assert packed_spec(Minimal, spec, by_name("auto")).page_size_bytes == 65536
    assert Minimal.get_kv_cache_shape(7, 16, 8, 128) == (7, 8, 16, 256)
    assert Minimal.get_builder_cls() is AttentionMetadataBuilder
    assert question(Minimal) == []
    assert Minimal.full_cls_name() == (__name__, "Minimal")
    assert Minimal.get_preferred_block_size(24) == 24
    latent = question(Minimal, kv_cache_dtype="fp8_ds_mla")
    assert latent == ["KV cache fp8_ds_mla not supported"]
