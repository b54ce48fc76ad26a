"""A JSON schema is followed to the letter or refused by keyword and path."""

import json
from datetime import datetime
from enum import Enum
from itertools import product
from typing import Any, Literal

import pytest
import xgrammar as xgr
from pydantic import BaseModel, ConfigDict, Field

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output import json_schema
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, parse

INT = {"type": "integer"}
STR = {"type": "string"}
LIST = {"type": "array", "items": INT}
OPEN = {"type": "object", "additionalProperties": INT}


class Bytes:
    """A tokenizer of single bytes, and one end."""

    info = xgr.TokenizerInfo(
        [bytes([i]) for i in range(256)] + [b"<end>"], stop_token_ids=[256]
    )


@pytest.fixture(scope="module")
def compiler() -> xgr.GrammarCompiler:
    return xgr.GrammarCompiler(Bytes.info)


def fits(compiler: xgr.GrammarCompiler, schema: Any, value: Any) -> bool:
    grammar = parse(StructuredOutputsParams(json=schema))
    matcher = xgr.GrammarMatcher(compiler.compile_grammar(grammar))
    return matcher.accept_string(json.dumps(value)) and matcher.accept_token(256)


def tagged(kind: str) -> dict[str, Any]:
    properties = {"kind": {"const": kind}}
    return {"type": "object", "properties": properties, "required": ["kind"]}


