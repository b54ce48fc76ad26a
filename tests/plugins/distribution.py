"""A Python distribution made up in a folder: a module and its entry points."""

from collections.abc import Mapping, Sequence
from pathlib import Path

#: A module of plugins of every kind. `HEARD` notes what was called.
SOURCE = '''
import torch

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import register_backend, AttentionBackendEnum
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

HEARD = []


def register():
    HEARD.append("register")
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.Attention")
    KVConnectorFactory.register_connector("Plugged", __name__, "Missing")


def fail():
    HEARD.append("fail")
    raise RuntimeError("this plugin always fails")


class Manager(FullAttentionManager):
    pass


@register_kv_cache_spec(
    manager_class=Manager, uniform_type_base_spec=FullAttentionSpec
)
class Spec(FullAttentionSpec):
    """Another class of spec, with a manager of its own."""


class Attention(CPUAttentionBackend):
    @staticmethod
    def get_name():
        return "CUSTOM"

    @classmethod
    def customize_spec(cls, spec):
        spec = super().customize_spec(spec)
        HEARD.append("customize_spec")
        return Spec(**{name: getattr(spec, name) for name in vars(spec)})


class Stats(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0):
        HEARD.append("stats")

    def record(self, scheduler_stats, iteration_stats, *args, **kwargs):
        HEARD.append("record")

    def log_engine_initialized(self):
        HEARD.append("initialized")


class Counting(LogitsProcessor):
    """Forces the tokens n, n + 1, ... on requests with extra_args {"count": n}."""

    @classmethod
    def validate_params(cls, sampling_params):
        count = (sampling_params.extra_args or {}).get("count", 0)
        if not isinstance(count, int):
            raise ValueError(f"count must be a whole number, got {count!r}")

    def __init__(self, vllm_config, device, is_pin_memory):
        self.rows = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.rows.pop(row, None)
        for row, params, prompt_ids, output_ids in batch_update.added:
            self.rows[row] = (params, prompt_ids, output_ids)
        for source, target, how in batch_update.moved:
            moving, staying = self.rows.pop(source, None), self.rows.pop(target, None)
            if moving is not None:
                self.rows[target] = moving
            if how is MoveDirectionality.SWAP and staying is not None:
                self.rows[source] = staying
        # Whoever is told in another order has rows that are not there.
        assert set(self.rows) == set(range(batch_update.batch_size))

    def apply(self, logits):
        for row, (params, prompt_ids, output_ids) in self.rows.items():
            start = (params.extra_args or {}).get("count")
            if start is not None:
                token = (start + len(output_ids)) % logits.shape[-1]
                logits[row] = float("-inf")
                logits[row, token] = 0.0
        return logits
'''


def install(
    folder: Path,
    name: str,
    entry_points: Mapping[str, Sequence[str]],
    source: str = SOURCE,
) -> Path:
    """Writes the module `name` and a dist-info that announces `entry_points`, by group,
    as "plugin = module:object". The folder is to be on sys.path."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    )
    lines = []
    for group, entries in entry_points.items():
        lines += [f"[{group}]", *entries, ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder
