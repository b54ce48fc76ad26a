"""Compiles kernel variants for GPUs that are not there, and counts what they take.

    echo '[["sm_80", "store fp8_e4m3:cells 128"]]' | python -m tests.triton.compiler

prints one JSON line per pair of target and variant: registers, bytes of local memory
(spills and stacks) and bytes of shared memory. A process that compiles cannot
interpret, so tests start this one: see `compiled`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm.v1.attention.ops.triton_variants import (
    KernelVariant,
    all_variants,
    warps_on,
)

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
        "num_warps": warps_on(gpu.warp_size, variant.num_warps),
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


def compiled(pairs: Iterable[tuple[str, str]]) -> list[Usage]:
    """The usage of pairs of a target and a variant's name, in a process of its own.

    Raises RuntimeError with the process's output where it fails.
    """
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            "TRITON_CACHE_DIR": cache,
            **inherited,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.triton.compiler"],
            input=json.dumps(list(pairs)),
            check=False,
            capture_output=True,
            text=True,
            env=environment,
        )
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-1000:]}\n{done.stderr[-4000:]}")
    return [Usage(**json.loads(line)) for line in done.stdout.splitlines()]


def main() -> None:
    variants = {variant.name: variant for variant in all_variants()}
    for target, name in json.load(sys.stdin):
        print(json.dumps(asdict(measure(variants[name], target))), flush=True)


if __name__ == "__main__":
    main()