# keyword -> schema, a value that fits, a value that does not
ENFORCED: dict[str, tuple[Any, Any, Any]] = {
    "type": ({"type": ["integer", "null"]}, None, "a"),
    "enum": ({"type": "string", "enum": ["a", "b"]}, "b", "c"),
    "const": ({"const": 7}, 7, 8),
    "$ref": ({"$defs": {"n": INT}, "$ref": "#/$defs/n"}, 1, "a"),
    "anyOf": ({"anyOf": [INT, {"type": "null"}]}, None, "a"),
    "oneOf": (
        {
            "$defs": {"a": tagged("a"), "b": tagged("b")},
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        },
        {"kind": "b"},
        {"kind": "c"},
    ),
    "allOf": ({"allOf": [INT]}, 1, "a"),
    "minimum": ({**INT, "minimum": 3}, 3, 2),
    "maximum": ({"type": "number", "maximum": 3.5}, 3, 4),
    "exclusiveMinimum": ({**INT, "exclusiveMinimum": 3}, 4, 3),
    "exclusiveMaximum": ({**INT, "exclusiveMaximum": 3}, 2, 3),
    "multipleOf": ({**INT, "multipleOf": 7}, 49, 50),
    "minLength": ({"type": ["string", "null"], "minLength": 2}, "ab", "a"),
    "maxLength": ({**STR, "maxLength": 2}, "ab", "abc"),
    "pattern": ({**STR, "pattern": "^a+$"}, "aa", "ab"),
    "format": ({**STR, "format": "date"}, "2020-01-31", "x"),
    "items": ({"items": INT}, [1], ["a"]),
    "prefixItems": ({"type": "array", "prefixItems": [INT, STR]}, [1, "a"], ["a", 1]),
    "unevaluatedItems": ({"type": "array", "unevaluatedItems": INT}, [1], ["a"]),
    "minItems": ({**LIST, "minItems": 2}, [1, 2], [1]),
    "maxItems": ({**LIST, "maxItems": 2}, [1, 2], [1, 2, 3]),
    "properties": ({"properties": {"a": INT}}, {"a": 1}, {"a": "x"}),
    "additionalProperties": (OPEN, {"a": 1}, {"a": "x"}),
    "unevaluatedProperties": ({"unevaluatedProperties": INT}, {"a": 1}, {"a": "x"}),
    "required": ({"properties": {"a": INT}, "required": ["a"]}, {"a": 1}, {}),
    "minProperties": ({**OPEN, "minProperties": 1}, {"a": 1}, {}),
    "maxProperties": ({**OPEN, "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}),
}


@pytest.mark.parametrize("keyword", json_schema.ENFORCED)
def test_an_enforced_keyword_forbids_what_it_should(
    compiler: xgr.GrammarCompiler, keyword: str
) -> None:
    schema, good, bad = ENFORCED[keyword]
    assert keyword in schema
    assert fits(compiler, schema, good)
    assert not fits(compiler, schema, bad)


ANY_TWO = {"type": "array", "minItems": 2}
OPEN_ARRAYS: list[tuple[Any, list[Any], list[Any]]] = [
    (ANY_TWO, [[1, "a"], [None, {}, []]], [[], [1], {}]),
    ({"type": "array", "maxItems": 2}, [[], ["a"], [1, None]], [[1, 2, 3]]),
    ({"type": "array", "maxItems": 0}, [[]], [[1]]),
    (
        {"type": "array", "prefixItems": [INT], "minItems": 2},
        [[1, "a"], [1, "a", None]],
        [[1], ["a", 1]],
    ),
    ({"properties": {"a": ANY_TWO}}, [{"a": [1, "a"]}], [{"a": [1]}]),
    ({"type": ["array", "null"], "minItems": 2}, [None, [1, "a"]], [[1], "a"]),
    ({"$defs": {"a": ANY_TWO}, "$ref": "#/$defs/a"}, [[1, "a"]], [[1]]),
    ({"type": "array", "items": ANY_TWO}, [[[1, "a"]]], [[[1]]]),
]


@pytest.mark.parametrize(
    ("schema", "good", "bad"), OPEN_ARRAYS, ids=range(len(OPEN_ARRAYS))
)
def test_items_that_are_not_described_may_be_anything(
    compiler: xgr.GrammarCompiler, schema: Any, good: list[Any], bad: list[Any]
) -> None:
    before = json.dumps(schema)
    assert [fits(compiler, schema, value) for value in good] == [True] * len(good)
    assert [fits(compiler, schema, value) for value in bad] == [False] * len(bad)
    assert json.dumps(schema) == before


def test_items_in_a_structural_tag_may_be_anything(
    compiler: xgr.GrammarCompiler,
) -> None:
    content = {"type": "json_schema", "json_schema": ANY_TWO}
    tag = json.dumps({"type": "structural_tag", "format": content})
    grammar = parse(StructuredOutputsParams(structural_tag=tag))
    for text, is_good in (('[1, "a"]', True), ("[1]", False)):
        matcher = xgr.GrammarMatcher(compiler.compile_grammar(grammar))
        assert (matcher.accept_string(text) and matcher.accept_token(256)) == is_good


FORMATTED = {
    "email": "a@b.co",
    "date": "2020-01-31",
    "time": "12:00:00Z",
    "date-time": "2020-01-31T12:00:00Z",
    "duration": "P1D",
    "ipv4": "1.2.3.4",
    "ipv6": "::1",
    "hostname": "a.b",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "uri": "http://a/b",
    "uri-reference": "/a",
    "uri-template": "/a{b}",
    "json-pointer": "/a",
    "relative-json-pointer": "0/a",
}


@pytest.mark.parametrize("name", sorted(json_schema.FORMATS))
def test_a_format_forbids_other_text(compiler: xgr.GrammarCompiler, name: str) -> None:
    schema = {"type": "string", "format": name}
    assert fits(compiler, schema, FORMATTED[name])
    assert not fits(compiler, schema, "  ")


@pytest.mark.parametrize("name", sorted(json_schema.ANNOTATIONS | {"x-order"}))
def test_an_annotation_changes_nothing(
    compiler: xgr.GrammarCompiler, name: str
) -> None:
    value: Any = {} if name in ("$defs", "definitions", "discriminator") else "text"
    schema = {**INT, name: value}
    assert fits(compiler, schema, 1) and not fits(compiler, schema, "a")


@pytest.mark.parametrize("keyword", sorted(json_schema.NOT_ENFORCED))
def test_what_is_not_enforced_is_refused_by_name_and_path(keyword: str) -> None:
    schema = {"properties": {"a": {"items": {**INT, keyword: {}}}}}
    with pytest.raises(VLLMValidationError) as caught:
        parse(StructuredOutputsParams(json=schema))
    wanted = f"schema keyword {keyword!r} at $.properties.a.items is not enforced here"
    assert wanted in str(caught.value)


REFUSED: list[tuple[Any, str]] = [
    ({"typ": "integer"}, "'typ' at $ is unknown; did you mean 'type'"),
    ({"type": []}, "'type' at $ must be one or several of"),
    ({"type": "int"}, "'type' at $ must be one or several of"),
    ({"allOf": [INT, {"minimum": 3}]}, "'allOf' at $ with several members"),
    ({"allOf": []}, "'allOf' at $ must hold"),
    ({"anyOf": [INT], "minimum": 3}, "'minimum' at $ is not enforced here beside"),
    ({"type": "string", "anyOf": [INT]}, "'type' at $ is not enforced here beside"),
    ({"oneOf": [INT, {"type": "number"}]}, "'oneOf' at $ is not enforced"),
    ({"type": "integer", "enum": [1, "a"]}, "'enum' at $ holds 'a'"),
    ({"type": "integer", "const": True}, "'const' at $ holds True"),
    ({"enum": ["a", "bb"], "minLength": 2}, "'minLength' at $ is not enforced"),
    ({**STR, "pattern": "a", "minLength": 2}, "'minLength' at $ is not enforced"),
    ({**STR, "format": "date", "maxLength": 2}, "'maxLength' at $ is not enforced"),
    ({**STR, "format": "date", "pattern": "a"}, "'format' at $ is not enforced"),
    ({**STR, "format": "iban"}, "'format' at $ 'iban' is not enforced"),
    ({**STR, "pattern": "^(?!a).+$"}, "'pattern' at $ cannot be followed"),
    ({**STR, "pattern": 5}, "'pattern' at $ must be text"),
    ({"minimum": 3}, "'minimum' at $ is not enforced here without 'type'"),
    ({"required": ["a"]}, "'required' at $ is not enforced here without 'type'"),
    ({"properties": {"b": INT}, "required": ["a"]}, "'required' at $ names 'a'"),
    ({**OPEN, "required": ["a"]}, "'required' at $ names 'a'"),
    ({**OPEN, "minProperties": 2}, "'minProperties' at $ is not enforced"),
    ({"type": "number", "multipleOf": 3}, "'multipleOf' at $ is enforced here only"),
    ({**INT, "multipleOf": 3, "minimum": 1}, "'multipleOf' at $ is not enforced"),
    ({**STR, "minLength": -5}, "'minLength' at $ must be a whole number >= 0, got -5"),
    ({"properties": 5}, "'properties' at $ must be an object"),
    ({"items": [INT]}, "schema at $.items must be an object"),
    ({"items": {"$ref": "http://a/b.json"}}, "'$ref' at $.items must lead into this"),
    ({"items": {"$ref": "#/$defs/x"}}, "'$ref' at $.items leads to '#/$defs/x', which"),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"not": {}}}}, "'not' at $.$defs.x is not"),
    ({"$ref": "#/$defs/x", "minimum": 1, "$defs": {"x": INT}}, "'minimum' at $ is not"),
    ("{", "json is not valid JSON: "),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED, ids=str)
