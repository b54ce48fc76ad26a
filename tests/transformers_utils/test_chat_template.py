"""Chat messages become prompts; what a template cannot take is a clear error."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from vllm.transformers_utils.chat_template import (
    flatten_content,
    load_chat_template,
    render_chat,
)

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{{ mark }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def tokenizer() -> Any:
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE)


def test_rendering_passes_flags_and_variables_to_the_template(tokenizer: Any) -> None:
    assert render_chat(tokenizer, HI) == "[user]hi\n[assistant]"
    assert render_chat(tokenizer, HI, add_generation_prompt=False) == "[user]hi\n"
    found = render_chat(tokenizer, HI, chat_template_kwargs={"mark": "!"})
    assert found == "[user]hi!\n[assistant]"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render_chat(tokenizer, HI, tools=tools).endswith("1 tools")


def test_a_given_template_wins_over_the_models_own(tokenizer: Any) -> None:
    assert render_chat(tokenizer, HI, chat_template="{{ messages[0].content }}") == "hi"


def test_the_last_message_can_be_continued(tokenizer: Any) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well,"}]
    found = render_chat(
        tokenizer, messages, add_generation_prompt=False, continue_final_message=True
    )
    assert found == "[user]hi\n[assistant]Well,"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]
    message = {"role": "user", "content": parts, "name": "n"}
    expected = {"role": "user", "content": "a\nb\nc", "name": "n"}
    assert flatten_content(message) == expected
    call = {"role": "assistant", "content": None, "tool_calls": []}
    assert flatten_content(call)["content"] == ""


@pytest.mark.parametrize(
    ("messages", "how", "words"),
    [
        ([], {}, "empty"),
        ([{"content": "x"}], {}, "role"),
        ([{"role": "bad", "content": "x"}], {}, "no such role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "image_url"),
        ([{"role": "user", "content": 5}], {}, "int"),
        (HI, {"continue_final_message": True}, "exclude"),
        (HI, {"chat_template": "{% broken"}, "template"),
    ],
)
def test_what_cannot_be_rendered_is_a_value_error(
    tokenizer: Any, messages: list[Any], how: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as error:
        render_chat(tokenizer, messages, **how)
    assert "\n" not in str(error.value)


def test_a_model_without_template_says_what_to_pass(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="--chat-template"):
        render_chat(tokenizer, HI)


def test_templates_come_from_files_or_text(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(TEMPLATE)
    assert load_chat_template(str(file)) == TEMPLATE
    assert load_chat_template(file) == TEMPLATE
    assert load_chat_template(TEMPLATE) == TEMPLATE
    assert load_chat_template(None) is None
    with pytest.raises(ValueError, match="nowhere"):
        load_chat_template("nowhere.jinja")


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{{ foo(", 1),
        ("{{ 1 }}\n{% if x %}", 2),
        ("{% for m in messages %}\n{{ m\n}", 3),
        ("{% nothing %}", 1),
        ("\n{{ x | no_such_filter }}", 2),
    ],
)
@pytest.mark.parametrize("in_file", [False, True])
def test_a_template_that_does_not_parse_is_refused_with_its_place(
    template: str, line: int, in_file: bool, tmp_path: Path
) -> None:
    value: str | Path = template
    if in_file:
        value = tmp_path / "t.jinja"
        value.write_text(template)
    with pytest.raises(ValueError) as error:
        load_chat_template(value)
    words = str(error.value)
    assert f"not valid Jinja (line {line}:" in words and "--chat-template" in words
    assert "\n" not in words and (not in_file or str(value) in words)


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        "{% generation %}{{ x }}{% endgeneration %}",
        "{% for m in messages %}{% break %}{% continue %}{% endfor %}",
        "{{ raise_exception('no') }}{{ strftime_now('%Y') }}{{ x | tojson }}",
    ],
)
def test_what_transformers_renders_is_taken(template: str) -> None:
    _compile_jinja_template(template)  # the reference
    assert load_chat_template(template + "\n") == template + "\n"


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"t\.jinja.*cannot be read.*UTF-8"):
        load_chat_template(file)
