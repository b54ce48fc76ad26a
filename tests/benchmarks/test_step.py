"""`vllm bench step` measures both ways and compares them."""

import json

import pytest

from tests.tiny_model import tiny_model  # noqa: F401
from vllm.benchmarks import step
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.ops import cpu_kernels


@pytest.mark.parametrize("eager", [False, True])
def test_both_ways_are_measured(tiny_model, capsys, eager: bool) -> None:  # noqa: F811
    parser = FlexibleArgumentParser()
    step.add_arguments(parser)
    asked = ["--model", tiny_model, "--batches", "1", "3", "--context", "24", "--json"]
    asked += ["--steps", "6", "--dtype", "float32", "--kv-cache-memory-bytes", "4MiB"]
    asked += ["--enforce-eager"] if eager else []
    assert step.run(parser.parse_args(asked)) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [figures["batch"] for figures in found["steps"]] == [1, 3]
    planned = cpu_kernels.available() and not eager
    for figures in found["steps"]:
        assert figures["eager_s"] > 0 and figures["read_s"] > 0
        assert (figures["planned_s"] > 0) == planned
        assert (figures["difference"] is not None) == planned
        assert not planned or figures["difference"] <= 2e-5