def test_a_schema_that_would_hold_in_part_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(VLLMValidationError) as caught:
        parse(StructuredOutputsParams(json=schema))
    assert said in str(caught.value)


ACCEPTED: list[tuple[Any, Any]] = [
    ({**INT, "minLength": 3, "format": "int32"}, 1),
    ({"type": "object", "anyOf": [tagged("a"), tagged("b")]}, {"kind": "b"}),
    ({"type": "string", "const": "a", "enum": ["a"]}, "a"),
    ({"oneOf": [{"const": "a"}, INT]}, "a"),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": INT, "unused": {"not": {}}}}, 1),
    ({"properties": {"a": {"$ref": "#"}}}, {"a": {"a": {}}}),
    ({**STR, "pattern": r"^\(\?=[(?=]$"}, "(?=?"),
]


@pytest.mark.parametrize(("schema", "value"), ACCEPTED, ids=str)
def test_what_means_nothing_more_is_no_reason_to_refuse(
    compiler: xgr.GrammarCompiler, schema: Any, value: Any
) -> None:
    assert fits(compiler, schema, value)


def test_schemas_inside_structural_tags_are_checked() -> None:
    content = {"type": "json_schema", "json_schema": {"not": {}}}
    form = {"type": "tag", "begin": "<", "content": content, "end": ">"}
    for tag in (
        {"type": "structural_tag", "format": form},
        {"structures": [{"begin": "<", "schema": {"not": {}}, "end": ">"}]},
    ):
        with pytest.raises(VLLMValidationError, match="'not' at"):
            parse(StructuredOutputsParams(structural_tag=json.dumps(tag)))


