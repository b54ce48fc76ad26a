"""`vllm bench throughput` and `serve` count what ran, and see outputs that differ."""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.remote_server import RemoteServer
from tests.tiny_model import save_tiny_llama
from vllm import LLM
from vllm.benchmarks import serve, throughput
from vllm.benchmarks.equality import compare, divergence, record
from vllm.benchmarks.in_turn import _rounds_of
from vllm.benchmarks.throughput import Job, measure
from vllm.benchmarks.workload import NAMED, Workload
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.main import main
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

SMALL = Workload(num_prompts=3, input_len=9, output_len=5, prefix_len=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny_llama(path)
    return path


def engine_args(folder: Path, **changes: Any) -> EngineArgs:
    values = {"dtype": "float32", "kv_cache_memory_bytes": "1MiB"} | changes
    return EngineArgs(model=str(folder), **values)


def test_named_workloads_are_those_that_are_compared_with_others() -> None:
    sizes = {
        name: (load.num_prompts, load.input_len, load.output_len, load.prefix_len)
        for name, load in NAMED.items()
    }
    assert sizes["a"] == (1, 32, 256, 0)
    assert sizes["b"] == (32, 128, 128, 0)
    assert sizes["c"] == (8, 2048, 128, 0)
    assert sizes["d"] == (4, 4096, 1, 0)
    assert sizes["e"] == (32, 1024 + 32, 32, 1024)
    pool = NAMED["pool"]
    assert (pool.num_prompts, pool.input_len + pool.output_len) == (64, 1024)
    assert pool.pool_bytes == 128 << 20


@pytest.mark.parametrize("cache_dtype", ["auto", "int8_per_token_head"])
def test_figures_of_a_run(folder: Path, cache_dtype: str) -> None:
    # One block of 16 tokens holds a request; the pool holds two and the null block.
    one = Workload(num_prompts=1, input_len=3, output_len=2)
    job = Job(
        engine_args=engine_args(
            folder,
            kv_cache_dtype=cache_dtype,
            block_size=16,
            num_gpu_blocks_override=3,
            max_model_len=16,
        ),
        workloads={"small": SMALL, "one": one},
        runs=2,
        compared_requests=2,
        submitted=time.time(),
    )
    small, alone = measure(job)
    assert (small["workload"], alone["workload"]) == ("small", "one")
    assert len(small["seconds"]) == 2
    median = sum(small["seconds"]) / 2
    assert small["output_tokens_per_s"] == pytest.approx(15 / median)
    assert small["prompt_tokens_per_s"] == pytest.approx(27 / median)
    assert small["max_requests_in_flight"] == 2
    assert alone["max_requests_in_flight"] == 1
    assert 0 < small["mean_requests_in_flight"] <= 2
    assert (small["num_tokens"], alone["num_tokens"]) == (10, 2)
    for row in (small, alone):
        assert row["tokens_equal"] == 1.0
        assert row["max_kl"] < 1e-5
        assert row["startup_s"] > 0 and row["peak_memory_mib"] > 50
        assert row["kv_cache_dtype"] == cache_dtype and row["dtype"] == "float32"
    json.dumps([small, alone])


def test_a_model_that_differs_is_seen(folder: Path, tmp_path: Path) -> None:
    llm = LLM(**vars(engine_args(folder, disable_log_stats=True)))
    vocab = llm.model_config.get_vocab_size()
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=5)
    recorded = record(llm, SMALL.prompts(vocab), params, 3)
    assert [len(r.output_token_ids) for r in recorded] == [5, 5, 5]
    llm.shutdown()
    for name in (folder, save_other(tmp_path)):
        args = engine_args(name, disable_log_stats=True, enforce_eager=True)
        eager = LLM(**vars(args))
        found = compare(eager, recorded)
        eager.shutdown()
        assert (found.tokens_equal == 1.0) == (name == folder)
    assert found.tokens_equal < 0.5
    assert found.mean_kl > 0.1


def save_other(path: Path) -> Path:
    save_tiny_llama(path, seed=1)
    return path


def test_divergence_is_that_of_the_second_from_the_first() -> None:
    reference, other = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])
    want = torch.nn.functional.kl_div(other.log(), reference, reduction="sum")
    found = divergence(reference.log(), other.log())
    torch.testing.assert_close(found, want.reshape(1))


