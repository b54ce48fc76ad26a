"""Linear layers, norms, activations and heads against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from vllm.model_executor.layers import packed_weight, panel_weight
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.packed_weight import OneDnnWeight, pack_weight
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

needs_packing = pytest.mark.skipif(
    not packed_weight.packing_works(), reason="no bf16 packing on this CPU"
)


def filled(layer: LinearBase) -> LinearBase:
    for param in layer.parameters():
        param.data.normal_()
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_equals_hf_to_the_bit(dtype: torch.dtype) -> None:
    ours, theirs = RMSNorm(48, eps=1e-5, dtype=dtype), LlamaRMSNorm(48, eps=1e-5)
    ours.weight.data.normal_(mean=1.0)
    theirs.weight.data = ours.weight.data
    x, residual = torch.randn(7, 48).to(dtype), torch.randn(7, 48).to(dtype)
    assert torch.equal(ours(x), theirs(x))
    normed, summed = ours(x, residual)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normed, theirs(x + residual))


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("silu", F.silu),
        ("gelu", F.gelu),
        ("gelu_pytorch_tanh", lambda x: F.gelu(x, approximate="tanh")),
    ],
)
def test_gated_activations(name: str, act) -> None:
    x = torch.randn(5, 2 * 12)
    torch.testing.assert_close(get_act_and_mul_fn(name)(x), act(x[:, :12]) * x[:, 12:])


def test_an_unknown_activation_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"relu6.*silu"):
        get_act_and_mul_fn("relu6")


def test_linear_returns_what_upstream_callers_unpack() -> None:
    layer = filled(RowParallelLinear(8, 6, bias=True))
    x = torch.randn(3, 8)
    y, bias = layer(x)
    assert bias is None
    torch.testing.assert_close(y, F.linear(x, layer.weight, layer.bias))
    deferred = filled(RowParallelLinear(8, 6, bias=True, skip_bias_add=True))
    y, bias = deferred(x)
    assert bias is deferred.bias
    torch.testing.assert_close(y, F.linear(x, deferred.weight))


def test_fused_rows_are_the_separate_projections() -> None:
    qkv = QKVParallelLinear(8, 4, 6, 2, bias=True, return_bias=False)
    parts = {"q": 24, "k": 8, "v": 8}
    weights = {shard: torch.randn(rows, 8) for shard, rows in parts.items()}
    biases = {shard: torch.randn(rows) for shard, rows in parts.items()}
    for shard in ("v", "q", "k"):  # in any order
        qkv.weight.weight_loader(qkv.weight, weights[shard], shard)
        qkv.bias.weight_loader(qkv.bias, biases[shard], shard)
    x = torch.randn(3, 8)
    expected = [F.linear(x, weights[s], biases[s]) for s in parts]
    torch.testing.assert_close(qkv(x), torch.cat(expected, -1))


@pytest.mark.parametrize("shard", ["x", 2, -1, 0.5])
def test_an_unknown_shard_is_refused(shard) -> None:
    merged = MergedColumnParallelLinear(8, [4, 4], prefix="mlp.gate_up_proj")
    with pytest.raises(ValueError, match="gate_up_proj"):
        merged.weight_loader(merged.weight, torch.zeros(4, 8), shard)


def test_a_tensor_of_another_shape_is_refused() -> None:
    merged = MergedColumnParallelLinear(8, [4, 4], prefix="mlp.gate_up_proj")
    with pytest.raises(ValueError, match=r"\(5, 8\), expected \(4, 8\)"):
        merged.weight_loader(merged.weight, torch.zeros(5, 8), 1)


def test_quantised_weights_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"o_proj.*not supported"):
        RowParallelLinear(4, 4, quant_config=object(), prefix="o_proj")


@needs_packing
@pytest.mark.parametrize("rows", [1, 2, 17, 64])
@pytest.mark.parametrize(("n", "k"), [(96, 64), (33, 40), (576, 1536), (3072, 576)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_equals_plain_linear(
    rows: int, n: int, k: int, bias: bool
) -> None:
    layer = LinearBase(k, n, bias=bias, params_dtype=torch.bfloat16, return_bias=False)
    filled(layer)
    x = torch.randn(rows, k).bfloat16()
    expected = layer(x).float()
    layer.process_weights_after_loading()
    layer.process_weights_after_loading()
    assert layer.packed is not None
    assert layer.weight is None, "the weight is kept once"
    found = layer(x).float()
    assert (found - expected).abs().max() <= 1e-2 * expected.abs().max()


@needs_packing
def test_onednn_packs_where_kernels_are_missing(monkeypatch) -> None:
    monkeypatch.setattr(panel_weight, "serves", lambda weight: False)
    weight, x = torch.randn(40, 24).bfloat16(), torch.randn(5, 24).bfloat16()
    packed = pack_weight(weight)
    assert isinstance(packed, OneDnnWeight)
    assert torch.equal(packed.to_dense(), weight)
    expected = F.linear(x, weight).float()
    error = (packed.linear(x, None).float() - expected).abs().max()
    assert error <= 1e-2 * expected.abs().max()
    assert pack_weight(weight.float()) is None


@needs_packing
def test_packed_linear_takes_strided_input() -> None:
    layer = LinearBase(32, 24, params_dtype=torch.bfloat16, return_bias=False)
    filled(layer).process_weights_after_loading()
    wide = torch.randn(5, 64).bfloat16()
    assert torch.equal(layer(wide[:, :32]), layer(wide[:, :32].contiguous()))


def test_a_tied_weight_is_kept_once() -> None:
    embedding = VocabParallelEmbedding(70, 12, params_dtype=torch.bfloat16)
    embedding.weight.data.normal_()
    dense = embedding.weight.data.clone()
    head = ParallelLMHead(70, 12, params_dtype=torch.bfloat16).tie_weights(embedding)
    assert head.weight is embedding.weight
    hidden, ids = torch.randn(3, 12).bfloat16(), torch.tensor([3, 69, 0, 33])
    head.process_weights_after_loading()
    if panel_weight.serves(dense):
        assert head.weight is embedding.weight is None
    found = LogitsProcessor(70)(head, hidden)
    torch.testing.assert_close(found, F.linear(hidden, dense), rtol=1e-2, atol=1e-2)
    assert torch.equal(embedding(ids), dense[ids])


def test_logits_are_capped_scaled_and_cut_to_the_vocabulary() -> None:
    head = ParallelLMHead(10, 4, bias=True, params_dtype=torch.float32)
    head.weight.data.normal_()
    head.bias.data.normal_()
    hidden = torch.randn(3, 4)
    found = LogitsProcessor(10, 8, scale=0.5, soft_cap=2.0)(head, hidden)
    plain = F.linear(hidden, head.weight, head.bias)[:, :8]
    torch.testing.assert_close(found, 0.5 * 2.0 * torch.tanh(plain / 2.0))


def test_a_head_embeds_nothing() -> None:
    with pytest.raises(RuntimeError, match="logits"):
        ParallelLMHead(4, 4)(torch.tensor([0]))
