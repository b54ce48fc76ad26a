"""Prompts computed in one process and continued in another, over nixl."""

import itertools
import logging
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kv_transfer.engine_process import (
    EngineProcess,
    core_of,
    decode,
    idle,
    num_free,
    prefill_params,
)
from tests.kv_transfer.engines import (
    NUM_TOKENS,
    assert_same,
    cached_of,
    engine,
    generate,
    offloading,
    random_prompts,
    run,
    tokens_of,
)
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.keeper import Hold
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    LoadOrder,
    RemotePrefill,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peer import Peer
from vllm.testing.kv_connector.models import ModelFolders
from vllm.utils.import_utils import has_module
from vllm.utils.network_utils import get_open_port
from vllm.v1.kv_formats import all_formats

pytestmark = pytest.mark.skipif(
    not (has_module("nixl_cu12") or has_module("nixl_cu13")),
    reason="nixl is not installed: pip install -r requirements/nixl.txt",
)

LENGTHS = [1, 5, 16, 17, 33, 70, 97]
# Of engines of which one dies: nobody waits long.
SHORT = {"lease_s": 3.0, "answer_timeout_s": 3.0, "read_timeout_s": 4.0}
RECOMPUTE = {"kv_load_failure_policy": "recompute"}


def nixl(more: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    """`kv_transfer_config` of a NixlConnector; `extra` goes to the connector."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        **(more or {}),
    }


@pytest.fixture(scope="module")
def prefiller() -> Iterator[EngineProcess]:
    with EngineProcess() as process:
        yield process


@pytest.fixture(scope="module")
def decoder() -> Iterator[EngineProcess]:
    with EngineProcess() as process:
        yield process


@pytest.fixture
def mortal() -> Iterator[EngineProcess]:
    """An engine that a test may kill."""
    with EngineProcess() as process:
        yield process


# --- tokens ---------------------------------------------------------------------------

# Every format with every kind of group it can be in; these few stand for them.
DEFAULT = [
    ("full", {"kv_cache_dtype": "nvfp4"}),
    ("full", {"kv_cache_dtype": "turboquant_3bit_nc", "enable_prefix_caching": False}),
    ("window", {"kv_cache_dtype": "fp8_e4m3"}),
    ("latent", {"kv_cache_dtype": "fp8_ds_mla"}),
    ("states", {"kv_cache_dtype": "int4_per_token_head"}),
    ("states", {"mamba_cache_mode": "align"}),
]


def _cases() -> list[Any]:
    cases: list[Any] = list(DEFAULT)
    for fmt in all_formats():
        for kind in ("latent",) if fmt.latent else ("full", "window", "states"):
            if (kind, {"kv_cache_dtype": fmt.name}) not in DEFAULT:
                case = (kind, {"kv_cache_dtype": fmt.name})
                cases.append(pytest.param(*case, marks=pytest.mark.slow))
    for layout in ("LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"):
        case = ("window", {"layout": layout, "attention_backend": "REFERENCE"})
        cases.append(pytest.param(*case, marks=pytest.mark.slow))
    return cases


@pytest.mark.parametrize("kind, how", _cases(), ids=str)
def test_tokens_are_those_of_a_single_engine(
    folders: ModelFolders,
    prefiller: EngineProcess,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    how: dict[str, Any],
) -> None:
    how = dict(how)
    layout = how.pop("layout", None)
    prefiller.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    if layout is not None:
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    prompts = random_prompts(LENGTHS)
    alone = run(folders[kind], prompts, **how)
    free = prefiller.start(folders[kind], nixl(), **how)
    params = prefiller.prefill(prompts)
    assert prefiller.num_free() < free
    with engine(folders[kind], nixl(), **how) as llm:
        before = num_free(llm)
        continued = decode(llm, prompts, params)
        assert_same(continued, alone)
        # Everything but the last token of each prompt was read.
        assert cached_of(continued) == [length - 1 for length in LENGTHS]
        idle(llm)
        assert num_free(llm) == before
    prefiller.wait_for_free(free)
    prefiller.setenv("VLLM_KV_CACHE_LAYOUT", None)


def reads_of(llm: LLM) -> list[LoadOrder]:
    """A list that gets every read of the engine from now on."""
    connector, orders = core_of(llm).scheduler.connector, list[LoadOrder]()
    build = connector.build_connector_meta

    def build_and_note(output: Any) -> Any:
        meta = build(output)
        orders.extend(meta.loads)
        return meta

    connector.build_connector_meta = build_and_note
    return orders


def test_only_what_is_not_here_is_read(
    folders: ModelFolders, prefiller: EngineProcess
) -> None:
    (prompt,) = random_prompts([100])
    others = [prompt[:50] + other for other in random_prompts([40, 60], seed=5)]
    alone = run(folders["full"], others)
    free = prefiller.start(folders["full"], nixl())
    with engine(folders["full"], nixl()) as llm:
        generate(llm, [prompt])
        reads = reads_of(llm)
        continued = decode(llm, others, prefiller.prefill(others))
        assert_same(continued, alone)
        assert cached_of(continued) == [89, 109]
        # 89 and 109 tokens have 6 and 7 blocks, of which 3 were here.
        assert [order.num_blocks for order in reads] == [3, 4]
        # Nothing is to be read of a prompt that is here whole.
        again = decode(llm, others, prefiller.prefill(others))
        assert_same(again, alone)
        assert [order.num_blocks for order in reads] == [3, 4, 1, 1]
    prefiller.wait_for_free(free)


def test_a_window_reads_its_last_blocks_only(
    folders: ModelFolders, prefiller: EngineProcess
) -> None:
    prompts = random_prompts([97])
    free = prefiller.start(folders["window"], nixl())
    with engine(folders["window"], nixl()) as llm:
        reads = reads_of(llm)
        decode(llm, prompts, prefiller.prefill(prompts))
        counts = sorted(len(ids) for ids in reads[0].local_block_ids)
        # 96 tokens; of a window of 24 tokens, 23 before the next one, in 2 blocks.
        assert set(counts) == {2, 6}
    prefiller.wait_for_free(free)


def test_pages_are_read_once_for_several_choices(
    folders: ModelFolders, prefiller: EngineProcess
) -> None:
    (prompt,) = random_prompts([70])
    (expected,) = tokens_of(run(folders["full"], [prompt]))
    free = prefiller.start(folders["full"], nixl())
    (params,) = prefiller.prefill([prompt])
    with engine(folders["full"], nixl()) as llm:
        reads = reads_of(llm)
        assert tokens_of(decode(llm, [prompt] * 3, [params] * 3)) == [expected] * 3
        assert len(reads) == 1
        idle(llm)
        # Later they are gone, and computed.
        assert tokens_of(decode(llm, [prompt], [params])) == [expected]
        assert len(reads) == 1
    prefiller.wait_for_free(free)


def test_a_small_pool_takes_many_prompts_in_turn(
    folders: ModelFolders, prefiller: EngineProcess
) -> None:
    prompts = random_prompts([20 + 11 * i for i in range(16)])
    alone = run(folders["full"], prompts)
    free = prefiller.start(folders["full"], nixl())
    with engine(
        folders["full"], nixl(), kv_cache_memory_bytes="640KiB", max_num_seqs=8
    ) as llm:
        before = num_free(llm)
        assert before < 2 * 16 + 8
        assert_same(decode(llm, prompts, prefiller.prefill(prompts)), alone)
        idle(llm)
        assert num_free(llm) == before
    prefiller.wait_for_free(free)


@pytest.mark.parametrize("nixl_is_first", [True, False])
def test_prompts_of_others_and_own_ones_go_together(
    folders: ModelFolders, prefiller: EngineProcess, nixl_is_first: bool
) -> None:
    """As one of several connectors, the other of which keeps blocks in host memory."""
    prompts = random_prompts([40, 70, 97])
    alone = run(folders["full"], prompts)
    both = [nixl(), offloading()]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": both if nixl_is_first else both[::-1]
        },
    }
    free = prefiller.start(folders["full"], transfer)
    with engine(folders["full"], transfer) as llm:
        before = num_free(llm)
        first = decode(llm, prompts, prefiller.prefill(prompts))
        assert_same(first, alone)
        assert cached_of(first) == [39, 69, 96]
        # Blocks that were read are offloaded like others.
        idle(llm)
        assert llm.reset_prefix_cache()
        again = generate(llm, prompts)
        assert_same(again, alone)
        assert cached_of(again) == [32, 64, 96]
        # Pages whose prompt is found elsewhere are let go.
        idle(llm)
        assert llm.reset_prefix_cache()
        assert_same(decode(llm, prompts, prefiller.prefill(prompts)), alone)
        idle(llm)
        assert num_free(llm) == before
    prefiller.wait_for_free(free)


# --- refusals -------------------------------------------------------------------------

REFUSED = [
    ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"}, "format_id fp8_e"),
    ({"block_size": 16}, {"block_size": 32}, "states 16 .*this engine 32"),
    ({"dtype": "float32"}, {"dtype": "bfloat16"}, "has model .*this engine"),
]


@pytest.mark.parametrize("theirs, mine, text", REFUSED, ids=str)
def test_pages_that_mean_something_else_are_refused_by_name(
    folders: ModelFolders,
    prefiller: EngineProcess,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    theirs: dict[str, Any],
    mine: dict[str, Any],
    text: str,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    (prompt,) = random_prompts([70])
    alone = run(folders["full"], [prompt], **mine)
    free = prefiller.start(folders["full"], nixl(), **theirs)
    for policy in ({}, RECOMPUTE):
        params = prefiller.prefill([prompt])
        with engine(folders["full"], nixl(policy), **mine) as llm:
            before = num_free(llm)
            (output,) = decode(llm, [prompt], params)
            if policy:
                assert_same([output], alone)
            else:
                assert output.outputs[0].finish_reason == "error"
                assert not output.outputs[0].token_ids
            idle(llm)
            assert num_free(llm) == before
        assert re.search(text, caplog.text)
        caplog.clear()
        prefiller.wait_for_free(free)


def test_pages_of_another_prompt_are_not_used(
    folders: ModelFolders, prefiller: EngineProcess
) -> None:
    prompts = random_prompts([70, 70])
    alone = run(folders["full"], prompts)
    free = prefiller.start(folders["full"], nixl())
    with engine(folders["full"], nixl()) as llm:
        reads = reads_of(llm)
        params = prefiller.prefill(prompts)
        assert_same(decode(llm, prompts, params[::-1]), alone)
        assert not reads
    prefiller.wait_for_free(free)


@pytest.mark.parametrize("policy", [{}, RECOMPUTE], ids=["fail", "recompute"])
def test_other_pages_than_were_told_of_are_refused_and_nothing_of_them_is_cached(
    folders: ModelFolders, prefiller: EngineProcess, policy: dict[str, str]
) -> None:
    """In one batch with requests that ask for what is theirs."""
    prompts = random_prompts([70] * 8)
    alone = run(folders["full"], prompts)
    free = prefiller.start(folders["full"], nixl(unclaimed_s=6.0))
    with engine(folders["full"], nixl(policy)) as llm:
        before = num_free(llm)
        params = prefiller.prefill(prompts)
        (own,), (others,) = (one["remote_block_ids"] for one in params[:2])
        wrong = [
            {"remote_block_ids": [own[::-1]]},
            {"remote_block_ids": [[999_999] * 10]},
            {"remote_block_ids": [others[:2] + own[2:]]},
            {"remote_block_ids": [list(range(1, 500_001))]},
            {"remote_engine_id": "another"},
            {"tp_size": 2},
        ]
        told = [params[0] | change for change in wrong] + params
        asked = [prompts[0]] * len(wrong) + prompts
        found = decode(llm, asked, told)
        assert_same(found[len(wrong) :], alone)
        for output in found[: len(wrong)]:
            if policy:
                assert_same([output], alone[:1])
            else:
                assert output.outputs[0].finish_reason == "error"
                assert "other pages" in str(output.outputs[0].stop_reason)
        # Where it is alone, too; and the prompt is computed well afterwards.
        assert llm.reset_prefix_cache()
        (again,) = prefiller.prefill(prompts[:1])
        decode(llm, prompts[:1], [again | {"remote_block_ids": [own[::-1]]}])
        assert_same(generate(llm, prompts), alone)
        idle(llm)
        assert num_free(llm) == before
    prefiller.wait_for_free(free)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"remote_port": "5600"}, "remote_port '5600'"),
        ({"remote_block_ids": None}, "remote_block_ids None"),
        ({"remote_block_ids": [[1], [2]]}, "2 KV cache groups, this engine has 1"),
        ({"remote_engine_id": None}, "remote_engine_id None"),
        ({"remote_block_ids": [["a"] * 100_000]}, "expected lists of block ids"),
    ],
)
def test_parameters_that_nobody_has_answered_are_refused(
    folders: ModelFolders, change: dict[str, Any], text: str
) -> None:
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "localhost",
        "remote_port": 1,
        "remote_block_ids": [[1, 2]],
        "remote_num_tokens": 20,
        "tp_size": 1,
    }
    (prompt,) = random_prompts([20])
    with engine(folders["full"], nixl()) as llm:
        with pytest.raises(ValueError, match=re.escape(text)) as refused:
            decode(llm, [prompt], [params | change])
        assert len(str(refused.value)) < 300
        # Nothing of it is left behind.
        assert len(tokens_of(generate(llm, [prompt]))[0]) == NUM_TOKENS


def test_an_engine_that_is_not_there_costs_time_only(folders: ModelFolders) -> None:
    (prompt,) = random_prompts([20])
    alone = run(folders["full"], [prompt])
    params = RemotePrefill(
        engine_id="e",
        request_id="r",
        host="localhost",
        port=get_open_port(),
        tp_size=1,
        num_tokens=20,
        block_ids=((1, 2),),
    ).to_params()
    with engine(folders["full"], nixl(answer_timeout_s=0.3)) as llm:
        started = time.monotonic()
        assert_same(decode(llm, [prompt], [params]), alone)
        assert 0.3 <= time.monotonic() - started < 5


def test_prompts_of_which_more_than_a_token_is_wanted_are_not_kept(
    folders: ModelFolders, prefiller: EngineProcess
) -> None:
    free = prefiller.start(folders["full"], nixl())
    (output,) = prefiller.generate(random_prompts([20]), 3, extra_args=prefill_params())
    assert output.kv_transfer_params is None
    assert prefiller.num_free() == free


# --- times and deaths -----------------------------------------------------------------


def test_pages_that_nobody_asks_for_come_back(
    folders: ModelFolders, prefiller: EngineProcess
) -> None:
    prompts = random_prompts([70])
    alone = run(folders["full"], prompts)
    free = prefiller.start(folders["full"], nixl(unclaimed_s=0.5))
    params = prefiller.prefill(prompts)
    assert prefiller.num_free() < free
    prefiller.wait_for_free(free)
    with engine(folders["full"], nixl()) as llm:
        reads = reads_of(llm)
        assert_same(decode(llm, prompts, params), alone)
        assert not reads


@pytest.mark.parametrize("num_steps", [0, 2, 6])
def test_blocks_come_back_on_both_sides_when_a_request_is_aborted(
    folders: ModelFolders, prefiller: EngineProcess, num_steps: int
) -> None:
    (prompt,) = random_prompts([97])
    free = prefiller.start(folders["full"], nixl())
    (params,) = prefiller.prefill([prompt])
    with engine(folders["full"], nixl()) as llm:
        before, core = num_free(llm), core_of(llm)
        sampling = SamplingParams(extra_args={"kv_transfer_params": params})
        llm.llm_engine.add_request("one", {"prompt_token_ids": prompt}, sampling)
        for _ in range(num_steps):
            core.step()
            time.sleep(0.001)
        llm.llm_engine.abort_request(["one"])
        idle(llm)
        assert num_free(llm) == before
        # Long before the lease is over: it was told so.
        prefiller.wait_for_free(free, timeout=10)


def use_tcp(monkeypatch: pytest.MonkeyPatch, *processes: EngineProcess) -> None:
    """Makes reads need both processes; shared memory can be read of a stopped one."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    for process in processes:
        process.setenv("UCX_TLS", "tcp")


def _ends() -> list[Any]:
    """How an engine goes, how it was read, and what its readers do then: two by two in
    the default run."""
    default = {
        (signal.SIGKILL, "tcp", "fail"),
        (signal.SIGKILL, "shared memory", "recompute"),
        (signal.SIGSTOP, "tcp", "recompute"),
        (signal.SIGSTOP, "shared memory", "fail"),
    }
    return [
        case if case in default else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(
            (signal.SIGKILL, signal.SIGSTOP),
            ("tcp", "shared memory"),
            ("fail", "recompute"),
        )
    ]


@pytest.mark.parametrize("end, transport, policy", _ends())
def test_a_prefill_engine_that_goes_while_it_is_read(
    folders: ModelFolders,
    mortal: EngineProcess,
    monkeypatch: pytest.MonkeyPatch,
    end: signal.Signals,
    transport: str,
    policy: str,
) -> None:
    if transport == "tcp":
        use_tcp(monkeypatch, mortal)
    first, prompt = random_prompts([40, 200])
    alone = run(folders["full"], [prompt])
    mortal.start(folders["full"], nixl())
    transfer = nixl({"kv_load_failure_policy": policy}, **SHORT)
    with engine(folders["full"], transfer) as llm:
        before, core = num_free(llm), core_of(llm)
        decode(llm, [first], mortal.prefill([first]))  # the engines have met
        (params,) = mortal.prefill([prompt])
        reads = reads_of(llm)
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            logprobs=1,
            extra_args={"kv_transfer_params": params},
        )
        llm.llm_engine.add_request("one", {"prompt_token_ids": prompt}, sampling)
        # Just before the order goes to the worker: it is read from a dead engine.
        hold = core.scheduler.connector.connector_scheduler.keeper
        while hold.state(RemotePrefill.from_params(params).key) is Hold.ASKED:
            time.sleep(0.001)
        mortal.send_signal(signal.SIGSTOP)
        if end == signal.SIGKILL:
            core.step()
            mortal.send_signal(end)
        outputs = []
        while llm.llm_engine.has_unfinished_requests():
            outputs += llm.llm_engine.step()
        (output,) = (one for one in outputs if one.finished)
        assert len(reads) == 1
        if policy == "recompute":
            assert_same([output], alone)
        else:
            assert output.outputs[0].finish_reason == "error"
        idle(llm)
        assert num_free(llm) == before
        # The engine goes on.
        assert_same(generate(llm, [prompt]), alone)


