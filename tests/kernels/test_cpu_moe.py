"""Experts in C++ equal the same sums in float64, on every instruction set."""

import pytest
import torch

from tests.kernels.cpu_attention_cases import needs_library
from vllm.model_executor.layers.activation import (
    ClampedSwigluAndMul,
    GeluAndMul,
    SiluAndMul,
)
from vllm.model_executor.layers.fused_moe import FusedMoE, StackedMoE, cpu_experts
from vllm.model_executor.layers.fused_moe.cpu_experts import (
    SILU,
    GatedActivation,
    PackedExperts,
    PackedMatrices,
    clamped_swiglu,
    moe_experts,
)
from vllm.v1.attention.ops import cpu_kernels

pytestmark = needs_library

EXPERTS = 11
ALPHA, LIMIT = 1.702, 1.5
# Relative to the largest output. In bfloat16 the activations between the products and
# the output are rounded, at 2^-9 each; torch rounds gates, ups and each expert's
# output too.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
DTYPES = list(TOLERANCES)
# (hidden, intermediate): whole panels, odd, smaller than a lane, V2-Lite's in small.
SIZES = [(64, 48), (37, 19), (3, 1), (256, 176)]


def weights_of(
    dtype: torch.dtype, hidden: int, inner: int, biased: bool = False
) -> list[torch.Tensor]:
    """w13, w2 and, if wanted, their biases."""
    generator = torch.Generator().manual_seed(hidden)
    shapes = [(EXPERTS, 2 * inner, hidden), (EXPERTS, hidden, inner)]
    if biased:
        shapes += [shape[:2] for shape in shapes]
    made = [torch.randn(s, generator=generator) / s[-1] ** 0.5 for s in shapes]
    return [tensor.to(dtype) for tensor in made]


def batch_of(
    dtype: torch.dtype, tokens: int, hidden: int, top_k: int, experts: int = EXPERTS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, expert ids and weights of tokens; experts past `experts` get none."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    scores = torch.rand(tokens, experts, generator=generator)
    ids = scores.topk(top_k, sorted=False).indices
    return x, ids, torch.rand(tokens, top_k, generator=generator)


def by_definition(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    ids: torch.Tensor,
    scales: torch.Tensor,
    clamped: bool = False,
) -> torch.Tensor:
    """[T, hidden] in float64, token by token and expert by expert."""
    w13, w2, *biases = (weight.double() for weight in weights)
    out = torch.zeros(x.shape, dtype=torch.double)
    for token in range(len(x)):
        for expert, scale in zip(ids[token].tolist(), scales[token], strict=True):
            both = w13[expert] @ x[token].double()
            if biases:
                both += biases[0][expert]
            gate, up = both.chunk(2)
            if clamped:
                gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
                hidden = gate / (1 + (-ALPHA * gate).exp()) * (up + 1)
            else:
                hidden = gate / (1 + (-gate).exp()) * up
            made = w2[expert] @ hidden
            out[token] += scale.double() * (
                made + biases[1][expert] if biases else made
            )
    return out


def computed(
    x: torch.Tensor,
    packed: PackedExperts,
    ids: torch.Tensor,
    scales: torch.Tensor,
    activation: GatedActivation = SILU,
) -> torch.Tensor:
    out = torch.full_like(x, torch.nan)
    moe_experts(out, x, packed, ids, scales, activation)
    return out


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.double() - expected).abs().max()
    assert error <= TOLERANCES[found.dtype] * expected.abs().max(), float(error)