def backend_of(info: xgr.TokenizerInfo) -> XgrammarBackend:
    built = object.__new__(XgrammarBackend)
    built._compiler, built._vocab_size = xgr.GrammarCompiler(info), info.vocab_size
    return built


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"grammar": "root ::= root"}, "no text, not even an empty one"),
        ({"grammar": 'root ::= "a"', "json_object": False}, None),
        ({"grammar": 'root ::= ""'}, None),
        ({"grammar": 'root ::= "a" | ""'}, None),
    ],
    ids=str,
)
def test_a_grammar_without_any_text_is_refused(
    form: dict[str, Any], said: str | None
) -> None:
    backend = backend_of(Bytes.info)
    params = StructuredOutputsParams(**form)
    if said is None:
        backend.compile(params, 256)
        return
    with pytest.raises(VLLMValidationError, match=said):
        backend.compile(params, 256)


def test_a_grammar_that_would_hold_up_the_steps_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Tokens of several letters: there are many ways through the grammar for each.
    words = [bytes(word) for n in (1, 2, 4) for word in product(b"abcd", repeat=n)]
    info = xgr.TokenizerInfo([*words, b"<end>"], stop_token_ids=[len(words)])
    backend = backend_of(info)
    nested = StructuredOutputsParams(regex="((a|b|[a-z]{0,50}){0,20}c?){0,15}d")
    plain = StructuredOutputsParams(regex="[a-z]{0,50}d")
    limit = "vllm.v1.structured_output.backend_xgrammar._MAX_SECONDS_PER_TOKEN"
    monkeypatch.setattr(limit, 0.01)
    backend.compile(plain, 256)
    with pytest.raises(VLLMValidationError, match="nest fewer"):
        backend.compile(nested, 256)


def test_messages_hold_no_source_of_the_library() -> None:
    big = {"type": "integer", "minimum": 10**20}
    for form in ({"json": big}, {"grammar": "no root"}, {"regex": r"(a)\1"}):
        with pytest.raises(VLLMValidationError) as caught:
            parse(StructuredOutputsParams(**form))
        assert ".cc" not in str(caught.value) and "Check" not in str(caught.value)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    """Where somebody lives."""

    street: str = Field(description="with its number", min_length=1, max_length=40)
    code: str | None = Field(default=None, examples=["10115"])


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    age: int = Field(ge=0, le=150)
    share: float = Field(gt=0, lt=1, default=0.5)
    colour: Colour = Colour.RED
    kind: Literal["a", "b"] = "a"
    home: Address
    former: list[Address] = Field(default_factory=list, max_length=3)
    work: Address | None = Field(default=None, description="if there is any")
    counts: dict[str, int] = Field(default_factory=dict)
    born: datetime
    mark: int | str = 1
    plate: str = Field(pattern=r"^[A-Z]{3}$", default="ABC")
    pair: tuple[int, str] = (1, "a")


@pytest.mark.parametrize("model", [Address, Person])
def test_schemas_of_usual_models_are_taken(model: type[BaseModel]) -> None:
    json_schema.check_schema(model.model_json_schema())
