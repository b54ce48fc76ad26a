"""Where a checkpoint's tensors go in a model of ours, checked before any is read.

Knows names, shards and shapes. Refuses to know file formats.
"""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vllm.model_executor.layers.attention.kv_layer import (
    KVCacheLayer,
    extract_layer_index,
)
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.linear import LinearBase, ShardId
from vllm.utils.huge_pages import LARGE

__all__ = [
    "PACKED_MODULES",
    "WeightInfo",
    "WeightPlan",
    "WeightTarget",
    "extract_layer_index",
    "maybe_prefix",
    "plan_weights",
    "text_part",
]

# Fused module -> the checkpoint's modules, in the order of their rows.
PACKED_MODULES: dict[str, list[str]] = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
_SHARDS: dict[str, tuple[str, ShardId]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}

# One matrix of one expert: where it goes in the stacks of `FusedMoE`.
_EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<id>\d+)\.(?P<proj>gate|down|up)_proj\.weight"
)
_EXPERT_SHARDS = {
    "gate": ("w13_weight", "w1"),
    "down": ("w2_weight", "w2"),
    "up": ("w13_weight", "w3"),
}

# Scales of the KV cache under the names that quantisation tools write.
_KV_SCALE = re.compile(
    r"(?P<attn>.*\.self_attn)\.(?:attn\.)?"
    r"(?:(?P<k>k_scale|k_proj\.k_scale|k_proj\.output_scale)"
    r"|(?P<v>v_scale|v_proj\.v_scale|v_proj\.output_scale)|kv_scale)"
)
# Tensors that older exporters wrote and nobody needs.
_IGNORED = re.compile(r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)")


@dataclass(frozen=True, kw_only=True)
class WeightInfo:
    """One checkpoint tensor under its Hugging Face name, before it is read."""

    name: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True, kw_only=True)
class WeightTarget:
    """Where a tensor goes: rows of a parameter, or the scales of an attention layer."""

    param: str = ""
    shard: ShardId = None
    layer: str = ""  # an attention layer, for KV scales
    scales: tuple[str, ...] = ()  # "k", "v"


# Parts of models that also read pictures: where the text model is, and what is not it.
_TEXT_MODEL = re.compile(
    r"(?:language_model\.(?=model\.|lm_head\.)|(model\.)language_model\.)"
)
_OTHER_PARTS = re.compile(
    r"(?:model\.)?(?:vision_tower|vision_model|multi_modal_projector)\."
)


def text_part(name: str) -> str | None:
    """The name of a tensor in the text model of a model of text and pictures; None for
    tensors of other parts."""
    if _OTHER_PARTS.match(name):
        return None
    return _TEXT_MODEL.sub(r"\1", name, count=1)


def maybe_prefix(prefix: str, name: str) -> str:
    """`name` below `prefix`, which may be empty."""
    return f"{prefix}.{name}" if prefix else name


def weight_target(name: str, params: Container[str]) -> WeightTarget | None:
    """The place of a checkpoint tensor by its name, given the model's parameters;
    None for one to skip."""
    if _IGNORED.fullmatch(name):
        return None
    scale = _KV_SCALE.fullmatch(name)
    if scale is not None:
        which = tuple(w for w in "kv" if scale[w]) or ("k", "v")
        return WeightTarget(layer=f"{scale['attn']}.attn", scales=which)
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        stack, which_matrix = _EXPERT_SHARDS[expert["proj"]]
        return WeightTarget(
            param=f"{expert['experts']}.{stack}",
            shard=(int(expert["id"]), which_matrix),
        )
    head, _, leaf = name.rpartition(".")
    path, _, module = head.rpartition(".")
    if module in _SHARDS and name not in params:
        fused, shard = _SHARDS[module]
        return WeightTarget(param=f"{path}.{fused}.{leaf}", shard=shard)
    return WeightTarget(param=name)


class WeightPlan:
    """Every checkpoint tensor with its place; nothing missing, nothing left over."""

    def __init__(
        self, model: nn.Module, targets: Mapping[str, WeightTarget | None]
    ) -> None:
        self.targets = targets
        self._params = dict(model.named_parameters())
        self._modules = dict(model.named_modules())

    def place(self, name: str, tensor: torch.Tensor, keep: bool = False) -> None:
        """Copies one tensor, any float dtype, into its rows. With `keep` a large one
        may become the parameter itself: nobody else has it."""
        target = self.targets[name]
        if target is None:
            return
        for which in target.scales:
            self._modules[target.layer].load_kv_scale(which, tensor)
        if not target.param:
            return
        param = self._params[target.param]
        loader = getattr(param, "weight_loader", None)
        if loader is None and keep and tensor.nbytes > LARGE and _alike(tensor, param):
            param.data = tensor
        elif loader is None:
            param.data.copy_(tensor)
        else:
            loader(param, tensor, target.shard)


