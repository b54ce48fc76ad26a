"""Code written against the public names of release 0.28 finds them here, unchanged."""

import importlib
import inspect
import logging
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

import msgspec
import pytest

from tests.public_surface import FIELDS, NAMES, PARAMETERS
from tests.tiny_model import tiny_model  # noqa: F401
from vllm import config
from vllm.config.accepted import ACCEPTED

CASES = [(m, n, p) for m, rows in PARAMETERS.items() for n, p in rows.items()]
CLASSES = [(m, n, f) for m, rows in FIELDS.items() for n, f in rows.items()]
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def found(module: str, dotted: str) -> Any:
    target: Any = importlib.import_module(module)
    for part in dotted.split("."):
        if not hasattr(target, part):
            importlib.import_module(f"{module}.{part}")  # a module of a package
        target = getattr(target, part)
    return target


@pytest.mark.parametrize("module", NAMES)
def test_names_are_there_and_facades_give_the_definition_itself(module: str) -> None:
    for name in NAMES[module]:
        value = found(module, name)
        home = getattr(value, "__module__", module)
        if not inspect.isclass(value) and not inspect.isfunction(value):
            continue
        assert found(home, value.__qualname__) is value, f"{module}.{name}"


@pytest.mark.parametrize(
    ("module", "name", "expected"), CASES, ids=[f"{m}.{n}" for m, n, _ in CASES]
)
def test_parameters_have_their_names_and_order(
    module: str, name: str, expected: tuple[str, ...]
) -> None:
    """Ours may take more, as long as nobody has to give it. Parameters after the first
    ones may be passed on."""
    signature = inspect.signature(found(module, name))
    ours = [p for p in signature.parameters.values() if p.name != "self"]
    passes_on = [p for p in ours if p.kind in VARIADIC]
    named = [p for p in ours if p.kind not in VARIADIC]
    wanted = [word for word in expected if not word.startswith("*")]
    taken = [p.name for p in named[: len(wanted)]]
    assert taken == wanted[: len(taken)]
    assert len(taken) == len(wanted) or passes_on, f"no {wanted[len(taken) :]}"
    extra = named[len(wanted) :]
    assert all(p.default is not p.empty for p in extra), extra


@pytest.mark.parametrize(
    ("module", "name", "expected"), CLASSES, ids=[f"{m}.{n}" for m, n, _ in CLASSES]
)
def test_fields_have_their_names_and_order(
    module: str, name: str, expected: tuple[str, ...]
) -> None:
    """Fields that are given by position keep their place; further ones are optional."""
    cls = found(module, name)
    if issubclass(cls, Enum):
        assert tuple(cls.__members__)[: len(expected)] == expected
    elif issubclass(cls, msgspec.Struct):
        own = [f for f in cls.__struct_fields__ if f in expected]
        assert own == [f for f in expected if f in own]
        assert all(hasattr(cls, f) for f in expected)
    elif is_dataclass(cls):
        ours = {f.name: f for f in fields(cls)}
        known = [f for f in expected if f in ours]
        assert all(hasattr(cls, f) for f in expected if f not in ours)
        by_place = [f for f in ours if f in known and not ours[f].kw_only]
        assert by_place == [f for f in known if f in by_place]
        inherited = {f for base in cls.__mro__[1:] for f in _field_names(base)}
        for field in ours.values():
            if field.name not in expected and field.name not in inherited:
                has_default = (field.default, field.default_factory) != (
                    MISSING,
                    MISSING,
                )
                assert has_default or not field.init, f"{field.name} must be given"
    else:
        assert all(hasattr(cls, f) for f in expected)


def _field_names(cls: type) -> list[str]:
    return [f.name for f in fields(cls)] if is_dataclass(cls) else []


@pytest.mark.parametrize(
    ("owner", "field"), [(o, f) for o, names in ACCEPTED.items() for f in sorted(names)]
)
def test_fields_without_a_part_behind_them_are_accepted(
    owner: str,
    field: str,
    tiny_model: str,  # noqa: F811
) -> None:
    cls = getattr(config, owner)
    assert field not in {f.name for f in fields(cls)}
    needs = {"model": tiny_model} if owner == "ModelConfig" else {}
    made = cls(**needs, **{field: None})
    assert getattr(made, field) is None
    assert repr(made)


def test_other_unknown_fields_are_refused_by_name() -> None:
    for owner in ("VllmConfig", "CacheConfig", "ParallelConfig"):
        with pytest.raises(ValueError, match="enable_warp"):
            getattr(config, owner)(enable_warp=True)


def test_it_is_said_that_a_field_has_no_effect(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING, "vllm"):
        config.ParallelConfig(enable_dbo=True, ubatch_size=3)
    assert "ParallelConfig: enable_dbo, ubatch_size accepted" in caplog.text
