"""How the next token of a request is chosen, and when the request ends."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import field as dc_field
from enum import Enum, IntEnum
from functools import cached_property
from typing import Annotated, Any

import msgspec
from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from vllm.exceptions import VLLMValidationError
from vllm.utils.text_utils import is_unicode, short_repr, shorten

_SAMPLING_EPS = 1e-5
# Below this temperature logits overflow: lower ones are raised to it, but 0 is greedy.
_MIN_TEMPERATURE = 1e-2
MAX_STOP_STRINGS = 64
# Each is tokenized twice, and looked for at every step.
MAX_BAD_WORDS = 1024
MAX_LIST_CHARACTERS = 16384  # of all stop strings, and of all bad words
# Every continuation has its own copy of the prompt and of the parameters: ids,
# characters and other values, 50 bytes each in the engine.
MAX_VALUES = 1 << 24


class SamplingType(IntEnum):
    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RequestOutputKind(Enum):
    """What each RequestOutput holds: everything so far, the news, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(config=ConfigDict(extra="forbid"))
class StructuredOutputsParams:
    """The form that the output must have: one of json, regex, choice, grammar,
    json_object and structural_tag. json_object=False asks for nothing."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    _backend: str | None = dc_field(default=None, init=False)
    _backend_was_auto: bool = dc_field(default=False, init=False)
    # The field of the request that asked, which errors name.
    _parameter: str = dc_field(default="structured_outputs", init=False)

    @property
    def num_values(self) -> int:
        """Characters and other values of the form."""
        return _num_values([getattr(self, name) for name in _FORMS])

    @classmethod
    def of(
        cls, fields: dict[str, Any], parameter: str = "structured_outputs"
    ) -> "StructuredOutputsParams":
        """The form that a dict states. VLLMValidationError, naming the place in the
        dict, where a value is of the wrong type."""
        try:
            form = cls(**fields)
        except ValidationError as error:
            faults = error.errors()
            cause = (faults[0].get("ctx") or {}).get("error")
            if isinstance(cause, VLLMValidationError):
                raise cause from error
            name, value = faults[0]["loc"][0], faults[0]["input"]
            # A field of several types has one complaint for each of them.
            items = [f"[{i}]" for i in faults[0]["loc"] if isinstance(i, int)]
            complaints = dict.fromkeys(f["msg"] for f in faults if f["loc"][0] == name)
            raise VLLMValidationError(
                f"{parameter}.{shorten(str(name), 100)}{''.join(items)}: "
                f"{'; or '.join(complaints)}, got {short_repr(value)}",
                parameter=parameter,
            ) from error
        form._parameter = parameter
        return form

    def __post_init__(self) -> None:
        forms = _FORMS
        given = [name for name in forms if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise VLLMValidationError(
                f"structured_outputs takes exactly one of {', '.join(forms)}, got "
                f"{' and '.join(given) or 'none'}",
                parameter="structured_outputs",
            )


@dataclass
class RepetitionDetectionParams:
    """Ends a request whose tail repeats a pattern of min to max tokens min_count times.

    All zero: off.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True):  # type: ignore[call-arg]
    """Sampling settings of one request. Raises VLLMValidationError naming the field.

    temperature 0 is greedy. top_k 0 or -1, top_p 1, min_p 0 and repetition_penalty 1
    are off. logprobs n returns the n most likely tokens besides the chosen one, -1 the
    whole vocabulary.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    _eos_token_id: int | None = None
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    routed_experts_prompt_start: int = 0
    bad_words: list[str] | None = None
    _bad_words_token_ids: list[list[int]] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None

    @staticmethod
    def from_optional(**kwargs: Any) -> "SamplingParams":
        """Builds parameters from values that may be None: None means the default."""
        return SamplingParams(**{k: v for k, v in kwargs.items() if v is not None})

    def __post_init__(self) -> None:
        for name, low, high, expected in _RANGES:
            _check_number(name, getattr(self, name), low, high, expected)
        self._adopt_lists()
        self._adopt_structured_outputs()
        if self.seed == -1:
            self.seed = None
        if 0 < self.temperature < _MIN_TEMPERATURE:
            self.temperature = max(self.temperature, _MIN_TEMPERATURE)
        self._verify()
        if self.stop and not self.include_stop_str_in_output:
            self.output_text_buffer_length = max(len(text) for text in self.stop) - 1
        if self.temperature < _SAMPLING_EPS:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        self._all_stop_token_ids.update(self.stop_token_ids or ())
        if self.skip_reading_prefix_cache is None:
            # Prompt logprobs need the logits of every prompt token.
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    def _adopt_lists(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name, most in _STRINGS.items():
            value = getattr(self, name)
            value = [] if value is None else value
            texts = _listed(name, value, "a list of non-empty strings")
            _check_strings(name, texts, most)
            setattr(self, name, texts)
        for name in _IDS:
            if (value := getattr(self, name)) is None:
                continue
            ids = _listed(name, value, "a list of token ids")
            if not {int}.issuperset(map(type, ids)):  # neither are booleans
                _refuse(name, ids, "a list of token ids, which are whole numbers")
            setattr(self, name, ids)
        self.stop_token_ids = self.stop_token_ids or []
        if self.logit_bias is not None:
            _check_biases(self.logit_bias)
        if not isinstance(self.extra_args, (dict, type(None))):
            _refuse("extra_args", self.extra_args, "a dict of names and values")

    def _adopt_structured_outputs(self) -> None:
        form: Any = self.structured_outputs
        if isinstance(form, dict):
            self.structured_outputs = StructuredOutputsParams.of(form)
        elif not isinstance(form, (StructuredOutputsParams, type(None))):
            _refuse(
                "structured_outputs",
                form,
                "StructuredOutputsParams or a dict of its fields",
            )

    def _verify(self) -> None:
        if not self.top_p > 0.0:
            _refuse("top_p", self.top_p, "a number above 0 and at most 1")
        if not self.repetition_penalty > 0.0:
            _refuse(
                "repetition_penalty",
                self.repetition_penalty,
                "a number above 0 and at most 1e6",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse(
                "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})"
            )
        if self.stop and not self.detokenize:
            _refuse("stop", self.stop, "detokenize=True, or stop_token_ids instead")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _refuse(
                "allowed_token_ids", self.allowed_token_ids, "at least one token id"
            )
        if self.n > 1 and self.sampling_type == SamplingType.GREEDY:
            _refuse("n", self.n, "1 when temperature is 0 (greedy)")

    @cached_property
    def sampling_type(self) -> SamplingType:
        if self.temperature < _SAMPLING_EPS:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def eos_token_id(self) -> int | None:
        return self._eos_token_id

    @property
    def all_stop_token_ids(self) -> set[int]:
        return self._all_stop_token_ids

    @property
    def bad_words_token_ids(self) -> list[list[int]] | None:
        return self._bad_words_token_ids

    def update_from_generation_config(
        self, generation_config: dict[str, Any], eos_token_id: int | None = None
    ) -> None:
        """Adds the model's end-of-sequence ids: the tokenizer's, and the further ones
        that its generation config states, which then stop a request as well."""
        self._eos_token_id = eos_token_id
        stated = generation_config.get("eos_token_id")
        ids = {stated} if isinstance(stated, int) else set(stated or ())
        if eos_token_id is not None:
            self._all_stop_token_ids.add(eos_token_id)
        self._all_stop_token_ids.update(ids)
        extra = ids - {eos_token_id}
        if extra and not self.ignore_eos:
            self.stop_token_ids = sorted(extra.union(self.stop_token_ids or ()))

    @property
    def num_values(self) -> int:
        """Ids, characters and other values in what has no fixed size."""
        given = (
            *(self.stop, self.bad_words, self.stop_token_ids, self.logprob_token_ids),
            *(self.allowed_token_ids, self.logit_bias, self.extra_args),
        )
        form = self.structured_outputs
        return _num_values(given) + (0 if form is None else form.num_values)

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing mutable."""
        return copy.deepcopy(self)


