"""Which manager serves a spec class, and which base class makes specs uniform.

Knows classes and dotted names only. Refuses to know any spec's fields and to import any
manager: a built-in row names its manager as "module:Name", resolved when asked for.
Built-in rows are filled in at every lookup, so a plugin may register before or after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.utils.import_utils import resolve

if TYPE_CHECKING:
    from vllm.v1.kv_cache_spec_base import KVCacheSpec

T = TypeVar("T", bound=type)


class SpecError(AssertionError, ValueError):
    """A KV cache spec or its registration breaks a rule; raised under `-O` too."""


@dataclass(frozen=True, kw_only=True)
class KVCacheSpecMetadata:
    """One row. `manager_class` is a class, or "module:Name" until it is first used."""

    kv_cache_spec_class: type[KVCacheSpec]
    manager_class: type[Any] | str
    uniform_type_base_spec: type[KVCacheSpec]

    @property
    def manager_path(self) -> str:
        """The manager as "module:Name", without importing it."""
        manager = self.manager_class
        if isinstance(manager, str):
            return manager
        return f"{manager.__module__}:{manager.__qualname__}"

    def resolved_manager(self) -> type[Any]:
        """The manager class, imported now where the row has its name only."""
        manager = self.manager_class
        return resolve(manager) if isinstance(manager, str) else manager

    def agrees_with(self, other: KVCacheSpecMetadata) -> bool:
        """True if both rows say the same."""
        return (
            self.kv_cache_spec_class is other.kv_cache_spec_class
            and self.uniform_type_base_spec is other.uniform_type_base_spec
            and (
                self.manager_path == other.manager_path
                or self.resolved_manager() is other.resolved_manager()
            )
        )


_REGISTRY_KVCACHESPEC_LIST: dict[type[KVCacheSpec], KVCacheSpecMetadata] = {}
_BUILTIN_ROWS: dict[type[KVCacheSpec], KVCacheSpecMetadata] = {}


class KVCacheSpecRegistry:
    """The table of spec classes. Lookups walk the MRO; the first row found wins."""

    @classmethod
    def declare_builtin(
        cls,
        kv_cache_spec_class: type[KVCacheSpec],
        manager_path: str,
        uniform_type_base_spec: type[KVCacheSpec] | None = None,
    ) -> None:
        """States the row of a spec of this package; its manager stays unimported."""
        _BUILTIN_ROWS[kv_cache_spec_class] = KVCacheSpecMetadata(
            kv_cache_spec_class=kv_cache_spec_class,
            manager_class=manager_path,
            uniform_type_base_spec=uniform_type_base_spec or kv_cache_spec_class,
        )

    @classmethod
    def register(
        cls,
        kv_cache_spec_class: type[KVCacheSpec],
        manager_class: type[Any] | None = None,
        uniform_type_base_spec: type[KVCacheSpec] | None = None,
    ) -> None:
        """Adds a row; the uniform base defaults to the class itself.

        Registering the same row again changes nothing. SpecError when the manager is
        missing, the class does not derive from its uniform base, or another row exists.
        """
        name = kv_cache_spec_class.__name__
        if manager_class is None:
            raise SpecError(
                f"{name} has no manager: pass manager_class, a subclass of "
                "SingleTypeKVCacheManager"
            )
        base = uniform_type_base_spec or kv_cache_spec_class
        if not issubclass(kv_cache_spec_class, base):
            raise SpecError(
                f"{name} does not derive from its uniform base {base.__name__}: give a "
                "base class of it, or leave uniform_type_base_spec out"
            )
        row = KVCacheSpecMetadata(
            kv_cache_spec_class=kv_cache_spec_class,
            manager_class=manager_class,
            uniform_type_base_spec=base,
        )
        old = _REGISTRY_KVCACHESPEC_LIST.get(kv_cache_spec_class)
        if old is not None and not row.agrees_with(old):
            raise SpecError(
                f"conflicting registration of {name}: it has manager "
                f"{old.manager_path} and base {old.uniform_type_base_spec.__name__}, "
                f"now {row.manager_path} and {base.__name__}. Subclass {name} instead."
            )
        _REGISTRY_KVCACHESPEC_LIST[kv_cache_spec_class] = row

    @classmethod
    def get_manager_class(
        cls, kv_cache_spec: KVCacheSpec | type[KVCacheSpec]
    ) -> type[Any] | None:
        """The manager of this spec, or None when nothing in its MRO is registered."""
        row = _find(kv_cache_spec)
        return None if row is None else row.resolved_manager()

    @classmethod
    def get_manager_path(
        cls, kv_cache_spec: KVCacheSpec | type[KVCacheSpec]
    ) -> str | None:
        """The manager's "module:Name" without importing it, or None."""
        row = _find(kv_cache_spec)
        return None if row is None else row.manager_path

    @classmethod
    def get_uniform_type_base_spec(
        cls, kv_cache_spec: KVCacheSpec | type[KVCacheSpec]
    ) -> type[KVCacheSpec] | None:
        """The class whose instances may share a group with this spec, or None."""
        row = _find(kv_cache_spec)
        return None if row is None else row.uniform_type_base_spec

    @classmethod
    def check_kv_cache_spec_registry(
        cls, kv_cache_specs: Mapping[str, KVCacheSpec]
    ) -> None:
        """Raises ValueError naming the first layer whose spec class is unknown."""
        for layer_name, spec in kv_cache_specs.items():
            if _find(spec) is None:
                raise ValueError(
                    f"layer {layer_name!r} has a KV cache spec of type "
                    f"{type(spec).__name__}, which no manager serves: decorate the "
                    "class with @register_kv_cache_spec(manager_class=...)"
                )


def register_kv_cache_spec(
    manager_class: type[Any] | None = None,
    uniform_type_base_spec: type[KVCacheSpec] | None = None,
) -> Callable[[T], T]:
    """Class decorator form of `KVCacheSpecRegistry.register`."""

    def decorator(kv_cache_spec_class: T) -> T:
        KVCacheSpecRegistry.register(
            kv_cache_spec_class, manager_class, uniform_type_base_spec
        )
        return kv_cache_spec_class

    return decorator


def check_kv_cache_spec_registry(kv_cache_specs: Mapping[str, KVCacheSpec]) -> None:
    """Function form of `KVCacheSpecRegistry.check_kv_cache_spec_registry`."""
    KVCacheSpecRegistry.check_kv_cache_spec_registry(kv_cache_specs)


def _find(
    kv_cache_spec: KVCacheSpec | type[KVCacheSpec],
) -> KVCacheSpecMetadata | None:
    for spec_class, row in _BUILTIN_ROWS.items():
        _REGISTRY_KVCACHESPEC_LIST.setdefault(spec_class, row)
    spec_class = (
        kv_cache_spec if isinstance(kv_cache_spec, type) else type(kv_cache_spec)
    )
    for parent in spec_class.__mro__:
        row = _REGISTRY_KVCACHESPEC_LIST.get(parent)
        if row is not None:
            return row
    return None
