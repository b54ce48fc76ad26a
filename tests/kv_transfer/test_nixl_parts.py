"""Leases, questions and ranks of the NixlConnector, without engines and nixl."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import (
    EngineTransferInfo,
    TransferTopology,
    get_current_attn_backend,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import agent
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import leases as leases_module
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.keeper import Hold, Keeper
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.leases import Leases, Standing
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    RemotePrefill,
    check_wishes,
    prompt_digest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.settings import NixlSettings
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    Answer,
    Held,
    Question,
    Refused,
    Release,
    Released,
    Renew,
    SideChannelLink,
    SideChannelServer,
)
from vllm.exceptions import VLLMValidationError
from vllm.utils.network_utils import get_open_port

LEASE_S = 0.6


def wait_for(condition: Any, timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it does not become true"
        time.sleep(0.005)


# --- leases ---------------------------------------------------------------------------


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The one number that leases take for the time, in seconds."""
    seconds = [100.0]
    clock = SimpleNamespace(monotonic=lambda: seconds[0])
    monkeypatch.setattr(leases_module, "time", clock)
    return seconds


def test_pages_are_held_until_every_rank_has_read_them() -> None:
    leases = Leases(unclaimed_s=60, lease_s=60)
    leases.hold("a", "pages", num_readers=2)
    a = ("a", "pages")
    assert leases.renew([a, ("b", "pages")]) == [Standing.HELD, Standing.GONE]
    assert leases.release(a, 0) and leases.release(a, 0)
    assert leases.take_over() == (set(), set())
    assert leases.release(a, 1)
    # From here on nobody may rely on them.
    assert not leases.release(a, 1) and leases.renew([a]) == [Standing.GONE]
    assert len(leases) == 1
    assert leases.take_over() == ({"a"}, set())
    assert len(leases) == 0


def test_pages_that_nobody_wants_go_at_once() -> None:
    leases = Leases(unclaimed_s=60, lease_s=60)
    leases.hold("a", "pages", num_readers=2)
    assert leases.release(("a", "pages"), None)
    assert leases.take_over() == ({"a"}, set())


def test_other_pages_cannot_be_had_under_the_name_of_a_request(
    now: list[float],
) -> None:
    leases = Leases(unclaimed_s=60, lease_s=10)
    leases.hold("a", "pages", num_readers=1)
    claims = [("a", "others"), ("a", "pages"), ("a", "")]
    assert leases.renew(claims) == [Standing.OTHER, Standing.HELD, Standing.OTHER]
    # Nor let go, nor kept.
    for rank in (0, None):
        assert not leases.release(("a", "others"), rank)
    now[0] += 9
    assert leases.renew([("a", "others")]) == [Standing.OTHER]
    assert leases.renew([("a", "pages")]) == [Standing.HELD]
    now[0] += 10
    assert leases.renew(claims) == [Standing.GONE] * 3


def test_a_lease_lives_from_one_renewal_to_the_next(
    now: list[float],
) -> None:
    leases = Leases(unclaimed_s=60, lease_s=10)
    claimed, unclaimed = ("claimed", "1"), ("unclaimed", "2")
    for claim in (claimed, unclaimed):
        leases.hold(*claim, num_readers=1)
    for _ in range(5):
        assert leases.renew([claimed]) == [Standing.HELD]
        now[0] += 9
    assert leases.take_over() == (set(), set())
    now[0] += 1
    # Too late, though nothing has been freed yet.
    assert not leases.release(claimed, 0)
    assert leases.renew([claimed]) == [Standing.GONE]
    assert leases.take_over() == (set(), {"claimed"})
    assert leases.renew([claimed, unclaimed]) == [Standing.GONE, Standing.HELD]
    now[0] += 60
    assert leases.take_over() == (set(), {"unclaimed"})


# --- the side channel -----------------------------------------------------------------


class Engine:
    """The side channel of an engine that holds what `leases` say."""

    def __init__(self, leases: Leases, port: int = 0) -> None:
        self.leases = leases
        self.asked: list[Question] = []
        self.server = SideChannelServer("localhost", port, self.answer)

    def answer(self, question: Question) -> Answer:
        self.asked.append(question)
        if isinstance(question, Renew):
            held = self.leases.renew(question.claims)
            return Held(held, self.leases.lease_s)
        if isinstance(question, Release):
            return Released(self.leases.release(question.claim, question.rank))
        raise ValueError("no questions about who I am")

    def remote(self, request_id: str) -> RemotePrefill:
        return RemotePrefill(
            engine_id="e",
            request_id=request_id,
            host="localhost",
            port=self.server.port,
            tp_size=1,
            num_tokens=20,
            block_ids=((1, 2),),
        )

    def hold(self, request_id: str) -> RemotePrefill:
        remote = self.remote(request_id)
        self.leases.hold(*remote.claim, num_readers=1)
        return remote