def _alike(tensor: torch.Tensor, param: torch.Tensor) -> bool:
    return (
        tensor.shape == param.shape
        and tensor.dtype == param.dtype
        and tensor.device == param.device
        and tensor.is_contiguous()
        # A parameter that was made in inference mode takes no other kind of tensor.
        and tensor.is_inference() == param.is_inference()
    )


def plan_weights(
    model: nn.Module, infos: Sequence[WeightInfo], skip: frozenset[str] = frozenset()
) -> dict[str, WeightTarget | None]:
    """The place of every tensor of a checkpoint, by name; `skip` names are left out.

    Works on a model on the meta device. Raises ValueError naming file, tensor and
    expected shape for a tensor that has no place or another shape, and naming the
    parameters that no tensor fills.
    """
    params = dict(model.named_parameters())
    modules = dict(model.named_modules())
    missing = {
        (name, shard): shape
        for name, param in params.items()
        for shard, shape in _pieces(name, param, modules).items()
    }
    targets: dict[str, WeightTarget | None] = {}
    for info in infos:
        target = None if info.name in skip else weight_target(info.name, params)
        targets[info.name] = target
        if target is None:
            continue
        if target.scales:
            _check_scale(info, target, modules)
        else:
            _check_piece(info, target, missing, params)
    if missing:
        _raise_missing(missing, [info.file for info in infos])
    return targets


def _pieces(
    name: str, param: nn.Parameter, modules: dict[str, nn.Module]
) -> dict[ShardId, tuple[int, ...]]:
    """Shape of each checkpoint tensor that together fill a parameter."""
    owner, _, leaf = name.rpartition(".")
    fused = PACKED_MODULES.get(owner.rpartition(".")[2])
    module = modules[owner]
    if isinstance(module, FusedMoE):
        return dict(module.checkpoint_pieces(leaf))
    if fused is None or not isinstance(module, LinearBase):
        return {None: tuple(param.shape)}
    shards = [_SHARDS[part][1] for part in fused]
    rest = tuple(param.shape[1:])
    return {shard: (module.shard_rows(shard)[1], *rest) for shard in shards}


def _check_piece(
    info: WeightInfo,
    target: WeightTarget,
    missing: dict[tuple[str, ShardId], tuple[int, ...]],
    params: dict[str, nn.Parameter],
) -> None:
    expected = missing.pop((target.param, target.shard), None)
    if expected is None:
        why = (
            "it occurs twice in the checkpoint"
            if target.param in params
            else "the model has no such weight; check that config.json and the weights "
            "belong together"
        )
        raise ValueError(f"unexpected tensor {info.name!r} in {info.file}: {why}")
    if info.shape != expected:
        raise ValueError(
            f"tensor {info.name!r} in {info.file} has shape {list(info.shape)}, "
            f"expected {list(expected)}: config and weights do not belong together"
        )


def _check_scale(
    info: WeightInfo, target: WeightTarget, modules: dict[str, nn.Module]
) -> None:
    if not isinstance(modules.get(target.layer), KVCacheLayer):
        raise ValueError(
            f"tensor {info.name!r} in {info.file} scales the KV cache of "
            f"{target.layer!r}, which the model does not have"
        )
    if info.shape not in ((), (1,)):
        raise ValueError(
            f"tensor {info.name!r} in {info.file} has shape {list(info.shape)}; only "
            "one scale per layer is supported"
        )


def _raise_missing(
    missing: dict[tuple[str, ShardId], tuple[int, ...]], files: list[str]
) -> None:
    named = [
        f"{_checkpoint_name(*key)} {list(shape)}" for key, shape in missing.items()
    ]
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    where = ", ".join(sorted(set(files))[:2]) or "the checkpoint"
    raise ValueError(
        f"missing tensors: {', '.join(named[:3])}{more} (name and expected shape) are "
        f"not in {where}: the download is incomplete, or config and weights do not "
        "belong together"
    )


def _checkpoint_name(param: str, shard: ShardId) -> str:
    if isinstance(shard, tuple):
        expert, which = shard
        proj = next(p for p, (_, w) in _EXPERT_SHARDS.items() if w == which)
        return f"{param.rpartition('.')[0]}.{expert}.{proj}_proj.weight"
    for part, (fused, its_shard) in _SHARDS.items():
        if shard == its_shard and f".{fused}." in param:
            return param.replace(f".{fused}.", f".{part}.")
    return param
