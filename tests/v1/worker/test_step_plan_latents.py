"""Planned steps over latents compute what eager ones do, for every variant of the model
and every format that can hold a latent, absorbed and expanded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.tiny import engine, greedy
from tests.model_executor.deepseek import DEEPSEEK, deepseek_model
from tests.model_executor.families import saved
from tests.tiny_model import tiny_tokenizer
from tests.v1.worker.test_step_plan import (
    BATCHES,
    PACKED_TOLERANCE,
    TOLERANCE,
    compared,
    prompts,
    runner_of,
)
from vllm.model_executor.step import NotPlanned
from vllm.v1.attention.ops import cpu_kernels
from vllm.v1.kv_formats import all_formats
from vllm.v1.worker.step_plan import StepPlan

pytestmark = pytest.mark.skipif(
    not cpu_kernels.available(), reason=cpu_kernels.why_unavailable()
)

FORMATS = [fmt.name for fmt in all_formats() if fmt.latent_capable]
# The kernels take latents of a multiple of 32 elements.
SMALL_LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 32}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by variant, written when asked for."""

    class Folders(dict):
        def __missing__(self, name: str) -> Path:
            changes = {} if name.endswith("real-latent") else SMALL_LATENT
            folder = tmp_path_factory.mktemp(name)
            self[name] = saved(deepseek_model(name, changes=changes), folder)
            tiny_tokenizer().save_pretrained(folder)
            return folder

    return Folders()


def worst(
    folder: Path, batch: int, *, absorbed: bool = False, **settings: Any
) -> float:
    """The largest relative difference of logits over a prefill and six decodes; with
    `absorbed` whatever that costs."""
    defaults = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
    with engine(folder, **(defaults | settings)) as llm, compared(llm) as seen:
        if absorbed:
            runner_of(llm).plan.trace.detours.clear()
        greedy(llm, prompts(batch), 6)
    decodes = [step for step in seen if step[0] == step[1] == batch]
    assert len(decodes) >= 4, seen
    assert len(seen) > len(decodes), seen
    return max(error for _, _, error in seen)


@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", DEEPSEEK)
def test_logits_equal_eager_ones(folders, name, dtype, absorbed) -> None:
    found = worst(folders[name], 3, dtype=dtype, absorbed=absorbed)
    assert found <= TOLERANCE[dtype]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_eager_ones_over_every_format(folders, name, batch) -> None:
    absorbed = batch % 2 == 0  # one way of each size of a batch
    found = worst(
        folders["v2-real-latent"], batch, absorbed=absorbed, kv_cache_dtype=name
    )
    assert found <= PACKED_TOLERANCE


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["v2-lite", "v2-groups", "v3-real-latent"])
def test_greedy_tokens_equal_eager_ones(folders, name: str, batch: int) -> None:
    asked = prompts(batch)
    with engine(folders[name]) as llm:
        assert runner_of(llm).plan is not None
        found = greedy(llm, asked, 12)
        assert greedy(llm, asked, 12) == found  # after prefix hits
    with engine(folders[name], enforce_eager=True) as llm:
        assert runner_of(llm).plan is None
        assert greedy(llm, asked, 12) == found


@pytest.mark.parametrize("chunk", [1024, 32], ids=["whole", "chunked"])
def test_queries_too_long_to_be_absorbed_are_expanded(folders, chunk: int) -> None:
    """In torch, by every layer, once in a step that has such a query; with the logits
    of an eager step whether it has or not."""
    settings = {"max_num_batched_tokens": chunk}
    with engine(folders["v2-real-latent"], **settings) as llm, compared(llm) as seen:
        runner, expanded = runner_of(llm), []
        detours = runner.plan.trace.detours
        most = detours[0].up_to
        assert 1 < most < 32, "the prompts below are of both kinds"
        for i, detour in enumerate(detours):

            def noted(q: Any, out: Any, detour: Any = detour) -> None:
                expanded.append(len(seen))
                detour.compute(q, out)

            detours[i] = replace(detour, compute=noted)
        greedy(llm, [[1] * (most + 1), [2] * most], 4)
        long_steps, end = set(expanded), len(seen)
        greedy(llm, [[3] * most], 4)
        assert len(detours) == 3
    assert long_steps == {0}
    assert len(expanded) == 6  # three layers, planned twice: see `compared`
    assert end >= 4
    assert max(error for _, _, error in seen) <= TOLERANCE["float32"]


