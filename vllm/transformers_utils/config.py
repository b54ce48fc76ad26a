"""Turns a model source into its Hugging Face config and generation defaults.

Knows files and their errors. Which architectures exist is a table in `architectures`;
how a model is computed is not known here.
"""

import json
from pathlib import Path
from typing import Any

from vllm.transformers_utils import gguf_config
from vllm.transformers_utils.architectures import (
    FALLBACK,
    STATE_LAYER_TYPES,
    pick_architecture,
    supported_architectures,
)
from vllm.transformers_utils.gguf import open_gguf
from vllm.transformers_utils.plain_config import PlainConfig
from vllm.transformers_utils.source import ModelSource, recommended_sampling
from vllm.utils.import_utils import resolve

# Imports transformers, which takes longer than anything else in a start.
_BUILD_CONFIG = "vllm.transformers_utils.hf_config:build_config"

GENERATION_CONFIG = "generation_config.json"
# Bookkeeping of the library that wrote generation_config.json.
_GENERATION_NOISE = ("_from_model_config", "transformers_version")


def get_config(
    source: ModelSource,
    trust_remote_code: bool = False,
    hf_overrides: dict[str, Any] | None = None,
    model_impl: str = "auto",
) -> Any:
    """The model's config, the architecture that is served first in `architectures`.

    `model_impl` says whose code computes the model, see `pick_architecture`; GGUF files
    are served by this package's code only.

    The object is one of transformers' config classes, or a PlainConfig where the source
    states everything.

    `hf_overrides` is merged into the file's keys (nested dicts key by key) before the
    config object is built. Raises ValueError, in one line, for a missing or damaged
    config.json, a missing `architectures`, an architecture or a quantisation that
    cannot be served, and values that the config class refuses.
    """
    raw, where = _raw_config(source)
    raw = _merged(raw, _rope_aware(hf_overrides or {}, raw))
    impl = "vllm" if source.kind == "gguf" and model_impl == "auto" else model_impl
    if source.kind == "gguf" and impl == "transformers":
        raise ValueError(
            f"{where} cannot be served with model_impl 'transformers': pass a Hugging "
            "Face folder, or --model-impl auto"
        )
    chosen = pick_architecture(raw.get("architectures"), where, impl)
    rest = [name for name in raw["architectures"] if name != chosen]
    raw["architectures"] = [chosen, *rest]
    _refuse_quantized(raw, where)
    if source.kind == "gguf" and not hf_overrides:
        return PlainConfig(raw)
    build = resolve(_BUILD_CONFIG)
    config = build(raw, where, source, trust_remote_code, hf_overrides)
    if chosen == FALLBACK:
        _refuse_unfit_for_fallback(config, rest, where)
    return config


def get_generation_config(source: ModelSource) -> dict[str, Any]:
    """Sampling defaults and special ids of the checkpoint; empty when it states none.

    `eos_token_id`, when present, is always a list of ids.
    """
    if source.kind == "gguf":
        stated = gguf_config.generation_config(open_gguf(source.path))
        return {**recommended_sampling(source), **stated}
    path = Path(source.path) / GENERATION_CONFIG
    return _generation_settings(path) if path.is_file() else {}


def generation_config_of(folder: str) -> dict[str, Any]:
    """The same of a folder that a user names, which has to state some: ValueError where
    it does not."""
    path = Path(folder).expanduser() / GENERATION_CONFIG
    if not path.is_file():
        raise ValueError(
            f"generation_config {folder!r} is no folder with {GENERATION_CONFIG}: "
            "expected such a folder, auto for the checkpoint's settings, or vllm for "
            "none (--generation-config)"
        )
    return _generation_settings(path)


def _generation_settings(path: Path) -> dict[str, Any]:
    settings = {
        key: value
        for key, value in _read_json(path).items()
        if key not in _GENERATION_NOISE and value is not None
    }
    if isinstance(settings.get("eos_token_id"), int):
        settings["eos_token_id"] = [settings["eos_token_id"]]
    return settings


def _raw_config(source: ModelSource) -> tuple[dict[str, Any], str]:
    """The config as a plain dict, and what to call it in messages."""
    if source.kind == "gguf":
        gguf = open_gguf(source.path)
        return gguf_config.config_dict(gguf), f"GGUF file {source.path}"
    path = Path(source.path) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"model {source.name!r} has no config.json in {source.path}: expected a "
            "complete Hugging Face folder; download the repository again"
        )
    return _read_json(path), str(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, object_hook=_special_float)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}): download or repair it"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


def _special_float(value: dict[str, Any]) -> Any:
    """Infinities as transformers writes them: {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _rope_aware(overrides: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """Moves the older keys rope_scaling and rope_theta to where the file has them."""
    if not isinstance(raw.get("rope_parameters"), dict):
        return dict(overrides)
    moved = {
        k: v for k, v in overrides.items() if k not in ("rope_scaling", "rope_theta")
    }
    rope = dict(overrides.get("rope_scaling") or {})
    if "type" in rope and "rope_type" not in rope:
        rope["rope_type"] = rope.pop("type")
    if "rope_theta" in overrides:
        rope["rope_theta"] = overrides["rope_theta"]
    if rope:
        moved["rope_parameters"] = {**rope, **moved.get("rope_parameters", {})}
    return moved


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, nested dicts merged key by key; neither is modified."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        nested = isinstance(old, dict) and isinstance(value, dict)
        result[key] = _merged(old, value) if nested else value
    return result


def _refuse_quantized(raw: dict[str, Any], where: str) -> None:
    quantization = raw.get("quantization_config")
    if not isinstance(quantization, dict):
        return
    method = quantization.get("quant_method", "unknown")
    if quantization.get("config_groups") == {}:  # only the KV cache has scales
        return
    raise ValueError(
        f"{where}: weights quantised with {method!r} are not supported; use the "
        "unquantised checkpoint or a GGUF file"
    )


def _refuse_unfit_for_fallback(config: Any, names: list[str], where: str) -> None:
    """ValueError for what transformers' own code would compute without keys and values
    that pages could hold; what the config does not tell is found on loading."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or [])
    states = sorted(kinds.intersection(STATE_LAYER_TYPES))
    why = None
    if getattr(config, "is_encoder_decoder", False):
        why = "it has an encoder and cross attention"
    elif states:
        why = f"its layers of type {', '.join(states)} keep recurrent states"
    elif not getattr(text, "num_attention_heads", None):
        why = "its layers have no attention heads"
    elif getattr(text, "attn_temperature_tuning", False):
        why = "its temperatures count positions by themselves"
    if why is not None:
        raise ValueError(
            f"{where}: {', '.join(names) or FALLBACK} cannot be served through "
            f"transformers' own code: {why}; use a model whose layers attend causally "
            f"to keys and values, or one of {', '.join(supported_architectures())}"
        )