@pytest.fixture
def engine() -> Iterator[Engine]:
    found = Engine(Leases(unclaimed_s=60, lease_s=LEASE_S))
    yield found
    found.server.close()


def test_questions_are_answered_whatever_else_is_sent(engine: Engine) -> None:
    with zmq.Context() as context:
        raw = context.socket(zmq.DEALER)
        raw.linger = 0
        raw.connect(f"tcp://127.0.0.1:{engine.server.port}")
        raw.send(b"what?")
        raw.send_multipart([b"1", b"\xff\xff"])
        raw.send_multipart([b"2", msgspec.msgpack.encode({"type": "exec"})])
        for number in (b"1", b"2"):
            assert raw.poll(2000)
            frames = raw.recv_multipart()
            assert frames[0] == number
            answer = msgspec.msgpack.decode(frames[1])
            assert answer["type"] == "refused" and answer["reason"]
        raw.close()
        link = SideChannelLink(context, "localhost", engine.server.port)
        number = link.ask(Renew([("x", "pages")]))
        answers: dict[int, Answer] = {}
        wait_for(lambda: answers.update(link.take_answers()) or answers)
        assert answers == {number: Held([Standing.GONE], LEASE_S)}
        link.close()


def test_a_question_that_fails_is_refused_with_its_reason(engine: Engine) -> None:
    with zmq.Context() as context:
        link = SideChannelLink(context, "localhost", engine.server.port)
        link.ask(msgspec.msgpack.decode(_MEET, type=Question))
        answers: dict[int, Answer] = {}
        wait_for(lambda: answers.update(link.take_answers()) or answers)
        assert list(answers.values()) == [Refused("no questions about who I am")]
        link.close()


_MEET = msgspec.msgpack.encode({"type": "meet", "engine_id": "e", "rank": 0})


def test_a_port_in_use_and_an_unknown_host_are_errors(engine: Engine) -> None:
    with pytest.raises(zmq.ZMQError):
        SideChannelServer("localhost", engine.server.port, engine.answer)
    with pytest.raises(ValueError, match="host 'no such host' is not known"):
        SideChannelServer("no such host", 0, engine.answer)


# --- the keeper -----------------------------------------------------------------------


def test_leases_are_renewed_until_they_are_dropped(engine: Engine) -> None:
    keeper = Keeper(answer_timeout_s=1.0)
    remote = engine.hold("a")
    keeper.keep(remote)
    wait_for(lambda: keeper.state(remote.key) is Hold.HELD)
    time.sleep(2.2 * LEASE_S)
    assert engine.leases.take_over() == (set(), set())
    keeper.drop(remote.key, release=False)
    assert keeper.state(remote.key) is Hold.GONE
    wait_for(lambda: engine.leases.take_over() == (set(), {"a"}))
    assert not any(isinstance(question, Release) for question in engine.asked)
    keeper.close()


@pytest.mark.parametrize("how", ["drop", "release", "close"])
def test_leases_are_released_when_nobody_wants_them(engine: Engine, how: str) -> None:
    keeper = Keeper(answer_timeout_s=1.0)
    remote = engine.hold("a")
    if how == "release":
        keeper.release(remote)
    else:
        keeper.keep(remote)
        wait_for(lambda: keeper.state(remote.key) is Hold.HELD)
    if how == "drop":
        keeper.drop(remote.key, release=True)
    if how == "close":
        keeper.close()
    # Not when the lease has run out: it is said so.
    wait_for(lambda: engine.leases.take_over() == ({"a"}, set()))
    keeper.close()


def test_what_is_not_held_is_gone(engine: Engine) -> None:
    keeper = Keeper(answer_timeout_s=1.0)
    here, gone = engine.hold("a"), engine.remote("b")
    keeper.keep(here)
    keeper.keep(gone)
    wait_for(lambda: keeper.state(gone.key) is Hold.GONE)
    wait_for(lambda: keeper.state(here.key) is Hold.HELD)
    keeper.close()


