"""TurboQuant presets and sizes, read off the format's layout table.

Knows which layers a preset leaves dense. Holds no byte number of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm.config.model import ModelConfig
from vllm.v1.kv_formats.layout import StateLayout
from vllm.v1.kv_formats.mode import KVQuantMode
from vllm.v1.kv_formats.turboquant import FORMATS, TurboQuant

TQ_PRESETS: dict[str, dict] = {
    fmt.name: {
        "key_quant_bits": fmt.key_bits,
        "value_quant_bits": fmt.value_bits,
        "norm_correction": fmt.norm_correction,
    }
    for fmt in FORMATS
}

# An entry of kv_cache_dtype_skip_layers that turns the boundary layers off.
NO_BOUNDARY = "none"

_FULL_ATTENTION = ("full_attention", "attention")
_HAS_ATTENTION = ("attention", "hybrid")


@dataclass
class TurboQuantConfig:
    """Bits and bytes of TurboQuant for one head size. `seed` is kept, nothing draws."""

    head_dim: int = 128
    key_quant_bits: int = 3
    value_quant_bits: int = 4
    seed: int = 42
    norm_correction: bool = False

    @property
    def _layout(self) -> StateLayout:
        fmt = TurboQuant(
            "turboquant",
            KVQuantMode.NONE,
            key_bits=self.key_quant_bits,
            value_bits=self.value_quant_bits,
            norm_correction=self.norm_correction,
        )
        return fmt.layout(self.head_dim, self.head_dim)

    def _packed(self, side: str) -> int:
        return sum(f.nbytes for f in self._layout.fields if f.of == side)

    @property
    def key_fp8(self) -> bool:
        """True where keys are e4m3 instead of codebook indices."""
        return TurboQuant.stores_fp8(self.key_quant_bits)

    @property
    def mse_bits(self) -> int:
        """Bits of the codebook; with e4m3 keys the value bits, and never looked up."""
        return self.value_quant_bits if self.key_fp8 else self.key_quant_bits

    @property
    def key_mse_bits(self) -> int:
        """Bits of a key index, 0 for e4m3 keys."""
        return 0 if self.key_fp8 else self.key_quant_bits

    @property
    def centroid_bits(self) -> int:
        """The same as `mse_bits`."""
        return self.mse_bits

    @property
    def n_centroids(self) -> int:
        """Entries of the codebook."""
        return 2**self.mse_bits

    @property
    def key_packed_size(self) -> int:
        """Bytes of one key with its norm."""
        return self._packed("k")

    @property
    def effective_value_quant_bits(self) -> int:
        """Bits of a value code."""
        return self.value_quant_bits

    @property
    def value_packed_size(self) -> int:
        """Bytes of one value with its step and zero."""
        return self._packed("v")

    @property
    def slot_size(self) -> int:
        """Bytes of one state without alignment."""
        return self.key_packed_size + self.value_packed_size

    @property
    def slot_size_aligned(self) -> int:
        """Bytes of one state as published."""
        return self._layout.nbytes

    @staticmethod
    def get_boundary_skip_layers(model_config: ModelConfig, n: int = 2) -> list[str]:
        """Layers that stay dense by default: the first and last n, as decimal strings.

        A model with fewer than 2n layers keeps half of them at each end. Hybrid models
        have none; NotImplementedError when their attention layers cannot be found.
        """
        if model_config.is_hybrid:
            if not _get_full_attention_layer_indices(model_config):
                raise NotImplementedError(
                    "TurboQuant needs to know the attention layers of a hybrid model: "
                    f"the config of {model_config.model} has none in layer_types, "
                    "layers_block_type or attn_type_list. Use another --kv-cache-dtype."
                )
            return []
        num_layers = model_config.hf_text_config.num_hidden_layers
        n = min(n, num_layers // 2)
        ends = {*range(n), *range(num_layers - n, num_layers)}
        return [str(layer) for layer in sorted(ends)]

    @staticmethod
    def from_cache_dtype(cache_dtype: str, head_dim: int) -> "TurboQuantConfig":
        """The config of a preset. ValueError listing the presets for another name."""
        if cache_dtype not in TQ_PRESETS:
            raise ValueError(
                f"unknown TurboQuant preset {cache_dtype!r}: expected one of "
                f"{', '.join(TQ_PRESETS)}"
            )
        return TurboQuantConfig(head_dim=head_dim, **TQ_PRESETS[cache_dtype])


def merge_skip_layers(asked: Iterable[str], boundary: Iterable[str]) -> list[str]:
    """Skip entries of the user and the default: numbers by value, then words.

    The entry "none" drops the default. Words (such as "sliding_window") and numbers mix
    freely.
    """
    asked = list(asked)
    wanted = {entry for entry in asked if entry != NO_BOUNDARY}
    if NO_BOUNDARY not in asked:
        wanted |= set(boundary)
    numbers = sorted((e for e in wanted if e.isdecimal()), key=int)
    return numbers + sorted(e for e in wanted if not e.isdecimal())


def _get_full_attention_layer_indices(model_config: ModelConfig) -> list[int]:
    """Indices of the attention layers of a hybrid model; empty when unknown."""
    config = model_config.hf_text_config
    for name, kinds in (
        ("layer_types", _FULL_ATTENTION),
        ("layers_block_type", _HAS_ATTENTION),
        ("attn_type_list", (1,)),
    ):
        layers = getattr(config, name, None)
        if layers:
            return [i for i, kind in enumerate(layers) if kind in kinds]
    return []
