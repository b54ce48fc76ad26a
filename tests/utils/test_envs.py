"""Environment variables mean what they say, or are refused by name."""

import pytest

from vllm import envs

FLAG = "VLLM_ENABLE_V1_MULTIPROCESSING"


@pytest.mark.parametrize("text", ["1", " Yes ", "on", "0", "OFF", ""])
def test_flags_are_read_as_words(monkeypatch, text: str) -> None:
    monkeypatch.setenv(FLAG, text)
    assert getattr(envs, FLAG) is (text.strip().lower() in ("1", "yes", "on"))


def test_other_words_are_no_flags(monkeypatch) -> None:
    monkeypatch.setenv(FLAG, "maybe")
    with pytest.raises(ValueError, match=f"{FLAG}='maybe': expected 1 or 0"):
        getattr(envs, FLAG)