OTHERS: list[dict[str, Any]] = [
    {"block_ids": ((2, 1),)},
    {"block_ids": ((1, 3),)},
    {"block_ids": ((1,), (2,))},
    {"block_ids": ((1,),)},
    {"block_ids": ((999_999,) * 10,)},
    {"block_ids": (tuple(range(500_000)),)},
    {"num_tokens": 19},
    {"prompt_hash": "of another prompt"},
    {"engine_id": "another"},
    {"tp_size": 2},
]


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: str(change)[:40])
def test_other_pages_than_were_told_of_are_refused_and_harm_nobody(
    engine: Engine, change: dict[str, Any]
) -> None:
    keeper = Keeper(answer_timeout_s=1.0)
    good = engine.hold("a")
    bad = replace(good, **change)
    keeper.keep(bad)
    keeper.keep(good)
    wait_for(lambda: keeper.state(bad.key) is Hold.REFUSED)
    wait_for(lambda: keeper.state(good.key) is Hold.HELD)
    # Whoever asked for others lets nothing go.
    keeper.drop(bad.key, release=True)
    keeper.release(bad)
    wait_for(lambda: any(isinstance(asked, Release) for asked in engine.asked))
    assert engine.leases.take_over() == (set(), set())
    assert engine.leases.renew([good.claim]) == [Standing.HELD]
    keeper.close()


def test_silence_is_an_answer_after_a_while() -> None:
    keeper = Keeper(answer_timeout_s=0.2)
    silent = RemotePrefill(
        engine_id="e",
        request_id="a",
        host="localhost",
        port=get_open_port(),
        tp_size=1,
        num_tokens=1,
        block_ids=((1,),),
    )
    started = time.monotonic()
    keeper.keep(silent)
    assert keeper.state(silent.key) is Hold.ASKED
    wait_for(lambda: keeper.state(silent.key) is Hold.GONE)
    assert time.monotonic() - started >= 0.2
    keeper.close()
    assert not any(t.name == "kv-lease-keeper" for t in threading.enumerate())


# --- parameters -----------------------------------------------------------------------


def request(tokens: list[int], **changes: Any) -> Any:
    known = {"prompt_embeds": None, "lora_request": None, "mm_features": []}
    return SimpleNamespace(all_token_ids=tokens, **(known | changes))


def test_parameters_come_back_as_they_were_sent(engine: Engine) -> None:
    remote = engine.remote("a")
    params = msgspec.json.decode(msgspec.json.encode(remote.to_params()))
    assert RemotePrefill.from_params(params) == remote
    # As engines with a single group may say it.
    assert RemotePrefill.from_params(params | {"remote_block_ids": [1, 2]}) == remote


@pytest.mark.parametrize(
    "change",
    [
        {"remote_port": -1},
        {"remote_port": 99_999},
        {"remote_port": "5600"},
        {"remote_host": ""},
        {"remote_host": "bad host\n"},
        {"remote_host": "x" * 5000},
        {"remote_block_ids": [[-2]]},
        {"remote_block_ids": [[2**70]]},
        {"remote_block_ids": "all"},
        {"remote_num_tokens": 1.5},
        {"remote_num_tokens": -1},
        {"tp_size": 0},
        {"remote_engine_id": None},
        {"remote_prompt_hash": 3},
    ],
    ids=lambda change: str(change)[:40],
)
def test_parameters_that_no_engine_sent_are_refused_by_name(
    engine: Engine, change: dict[str, Any]
) -> None:
    with pytest.raises(VLLMValidationError, match=next(iter(change))) as refusal:
        RemotePrefill.from_params(engine.remote("a").to_params() | change)
    assert refusal.value.parameter == "kv_transfer_params"
    assert len(str(refusal.value)) < 300


def test_wishes_are_true_or_false() -> None:
    check_wishes({"do_remote_prefill": True, "do_remote_decode": None})
    with pytest.raises(ValueError, match="do_remote_decode 'maybe'"):
        check_wishes({"do_remote_decode": "maybe"})


def test_a_place_without_an_engine_does_not_harm_the_others(engine: Engine) -> None:
    keeper = Keeper(answer_timeout_s=1.0)
    good = engine.hold("good")
    bad = replace(good, request_id="bad", port=-1)
    keeper.keep(bad)
    wait_for(lambda: keeper.state(bad.key) is Hold.GONE)
    keeper.keep(good)
    wait_for(lambda: keeper.state(good.key) is Hold.HELD)
    keeper.close()
    assert not any(t.name == "kv-lease-keeper" for t in threading.enumerate())


