"""Messages survive the wire bit for bit, and nothing but plain data gets through."""

import dataclasses
import enum
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import _TORCH_DTYPES, MsgpackDecoder, MsgpackEncoder


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    label: str | None = None


class Message(msgspec.Struct):
    tensor: torch.Tensor | None = None
    array: np.ndarray | None = None
    anything: Any = None
    colour: Colour | None = None
    point: Point | None = None


def roundtrip(obj: Any, t: Any = Any) -> Any:
    return MsgpackDecoder(t).decode(MsgpackEncoder().encode(obj))


@pytest.mark.parametrize("name", sorted(_TORCH_DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (7, 5), (4096, 3)])
def test_tensors_come_back_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    dtype = _TORCH_DTYPES[name]
    sent = torch.randint(0, 2, shape).to(dtype)
    for typed in (True, False):
        message = Message(tensor=sent) if typed else Message(anything=[sent])
        got = roundtrip(message, Message)
        got = got.tensor if typed else got.anything[0]
        assert got.dtype == dtype and got.shape == sent.shape
        assert (
            got.reshape(-1).view(torch.uint8).equal(sent.reshape(-1).view(torch.uint8))
        )
        got.zero_()  # writable, and not the sender's memory


@pytest.mark.parametrize("dtype", ["<i4", "<i8", "<f4", "|b1", "<u2"])
@pytest.mark.parametrize("shape", [(), (0, 2), (5, 3), (3000,)])
def test_arrays_come_back_equal(dtype: str, shape: tuple[int, ...]) -> None:
    sent = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    got = roundtrip(Message(array=sent), Message).array
    assert got.dtype == sent.dtype and got.shape == sent.shape
    assert np.array_equal(got, sent)


def test_strided_arrays_are_packed() -> None:
    tensor = torch.arange(12).reshape(3, 4).t()
    array = np.arange(12).reshape(3, 4)[:, ::2]
    got = roundtrip(Message(tensor=tensor, array=array), Message)
    assert got.tensor.equal(tensor) and np.array_equal(got.array, array)


def test_large_arrays_get_frames_of_their_own() -> None:
    frames = MsgpackEncoder().encode(Message(tensor=torch.zeros(10000)))
    assert len(frames) == 2 and len(frames[0]) < 100


def test_enums_and_dataclasses_keep_their_types() -> None:
    got = roundtrip(Message(colour=Colour.RED, point=Point(3, "a")), Message)
    assert got.colour is Colour.RED and got.point == Point(3, "a")


def test_requests_survive() -> None:
    params = SamplingParams(
        temperature=0.5,
        stop=["x"],
        logit_bias={3: 1.5},
        output_kind=RequestOutputKind.DELTA,
    )
    params.update_from_generation_config({"eos_token_id": [1, 2]}, eos_token_id=1)
    sent = EngineCoreRequest("r", [1, 2, 3], None, params, None, 1.5, cache_salt="s")
    got = roundtrip(sent, EngineCoreRequest)
    assert got == sent
    assert got.sampling_params.eos_token_id == 1
    assert got.sampling_params.all_stop_token_ids == {1, 2}


def test_outputs_survive() -> None:
    lists = LogprobsLists(
        np.array([[1, 2]]), np.array([[-0.5, -1.0]], dtype=np.float32), np.array([1])
    )
    tensors = LogprobsTensors(torch.ones(2, 3), torch.rand(2, 3), torch.arange(2))
    output = EngineCoreOutput(
        "r",
        [7],
        new_logprobs=lists,
        new_prompt_logprobs_tensors=tensors,
        finish_reason=FinishReason.STOP,
        stop_reason="x",
    )
    stats = SchedulerStats(prefix_cache_stats=PrefixCacheStats(queries=3))
    sent = EngineCoreOutputs(outputs=[output], scheduler_stats=stats)
    got = roundtrip(sent, EngineCoreOutputs)
    assert got.scheduler_stats == stats and got.timestamp == sent.timestamp
    assert got.outputs[0].finish_reason is FinishReason.STOP
    assert np.array_equal(got.outputs[0].new_logprobs.logprobs, lists.logprobs)
    assert got.outputs[0].new_prompt_logprobs_tensors.logprobs.equal(tensors.logprobs)


class Custom:
    pass


@pytest.mark.parametrize(
    "value", [Custom(), lambda: 0, np.array([Custom()]), np.array(["a"])]
)
def test_objects_are_refused_when_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent between processes"):
        MsgpackEncoder().encode(Message(anything=value))


def ext(code: int, payload: bytes) -> bytes:
    return msgspec.msgpack.encode([None, None, msgspec.msgpack.Ext(code, payload)])


@pytest.mark.parametrize("code", [0, 2, 3, 127])
def test_pickled_extensions_are_refused(code: int) -> None:
    evil = pickle.dumps(print)
    with pytest.raises(msgspec.ValidationError, match="not accepted"):
        MsgpackDecoder().decode(ext(code, evil))


@pytest.mark.parametrize(
    "header",
    [
        ("torch", "float32", (3,), 0, b"1234"),  # too short
        ("torch", "object", (1,), 0, b"1234"),
        ("numpy", "O", (1,), 0, b"12345678"),
        ("numpy", "nonsense", (1,), 0, b"12345678"),
        ("numpy", "<f4", (-1,), 0, b"1234"),
        ("numpy", "<f4", (1,), 3, b""),  # no such frame
        ("pickle", "<f4", (1,), 0, b"1234"),
    ],
)
def test_malformed_arrays_are_refused(header: tuple) -> None:
    with pytest.raises(msgspec.ValidationError):
        MsgpackDecoder().decode(ext(1, msgspec.msgpack.encode(header)))


def test_a_message_without_frames_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError, match="no frames"):
        MsgpackDecoder().decode([])


def test_a_field_of_array_type_takes_no_other_data() -> None:
    with pytest.raises(msgspec.ValidationError):
        roundtrip({"tensor": [1, 2]}, Message)
