"""Loggers of the package: one format, one handler, messages that can be said once and
that cannot be forged."""

import logging
import re
import sys
from functools import cache, lru_cache
from typing import Any

from vllm import envs

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"
_CONTINUATION = "\n    "
# What moves the cursor of a terminal or ends a line there: control characters but
# for tab and newline, and Unicode's own line and paragraph separators.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


class OneEntryFormatter(logging.Formatter):
    """Lines of a message, but for the first, are indented; control characters are
    shown as escapes. Messages hold what clients send, such as the ids of requests: none
    of it can look like an entry of its own, or erase one."""

    def format(self, record: logging.LogRecord) -> str:
        text = _CONTROL.sub(_escaped, super().format(record))
        return text.replace("\n", _CONTINUATION)


def _escaped(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode()


class VllmLogger(logging.Logger):
    """A logger with `*_once` methods: the same message is printed once a process."""

    def debug_once(self, msg: str, *args: Any) -> None:
        _log_once(self, logging.DEBUG, msg, args)

    def info_once(self, msg: str, *args: Any) -> None:
        _log_once(self, logging.INFO, msg, args)

    def warning_once(self, msg: str, *args: Any) -> None:
        _log_once(self, logging.WARNING, msg, args)


@cache
def _log_once(
    logger: logging.Logger, level: int, msg: str, args: tuple[Any, ...]
) -> None:
    logger.log(level, msg, *args, stacklevel=3)


@lru_cache(maxsize=1)
def _configure_root() -> None:
    root = logging.getLogger("vllm")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(OneEntryFormatter(_FORMAT, _DATE_FORMAT))
        root.addHandler(handler)
        root.propagate = False
    level = str(envs.VLLM_LOGGING_LEVEL).upper()
    if not isinstance(logging.getLevelName(level), int):
        raise ValueError(
            f"VLLM_LOGGING_LEVEL={level!r}: expected DEBUG, INFO, WARNING or ERROR"
        )
    root.setLevel(level)


def init_logger(name: str) -> VllmLogger:
    """The logger of a module; call it as `logger = init_logger(__name__)`."""
    _configure_root()
    manager = logging.Logger.manager
    previous = manager.loggerClass
    manager.loggerClass = VllmLogger
    try:
        logger = logging.getLogger(name)
    finally:
        manager.loggerClass = previous
    if not isinstance(logger, VllmLogger):
        raise TypeError(f"logger {name!r} was created before vllm.logger was imported")
    return logger
