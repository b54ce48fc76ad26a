"""The laws of docs/architecture.md as checks over source text.

Each check takes a path (relative to the repository) and its source, and returns a list
of violations in words. Apart from the tests, so that mutated sources can be checked.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from vllm.v1.kv_formats import all_formats
from vllm.v1.kv_formats.mode import CACHE_DTYPES

# Elements of a DeepSeek latent with its rope part.
DS_LATENT = 576
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vllm"

# Longest prefix wins. Numbers are the layers of docs/architecture.md, bottom up.
LAYERS = {
    "vllm": 0,
    "vllm.version": 0,
    "vllm.envs": 0,
    "vllm.logger": 0,
    "vllm.exceptions": 0,
    "vllm.plugins": 0,
    "vllm.utils": 0,
    "vllm.v1.kv_formats": 1,
    "vllm.utils.torch_utils": 2,
    "vllm.model_executor.layers.quantization": 2,
    "vllm.transformers_utils": 2,
    "vllm.config": 2,
    "vllm.sampling_params": 2,
    "vllm.pooling_params": 2,
    "vllm.lora": 2,
    "vllm.multimodal": 2,
    "vllm.inputs": 2,
    "vllm.outputs": 2,
    "vllm.forward_context": 3,
    "vllm.v1": 3,  # interfaces and messages; what sits higher is listed below
    "vllm.v1.core.sched.output": 3,
    "vllm.platforms": 4,
    "vllm.distributed.parallel_state": 4,
    "vllm.v1.attention": 5,
    "vllm.v1.attention.backends.registry": 2,  # a table of names
    "vllm.distributed": 6,
    "vllm.v1.request": 7,
    "vllm.v1.core": 7,
    "vllm.v1.structured_output": 7,
    "vllm.model_executor": 8,
    "vllm.v1.worker": 9,
    "vllm.v1.sample": 9,
    "vllm.v1.executor": 9,
    "vllm.v1.engine": 10,
    "vllm.v1.engine.__init__": 3,
    "vllm.v1.metrics": 10,
    "vllm.v1.metrics.stats": 3,
    "vllm.engine": 10,
    "vllm.entrypoints": 11,
    "vllm.benchmarks": 11,
    "vllm.testing": 11,
}
# Packages of one height whose modules must not import each other.
SIBLINGS = [("vllm.v1.core", "vllm.model_executor")]
SIBLING_EXEMPT = (
    "vllm.v1.core.sched.output",
    "vllm.model_executor.layers.quantization",
)

# Who may ask a spec's class: the spec modules, the planner, the manager table.
SPEC_CLASS_READERS = (
    "vllm/v1/kv_cache_",
    "vllm/v1/core/kv_cache_planning",
    "vllm/v1/core/kv_cache_grouping",
    "vllm/v1/core/kv_cache_capacity",
    "vllm/v1/core/kv_cache_report",
    "vllm/v1/core/kv_cache_tensors",
    "vllm/v1/core/kv_cache_unification",
    "vllm/v1/core/single_type_kv_cache_manager",
    "vllm/v1/core/managers/",
)
HOOK_CALLER = "vllm/v1/page_planning.py"

# Names of dtypes that mean the same to models and caches are not cache-dtype parsing.
_PLAIN_DTYPES = {"auto", "float16", "bfloat16", "float32"}
_CACHE_WORDS = set(CACHE_DTYPES) - _PLAIN_DTYPES
_CACHE_PREFIXES = (
    "fp8",
    "nvfp4",
    "turboquant",
    "int4_per",
    "int8_per",
    "per_token_head",
)
_FORMAT_BLIND = re.compile(r"mla|mamba|quant", re.IGNORECASE)


def sources() -> Iterator[tuple[str, str]]:
    """(path relative to the repository, text) of every module of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text()


def record_sizes() -> set[int]:
    """Bytes of one state of the latent and packed formats at common head sizes."""
    sizes = set()
    for fmt in all_formats():
        if fmt.latent:
            sizes.add(fmt.packing(1, DS_LATENT, 0, torch.bfloat16).state_bytes)
        elif fmt.mode.is_turboquant or fmt.mode.is_per_token_head:
            sizes.add(fmt.packing(1, 128, 128, torch.bfloat16).state_bytes)
    return {size for size in sizes if size & (size - 1)}


def typed_record_sizes(path: str, source: str) -> list[str]:
    """Law 1: a byte number is written once, in its format's table."""
    if path.startswith("vllm/v1/kv_formats/"):
        return []
    sizes = record_sizes()
    return [
        f"{path}:{node.lineno}: {node.value} is the size of a record"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and type(node.value) is int
        and node.value in sizes
    ]