@pytest.mark.parametrize(
    "delay",
    [0.01, *(pytest.param(t, marks=pytest.mark.slow) for t in (0.0, 0.003, 0.03))],
)
def test_blocks_come_back_when_the_decode_engine_dies(
    folders: ModelFolders,
    prefiller: EngineProcess,
    mortal: EngineProcess,
    delay: float,
) -> None:
    prompts = random_prompts([200] * 8)
    free = prefiller.start(folders["full"], nixl(unclaimed_s=2.0, **SHORT))
    mortal.start(folders["full"], nixl())
    params = prefiller.prefill(prompts)
    mortal.submit("decode", prompts, params)
    time.sleep(delay)
    mortal.send_signal(signal.SIGKILL)
    prefiller.wait_for_free(free, timeout=15)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_pages_that_are_others_by_now_are_not_used(
    folders: ModelFolders,
    prefiller: EngineProcess,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
) -> None:
    """The decode engine comes to a halt between its claim and its read."""
    prompts, others = random_prompts([200] * 4), random_prompts([200] * 8, seed=9)
    alone = run(folders["full"], prompts)
    free = prefiller.start(
        folders["full"],
        nixl(lease_s=0.5),
        num_gpu_blocks_override=64,
        enable_prefix_caching=False,
    )
    read, reads = Peer.read, []

    def late(peer: Peer, order: LoadOrder) -> Any:
        if not reads:
            prefiller.wait_for_free(free)
            prefiller.generate(others, 1)
        reads.append(order)
        return read(peer, order)

    params = prefiller.prefill(prompts)
    with engine(folders["full"], nixl({"kv_load_failure_policy": policy})) as llm:
        before = num_free(llm)
        keeper = core_of(llm).scheduler.connector.connector_scheduler.keeper
        take_due = keeper._take_due
        monkeypatch.setattr(Peer, "read", late)
        # Claims, and never renews.
        due: list[Any] = []
        monkeypatch.setattr(
            keeper,
            "_take_due",
            lambda now: {} if len(due) > 3 else due.append(now) or take_due(now),
        )
        continued = decode(llm, prompts, params)
        assert len(reads) == 4
        if policy == "recompute":
            assert_same(continued, alone)
        else:
            reasons = {output.outputs[0].finish_reason for output in continued}
            assert reasons == {"error"}
        idle(llm)
        assert num_free(llm) == before


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "shared memory"])
def test_pages_that_changed_while_they_were_read_are_not_used(
    folders: ModelFolders,
    prefiller: EngineProcess,
    decoder: EngineProcess,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
) -> None:
    if transport == "tcp":
        use_tcp(monkeypatch, prefiller, decoder)
    prompts, others = random_prompts([200] * 8), random_prompts([200] * 8, seed=9)
    alone = run(folders["full"], prompts)
    try:
        free = prefiller.start(
            folders["full"],
            nixl(lease_s=0.2, unclaimed_s=0.4),
            kv_cache_memory_bytes="2MiB",
        )
        decoder.start(folders["full"], nixl(RECOMPUTE, **SHORT))
        for delay in (0.0, 0.004, 0.012):
            params = prefiller.prefill(prompts)
            decoder.submit("decode", prompts, params)
            time.sleep(delay)
            decoder.send_signal(signal.SIGSTOP)
            # The lease of what was claimed ends, and its blocks get other pages.
            time.sleep(0.5)
            prefiller.generate(others, 1)
            decoder.send_signal(signal.SIGCONT)
            assert_same(decoder.result(), alone)
        prefiller.wait_for_free(free)
    finally:
        for process in (prefiller, decoder):
            process.setenv("UCX_TLS", None)
