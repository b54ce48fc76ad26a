"""An entry of the log begins where a line begins, and nowhere else."""

import io
import logging
import sys

import pytest

from vllm.logger import OneEntryFormatter, init_logger

FORGED = "id\nINFO 01-01 00:00:00 [vllm.fake] all is well"


def written(message: str, *args: object, exc_info: bool = False) -> str:
    record = logging.LogRecord(
        "vllm.x",
        logging.INFO,
        __file__,
        1,
        message,
        args,
        sys.exc_info() if exc_info else None,
    )
    return OneEntryFormatter("%(levelname)s %(message)s").format(record)


def test_a_plain_message_is_told_as_it_is() -> None:
    assert written("request %s added\té 你好 😀", "r-1") == (
        "INFO request r-1 added\té 你好 😀"
    )


@pytest.mark.parametrize("given", [FORGED, FORGED.replace("\n", "\n\n\n")])
def test_only_the_first_line_of_a_message_begins_at_the_margin(given: str) -> None:
    first, *others = written("request %s added", given).split("\n")
    assert first == "INFO request id" and others
    assert all(line.startswith("    ") for line in others)


def test_lines_of_an_exception_are_indented() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        first, *others = written("failed", exc_info=True).split("\n")
    assert first == "INFO failed" and len(others) > 3
    assert all(line.startswith("    ") for line in others)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("\r", r"\r"),
        ("\x1b[2K\x1b[1A", r"\x1b[2K\x1b[1A"),
        ("\b\0\x7f", r"\x08\x00\x7f"),
        ("\v\f\x1c", r"\x0b\x0c\x1c"),
        ("\x85\x9b2J", r"\x85\x9b2J"),
        ("\u2028\u2029", r"\u2028\u2029"),
    ],
)
def test_control_characters_are_shown_and_not_sent(given: str, shown: str) -> None:
    assert written("request %s", given) == f"INFO request {shown}"
    assert len(written("request %s", given).splitlines()) == 1


def test_loggers_of_the_package_write_so(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = init_logger("vllm.test_logger")
    handlers = logging.getLogger("vllm").handlers
    (handler,) = [h for h in handlers if isinstance(h.formatter, OneEntryFormatter)]
    stream = io.StringIO()
    monkeypatch.setattr(handler, "stream", stream)
    logger.error("request %s", FORGED)
    assert stream.getvalue().count("\n") == 2
    assert stream.getvalue().split("\n")[1].startswith("    INFO")
