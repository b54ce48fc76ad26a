"""Finds and runs the plugins of other distributions."""

from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)

GENERAL_PLUGINS_GROUP = "vllm.general_plugins"
STAT_LOGGER_PLUGINS_GROUP = "vllm.stat_logger_plugins"


def load_plugins_by_group(group: str) -> dict[str, Any]:
    """Loads the entry points of a group that VLLM_PLUGINS allows (all when unset).

    A plugin that cannot be loaded is logged and skipped.
    """
    allowed = envs.VLLM_PLUGINS
    loaded: dict[str, Any] = {}
    for entry in entry_points(group=group):
        if allowed is not None and entry.name not in allowed:
            continue
        try:
            loaded[entry.name] = entry.load()
        except Exception:
            logger.exception("plugin %s (%s) could not be loaded", entry.name, group)
    return loaded


@lru_cache(maxsize=1)
def load_general_plugins() -> None:
    """Runs each general plugin once a process."""
    for name, plugin in load_plugins_by_group(GENERAL_PLUGINS_GROUP).items():
        try:
            plugin()
        except Exception:
            logger.exception("plugin %s failed", name)