def test_bits_do_not_depend_on_a_long_query_in_the_step(folders) -> None:
    """A request's logits, alone and beside a query that is expanded."""
    settings = {"dtype": "bfloat16", "max_num_batched_tokens": 1024}
    with engine(folders["v3-real-latent"], **settings) as llm:
        runner, logits = runner_of(llm), []
        inner, runner.keeps_logits = runner._run_model, True

        def noted(step: Any) -> Any:
            found = inner(step)
            logits.append(found[1].logits.clone())
            return found

        runner._run_model = noted
        short, long = [5, 6, 7], list(range(2, 60))
        assert len(long) > runner.plan.trace.detours[0].up_to >= len(short)
        greedy(llm, [short], 1)
        llm.reset_prefix_cache()
        greedy(llm, [long, short], 1)
    alone, beside = logits
    assert torch.equal(alone[0], beside[1])


def test_queries_that_are_expanded_keep_every_token(folders) -> None:
    with engine(folders["v3-real-latent"]) as llm:
        assert not runner_of(llm).plan.program.short


def test_latents_without_a_kernel_run_eager_and_say_why(folders, tmp_path) -> None:
    folder = saved(deepseek_model("v2", changes={"qk_rope_head_dim": 16}), tmp_path)
    tiny_tokenizer().save_pretrained(folder)
    with engine(folder) as llm:
        runner = runner_of(llm)
        assert runner.plan is None
        with pytest.raises(NotPlanned, match="CPU_MLA has no kernel"):
            StepPlan(runner.model, torch.float32, 64, 8, runner.attn_groups)


@pytest.mark.parametrize("isa", ["avx2", "generic"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["auto", "int4_per_token_head", "fp8_ds_mla"])
def test_older_instruction_sets_serve_too(folders, name, dtype, isa) -> None:
    try:
        cpu_kernels.choose_isa(isa)
    except ValueError as error:
        pytest.skip(str(error))
    settings = {"dtype": dtype, "kv_cache_dtype": name}
    try:
        found = worst(folders["v3-real-latent"], 3, **settings)
        # A last bit more or less decides about codes of a packed latent.
        assert found <= TOLERANCE[dtype if name == "auto" else "bfloat16"]
    finally:
        cpu_kernels.choose_isa(None)


@pytest.mark.parametrize("name", ["auto", "int4_per_token_head"])
def test_bits_do_not_depend_on_threads(folders, name: str) -> None:
    before = torch.get_num_threads()
    how = {"dtype": "bfloat16", "kv_cache_dtype": name}
    with engine(folders["v3-real-latent"], **how) as llm:
        runner, logits = runner_of(llm), {}
        inner = runner.plan.run

        def noted(step: Any, wanted: Any, **how: bool) -> Any:
            assert how["only_tokens"]
            found = inner(step, wanted, only_tokens=False, every_token=False)
            logits.setdefault(torch.get_num_threads(), []).append(found.logits.clone())
            return found

        runner.plan.run = noted
        runner.plan.trace.detours.clear()
        try:
            for count in (1, 3):
                llm.reset_prefix_cache()
                torch.set_num_threads(count)
                greedy(llm, prompts(8), 6)
        finally:
            torch.set_num_threads(before)
    assert len(logits[1]) > 4
    for one, many in zip(logits[1], logits[3], strict=True):
        assert torch.equal(one, many)
