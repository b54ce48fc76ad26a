"""Loggers of the package: one format, one handler, messages that can be said once."""

import logging
import sys
from functools import cache, lru_cache
from typing import Any

from vllm import envs

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"


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
        handler.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
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
