"""Builds config objects of transformers from the keys of a config.json.

Knows the library's classes and their errors; `config` decides which models need them.
"""

from typing import Any

from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from vllm.transformers_utils.source import ModelSource


def build_config(
    raw: dict[str, Any],
    where: str,
    source: ModelSource,
    trust_remote_code: bool,
    hf_overrides: dict[str, Any] | None,
) -> PretrainedConfig:
    """The config object of `raw`, which `where` names in messages.

    Raises ValueError for an unknown model_type and for values that its class refuses.
    """
    model_type = raw.get("model_type")
    if model_type not in CONFIG_MAPPING:
        if trust_remote_code and raw.get("auto_map"):
            config = AutoConfig.from_pretrained(source.path, trust_remote_code=True)
            config.update(hf_overrides or {})
            config.architectures = raw["architectures"]
            return config
        hint = (
            "pass --trust-remote-code to run the config class that it brings along"
            if raw.get("auto_map")
            else "set the `model_type` that transformers uses for this architecture"
        )
        raise ValueError(f"{where}: unknown model_type {model_type!r}; {hint}")
    try:
        return CONFIG_MAPPING[model_type].from_dict(raw)
    except Exception as error:  # the strict config classes raise several kinds
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{where} is refused by the {model_type!r} config class ({reason}): "
            "correct the file or pass --hf-overrides"
        ) from error
