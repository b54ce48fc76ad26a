"""Resolves "module:Name" strings: the one way to import something late."""

import importlib
import importlib.util
from typing import Any

from vllm.utils.gc_utils import collector_paused


def resolve(path: str) -> Any:
    """Imports `module` and returns its attribute `Name`, for a path "module:Name".

    Raises ValueError when the path has no colon, ImportError when the module cannot be
    imported, AttributeError when it has no such name.
    """
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"cannot resolve {path!r}: expected 'package.module:Name'")
    with collector_paused():
        return getattr(importlib.import_module(module), name)


def resolve_qualname(path: str) -> Any:
    """Resolves "package.module.Name", the dotted form that plugins and backends use."""
    module, dot, name = path.rpartition(".")
    if not dot:
        raise ValueError(f"cannot resolve {path!r}: expected 'package.module.Name'")
    return resolve(f"{module}:{name}")


resolve_obj_by_qualname = resolve_qualname


def resolve_setting(setting: str, path: str) -> Any:
    """What a setting names by "module:Name" or "module.Name".

    Raises ValueError, with the setting and the reason, where there is no such thing.
    """
    try:
        return resolve(path) if ":" in path else resolve_qualname(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise _not_loaded(setting, path, error) from error


def find_setting(setting: str, path: str) -> None:
    """Says whether the module that a setting names is there, without loading it.

    Raises ValueError as `resolve_setting` does; a missing name is left to that one.
    """
    module = path.partition(":")[0] if ":" in path else path.rpartition(".")[0]
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise _not_loaded(setting, path, error) from error
    if found is None:
        raise _not_loaded(setting, path, f"No module named {module!r}")


def _not_loaded(setting: str, path: str, why: object) -> ValueError:
    return ValueError(
        f"{setting} {path!r} cannot be loaded: {why}; expected the path of "
        "a class that Python finds, as 'package.module.Name'"
    )


def has_module(name: str) -> bool:
    """Says whether a module can be found, without importing it."""
    return importlib.util.find_spec(name) is not None