def test_the_command_prints_a_row_for_each_format(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    arguments = [
        *("--model", str(folder), "--dtype", "float32", "--runs", "1", "--json"),
        *("--num-prompts", "2", "--input-len", "6", "--output-len", "3"),
        *("--kv-cache-memory-bytes", "1MiB", "--formats", "fp8"),
        *("--chart", str(tmp_path / "speeds.svg")),
    ]
    assert main(["bench", "throughput", *arguments]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["kv_cache_dtype"] == "fp8" and row["workload"] == "given"
    assert row["tokens_equal"] == 1.0
    assert ">given: output tokens/s<" in (tmp_path / "speeds.svg").read_text()


def test_formats_that_take_turns_are_compared_round_by_round(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *("--model", str(folder), "--dtype", "float32", "--json", "--in-turn"),
        *("--num-prompts", "2", "--input-len", "6", "--output-len", "3"),
        *("--kv-cache-memory-bytes", "1MiB", "--formats", "auto", "fp8", "--runs", "2"),
    ]
    assert main(["bench", "throughput", *arguments]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["kv_cache_dtype"], second["kv_cache_dtype"]) == ("auto", "fp8")
    assert len(first["seconds"]) == len(second["seconds"]) == 2
    assert first["times_first"] == 1.0
    ratios = [a / b for a, b in zip(first["seconds"], second["seconds"], strict=True)]
    assert second["times_first"] == pytest.approx(sum(ratios) / 2)
    taken = sum(second["seconds"]) / 2
    assert second["output_tokens_per_s"] == pytest.approx(2 * 3 / taken)


def test_turns_are_taken_forwards_and_backwards() -> None:
    asked: list[str] = []

    def engine(name: str) -> Any:
        return lambda load: asked.append(name) or float(len(asked))

    seconds = _rounds_of([engine("x"), engine("y")], SMALL, 2)
    assert "".join(asked) == "yxxyyx"  # the first round warms up
    assert seconds == [[3.0, 6.0], [4.0, 5.0]]


def test_unlike_pools_and_charts_take_no_turns(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(folder), "--in-turn", "--workload", "a", "pool"]
    assert main(["bench", "throughput", *arguments]) != 0
    assert "--in-turn --workload a pool: expected" in capsys.readouterr().err
    arguments = ["--model", str(folder), "--in-turn", "--chart", "speeds.svg"]
    assert main(["bench", "throughput", *arguments]) != 0
    assert "--chart speeds.svg: not drawn" in capsys.readouterr().err


def test_workloads_of_one_pool_share_an_engine() -> None:
    chosen = {name: NAMED[name] for name in ("a", "pool", "b")}
    groups = throughput._by_pool(chosen)
    assert [list(group) for group in groups] == [["a", "b"], ["pool"]]


def test_a_server_under_load(folder: Path, capsys: Any) -> None:
    parser = FlexibleArgumentParser()
    serve.add_arguments(parser)
    with RemoteServer(str(folder), ["--kv-cache-memory-bytes", "1MiB"]) as server:
        options = ["--url", server.url, "--vocab-size", "300", "--json"]
        sizes = ["--num-prompts", "5", "--input-len", "8", "--output-len", "4"]
        args: argparse.Namespace = parser.parse_args(
            [*options, *sizes, "--concurrency", "2"]
        )
        assert serve.run(args) == 0
    figures = json.loads(capsys.readouterr().out)
    rate = figures["output_tokens_per_s"] / figures["requests_per_s"]
    assert rate == pytest.approx(4)
    first, gap = figures["time_to_first_token_s"], figures["inter_token_latency_s"]
    assert 0 < first["median"] <= first["p99"]
    assert 0 < gap["median"] <= gap["p99"]
    assert first["median"] < figures["request_latency_s"]["median"]


def test_a_pool_is_given_to_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[EngineArgs] = []

    def engine(args: EngineArgs) -> LLM:
        asked.append(args)
        raise InterruptedError

    monkeypatch.setattr(throughput, "offline_engine", engine)
    job = Job(
        engine_args=engine_args(folder),
        workloads={"small": replace(SMALL, pool_bytes=123 << 10)},
        runs=1,
        compared_requests=0,
        submitted=0.0,
    )
    with pytest.raises(InterruptedError):
        measure(job)
    assert asked[0].kv_cache_memory_bytes == 123 << 10