def test_a_prompt_is_named_by_what_its_states_depend_on() -> None:
    tokens = [1, 2, 3, 4]
    media = SimpleNamespace(identifier="m", mm_position=SimpleNamespace(offset=1))
    names = [
        prompt_digest(request(tokens), 3),
        prompt_digest(request(tokens), 4),
        prompt_digest(request([1, 2, 4]), 3),
        prompt_digest(request(tokens, lora_request=SimpleNamespace(lora_name="l")), 3),
        prompt_digest(request(tokens, mm_features=[media]), 3),
    ]
    assert len(set(names)) == len(names)
    assert prompt_digest(request([1, 2, 3, 9]), 3) == names[0]
    assert prompt_digest(request(tokens, prompt_embeds=object()), 3) is None


def test_times_are_those_given_or_defaults() -> None:
    def settings(**extra: Any) -> NixlSettings:
        transfer = KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role="kv_producer",
            kv_connector_extra_config=extra,
        )
        config: Any = SimpleNamespace(kv_transfer_config=transfer)
        return NixlSettings.from_config(config)

    found = settings(lease_s=3)
    assert found.serves and not found.reads
    assert (found.lease_s, found.unclaimed_s, found.port) == (3, 480, None)


def test_environment_names_the_side_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5700")
    monkeypatch.setenv("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "7")
    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    found = NixlSettings.from_config(config)
    assert (found.host, found.port, found.unclaimed_s) == ("10.0.0.1", 5700, 7)
    assert found.serves and found.reads


def test_without_nixl_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "has_module", lambda name: False)
    with pytest.raises(ValueError, match="pip install nixl-cu12"):
        agent.nixl_module()


def test_names_lead_to_the_connector() -> None:
    get = KVConnectorFactory.get_connector_class_by_name
    assert get("NixlConnector") is get("NixlPullConnector")
    with pytest.raises(ValueError, match="NixlPushConnector is not built in"):
        get("NixlPushConnector")


# --- ranks ----------------------------------------------------------------------------


def topology(tp_rank: int, tp_size: int, num_heads: int = 8) -> TransferTopology:
    return TransferTopology(
        tp_rank=tp_rank,
        tp_size=tp_size,
        block_size=16,
        engine_id="mine",
        total_num_kv_heads=num_heads,
    )


def info(tp_size: int, block_size: int = 16) -> EngineTransferInfo:
    return EngineTransferInfo(tp_size, 4096, block_size, 1)


@pytest.mark.parametrize("mine", [1, 2, 4, 8])
@pytest.mark.parametrize("theirs", [1, 2, 4, 8])
def test_ranks_read_where_their_heads_are(mine: int, theirs: int) -> None:
    """Rank r of n holds heads [8r/n, 8(r+1)/n)."""
    for rank in range(mine):
        found = topology(rank, mine)
        found.register_remote_engine("theirs", info(theirs))
        heads = set(range(8 * rank // mine, 8 * (rank + 1) // mine))
        expected = [
            other
            for other in range(theirs)
            if heads & set(range(8 * other // theirs, 8 * (other + 1) // theirs))
        ]
        assert found.handshake_target_ranks(theirs) == expected
        assert found.target_remote_ranks("theirs") == expected


def test_one_rank_is_enough_where_all_hold_the_same() -> None:
    found = topology(0, 1, num_heads=1)
    found.register_remote_engine("theirs", info(4))
    assert found.replicates_kv_cache("theirs") and found.is_kv_replicated("theirs")
    assert found.handshake_target_ranks(4) == [0, 1, 2, 3]
    assert found.target_remote_ranks("theirs") == [0]
    assert "theirs: 4 ranks (here 1)" in found.describe("theirs")
    found.unregister_remote_engine("theirs")
    with pytest.raises(KeyError):
        found.get_engine_info("theirs")


def test_sizes_that_do_not_divide_are_refused() -> None:
    found = topology(0, 2)
    assert found.block_size_ratio(4) == 4
    with pytest.raises(ValueError, match="sizes 2 here and 3 there"):
        found.register_remote_engine("theirs", info(3))
    with pytest.raises(ValueError, match="blocks of 16 tokens here and 32 there"):
        found.register_remote_engine("theirs", info(2, block_size=32))
    with pytest.raises(ValueError, match="rank 2 is none of 2"):
        topology(2, 2)


def test_the_backend_of_a_layer_is_found_by_its_name() -> None:
    layers = {"a": object(), "b": SimpleNamespace(attn_backend="B")}
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers)
    )
    assert get_current_attn_backend(config) == "B"
    assert get_current_attn_backend(config, ["a", "b"]) == "B"
    with pytest.raises(ValueError, match=r"no layer of \['a', 'c'\] has"):
        get_current_attn_backend(config, ["a", "c"])
