"""Memory that a caller allocated is seen as memory that the worker allocates."""

import pytest
import torch

from tests.v1.worker.test_kv_cache_init import Backend, full, plain_config
from tests.v1.worker.test_worker_utils import taking
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu.attn_utils import _reshape_kv_cache
from vllm.v1.worker.kv_cache_init import BoundLayer, create_kv_caches
from vllm.v1.worker.utils import AttentionGroup

CPU = torch.device("cpu")


def raw(config, size=None) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(size or tensor.size, dtype=torch.int8)
        for tensor in config.kv_cache_tensors
        for name in tensor.shared_by
    }


@pytest.mark.parametrize("name", ["NHD", "HND", "LHBNC"])
@pytest.mark.parametrize("spec", [full(), full(block_size=64), full(num_kv_heads=1)])
def test_views_are_those_of_the_worker(name, spec, monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", name)
    layout, config = KVCacheLayout.from_name(name), plain_config(spec)
    kernel = 16 if layout.block_compact else spec.block_size
    backend = taking(MultipleOf(16))
    group = AttentionGroup(backend, ["a", "b", "c"], spec, 0)
    views = _reshape_kv_cache(
        [group], raw(config), "auto", [kernel], {"c": "b"}, config
    )
    bound = BoundLayer(backend=backend, kernel_block_size=kernel)
    wanted, _ = create_kv_caches(config, layout, {"a": bound, "b": bound}, CPU)
    assert views["c"] is views["b"]
    for layer, view in wanted.items():
        assert views[layer].shape == view.shape
        assert views[layer].stride() == view.stride()
        assert views[layer].dtype == view.dtype


def test_states_are_sliced_out_of_their_pages():
    spec = MambaSpec(16, ((3, 8), (4,)), (torch.bfloat16, torch.float32))
    config = plain_config(spec, names=("a",))
    group = AttentionGroup(Backend, ["a"], spec, 0)
    first, second = _reshape_kv_cache([group], raw(config), "auto", [16], {})["a"]
    assert (first.shape, second.shape) == ((4, 3, 8), (4, 4))


def test_a_tensor_that_is_no_whole_number_of_blocks_is_refused():
    config = plain_config(full(), names=("a",))
    group = AttentionGroup(Backend, ["a"], full(), 0)
    with pytest.raises(ValueError, match="'a': a tensor of 70000 bytes"):
        _reshape_kv_cache([group], raw(config, 70_000), "auto", [16], {})
