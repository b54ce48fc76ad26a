"""`vllm bench attention` measures what it says, on caches of any size."""

import argparse
import json

import pytest

from tests.kernels.cpu_attention_cases import needs_library
from vllm.benchmarks import attention
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_formats import by_name


def arguments(*extra: str) -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    attention.add_arguments(parser)
    small = ("--cache-mib", "2", "--repetitions", "2", "--prefill-tokens", "16")
    return parser.parse_args([*small, *extra])


@needs_library
def test_every_format_and_context_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    extra = ("--contexts", "64", "100", "--num-kv-heads", "2", "--head-size", "32")
    assert attention.run(arguments("--json", *extra)) == 0
    figures = json.loads(capsys.readouterr().out)
    cases = {(f, c) for f in attention.FORMATS for c in (64, 100)}
    assert {(d["cache_dtype"], d["context"]) for d in figures["decode"]} == cases
    assert {(p["cache_dtype"], p["context"]) for p in figures["prefill"]} == cases
    for row in figures["decode"]:
        heads = row["million_token_heads_per_s"] * 1e6
        cell = by_name(row["cache_dtype"]).bytes_per_token(1, 32, 32)
        assert row["gb_per_s"] == pytest.approx(heads * cell / 1e9, rel=1e-3)
        assert row["times_bfloat16"] > 0
        assert row["bandwidth_fraction"] > 0
    assert all(row["gflop_per_s"] > 0 for row in figures["prefill"])


@needs_library
def test_a_format_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="fp8_ds_mla has no CPU kernel"):
        attention.run(arguments("--formats", "fp8_ds_mla"))
