"""Which generation settings act here, under which name the sampler has them, and what
they may be. Knows nothing of where they are stated."""

import difflib
from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.utils.text_utils import short_repr

logger = init_logger(__name__)

# Names in generation_config.json, and the fields of SamplingParams.
_SAMPLING = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
_EOS = "eos_token_id"
# What such files hold besides, and nothing here acts on.
_IDLE = frozenset(
    {
        "_from_model_config",
        "bos_token_id",
        "do_sample",
        "pad_token_id",
        "transformers_version",
    }
)


def sampling_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the settings say of sampling, under SamplingParams' names."""
    return {
        field: settings[name]
        for name, field in _SAMPLING.items()
        if settings.get(name) is not None
    }


def check_override(settings: Mapping[str, Any], option: str) -> None:
    """ValueError for a setting that does not exist, or whose value cannot be: what a
    user states is to act. `option` is where it is stated. None takes a default away."""
    known = [*_SAMPLING, _EOS]
    for name in settings:
        if name not in known and name not in _IDLE:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ValueError(
                f"{option} has no setting {short_repr(name)}: {hint}expected some of "
                f"{', '.join(known)}"
            )
    if idle := sorted(_IDLE & settings.keys()):
        logger.warning_once("%s: %s without effect here", option, ", ".join(idle))
    check_values(settings, option)


def check_values(settings: Mapping[str, Any], place: str) -> None:
    """ValueError for a value that no request could be served with."""
    for name, field in _SAMPLING.items():
        if settings.get(name) is None:
            continue
        try:
            SamplingParams(**{field: settings[name]})
        except VLLMValidationError as error:
            reason = str(error).removeprefix(field)
            raise ValueError(f"{place}: {name}{reason}") from error
    ids = settings.get(_EOS)
    for token_id in ids if isinstance(ids, list) else [ids]:
        if ids is not None and (type(token_id) is not int or token_id < 0):
            raise ValueError(
                f"{place}: {_EOS} must be a token id or a list of token ids, got "
                f"{short_repr(ids)}"
            )
