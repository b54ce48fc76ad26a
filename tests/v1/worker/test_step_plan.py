"""Planned steps compute what eager ones do: the same batch, both ways, step by step."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.tiny import engine, greedy, prompts_of
from tests.model_executor.families import FAMILIES, hf_model, saved
from tests.tiny_model import tiny_tokenizer
from vllm import LLM
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.step import NotPlanned, StepTrace
from vllm.v1.attention.ops import cpu_kernels
from vllm.v1.kv_formats import all_formats
from vllm.v1.worker.step_plan import StepPlan

pytestmark = pytest.mark.skipif(
    not cpu_kernels.available(), reason=cpu_kernels.why_unavailable()
)

# Largest difference of logits, relative to the largest logit. Two sums of float32
# decide differently about a few codes of a packed cache: all that is left there.
TOLERANCE = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}
PACKED_TOLERANCE = 2e-2
BATCHES = [1, 3, 8, 32]
FORMATS = [fmt.name for fmt in all_formats() if not fmt.latent]
VOCABULARY = 99


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by family, written when asked for."""

    class Folders(dict):
        def __missing__(self, family: str) -> Path:
            folder = tmp_path_factory.mktemp(family)
            self[family] = saved(hf_model(family), folder)
            tiny_tokenizer().save_pretrained(folder)
            return folder

    return Folders()


def runner_of(llm: LLM) -> Any:
    (worker,) = llm.collective_rpc(lambda worker: worker)
    return worker.model_runner


@contextmanager
def compared(llm: LLM) -> Iterator[list[tuple[int, int, float]]]:
    """Inside, every step runs eager, then planned over the same slots. Collects tokens,
    requests and the largest relative difference of the logits."""
    runner, seen = runner_of(llm), []
    inner = runner._run_model

    def both(step: Any) -> Any:
        eager = runner.model(step.input_ids, step.positions)
        expected = runner._compute_logits(eager[torch.from_numpy(step.last_tokens)])
        hidden, logits = inner(step)
        assert logits is not None
        assert hidden.shape == eager.shape
        assert logits.shape == expected.shape
        error = (logits.float() - expected.float()).abs().max()
        error = error / expected.float().abs().max()
        seen.append((step.num_tokens, step.num_reqs, float(error)))
        return hidden, logits

    runner._run_model = both
    try:
        yield seen
    finally:
        del runner._run_model


def prompts(count: int) -> list[list[int]]:
    lengths = [5 + 7 * i % 40 for i in range(count)]
    return [[t % VOCABULARY for t in p] for p in prompts_of(lengths)]


def worst(folder: Path, batch: int, **settings: Any) -> float:
    defaults = {"max_num_seqs": 32, "max_num_batched_tokens": 1024}
    with engine(folder, **(defaults | settings)) as llm, compared(llm) as seen:
        greedy(llm, prompts(batch), 6)
    decodes = [step for step in seen if step[0] == step[1] == batch]
    assert len(decodes) >= 4, seen
    return max(error for _, _, error in seen)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_eager_ones(folders, family: str, dtype: str) -> None:
    assert worst(folders[family], 3, dtype=dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_eager_ones_over_every_format(folders, name, batch) -> None:
    found = worst(folders["qwen3"], batch, kv_cache_dtype=name)
    assert found <= PACKED_TOLERANCE


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", ["llama-tied", "gemma3", "mixtral-window"])
def test_greedy_tokens_equal_eager_ones(folders, family: str, batch: int) -> None:
    asked = prompts(batch)
    with engine(folders[family]) as llm:
        assert runner_of(llm).plan is not None
        found = greedy(llm, asked, 12)
    with engine(folders[family], enforce_eager=True) as llm:
        assert runner_of(llm).plan is None
        assert greedy(llm, asked, 12) == found


def test_what_has_no_operation_runs_eager_and_says_why(folders, monkeypatch) -> None:
    monkeypatch.delattr(SiluAndMul, "emit")
    with engine(folders["llama"]) as llm:
        runner = runner_of(llm)
        assert runner.plan is None
        with pytest.raises(NotPlanned, match="SiluAndMul has no operation"):
            StepPlan(runner.model, torch.float32, 64, 8, runner.attn_groups)


def test_functions_without_an_operation_are_refused_by_name() -> None:
    rows = StepTrace(torch.float32, 64, 8, {}).slot(1, 32)
    with pytest.raises(NotPlanned, match="`float` of activations"):
        rows.float()
    with pytest.raises(NotPlanned, match="`cat` of activations"):
        torch.cat([rows, rows])
    with pytest.raises(NotPlanned, match="heads of 4 elements that lie apart"):
        rows.unflatten(1, (4, 8))[:, :, :4].flat()


def logits_by_threads(
    llm: LLM, counts: tuple[int, ...], max_tokens: int, around: Any = None
) -> dict[int, list[torch.Tensor]]:
    """Of every step of the same prompts, first with one thread; `around` the others."""
    runner, before = runner_of(llm), torch.get_num_threads()
    found: dict[int, list[torch.Tensor]] = {}
    inner = runner.plan.run

    def noted(step: Any, wanted: Any) -> Any:
        hidden, logits = inner(step, wanted)
        found.setdefault(torch.get_num_threads(), []).append(logits.clone())
        return hidden, logits

    def run(count: int) -> None:
        llm.reset_prefix_cache()
        torch.set_num_threads(count)
        greedy(llm, prompts(8), max_tokens)

    runner.plan.run = noted
    try:
        run(1)
        with around or nullcontext():
            for count in counts:
                run(count)
    finally:
        torch.set_num_threads(before)
        del runner.plan.run
    return found


def assert_bits_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(expected) > 4
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", ["qwen3", "gpt-oss"])
def test_bits_do_not_depend_on_threads(folders, family: str) -> None:
    with engine(folders[family], dtype="bfloat16") as llm:
        found = logits_by_threads(llm, (2, 3), 6)
    assert_bits_equal(found[2], found[1])
    assert_bits_equal(found[3], found[1])


@contextmanager
def every_core_taken() -> Iterator[None]:
    spin = [sys.executable, "-c", "while True: pass"]
    programs = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def test_bits_do_not_depend_on_programs_that_share_the_cores(folders) -> None:
    """Teams that wait for a thread without a core leave steps to one thread."""
    with engine(folders["qwen3"], dtype="bfloat16") as llm:
        found = logits_by_threads(llm, (2,), 100, every_core_taken())
    assert_bits_equal(found[2], found[1])


@pytest.mark.parametrize("isa", ["avx2", "generic"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss"])
def test_older_instruction_sets_serve_too(folders, family, dtype, isa) -> None:
    try:
        cpu_kernels.choose_isa(isa)
    except ValueError as error:
        pytest.skip(str(error))
    try:
        assert worst(folders[family], 3, dtype=dtype) <= TOLERANCE[dtype]
    finally:
        cpu_kernels.choose_isa(None)


def test_tokens_outside_the_vocabulary_are_refused(folders) -> None:
    with engine(folders["llama"]) as llm:
        runner = runner_of(llm)
        inner = runner._run_model

        def broken(step: Any) -> Any:
            step.input_ids[-1] = VOCABULARY
            return inner(step)

        runner._run_model = broken
        with pytest.raises(ValueError, match="token 4 of the step is outside"):
            greedy(llm, [[1, 2, 3, 4, 5]], 1)
