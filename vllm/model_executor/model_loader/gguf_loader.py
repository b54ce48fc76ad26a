"""Reads the weights of a GGUF file, dequantised to the model's dtype.

Knows llama.cpp's tensor names and its row order for rotated projections; the block
formats are decoded by the gguf package, but for the one that vocabularies come in.
"""

import math
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from vllm.config import ModelConfig
from vllm.model_executor.layers.panel_weight import room_for
from vllm.model_executor.model_loader.base import BaseModelLoader
from vllm.model_executor.models.utils import WeightInfo
from vllm.transformers_utils.gguf import GGUFFile, GGUFTensor, open_gguf
from vllm.utils.huge_pages import LARGE

# Elements dequantised to float32 at once: half a MiB, which the package holds thrice.
_CHUNK_ELEMENTS = 1 << 17
_Q8_0_CODES, _Q8_0_BYTES = GGML_QUANT_SIZES[GGMLQuantizationType.Q8_0]
# Numpy leaves the interpreter to others while it computes.
_TENSORS_AHEAD = 2

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Where the same words mean other norms.
_PER_LAYER_GEMMA = _PER_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Rope factors belong to the config.
_IGNORED = re.compile(r"rope_\w+\.weight|blk\.\d+\.(attn_rot_embd|rope_\w+)(\.weight)?")


def hf_name(name: str, arch: str = "llama") -> str | None:
    """The Hugging Face name of a GGUF tensor; None to skip it, itself if unknown."""
    if _IGNORED.fullmatch(name):
        return None
    layer = _LAYER_TENSOR.fullmatch(name)
    names = _PER_LAYER_GEMMA if arch.startswith("gemma") else _PER_LAYER
    if layer is not None and layer[2] in names:
        return f"model.layers.{layer[1]}.{names[layer[2]]}.{layer[3]}"
    stem, _, leaf = name.rpartition(".")
    return f"{_TOP[stem]}.{leaf}" if stem in _TOP else name


class GGUFCheckpoint:
    """An opened file; `dtype` is what its tensors are dequantised to."""

    gives_away = True

    def __init__(self, gguf: GGUFFile, config: Any, dtype: torch.dtype) -> None:
        self._gguf = gguf
        self._dtype = dtype
        self._names = {
            name: tensor
            for raw, tensor in gguf.tensors.items()
            if (name := hf_name(raw, gguf.architecture)) is not None
        }
        # llama.cpp adds the one to norms that multiply by 1 + weight.
        self._norms_hold_one = gguf.architecture.startswith("gemma")
        # llama.cpp stores these rows with rotated pairs side by side.
        self._paired_heads: dict[str, int] = {}
        if gguf.architecture == "llama":
            self._paired_heads = {
                "attn_q": config.num_attention_heads,
                "attn_k": config.num_key_value_heads,
            }

    def infos(self) -> list[WeightInfo]:
        return [
            WeightInfo(name=name, shape=tensor.shape, file=self._gguf.path)
            for name, tensor in self._names.items()
        ]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """In the file's order; while one is placed, the next ones are dequantised."""
        coming: deque[tuple[str, Future[torch.Tensor]]] = deque()
        with ThreadPoolExecutor(max_workers=_TENSORS_AHEAD) as pool:
            for name, tensor in self._names.items():
                coming.append((name, pool.submit(self._dequantized, tensor)))
                if len(coming) > _TENSORS_AHEAD:
                    yield self._next(coming)
            while coming:
                yield self._next(coming)

    def _next(
        self, coming: deque[tuple[str, Future[torch.Tensor]]]
    ) -> tuple[str, torch.Tensor]:
        name, tensor = coming.popleft()
        values = tensor.result()
        self._gguf.release()
        return name, values

    def _dequantized(self, tensor: GGUFTensor) -> torch.Tensor:
        """The values in the model's dtype and shape, in Hugging Face's row order."""
        num_rows = math.prod(tensor.shape[:-1])
        columns = tensor.shape[-1]
        plus_one = self._norms_hold_one and tensor.name.endswith("norm.weight")
        dtype = torch.float32 if plus_one else self._dtype
        shape = torch.Size((num_rows, columns))
        large = shape.numel() * dtype.itemsize > LARGE
        out = room_for(shape, dtype) if large else torch.empty(shape, dtype=dtype)
        step = max(1, _CHUNK_ELEMENTS // columns)
        for start in range(0, num_rows, step):
            rows = slice(start, min(start + step, num_rows))
            self._fill(out[rows], tensor, rows)
        out = out.view(tensor.shape)
        if plus_one:
            return out - 1.0
        heads = self._paired_heads.get(tensor.name.split(".")[-2])
        return out if heads is None else unpaired_rows(out, heads)

    def _fill(self, out: torch.Tensor, tensor: GGUFTensor, rows: slice) -> None:
        """Some rows of a tensor, into `out` [rows, columns]."""
        if tensor.type == GGMLQuantizationType.Q8_0:
            raw = self._gguf.raw_rows(tensor)[rows]
            out.view(-1, _Q8_0_CODES).copy_(q8_0_values(raw.reshape(-1, _Q8_0_BYTES)))
            return
        values = self._gguf.dequantize(tensor, rows)
        # A copy where the values are the mapped file itself, which is read-only.
        writable = values if values.flags.writeable else values.copy()
        out.copy_(torch.from_numpy(writable))


def q8_0_values(blocks: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Blocks [n, 34 bytes] of a float16 scale and 32 int8 codes, as float32 [n, 32].

    The values are those of the gguf package, which takes three times as long: 0.4 s of
    a start-up for 262,144 words of 640 elements.
    """
    # A copy, as torch warns of memory that is read-only.
    stored = torch.from_numpy(blocks.copy())
    scales = stored[:, :2].contiguous().view(torch.float16).float()
    return stored[:, 2:].view(torch.int8).float().mul_(scales)


def unpaired_rows(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows 2i and 2i + 1 of each head go to i and i + D/2 (weights and biases)."""
    halves = x.unflatten(0, (heads, -1, 2)).transpose(1, 2)
    return halves.reshape(x.shape)


class GGUFModelLoader(BaseModelLoader):
    """One .gguf file."""

    def open(self, model_config: ModelConfig) -> GGUFCheckpoint:
        gguf = open_gguf(model_config.source.path)
        if int(gguf.get("split.count", 1)) > 1:
            raise ValueError(
                f"GGUF file {gguf.path} is one of {gguf.get('split.count')} parts, "
                "which is not supported: merge them with `llama-gguf-split --merge`"
            )
        return GGUFCheckpoint(gguf, model_config.hf_text_config, model_config.dtype)