@pytest.mark.parametrize("hidden, inner", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_equal_their_definition(
    isa: str, dtype: torch.dtype, hidden: int, inner: int
) -> None:
    weights = weights_of(dtype, hidden, inner)
    packed = PackedExperts(*weights)
    for tokens, top_k in ((1, 1), (1, 8), (2, 3), (7, 6), (33, 2), (64, 8)):
        batch = batch_of(dtype, tokens, hidden, top_k)
        found = computed(batch[0], packed, *batch[1:])
        assert_close(found, by_definition(batch[0], weights, *batch[1:]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_biases_and_the_clamped_activation_equal_their_definition(
    isa: str, dtype: torch.dtype
) -> None:
    for hidden, inner in SIZES:
        weights = weights_of(dtype, hidden, inner, biased=True)
        packed = PackedExperts(*weights)
        x, ids, scales = batch_of(dtype, 13, hidden, 4)
        x = x * 3  # into the clamps
        found = computed(x, packed, ids, scales, clamped_swiglu(ALPHA, LIMIT))
        assert_close(found, by_definition(x, weights, ids, scales, clamped=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_does_not_see_its_batch(isa: str, dtype: torch.dtype) -> None:
    hidden, inner = 64, 48
    packed = PackedExperts(*weights_of(dtype, hidden, inner))
    # More tokens than one pass takes; half of the experts stay empty.
    x, ids, scales = batch_of(dtype, 700, hidden, 4, experts=EXPERTS // 2)
    whole = computed(x, packed, ids, scales)
    for part in (slice(0, 1), slice(5, 12), slice(505, 530), slice(699, 700)):
        alone = computed(x[part], packed, ids[part], scales[part])
        assert torch.equal(alone, whole[part])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_no_bit(isa: str, dtype: torch.dtype) -> None:
    packed = PackedExperts(*weights_of(dtype, 256, 176))
    batch = batch_of(dtype, 9, 256, 3)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(computed(batch[0], packed, *batch[1:]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_may_name_an_expert_twice_or_none(isa: str, dtype: torch.dtype) -> None:
    weights = weights_of(dtype, 37, 19)
    packed = PackedExperts(*weights)
    x, _, scales = batch_of(dtype, 3, 37, 2)
    ids = torch.tensor([[4, 4], [10, 0], [0, 0]])
    assert_close(
        computed(x, packed, ids, scales), by_definition(x, weights, ids, scales)
    )
    assert not computed(x, packed, ids[:, :0], scales[:, :0]).any()
    assert computed(x[:0], packed, ids[:0], scales[:0]).shape == (0, 37)


def test_rows_may_be_strided(isa: str) -> None:
    weights = weights_of(torch.float32, 37, 19)
    wide, ids, scales = batch_of(torch.float32, 5, 74, 2)
    out = torch.full((5, 74), torch.nan)
    x = wide[:, 37:]
    moe_experts(out[:, :37], x, PackedExperts(*weights), ids, scales)
    assert_close(out[:, :37], by_definition(x, weights, ids, scales))
    assert out[:, 37:].isnan().all()


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpacked_weights_are_the_weights(dtype: torch.dtype, gated: bool) -> None:
    for hidden, inner in SIZES:
        weight = weights_of(dtype, hidden, inner)[0 if gated else 1]
        packed = PackedMatrices(weight, gated=gated)
        assert torch.equal(packed.to_dense(), weight)
        assert packed.data.count_nonzero() == weight.count_nonzero()


WRONG = {
    "id past the layer": (dict(ids=[[0, EXPERTS]]), "outside the layer"),
    "negative id": (dict(ids=[[0, -1]]), "outside the layer"),
    "x of another type": (dict(x=torch.zeros(1, 37).half()), "x is torch.float16"),
    "x of another size": (dict(x=torch.zeros(1, 36)), r"\(1, 36\).*\(1, 37\)"),
    "weights of another shape": (dict(scales=[[1.0]]), r"\(1, 2\).*\(1, 1\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    changes, message = WRONG[name]
    given = {
        "x": torch.zeros(1, 37),
        "ids": [[0, 1]],
        "scales": [[1.0, 1.0]],
        **changes,
    }
    packed = PackedExperts(*weights_of(torch.float32, 37, 19))
    ids, scales = torch.tensor(given["ids"]), torch.tensor(given["scales"])
    out = torch.full((1, 37), torch.nan)
    with pytest.raises(ValueError, match=message):
        moe_experts(out, given["x"], packed, ids, scales)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["silu", "clamped"])
def test_a_layer_gives_what_torch_gives(
    isa: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, biased: bool
) -> None:
    hidden, inner = 64, 48
    weights = weights_of(dtype, hidden, inner, biased)
    layers = []
    for served in (True, False):
        layer = FusedMoE(EXPERTS, hidden, inner, params_dtype=dtype)
        if biased:
            act = ClampedSwigluAndMul(ALPHA, LIMIT)
            layer = StackedMoE(
                *(EXPERTS, hidden, inner),
                params_dtype=dtype,
                has_bias=True,
                act_fn=act,
            )
        for param, weight in zip(layer.parameters(), weights, strict=True):
            param.data.copy_(weight)
        if not served:
            monkeypatch.setattr(cpu_experts, "_functions", lambda: None)
        layer.process_weights_after_loading()
        assert (layer.packed_experts is not None) == served
        layers.append(layer)
        monkeypatch.undo()
    x, ids, scales = batch_of(dtype, 17, hidden, 3)
    with torch.inference_mode():
        found, expected = (layer(x, scales, ids) for layer in layers)
    assert_close(found, expected.double())


def test_what_has_no_kernel_stays_with_torch() -> None:
    weight = torch.zeros(1, 2, 2)
    assert cpu_experts.serves(weight, SiluAndMul())
    assert not cpu_experts.serves(weight.double(), SiluAndMul())
    assert not cpu_experts.serves(weight, GeluAndMul())
    assert not cpu_experts.serves(weight.to("meta"), SiluAndMul())


def test_a_library_of_other_sources_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu_experts._functions.cache_clear()
    monkeypatch.setattr(cpu_kernels.loaded(), "handle", object())
    try:
        assert not cpu_experts.serves(torch.zeros(1, 2, 2), SiluAndMul())
    finally:
        cpu_experts._functions.cache_clear()
