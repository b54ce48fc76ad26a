"""A short benchmark for a GPU: `python -m tests.gpu.bench --json FILE`.

Stores and attention of every format that Triton serves, beside a copy of as many bytes;
and decoding of a model with random weights, eagerly and by captured graphs. Times are
medians of CUDA events. `--device cpu` runs tiny shapes, to try the program.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config

from tests.e2e.tiny import engine
from tests.tiny_model import tiny_tokenizer
from vllm import LLM, SamplingParams
from vllm.v1.attention.ops import cuda_kernels, triton_paged, triton_store
from vllm.v1.attention.ops.triton_batch import Requests
from vllm.v1.kv_formats import KVFormat, all_formats
from vllm.v1.kv_formats.nvfp4 import NvFp4

DTYPE = torch.bfloat16
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A layer, a batch of decodes, a prompt, and a model."""

    kv_heads: int = 8
    group: int = 4
    head_size: int = 128
    block_size: int = 16
    requests: int = 32
    context: int = 8192
    prompt: int = 8192
    repetitions: int = 20
    hidden: int = 2048
    layers: int = 16
    tokens: int = 128


TINY = Sizes(
    kv_heads=1,
    group=2,
    head_size=64,
    requests=2,
    context=33,
    prompt=20,
    repetitions=1,
    hidden=64,
    layers=1,
    tokens=3,
)


