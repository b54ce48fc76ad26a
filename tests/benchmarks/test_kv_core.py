"""`vllm bench kv-core` measures what it says; scheduling stays as lean as it is."""

import argparse
import cProfile
import json
import pstats

import pytest

from vllm.benchmarks import kv_core
from vllm.utils.argparse_utils import FlexibleArgumentParser

FIGURES = {
    "block_pairs_per_s": "1/s",
    "batched_blocks_per_s": "1/s",
    "hash_ms": "ms",
    "allocate_ms": "ms",
    "lookup_ms": "ms",
    "schedule_ms": "ms",
    "update_ms": "ms",
    "step_us_per_request": "us",
}
# Python calls for one running request and step, in and out: 62 when this was written.
MAX_CALLS = 70


def arguments(*extra: str) -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    kv_core.add_arguments(parser)
    sizes = ("--hash-tokens", "64", "--prompt-tokens", "200", "--requests", "8")
    return parser.parse_args([*sizes, "--steps", "8", "--repetitions", "1", *extra])


def test_every_figure_has_a_value_and_a_unit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert kv_core.run(arguments("--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert {n: f["unit"] for n, f in report["figures"].items()} == FIGURES
    assert all(figure["value"] > 0 for figure in report["figures"].values())
    assert report["settings"]["requests"] == 8


def test_figures_are_printed_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert kv_core.run(arguments("--hash-algo", "xxhash")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(FIGURES)
    assert "xxhash" in lines[2]


def test_a_decoding_request_costs_few_calls() -> None:
    """Time depends on the machine; the number of calls does not."""
    requests, steps = 64, 16  # a whole block: one of these steps takes a new one
    settings = kv_core.Settings(
        block_size=16,
        hash_algo="sha256",
        hash_tokens=16,
        prompt_tokens=16,
        requests=requests,
        steps=steps,
        repetitions=1,
    )
    scheduler = kv_core.Bench(settings).running_scheduler()
    profile = cProfile.Profile()
    for _ in range(steps):
        profile.enable()
        output = scheduler.schedule()
        profile.disable()
        sampled = kv_core.sampled_by(output)
        profile.enable()
        scheduler.update_from_output(output, sampled)
        profile.disable()
    assert len(scheduler.running) == requests
    calls = pstats.Stats(profile).total_calls / requests / steps
    assert calls <= MAX_CALLS
