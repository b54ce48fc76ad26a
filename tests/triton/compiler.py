"""Compiles kernel variants for GPUs that are not there, and counts what they take.

    python -m tests.triton.compiler '{"targets": ["sm_80"], "names": ["store "]}'

prints one JSON line per variant and target: registers, bytes of local memory (spills
and stacks) and bytes of shared memory. `names` are prefixes. A process that compiles
cannot interpret, so tests start this one: see `compiled`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm.v1.attention.ops.triton_variants import KernelVariant, all_variants

KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Target:
    """A GPU, and the most shared memory in bytes that one block may take there."""

    gpu: GPUTarget
    shared_limit: int


TARGETS = {
    "sm_80": Target(gpu=GPUTarget("cuda", 80, 32), shared_limit=163 * KIB),
    "sm_90": Target(gpu=GPUTarget("cuda", 90, 32), shared_limit=227 * KIB),
    "sm_100": Target(gpu=GPUTarget("cuda", 100, 32), shared_limit=227 * KIB),
    "sm_120": Target(gpu=GPUTarget("cuda", 120, 32), shared_limit=99 * KIB),
    "gfx942": Target(gpu=GPUTarget("hip", "gfx942", 64), shared_limit=64 * KIB),
}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What one compiled variant takes: registers of a thread, bytes of local memory of
    a thread (spills and stacks), bytes of shared memory of a block."""

    variant: str
    target: str
    registers: int
    local_bytes: int
    shared_bytes: int


def measure(variant: KernelVariant, target: str) -> Usage:
    """Compiles a variant. Raises what Triton raises where it does not compile."""
    gpu = TARGETS[target].gpu
    constants = dict.fromkeys(variant.constexprs, "constexpr")
    source = ASTSource(
        fn=variant.fn,
        signature={**variant.signature, **constants},
        constexprs=dict(variant.constexprs),
        attrs=_alignments(variant),
    )
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": variant.enable_fp_fusion,
    }
    compiled = triton.compile(source, target=gpu, options=options)
    if gpu.backend == "cuda":
        registers, local = _cuda_usage(compiled.asm["cubin"])
    else:
        registers, local = _hip_usage(compiled.asm["amdgcn"])
    return Usage(
        variant=variant.name,
        target=target,
        registers=registers,
        local_bytes=local,
        shared_bytes=compiled.metadata.shared,
    )


def _alignments(variant: KernelVariant) -> dict[tuple[int], list[list[Any]]]:
    """As tensors are allocated: pointers and strides are multiples of 16."""
    names = variant.fn.arg_names
    aligned = [
        name
        for name, kind in variant.signature.items()
        if kind.startswith("*") or name.endswith("stride")
    ]
    return {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}


def _cuda_usage(cubin: bytes) -> tuple[int, int]:
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def _hip_usage(assembly: str) -> tuple[int, int]:
    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", assembly)
        if match is None:
            raise LookupError(f"no {name} in the assembly")
        return int(match.group(1))

    # Scalars spill to lanes of vector registers, which costs no memory.
    return number("vgpr_count"), number("private_segment_fixed_size")


def compiled(
    targets: Sequence[str], names: Sequence[str] = ("",), every: int = 1
) -> list[Usage]:
    """The usage of the variants whose names start so, or of each `every`-th of them.

    Runs in a process of its own. Raises RuntimeError with its output where it fails.
    """
    request = json.dumps({"targets": targets, "names": names, "every": every})
    with tempfile.TemporaryDirectory() as cache:
        environment: Mapping[str, str] = {
            **{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
            "TRITON_CACHE_DIR": cache,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.triton.compiler", request],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
        )
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return [Usage(**json.loads(line)) for line in done.stdout.splitlines()]


def chosen(names: Sequence[str], every: int) -> Iterator[KernelVariant]:
    found = (v for v in all_variants() if v.name.startswith(tuple(names)))
    for i, variant in enumerate(found):
        if i % every == 0:
            yield variant


def main() -> None:
    request = json.loads(sys.argv[1])
    for variant in chosen(request.get("names", [""]), request.get("every", 1)):
        for target in request["targets"]:
            print(json.dumps(asdict(measure(variant, target))), flush=True)


if __name__ == "__main__":
    main()