def _text_constants(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def _mentions_cache_dtype(node: ast.AST) -> bool:
    names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    names += [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    return any("cache_dtype" in n and "skip" not in n for n in names)


def parsed_cache_dtypes(path: str, source: str) -> list[str]:
    """Law 2: cache-dtype strings are parsed in kv_formats, and nowhere else."""
    if path.startswith("vllm/v1/kv_formats/"):
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            words = set(_text_constants(node))
            if words & _CACHE_WORDS or (words and _mentions_cache_dtype(node)):
                found.append(f"{path}:{node.lineno}: compares a cache dtype")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr not in ("startswith", "endswith"):
                continue
            if any(w.startswith(_CACHE_PREFIXES) for w in _text_constants(node)):
                found.append(f"{path}:{node.lineno}: parses a cache dtype")
    return found


def asked_spec_classes(path: str, source: str) -> list[str]:
    """Law 3: only specs, planner and manager table ask a spec's class."""
    if path.startswith(SPEC_CLASS_READERS):
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            names = [n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)]
            names += [
                n.attr for n in ast.walk(node.args[1]) if isinstance(n, ast.Attribute)
            ]
            if any(re.search(r"Specs?$", name) for name in names):
                found.append(f"{path}:{node.lineno}: asks the class of a spec")
    return found


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def layer_of(module: str) -> int:
    """The layer of a module, by the longest matching prefix."""
    for key in (f"{module}.__init__", module):
        if key in LAYERS:
            return LAYERS[key]
    parts = module.removesuffix(".__init__").split(".")
    while parts:
        if (name := ".".join(parts)) in LAYERS:
            return LAYERS[name]
        parts.pop()
    raise LookupError(f"{module} has no layer")


def _imported(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                child = PACKAGE.parent / f"{node.module}.{alias.name}".replace(".", "/")
                is_module = child.with_suffix(".py").exists() or child.is_dir()
                yield (
                    node.lineno,
                    f"{node.module}.{alias.name}" if is_module else node.module,
                )


def upward_imports(path: str, source: str) -> list[str]:
    """Law 4: imports point down the layers; siblings do not see each other."""
    if path == "vllm/__init__.py":
        return []
    module = _module(path)
    mine = layer_of(module)
    found = []
    for line, target in _imported(ast.parse(source), module):
        if target != "vllm" and not target.startswith("vllm."):
            continue
        theirs = layer_of(target)
        if theirs > mine:
            found.append(f"{path}:{line}: layer {mine} imports {target} of {theirs}")
        for one, other in [*SIBLINGS, *[(b, a) for a, b in SIBLINGS]]:
            if (
                module.startswith(one)
                and target.startswith(other)
                and not module.startswith(SIBLING_EXEMPT)
                and not target.startswith(SIBLING_EXEMPT)
            ):
                found.append(f"{path}:{line}: imports its sibling {target}")
    return found


def lazy_imports(path: str, source: str) -> list[str]:
    """Law 4: imports stand at module level."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for part in ast.walk(node):
            if isinstance(part, (ast.Import, ast.ImportFrom)):
                found.append(f"{path}:{part.lineno}: imports inside {node.name}()")
    return found


def hook_calls(path: str, source: str) -> list[str]:
    """Law 5: one function calls the hook; nobody else turns raw specs into packed."""
    if path == HOOK_CALLER:
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "customize_spec"
            and not (
                isinstance(node.func.value, ast.Call)
                and isinstance(node.func.value.func, ast.Name)
                and node.func.value.func.id == "super"
            )
        ):
            found.append(f"{path}:{node.lineno}: calls customize_spec")
    return found


def format_words_in_connectors(path: str, source: str) -> list[str]:
    """Law 7: connectors see geometry, not formats."""
    if not path.startswith("vllm/distributed/kv_transfer/"):
        return []
    return [
        f"{path}:{i}: asks what the bytes mean"
        for i, line in enumerate(source.splitlines(), 1)
        if _FORMAT_BLIND.search(line)
    ]


LAWS = {
    "record sizes are written once": typed_record_sizes,
    "cache dtypes are parsed once": parsed_cache_dtypes,
    "spec classes are asked in three places": asked_spec_classes,
    "imports point down": upward_imports,
    "imports stand at module level": lazy_imports,
    "the hook has one caller": hook_calls,
    "connectors do not know formats": format_words_in_connectors,
}
