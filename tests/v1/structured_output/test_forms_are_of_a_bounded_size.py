"""A form is refused before its size keeps others waiting, or breaks the library."""

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output import MAX_FORM_CHARACTERS, check_structured_outputs
from vllm.v1.structured_output.json_schema import check_schema
from vllm.v1.structured_output.regular_expression import check_regex, written_out

CONFIG: Any = SimpleNamespace(skip_tokenizer_init=False)
LONG = "a" * MAX_FORM_CHARACTERS


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"enum": [LONG]}},
        {"json": f'{{"enum": ["{LONG}"]}}'},
        {"regex": LONG + "b"},
        {"choice": ["ab", LONG]},
        {"grammar": f'root ::= "{LONG}"'},
        {"structural_tag": f'{{"type": "{LONG}"}}'},
    ],
    ids=lambda form: next(iter(form)),
)
def test_a_form_has_a_limit(form: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="expected at most 131,072") as caught:
        check_structured_outputs(StructuredOutputsParams(**form), CONFIG)
    assert caught.value.parameter == "structured_outputs"


@pytest.mark.parametrize("end", ["", "\\", "]", "a]", "\\]"])
@pytest.mark.parametrize("start", ["[", "[^", "[]", "[\\", "(["])
def test_open_classes_are_read_in_time_that_grows_as_the_length(
    start: str, end: str
) -> None:
    started = time.process_time()
    check_regex(start * 30_000 + end)
    assert time.process_time() - started < 1.0  # to the end from each of them: 20 s


@pytest.mark.parametrize(
    "pattern", ["[a](?=b)", "[^]a](?!b)", r"[\]](?<=b)", "a(?=b)["]
)
def test_assertions_outside_of_classes_are_found(pattern: str) -> None:
    with pytest.raises(ValueError, match="looking ahead or behind"):
        check_regex(pattern)


@pytest.mark.parametrize("pattern", ["[(?=]", "[](?=]", r"[\](?=]", r"\(?=", "[(?="])
def test_text_inside_of_classes_is_no_assertion(pattern: str) -> None:
    check_regex(pattern)


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("ab|c*", 3),
        ("(ab){3}", 6),
        ("(ab){2,}c", 5),
        ("(a(b[c{9}]{2}){3}){4,5}", 50),
        (r"\{3}\({2}", 5),
        ("a{0}", 1),
        ("(a{2}", 2),
        ("a)b{2}", 4),
        ("{3}", 0),
        ("a{" + "9" * 5000 + "}", 10**9),
        ("a" + "{9}" * 40_000, 10**9),
    ],
)
def test_counted_repetitions_are_written_out(pattern: str, size: int) -> None:
    assert written_out(pattern) == size


def test_repetitions_of_repetitions_have_a_limit() -> None:
    check_regex("(ab{255}){64}")
    with pytest.raises(ValueError, match="16,448 characters and classes"):
        check_regex("(ab{256}){64}")
    with pytest.raises(ValueError, match="written out"):
        check_regex("((((((((a{99}){99}){99}){99}){99}){99}){99}){99}){99}")


def test_patterns_of_a_schema_have_a_limit_together() -> None:
    def schema(count: int) -> dict[str, Any]:
        text = {"type": "string", "pattern": "^(ab{63}){64}$"}
        names = [f"p{i}" for i in range(count)]
        return {"type": "object", "properties": dict.fromkeys(names, text)}

    check_schema(schema(3))
    with pytest.raises(ValueError, match="and 3 others together have 16,392 char"):
        check_schema(schema(4))


def chain(length: int) -> dict[str, Any]:
    """Definitions of which each refers to the next."""
    links = {
        f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}}
        for i in range(length - 1)
    }
    return {
        "$ref": "#/$defs/d0",
        "$defs": {**links, f"d{length - 1}": {"type": "null"}},
    }


def test_definitions_that_are_followed_are_counted() -> None:
    """The library follows them by recursion: 4,000 end the process."""
    check_schema(chain(500))
    check_structured_outputs(StructuredOutputsParams(json=chain(500)), CONFIG)
    with pytest.raises(ValueError, match=re.escape("more than 500 definitions")):
        check_schema(chain(501))
    unused = {"$defs": {f"u{i}": {"type": "null"} for i in range(2000)}, "type": "null"}
    check_schema(unused)


def test_members_that_exclude_each_other_are_counted() -> None:
    def one_of(count: int) -> dict[str, Any]:
        return {"oneOf": [{"const": i} for i in range(count)]}

    check_schema(one_of(128))
    with pytest.raises(ValueError, match="has 129 members, expected at most 128"):
        check_schema(one_of(129))
