"""REFERENCE and CPU_ATTN equal naive attention over what the format stores."""

import pytest
import torch

from tests.v1.attention.paged_batch import Case, PagedBatch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.reference import (
    ReferenceAttentionBackend,
    ReferenceAttentionImpl,
)
from vllm.v1.kv_formats import KVScales, all_formats

BACKENDS = [ReferenceAttentionBackend, CPUAttentionBackend]
FORMATS = [fmt.name for fmt in all_formats() if not fmt.latent]
TYPICAL = ["auto", "fp8", "int8_per_token_head", "nvfp4", "turboquant_4bit_nc"]

PREFILL = [(1, 1), (5, 5), (37, 37)]
CHUNKED = [(7, 40), (16, 80), (3, 19)]
DECODE = [(1, 1), (1, 16), (1, 17), (1, 70), (1, 71)]
MIXED = [(1, 33), (9, 50), (1, 2), (20, 20), (1, 35)]
BATCHES = {
    "prefill": PREFILL,
    "chunked": CHUNKED,
    "decode": DECODE,
    "mixed": MIXED,
}


def check(case: Case, backend, tolerance: float = 2e-5) -> None:
    batch = PagedBatch(case, backend)
    result = batch.run()
    assert result.dtype == case.dtype
    torch.testing.assert_close(
        result.double(), batch.expected(), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
@pytest.mark.parametrize("cache_dtype", FORMATS)
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES.keys())
def test_every_format_attends_to_what_it_stores(backend, cache_dtype, requests):
    check(Case(requests, cache_dtype, seed=1), backend)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
@pytest.mark.parametrize("cache_dtype", TYPICAL)
@pytest.mark.parametrize("group", [1, 3, 7])
def test_query_heads_share_kv_heads_in_order(backend, cache_dtype, group):
    check(Case(MIXED, cache_dtype, group=group, num_kv_heads=3), backend)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
@pytest.mark.parametrize("cache_dtype", FORMATS)
@pytest.mark.parametrize("head_size", [32, 80, 96, 128, 192, 256])
def test_head_sizes_a_format_fits(backend, cache_dtype, head_size):
    fmt = next(f for f in all_formats() if f.name == cache_dtype)
    try:
        fmt.check_head_size(head_size, head_size)
    except ValueError as refusal:
        assert cache_dtype in str(refusal) and str(head_size) in str(refusal)
        return
    requests = [(3, 20), (1, 18)]
    check(Case(requests, cache_dtype, num_kv_heads=1, head_size=head_size), backend)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
@pytest.mark.parametrize("cache_dtype", TYPICAL)
@pytest.mark.parametrize("window", [1, 16, 23])
def test_a_window_hides_older_states(backend, cache_dtype, window):
    check(Case(MIXED, cache_dtype, sliding_window=window), backend)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
@pytest.mark.parametrize("cache_dtype", TYPICAL)
def test_soft_cap_and_sinks(backend, cache_dtype):
    check(Case(MIXED, cache_dtype, soft_cap=0.8), backend)
    check(Case(MIXED, cache_dtype, sinks=True), backend)
    everything = Case(
        MIXED, cache_dtype, soft_cap=2.0, sinks=True, sliding_window=9, group=3
    )
    check(everything, backend)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
@pytest.mark.parametrize("window", [None, 11])
def test_non_causal_queries_see_the_whole_context(backend, window):
    check(Case(MIXED, causal=False, sliding_window=window), backend)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "int4_per_token_head"])
def test_values_may_be_narrower_than_keys(backend, cache_dtype):
    check(Case(MIXED, cache_dtype, head_size=96, head_size_v=64), backend)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_block_size_does_not_matter(backend, block_size):
    check(Case(MIXED, block_size=block_size), backend)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", ["auto", "float32", "float16", "bfloat16"])
def test_half_precision_models(backend, dtype, cache_dtype):
    tolerance = 1e-2 if dtype is torch.bfloat16 else 2e-3
    check(Case(MIXED, cache_dtype, dtype=dtype), backend, tolerance)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e5m2", "nvfp4"])
