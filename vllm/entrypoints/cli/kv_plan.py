"""`vllm kv-plan MODEL`: what the KV cache of a model costs, from its config alone."""

import argparse
import json
import logging
from dataclasses import replace

import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs, memory_option
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.mem_constants import GiB_bytes
from vllm.utils.mem_utils import format_bytes
from vllm.v1.core.kv_cache_report import KVPlan, kv_plan
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_formats import all_formats
from vllm.v1.worker.layer_specs import (
    caching_layers,
    get_kv_cache_specs,
    get_layer_formats,
)

_WHY_MIXED = """
Layers in another format: their numbers, and the format that they store instead of the
one that the line begins with. --kv-cache-dtype-skip-layers chooses them; TurboQuant
leaves the first two and the last two out, unless it says none."""
DEFAULT_MODEL = "smollm2-135m"


def add_arguments(parser: FlexibleArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", default=DEFAULT_MODEL, help="model to plan for")
    add(
        "--memory",
        type=memory_option,
        help="memory of the KV cache, for example 4GiB",
    )
    add("--all", action="store_true", help="compare every format")
    add("--json", action="store_true", help="print JSON")
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    # The table says it all; start-up's lines would hide it.
    logging.getLogger("vllm").setLevel(logging.WARNING)
    engine_args = EngineArgs.from_cli_args(args)
    engine_args.model = args.model
    if args.memory is not None:
        engine_args.kv_cache_memory_bytes = args.memory
    elif engine_args.kv_cache_memory_bytes is None:
        engine_args.kv_cache_memory_bytes = 4 * GiB_bytes
    if args.all:
        return _print_comparison(engine_args, args.json)
    plan = plan_without_weights(engine_args)
    if args.json:
        print(json.dumps(plan.as_dict(), indent=2))
    else:
        print(describe(plan))
    return 0


def plan_without_weights(engine_args: EngineArgs) -> KVPlan:
    """The plan that an engine with these arguments would make.

    The model is built without storage, so each layer's own backend and hook are asked,
    as at start-up. Raises ValueError for what the engine would refuse; how the weights
    are quantised does not matter here.
    """
    overrides = {"quantization_config": None, **(engine_args.hf_overrides or {})}
    engine_args = replace(engine_args, hf_overrides=overrides)
    config = engine_args.create_engine_config()
    _register_layers(config)
    current_platform.update_block_size_for_backend(config)
    plans = get_kv_cache_configs(
        config,
        [get_kv_cache_specs(config)],
        [config.cache_config.kv_cache_memory_bytes],
        layer_formats=get_layer_formats(config),
    )
    names = {
        name: layer.get_attn_backend().get_name()
        for name, layer in caching_layers(config).items()
    }
    return kv_plan(config, plans[0], names)


def _register_layers(config: VllmConfig) -> None:
    """Builds the model on the meta device: its layers register, no weight is stored."""
    model_cls, _ = ModelRegistry.resolve_model_cls(config.model_config.architectures)
    with set_current_vllm_config(config), torch.device("meta"):
        model_cls(vllm_config=config)


def describe(plan: KVPlan) -> str:
    """A plan as text: a row per layer group, then what fits."""
    header = (
        f"{'layers':12} {'format':26} {'backend':10} {'spec':20} {'H':>3} {'N':>4} "
        f"{'C':>5} {'page bytes':>11} {'bytes/token':>12} {'of bf16':>8}"
    )
    lines = [header]
    for g in plan.groups:
        share = g.bytes_per_token / g.dense_bytes_per_token
        lines.append(
            f"{g.layers:12} {g.format_id:26} {g.backend:10} {g.spec:20} "
            f"{g.head_slots:3} {g.num_states:4} {g.state_bytes:5} {g.page_bytes:11,} "
            f"{g.bytes_per_token:12,.0f} {share:8.1%}"
        )
    lines.append(
        f"\nall layers: {plan.bytes_per_token:,.0f} bytes per token, "
        f"{plan.saving:.2f}x the tokens of bf16\n"
        f"pool: {format_bytes(plan.pool_bytes)} = {plan.num_blocks:,} blocks of "
        f"{plan.block_size} tokens\n"
        f"KV cache size: {plan.capacity_tokens:,} tokens; maximum concurrency for "
        f"{plan.max_model_len:,} tokens per request: {plan.max_concurrency:.2f}x"
    )
    return "\n".join(lines)


def _print_comparison(engine_args: EngineArgs, as_json: bool) -> int:
    """One row per accepted format; refusals are rows with their reason."""
    rows = []
    for fmt in all_formats():
        wanted = replace(engine_args, kv_cache_dtype=fmt.name)
        try:
            rows.append((fmt.name, plan_without_weights(wanted), ""))
        except ValueError as error:
            rows.append((fmt.name, None, str(error).splitlines()[0]))
    if as_json:
        table = {
            name: {"refused": reason} if plan is None else plan.as_dict()
            for name, plan, reason in rows
        }
        print(json.dumps(table, indent=2))
        return 0
    print(_table(rows))
    return 0


def _table(rows: list[tuple[str, KVPlan | None, str]]) -> str:
    """A line per format. Where some layers store another one, a column says which, and
    a last line says why."""
    plans = [plan for _, plan, _ in rows if plan is not None]
    is_mixed = any(plan.other_formats() for plan in plans)
    lines = [
        f"{'format':22} {'bytes/token':>12} {'vs bf16':>8} {'tokens':>12} "
        f"{'concurrency':>12}" + ("  layers in another format" if is_mixed else "")
    ]
    for name, plan, reason in rows:
        if plan is None:
            lines.append(f"{name:22} refused: {reason}")
            continue
        others = [f"{layers} in {fmt}" for layers, fmt in plan.other_formats()]
        lines.append(
            f"{name:22} {plan.bytes_per_token:12,.0f} {plan.saving:7.2f}x "
            f"{plan.capacity_tokens:12,} {plan.max_concurrency:11.2f}x  "
            f"{'; '.join(others)}".rstrip()
        )
    if is_mixed:
        lines.append(_WHY_MIXED)
    return "\n".join(lines)