def milliseconds(call: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Median of `repeat` calls, after two that compile and warm up."""
    call()
    call()
    times = []
    for _ in range(repeat):
        if device.type == "cpu":
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


class Layer:
    """Pages of one layer and a batch over them."""

    def __init__(self, fmt: KVFormat, sizes: Sizes, device: torch.device) -> None:
        self.fmt, self.sizes, self.device = fmt, sizes, device
        heads, size = sizes.kv_heads, sizes.head_size
        packing = fmt.packing(heads, size, size, DTYPE)
        self.width = -(-sizes.context // sizes.block_size)
        shape = (sizes.requests * self.width, packing.head_slots, sizes.block_size)
        self.pages = torch.zeros(
            (*shape, packing.state_bytes), dtype=torch.uint8, device=device
        )
        slots = shape[0] * sizes.block_size
        self.slots = torch.randperm(slots, device=device)
        self.key, self.value = (
            torch.randn(slots, heads, size, dtype=DTYPE, device=device)
            for _ in range(2)
        )
        self.bytes = packing.head_slots * packing.state_bytes

    def store(self, store: Callable[..., None]) -> dict[str, Any]:
        arguments = self.pages, self.slots, self.key, self.value, self.fmt
        took = milliseconds(
            lambda: store(*arguments), self.device, self.sizes.repetitions
        )
        rows = self.key.nbytes + self.value.nbytes
        moved = rows + len(self.slots) * self.bytes
        return {"ms": took, "GB/s": moved / took / 1e6, "tokens": len(self.slots)}

    def attend(self, new: int, requests: int, length: int) -> dict[str, Any]:
        sizes = self.sizes
        heads = sizes.kv_heads * sizes.group
        query = torch.randn(
            requests * new, heads, sizes.head_size, dtype=DTYPE, device=self.device
        )
        out = torch.empty_like(query)
        starts = torch.arange(requests + 1, device=self.device) * new
        width = -(-length // sizes.block_size)
        blocks = torch.randperm(len(self.pages), device=self.device)
        table = blocks[: requests * width].int().view(requests, width)
        batch = Requests(
            query_start_loc=starts.int(),
            seq_lens=torch.full((requests,), length, device=self.device).int(),
            block_table=table,
            max_query_len=new,
            max_seq_len=length,
        )
        arguments = out, query, self.pages, self.fmt, batch, sizes.head_size**-0.5
        took = milliseconds(
            lambda: triton_paged.paged_attention(*arguments),
            self.device,
            sizes.repetitions,
        )
        pairs = requests * (new * length - new * (new - 1) // 2)
        return {
            "ms": took,
            "GB/s": requests * length * self.bytes / took / 1e6,
            "TFLOP/s": 4 * pairs * heads * sizes.head_size / took / 1e9,
        }


def copy_of(count: int, device: torch.device, repeat: int) -> dict[str, Any]:
    """What the memory gives: bytes read and written by a plain copy."""
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took = milliseconds(lambda: target.copy_(source), device, repeat)
    return {"ms": took, "GB/s": 2 * count / took / 1e6}


def kernel_rows(sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    yield {
        "what": "copy",
        **copy_of(
            (1 << 30) if device.type == "cuda" else 1 << 20, device, sizes.repetitions
        ),
    }
    for fmt in all_formats():
        fmt = fmt.resolve(DTYPE)
        if fmt.latent or fmt.alias_of or not triton_store.serves(fmt):
            continue
        layer = Layer(fmt, sizes, device)
        row = {"format": fmt.format_id, "bytes": layer.bytes}
        yield {"what": "store", **row, **layer.store(triton_store.store)}
        if isinstance(fmt, NvFp4) and not cuda_kernels.why_unavailable():
            yield {
                "what": "store (CUDA)",
                **row,
                **layer.store(cuda_kernels.nvfp4_store),
            }
        if triton_paged.serves(fmt):
            decode = layer.attend(1, sizes.requests, sizes.context)
            yield {"what": "decode", **row, **decode}
            prompt = min(sizes.prompt, sizes.requests * sizes.context)
            yield {"what": "prefill", **row, **layer.attend(prompt, 1, prompt)}


def model_rows(sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """Tokens per second of a model with random weights."""
    config = Qwen2Config(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=sizes.hidden,
        intermediate_size=4 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=max(2, sizes.hidden // 64),
        num_key_value_heads=max(1, sizes.hidden // 256),
        max_position_embeddings=4096,
        architectures=["Qwen2ForCausalLM"],
        torch_dtype="bfloat16",
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        for name in ("auto", "fp8", "int8_per_token_head"):
            for eager in (True, False):
                yield from _model_row(Path(folder), sizes, name, eager)


def _model_row(
    folder: Path, sizes: Sizes, name: str, eager: bool
) -> Iterator[dict[str, Any]]:
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "kv_cache_dtype": name,
        "enforce_eager": eager,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": "64MiB" if sizes is TINY else "8GiB",
        "max_num_seqs": 64,
    }
    with engine(folder, **settings) as llm:
        for requests in (1, 64) if sizes is not TINY else (2,):
            generate(llm, requests, 4)
            start = time.perf_counter()
            generate(llm, requests, sizes.tokens)
            took = time.perf_counter() - start
            yield {
                "what": "model, eager" if eager else "model, graphs",
                "format": name,
                "requests": requests,
                "tok/s": requests * sizes.tokens / took,
                "ms": 1e3 * took / sizes.tokens,
            }


def generate(llm: LLM, requests: int, tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": [2 + i % 50] * 16} for i in range(requests)]
    llm.generate(prompts, params, use_tqdm=False)


def show(row: dict[str, Any]) -> None:
    cells = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()]
    print("  ".join(f"{k} {c}" for k, c in zip(row, cells, strict=True)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=150.0, help="stop after these")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device: run this on a machine with a GPU, or --device cpu")
    sizes = Sizes() if device.type == "cuda" else TINY
    begun = time.monotonic()
    rows: list[dict[str, Any]] = []
    for part, share in ((kernel_rows, 0.6), (model_rows, 1.0)):
        for row in part(sizes, device):
            rows.append(row)
            show(row)
            if args.json:
                shape = asdict(sizes)
                args.json.write_text(
                    json.dumps({"sizes": shape, "rows": rows}, indent=1)
                )
            if time.monotonic() - begun > share * args.seconds:
                print(f"stopped {part.__name__} after {share * args.seconds:.0f} s")
                break


if __name__ == "__main__":
    main()