def test_scales_of_the_layer_apply_to_writes_and_reads(backend, cache_dtype):
    case = Case(MIXED, cache_dtype, scales=KVScales(k=0.3, v=0.07))
    check(case, backend)
    unscaled = PagedBatch(Case(MIXED, cache_dtype), backend).run()
    assert not torch.equal(PagedBatch(case, backend).run(), unscaled)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
@pytest.mark.parametrize("cache_dtype", FORMATS)
def test_a_prefix_hit_gives_what_a_miss_gives(backend, cache_dtype):
    miss = PagedBatch(Case([(48, 48)], cache_dtype, seed=3), backend)
    hit = PagedBatch(Case([(16, 48)], cache_dtype, seed=3), backend)
    hit.keys, hit.values = miss.keys, miss.values
    hit.queries = [miss.queries[0][32:]]
    torch.testing.assert_close(hit.run(), miss.run()[32:], rtol=1e-5, atol=1e-6)


def test_long_contexts_are_read_in_chunks(monkeypatch):
    module = "vllm.v1.attention.backends.reference"
    whole = PagedBatch(Case(MIXED, sinks=True), ReferenceAttentionBackend).run()
    monkeypatch.setattr(f"{module}._MAX_CHUNK_STATES", 16)
    monkeypatch.setattr("vllm.v1.attention.ops.online_softmax._MAX_PAIRS", 48)
    pieces = PagedBatch(Case(MIXED, sinks=True), ReferenceAttentionBackend).run()
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.get_name())
def test_padding_slots_write_nothing(backend):
    batch = PagedBatch(Case([(4, 4)]), backend)
    before = batch.kv_cache.view(torch.uint8).clone()
    slots = torch.full((4,), -1)
    batch.impl.do_kv_cache_update(
        batch.layer, batch.keys[0], batch.values[0], batch.kv_cache, slots
    )
    assert torch.equal(batch.kv_cache.view(torch.uint8), before)


def test_encoder_layers_attend_to_the_step_itself():
    batch = PagedBatch(Case([(5, 5), (9, 9)], causal=False), ReferenceAttentionBackend)
    impl = ReferenceAttentionImpl(
        num_heads=4,
        head_size=64,
        scale=batch.scale,
        num_kv_heads=2,
        attn_type="encoder_only",
    )
    key, value = torch.cat(batch.keys), torch.cat(batch.values)
    query = torch.cat(batch.queries)
    empty = torch.empty(0)
    impl.do_kv_cache_update(batch.layer, key, value, empty, batch.slots(0, 0, 5))
    output = impl.forward(
        batch.layer,
        query,
        key,
        value,
        empty,
        batch.metadata(),
        torch.empty_like(query),
    )
    torch.testing.assert_close(output.double(), batch.expected(), rtol=2e-5, atol=2e-5)


def test_a_profiling_run_needs_no_cache():
    batch = PagedBatch(Case([(2, 2)]), ReferenceAttentionBackend)
    query = batch.queries[0]
    output = torch.full_like(query, 7.0)
    args = (batch.layer, query, batch.keys[0], batch.values[0], torch.empty(0), None)
    assert not batch.impl.forward(*args, output).any()


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"alibi_slopes": [0.5] * 4}, "ALiBi"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder"),
        ({"sinks": torch.zeros(3)}, "4 heads"),
        ({"kv_cache_dtype": "fp9"}, "fp9"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(argument, words):
    with pytest.raises(ValueError, match=words):
        ReferenceAttentionImpl(4, 64, 0.1, num_kv_heads=2, **argument)


@pytest.mark.parametrize("cache_dtype", FORMATS)
@pytest.mark.parametrize("built", [True, False])
def test_torch_serves_where_kernels_are_not_built(monkeypatch, cache_dtype, built):
    kernels = "vllm.v1.attention.backends.cpu_attn.cpu_kernels"
    monkeypatch.setattr(f"{kernels}.available", lambda: built)
    batch = PagedBatch(Case(MIXED, cache_dtype), CPUAttentionBackend)
    assert batch.impl.uses_kernels == built
    if not built:
        torch.testing.assert_close(
            batch.run().double(), batch.expected(), rtol=2e-5, atol=2e-5
        )
