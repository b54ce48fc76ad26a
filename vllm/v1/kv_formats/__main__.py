"""Prints the table of one format: python -m vllm.v1.kv_formats NAME [options]."""

import argparse
import sys

import torch

from vllm.utils.argparse_utils import FlexibleArgumentParser, at_least
from vllm.v1.kv_formats.base import KVFormat
from vllm.v1.kv_formats.picture import example_sizes, field_table
from vllm.v1.kv_formats.registry import all_formats, by_id, model_formats

_DTYPES = ("bfloat16", "float16", "float32")


def _parser() -> argparse.ArgumentParser:
    names = ", ".join(fmt.name for fmt in (*all_formats(), *model_formats()))
    parser = FlexibleArgumentParser(
        prog="python -m vllm.v1.kv_formats",
        description="Print what one cached state of a format looks like.",
    )
    parser.add_argument("name", help=f"NAME or NAME:ARRANGEMENT, where NAME is {names}")
    # Head sizes are even: rotary position embeddings turn pairs of elements.
    parser.add_argument(
        "--head-size", type=at_least(2, 2), help="elements of a key (128)"
    )
    parser.add_argument(
        "--head-size-v",
        type=at_least(0, 2),
        help="elements of a value; 0 for an MLA latent",
    )
    parser.add_argument("--kv-heads", type=at_least(1), default=1)
    parser.add_argument(
        "--block-size", type=at_least(1), default=16, help="tokens per page"
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, default=_DTYPES[0], help="dtype of the model"
    )
    return parser


def describe(
    fmt: KVFormat,
    head_size: int,
    head_size_v: int,
    kv_heads: int,
    block_size: int,
    model_dtype: torch.dtype,
) -> list[str]:
    """The report of one format, line by line."""
    fmt = fmt.resolve(model_dtype)
    layout = fmt.layout(head_size, head_size_v, model_dtype)
    packing = fmt.packing(kv_heads, head_size, head_size_v, model_dtype)
    storage = str(fmt.storage_dtype(model_dtype)).removeprefix("torch.")
    token = packing.head_slots * packing.state_bytes
    facts = [
        (f"one cell ({packing.head_slots} head slots)", packing.state_bytes, ""),
        (f"one token ({kv_heads} KV heads)", token, " per token per layer"),
        (f"one page ({block_size} tokens)", token * block_size, ""),
    ]
    return [
        f"{fmt.format_id}: {fmt.summary}",
        f"mode {fmt.mode.name} ({fmt.mode.value}), cache tensor of {storage}, "
        f"head sizes {head_size} and {head_size_v}",
        "",
        *field_table(layout),
        "",
        *(f"{what:28}{nbytes:>10,} bytes{tail}" for what, nbytes, tail in facts),
    ]


def main(argv: list[str] | None = None) -> int:
    """Prints the report; returns 1 after one line on standard error when it cannot."""
    args = _parser().parse_args(argv)
    try:
        fmt = by_id(args.name)
        size, size_v = example_sizes(fmt)
        if args.head_size is not None:
            size, size_v = args.head_size, 0 if fmt.latent else args.head_size
        if args.head_size_v is not None:
            size_v = args.head_size_v
        dtype = getattr(torch, args.dtype)
        lines = describe(fmt, size, size_v, args.kv_heads, args.block_size, dtype)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
