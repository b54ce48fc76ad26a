"""Checkpoints that fit are loaded, all others are named before memory is taken."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.model_executor.families import engine_config, hf_model, saved
from vllm.model_executor.layers import panel_weight
from vllm.model_executor.layers.panel_weight import PanelWeight
from vllm.model_executor.model_loader import base, get_model
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.utils import WeightInfo, WeightPlan, plan_weights
from vllm.transformers_utils import architectures
from vllm.utils.huge_pages import LARGE

WEIGHTS = "model.safetensors"
Q0 = "model.layers.0.self_attn.q_proj.weight"
K1 = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(hf_model("llama"), tmp_path)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """By name, those that are kept packed unpacked."""
    unpacked = {
        f"{name}.weight": module.dense_weight()
        for name, module in model.named_modules()
        if hasattr(module, "dense_weight")
    }
    return unpacked | {name: param.detach() for name, param in model.named_parameters()}


def load(folder: Path, dtype: str = "float32", **how: Any) -> nn.Module:
    config = engine_config(folder, dtype=dtype)
    for key, value in how.items():
        setattr(config.load_config, key, value)
    return get_model(vllm_config=config)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_fused_parameters_hold_the_checkpoints_rows(folder: Path) -> None:
    theirs, ours = load_file(folder / WEIGHTS), weights_of(load(folder))
    layer = "model.layers.2."
    fused = torch.cat(
        [theirs[f"{layer}self_attn.{p}_proj.weight"] for p in ("q", "k", "v")]
    )
    assert torch.equal(ours[f"{layer}self_attn.qkv_proj.weight"], fused)
    fused = torch.cat([theirs[f"{layer}mlp.{p}_proj.weight"] for p in ("gate", "up")])
    assert torch.equal(ours[f"{layer}mlp.gate_up_proj.weight"], fused)
    for name in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(ours[name], theirs[name])


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    model = hf_model("qwen2")
    whole = load(saved(model, tmp_path / "whole"))
    sharded = saved(model, tmp_path / "sharded", max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    found = weights_of(load(sharded))
    for name, value in weights_of(whole).items():
        assert torch.equal(found[name], value), name


def test_a_checkpoint_in_another_dtype_is_converted(tmp_path: Path) -> None:
    folder = saved(hf_model("llama").to(torch.float16), tmp_path)
    norm = weights_of(load(folder, "float32"))["model.norm.weight"]
    assert norm.dtype == torch.float32
    assert torch.equal(norm, load_file(folder / WEIGHTS)["model.norm.weight"].float())


def test_a_tied_head_ignores_its_own_copy(tmp_path: Path) -> None:
    folder = saved(hf_model("llama-tied"), tmp_path)
    edit(folder, lambda t: t.update({"lm_head.weight": torch.zeros(99, 64)}))
    model = load(folder)
    weights = weights_of(model)
    assert weights["lm_head.weight"].any()
    embedding = weights["model.embed_tokens.weight"]
    assert torch.equal(weights["lm_head.weight"], embedding)


def test_relics_of_old_exporters_are_skipped(folder: Path) -> None:
    relic = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda t: t.update({relic: torch.zeros(8)}))
    load(folder)


@pytest.fixture
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test when weights are given memory."""

    def fail(*_: Any) -> None:
        pytest.fail("weights were allocated before the checkpoint was refused")

    monkeypatch.setattr(base, "materialize", fail)


def pop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.usefixtures("no_allocation")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (pop(Q0), [Q0, "[64, 64]", "missing"]),
        (pop("model.norm.weight"), ["model.norm.weight", "missing"]),
        (put(K1, torch.zeros(33, 64)), [K1, "[33, 64]", "[32, 64]"]),
        (put("model.layers.3.mlp.up_proj.weight", torch.zeros(96, 64)), ["layers.3"]),
        (put("visual.patch.weight", torch.zeros(2, 2)), ["visual", "unexpected"]),
        (put(Q0 + "_scale", torch.zeros(64)), ["unexpected"]),
        (put(Q0, torch.zeros(64, 64, dtype=torch.int8)), [Q0, "I8", "quantised"]),
        (put("model.layers.9.self_attn.k_scale", torch.ones(1)), ["layers.9"]),
        (put("model.layers.0.self_attn.k_scale", torch.ones(2)), ["one scale"]),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    folder: Path, change: Callable[[Any], Any], words: list[str]
) -> None:
    edit(folder, change)
    with pytest.raises(ValueError) as error:
        load(folder)
    for word in [*words, str(folder)]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("no_allocation")
def test_every_truncation_is_named(folder: Path) -> None:
    path = folder / WEIGHTS
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for length in (0, 5, 8, 100, header - 1, header, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors.*truncated"):
            load(folder)
    path.write_bytes(whole + b"xx")
    with pytest.raises(ValueError, match="2 bytes"):
        load(folder)


@pytest.mark.usefixtures("no_allocation")
def test_a_header_that_lies_about_a_tensor_is_named(folder: Path) -> None:
    path = folder / WEIGHTS
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    header[Q0]["shape"] = [64, 65]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    with pytest.raises(ValueError, match=Q0):
        load(folder)


@pytest.mark.usefixtures("no_allocation")
def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = saved(hf_model("llama"), tmp_path, max_shard_size="40KB")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=lost.name):
        load(folder)


@pytest.mark.usefixtures("no_allocation")
@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json"):
        load(folder)


