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
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe.routing import Routing
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
ONE_EXPERT = 0.2  # what another choice of experts may change
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
def routed(dtype: torch.dtype) -> Iterator[list[bool]]:
    """Says of every choice of experts inside whether it stays the same when its logits
    change by roundings of `dtype`: else two orders of summation may differ by a
    whole expert."""
    settled: list[bool] = []
    inner = Routing.select

    def select(self: Routing, logits: Any, bias: Any = None) -> Any:
        chosen = inner(self, logits, bias)
        noise = torch.finfo(dtype).eps * logits.float().abs().max()
        generator = torch.Generator().manual_seed(0)
        for _ in range(16):
            moved = torch.randn(logits.shape, generator=generator) * noise
            others = inner(self, logits.float() + moved, bias)[1]
            settled.append(torch.equal(others.sort().values, chosen[1].sort().values))
        return chosen

    Routing.select = select
    try:
        yield settled
    finally:
        Routing.select = inner


@contextmanager
def compared(llm: LLM) -> Iterator[list[tuple[int, int, float]]]:
    """Inside, every step runs eager, then planned over the same slots. Collects tokens,
    requests and the largest relative difference of the logits: 0 where two experts are
    too close for their order to say more than that it is below ONE_EXPERT. The tokens
    of a step that makes no logits must be theirs."""
    runner, seen = runner_of(llm), []
    inner = runner._run_model

    def both(step: Any) -> Any:
        with routed(runner.model_config.dtype) as settled:
            eager = runner.model(step.input_ids, step.positions)
        expected = runner._compute_logits(eager[torch.from_numpy(step.last_tokens)])
        runner.keeps_logits = True
        hidden, planned = inner(step)
        assert hidden is None, "nobody asked for every token"
        assert planned is not None
        logits = planned.logits.float()
        assert logits.shape == expected.shape
        error = (logits - expected.float()).abs().max()
        error = error / expected.float().abs().max()
        first = torch.from_numpy(logits.numpy().argmax(-1))
        assert torch.equal(planned.likeliest, first)
        runner.keeps_logits = False
        found = inner(step)
        assert found[1].logits is None
        assert torch.equal(found[1].likeliest, first)
        if not all(settled):
            assert error <= ONE_EXPERT
            error = 0
        seen.append((step.num_tokens, step.num_reqs, float(error)))
        return found

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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_tokens_that_are_left_out_at_the_end(
    folders, family: str, dtype: str
) -> None:
    """What comes after the last store is for tokens whose logits are wanted."""
    how = {"dtype": dtype, "max_num_batched_tokens": 24, "max_num_seqs": 8}
    with engine(folders[family], **how) as llm:
        runner, sizes = runner_of(llm), []
        plan, inner = runner.plan, runner._run_model
        assert plan.program.short

        def both(step: Any) -> Any:
            last = step.last_tokens
            whole = plan.run(step, last, only_tokens=False, every_token=True)
            assert whole.hidden.shape[0] == step.num_tokens
            expected = whole.logits.clone()
            none = plan.run(step, last[:0], only_tokens=True, every_token=False)
            assert none.likeliest.shape == (0,)
            short = plan.run(step, last, only_tokens=False, every_token=False)
            assert torch.equal(short.logits, expected)
            sizes.append((step.num_tokens, step.num_reqs))
            return inner(step)

        runner._run_model = both
        greedy(llm, prompts(4), 4)
        del runner._run_model
    assert any(tokens > requests > 1 for tokens, requests in sizes)


def test_prompt_logprobs_are_those_of_an_eager_engine(folders) -> None:
    asked = [TokensPrompt(prompt_token_ids=p) for p in prompts(3)]
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)

    def found(**how: Any) -> list[float]:
        with engine(folders["gemma3"], max_num_batched_tokens=24, **how) as llm:
            outputs = llm.generate(asked, params, use_tqdm=False)
            greedy(llm, prompts(2), 3)  # and then nobody wants them any more
        return [
            entry.logprob
            for output in outputs
            for entries in (output.prompt_logprobs or [])[1:]
            for entry in entries.values()
        ]

    expected = found(enforce_eager=True)
    assert len(expected) > 30
    assert found() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_requests_that_need_logits_get_the_tokens_of_those_that_do_not(
    folders, dtype: str
) -> None:
    asked = [TokensPrompt(prompt_token_ids=p) for p in prompts(5)]
    settings = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    everything = list(range(VOCABULARY))
    plain = SamplingParams(**settings)
    ways: list[Any] = [
        SamplingParams(**settings, logprobs=2),
        SamplingParams(**settings, allowed_token_ids=everything),
        [plain] * 4 + [SamplingParams(seed=1)],
    ]
    with engine(folders["gemma3"], dtype=dtype) as llm:

        def tokens(params: Any) -> list[list[int]]:
            outputs = llm.generate(asked, params, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs[:4]]

        expected = tokens(plain)
        assert [tokens(params) for params in ways] == [expected] * len(ways)


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

    def noted(step: Any, wanted: Any, **how: bool) -> Any:
        assert how == {"only_tokens": True, "every_token": False}
        planned = inner(step, wanted, only_tokens=False, every_token=False)
        found.setdefault(torch.get_num_threads(), []).append(planned.logits.clone())
        return planned

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
