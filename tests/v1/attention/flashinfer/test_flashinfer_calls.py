"""Every call into flashinfer binds to the installed package's signatures, and the
stand-in that other tests use takes no argument that the package does not take."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.v1.attention.flashinfer.stand_in import TARGETS, Decode, Prefill
from vllm.utils.import_utils import has_module, resolve
from vllm.v1.attention.ops import flashinfer_calls as calls

needs_flashinfer = pytest.mark.skipif(
    not has_module("flashinfer"),
    reason="flashinfer-python is not installed (optional, 2.6 GB with its needs)",
)
INTS = torch.zeros(2, dtype=torch.int32)
PAGES = torch.zeros(1, 1, 16, 64, dtype=torch.float16)
CACHES = calls.Caches(codes=(PAGES, PAGES), scales=(PAGES, PAGES))
LISTS = calls.PageLists(starts=INTS, pages=INTS, last_states=INTS)
BUFFERS = calls.PageBuffers(starts=INTS, pages=INTS, last_states=INTS)
SHAPE = calls.LayerShape(
    num_heads=2,
    num_kv_heads=1,
    head_size=64,
    page_size=16,
    scale=1.0,
    window_left=-1,
    soft_cap=0.0,
    query_dtype=torch.float16,
    cache_dtype=torch.float16,
    token_head_scales=False,
)
BATCH = calls.Batch(
    block_table=INTS,
    seq_lens=INTS,
    query_starts=INTS,
    context_starts=INTS,
    max_query_len=1,
    max_seq_len=1,
)
SCALED = {"score_scale": 1.0, "value_scale": 1.0, "window_left": -1, "sinks": None}
ONE_CALL: dict[str, Callable[[Any], Any]] = {
    "prefill_wrapper": lambda w: calls.prefill_wrapper(PAGES),
    "decode_wrapper": lambda w: calls.decode_wrapper(PAGES, None),
    "captured decode_wrapper": lambda w: calls.decode_wrapper(PAGES, BUFFERS),
    "plan_prefill": lambda w: calls.plan_prefill(w, SHAPE, LISTS, INTS, True),
    "plan_decode": lambda w: calls.plan_decode(w, SHAPE, LISTS),
    "run prefill": lambda w: calls.run(w, PAGES, CACHES, PAGES, 1.0, 1.0),
    "run decode": lambda w: calls.run(w, PAGES, CACHES, PAGES, 1.0, 1.0),
    "trtllm_prefill": lambda w: calls.trtllm_prefill(
        PAGES, PAGES, CACHES, BATCH, PAGES, **SCALED, causal=True
    ),
    "trtllm_decode": lambda w: calls.trtllm_decode(
        PAGES, PAGES, CACHES, BATCH, PAGES, **SCALED
    ),
}


class Recorder:
    """Binds every call to the real signature instead of making it."""

    def __init__(self, of: type | None) -> None:
        self.of = of
        self.bound: list[inspect.BoundArguments] = []

    def resolve(self, path: str) -> Callable[..., None]:
        real = resolve(path)
        return lambda **arguments: self.bind(real, arguments)

    def bind(self, real: Any, arguments: dict[str, Any], *first: Any) -> None:
        self.bound.append(inspect.signature(real).bind(*first, **arguments))

    def method(self, name: str) -> Callable[..., None]:
        # Decode's `plan` hands its keywords to `_plan_impl`, which names them.
        real = getattr(self.of, f"_{name}_impl", None) or getattr(self.of, name)
        return lambda **arguments: self.bind(real, arguments, None)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return self.method(name)


def of_call(name: str) -> type | None:
    if "trtllm" in name or not has_module("flashinfer"):
        return None
    return resolve(calls.PREFILL if "prefill" in name else calls.DECODE)


@needs_flashinfer
@pytest.mark.parametrize("name", ONE_CALL)
def test_arguments_bind_to_the_installed_package(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(of_call(name))
    monkeypatch.setattr(calls, "resolve", recorder.resolve)
    ONE_CALL[name](recorder)
    (bound,) = recorder.bound
    for parameter in bound.arguments:
        assert parameter not in ("args", "kwargs", "deprecated_positional_args")


@needs_flashinfer
def test_the_stand_in_takes_what_the_package_takes() -> None:
    for path, stand_in in TARGETS.items():
        real = resolve(path)
        if isinstance(stand_in, type):
            _check_subset(stand_in.__init__, real.__init__)
            _check_subset(stand_in.run, real.run)
            _check_subset(stand_in.plan, getattr(real, "_plan_impl", real.plan))
        else:
            _check_subset(stand_in, real)


def _check_subset(ours: Any, theirs: Any) -> None:
    known = inspect.signature(theirs).parameters
    for name, parameter in inspect.signature(ours).parameters.items():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            assert name in known, (theirs, name)


@needs_flashinfer
@pytest.mark.parametrize("name", ["plan_decode", "run prefill"])
def test_a_wrong_argument_is_noticed(name: str) -> None:
    recorder = Recorder(of_call(name))
    ONE_CALL[name](recorder)
    method = "plan" if name.startswith("plan") else "run"
    taken = recorder.bound[0].kwargs | recorder.bound[0].arguments
    taken.pop("self")
    with pytest.raises(TypeError, match="unexpected keyword argument 'page_sizes'"):
        recorder.method(method)(**taken, page_sizes=16)


def test_calls_reach_the_stand_in_by_its_paths() -> None:
    assert TARGETS[calls.PREFILL] is Prefill and TARGETS[calls.DECODE] is Decode
    assert set(TARGETS) == {
        value for value in vars(calls).values() if str(value).startswith("flashinfer.")
    }