def check_values(n: int, num_values: int, parameter: str = "n") -> None:
    """VLLMValidationError where n continuations of `num_values` each are too much."""
    if n * num_values > MAX_VALUES:
        raise VLLMValidationError(
            f"{n:,} continuations of {num_values:,} tokens, ids and characters of the "
            f"prompt and its parameters are above the limit of {MAX_VALUES:,} in all: "
            "ask for the others in further requests",
            parameter=parameter,
        )


def _num_values(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(_num_values(k) + _num_values(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return sum(map(_num_values, value))
    return value is not None


def _check_number(
    name: str, value: Any, low: float, high: float, expected: str
) -> None:
    if value is None and name in _MAY_BE_NONE:
        return
    types = (int,) if name in _WHOLE else (int, float)
    if not isinstance(value, types) or isinstance(value, bool):
        _refuse(name, value, expected)
    if not low <= value <= high:  # also refuses NaN
        _refuse(name, value, expected)


def _listed(name: str, value: Any, expected: str) -> list[Any]:
    """What a parameter lists. A text lists its characters, which nobody means."""
    no_list = isinstance(value, (str, bytes, bytearray, Mapping))
    if no_list or not isinstance(value, Iterable):
        _refuse(name, value, expected)
    return list(value)


def _check_biases(biases: Any) -> None:
    expected = "a dict of token ids and numbers"
    if not isinstance(biases, Mapping):
        _refuse("logit_bias", biases, expected)
    for token, bias in biases.items():
        # JSON objects have text keys.
        is_id = token.isdigit() if isinstance(token, str) else type(token) is int
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not is_id or not is_number or not bias < _INF:  # also refuses NaN
            _refuse("logit_bias", {token: bias}, expected)


def _check_strings(name: str, texts: Any, most: int) -> None:
    if len(texts) > most:
        raise VLLMValidationError(
            f"{name} must hold at most {most:,} strings, got {len(texts):,}: leave the "
            "others out",
            parameter=name,
            value=len(texts),
        )
    if any(not isinstance(text, str) or not text for text in texts):
        _refuse(name, texts, "a list of non-empty strings")
    if not is_unicode("".join(texts)):
        _refuse(name, texts, "valid Unicode, without halves of surrogate pairs")
    if (length := sum(map(len, texts))) > MAX_LIST_CHARACTERS:
        raise VLLMValidationError(
            f"{name} must hold at most {MAX_LIST_CHARACTERS:,} characters in all, got "
            f"{length:,}: use fewer or shorter strings",
            parameter=name,
            value=length,
        )


def _refuse(name: str, value: Any, expected: str) -> None:
    raise VLLMValidationError(
        f"{name} must be {expected}, got {short_repr(value)}",
        parameter=name,
        value=value,
    )


_MAY_BE_NONE = {"max_tokens", "logprobs", "prompt_logprobs", "seed", "stream_interval"}
_WHOLE = _MAY_BE_NONE | {"n", "top_k", "min_tokens"}
_INF = float("inf")
_COUNT = "a whole number of at least 0"
# field, lowest, highest, in words
_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("n", 1, 16384, "a whole number from 1 to 16384"),
    ("presence_penalty", -2.0, 2.0, "a number between -2 and 2"),
    ("frequency_penalty", -2.0, 2.0, "a number between -2 and 2"),
    ("repetition_penalty", 0.0, 1e6, "a number above 0 and at most 1e6"),
    ("temperature", 0.0, 1e6, "a number from 0 to 1e6"),
    ("top_p", 0.0, 1.0, "a number above 0 and at most 1"),
    ("top_k", -1, 2**31 - 1, "a whole number: -1 or 0 (off), or from 1 to 2**31 - 1"),
    ("min_p", 0.0, 1.0, "a number between 0 and 1"),
    ("max_tokens", 1, 2**31 - 1, "a whole number from 1 to 2**31 - 1"),
    ("min_tokens", 0, 2**31 - 1, "a whole number from 0 to 2**31 - 1"),
    ("logprobs", -1, _INF, f"{_COUNT}, or -1 for the whole vocabulary"),
    ("prompt_logprobs", -1, _INF, f"{_COUNT}, or -1 for the whole vocabulary"),
    ("seed", -(2**63), 2**64 - 1, "a whole number of 64 bits"),
    ("stream_interval", 1, 2**31 - 1, "a whole number from 1 to 2**31 - 1"),
)
# Lists of texts, and how many of them there may be; lists of token ids.
_STRINGS = {"stop": MAX_STOP_STRINGS, "bad_words": MAX_BAD_WORDS}
_IDS = ("stop_token_ids", "logprob_token_ids", "allowed_token_ids")