@pytest.mark.usefixtures("no_allocation")
def test_pickled_weights_are_refused_with_the_way_out(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*save_pretrained"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match="no weights"):
        load(folder)


def test_a_load_format_that_does_not_fit_is_refused(folder: Path) -> None:
    load(folder, load_format="safetensors")
    with pytest.raises(ValueError, match=r"gguf.*--load-format auto"):
        load(folder, load_format="gguf")


def test_dummy_weights_need_no_file_and_are_the_same_each_time(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    first, second = (weights_of(load(folder, load_format="dummy")) for _ in range(2))
    assert first
    for name, value in first.items():
        assert value.isfinite().all()
        assert torch.equal(value, second[name])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"k_scale": 0.25, "v_scale": 0.5}, (0.25, 0.5)),
        ({"attn.k_scale": 0.25, "attn.v_scale": 0.5}, (0.25, 0.5)),
        ({"k_proj.k_scale": 0.25, "v_proj.v_scale": 0.5}, (0.25, 0.5)),
        ({"k_proj.output_scale": 0.25}, (0.25, 1.0)),
        ({"kv_scale": 0.75}, (0.75, 0.75)),
    ],
)
def test_cache_scales_reach_their_layer(
    folder: Path, names: dict[str, float], expected: tuple[float, float]
) -> None:
    at = "model.layers.1.self_attn."
    edit(
        folder, lambda t: t.update({at + n: torch.tensor(s) for n, s in names.items()})
    )
    model = load(folder)
    scales = [
        (layer.self_attn.attn._k_scale_float, layer.self_attn.attn._v_scale_float)
        for layer in model.model.layers
    ]
    assert scales == [(1.0, 1.0), expected, (1.0, 1.0)]


def test_a_zero_scale_in_a_checkpoint_is_refused(folder: Path) -> None:
    edit(folder, put("model.layers.1.self_attn.k_scale", torch.zeros(1)))
    with pytest.raises(ValueError, match=r"layers\.1.*k_scale"):
        load(folder)


class PluggedIn(nn.Module):
    """A model class from outside, written against the public protocol."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.names: list[str] = []

    def load_weights(self, weights: Any) -> set[str]:
        self.names = [name for name, _ in weights]
        return set(self.names)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    table = dict(architectures.ARCHITECTURES)
    monkeypatch.setattr(architectures, "ARCHITECTURES", table)
    monkeypatch.setattr("vllm.model_executor.models.registry.ARCHITECTURES", table)
    return ModelRegistry


@pytest.mark.parametrize("lazy", [False, True])
def test_a_registered_model_is_built_and_loads_itself(
    folder: Path, registry: Any, lazy: bool
) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["architectures"] = ["PluggedInForCausalLM"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"PluggedIn.*register_model"):
        load(folder)
    target = f"{PluggedIn.__module__}:PluggedIn" if lazy else PluggedIn
    registry.register_model("PluggedInForCausalLM", target)
    assert "PluggedInForCausalLM" in registry.get_supported_archs()
    model = load(folder)
    assert type(model).__name__ == "PluggedIn"
    assert Q0 in model.names
    assert not model.weight.is_meta


@pytest.mark.parametrize("target", ["no-colon", 5, dict])
def test_registering_something_else_is_refused(registry: Any, target: Any) -> None:
    with pytest.raises(ValueError, match="cannot register"):
        registry.register_model("X", target)


def test_weights_can_be_given_as_pairs(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(panel_weight, "serves", lambda weight: False)
    model = load(folder)
    tensors = {k: v + 1 for k, v in load_file(folder / WEIGHTS).items()}
    assert model.load_weights(tensors.items()) == set(tensors)
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"])


@pytest.mark.parametrize("rows", [3, LARGE // 16 + 1])
@pytest.mark.parametrize("keep", [False, True])
def test_only_what_is_large_and_given_away_becomes_the_parameter(
    keep: bool, rows: int
) -> None:
    model = torch.nn.Linear(4, rows, bias=False)
    info = WeightInfo(name="weight", shape=(rows, 4), file="f")
    plan = WeightPlan(model, plan_weights(model, [info]))
    weight = torch.randn(rows, 4)
    with torch.no_grad():
        plan.place("weight", weight, keep=keep)
    assert torch.equal(model.weight, weight)
    kept = model.weight.data_ptr() == weight.data_ptr()
    assert kept is (keep and weight.nbytes > LARGE)
    with torch.no_grad():
        plan.place("weight", weight.double(), keep=keep)  # another type is never kept
    assert model.weight.dtype == torch.float32


def test_weights_lie_where_they_become_panels() -> None:
    model = nn.Sequential(
        nn.Linear(8, 64, bias=False, device="meta"),
        nn.Linear(64, 32, bias=False, device="meta"),
    )
    base.materialize(model, "cpu")
    first, second = (layer.weight for layer in model)
    assert second.data_ptr() == first.data_ptr() + first.nbytes  # side by side
    for weight in first, second:
        assert PanelWeight(weight, dropped_by=1).data.data_ptr() == weight.data_ptr()


def test_every_module_that_holds_a_parameter_is_counted() -> None:
    model = nn.Module()
    model.alone = nn.Linear(4, 3, bias=False, device="meta")
    model.shared = nn.Linear(4, 3, bias=False, device="meta")
    model.other = nn.Linear(4, 3, bias=False, device="meta")
    model.other.weight = model.shared.weight
    base.materialize(model, "cpu")
    assert model.alone.weight.holders == 1
    assert model.other.weight is model.shared.weight
    assert model.shared.weight.holders == 2
