"""What the engines of a check do, and what must hold afterwards.

Knows requests and blocks. A check is a fresh connector, one or two engines and a report
in words.
"""

import random
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.testing.kv_connector.cases import BLOCK, Case, engine_config
from vllm.testing.kv_connector.report import Report
from vllm.testing.kv_connector.states import extend, names_of
from vllm.testing.kv_connector.watch import SchedulerWatch
from vllm.testing.kv_connector.worker import FakeExecutor, next_token
from vllm.utils.import_utils import has_module
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore

NUM_TOKENS = 5
_MOST_SECONDS = 30.0
# Around the ends of blocks, and shorter than one.
_LENGTHS = (5, 16, 17, 47, 48, 70, 97)


def random_prompts(lengths: Any, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 900) for _ in range(n)] for n in lengths]


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    """What a request gives that runs alone."""
    name, tokens = names_of(prompt)[-1], list[int]()
    for _ in range(num_tokens):
        tokens.append(next_token(name))
        name = extend(name, tokens[-1])
    return tokens


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The connector that is checked: its kv_transfer_config, in which `{tmp}` stands
    for a folder, and what is expected of its loads (see EXPECTATIONS). `needs` names
    packages of which one must be there."""

    transfer: dict[str, Any]
    expect: str = "bytes"
    serves_groups: bool = True
    needs: tuple[str, ...] = ()

    @property
    def is_there(self) -> bool:
        """False where a package is missing."""
        return not self.needs or any(has_module(name) for name in self.needs)

    def config(self, folder: Path) -> dict[str, Any]:
        return _filled(self.transfer, str(folder))


def _filled(value: Any, folder: str) -> Any:
    if isinstance(value, str):
        return value.replace("{tmp}", folder)
    if isinstance(value, dict):
        return {key: _filled(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, folder) for inner in value]
    return value


class FakeEngine:
    """A real engine core over a fake worker."""

    def __init__(
        self,
        case: Case,
        subject: Subject,
        folder: Path,
        report: Report,
        **settings: Any,
    ) -> None:
        config = engine_config(folder, subject.config(folder), **settings)
        self.report = report
        self.core = EngineCore(
            config,
            executor_class=lambda vllm_config: FakeExecutor(  # type: ignore[arg-type]
                vllm_config, case, report, compares=subject.expect != "blocks"
            ),
        )
        self.worker = self.core.model_executor.worker
        self.scheduler = self.core.scheduler
        self.watch = SchedulerWatch(self.scheduler.connector, report)
        self.worker.loaded = self.watch.loaded
        self.num_free = self._num_free()
        self.tokens: dict[str, list[int]] = {}
        self.passed_on: set[str] = set()
        #: What the connector told clients, by request.
        self.told: dict[str, dict[str, Any] | None] = {}
        self.alive: dict[str, list[int]] = {}
        self._num_requests = 0

    def _num_free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(
        self,
        prompt: list[int],
        num_tokens: int = NUM_TOKENS,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> str:
        self._num_requests += 1
        request_id = f"{self._num_requests}"
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        if kv_transfer_params is not None:
            params.extra_args = {"kv_transfer_params": kv_transfer_params}
        self.core.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
            )
        )
        self.alive[request_id] = prompt
        self.tokens[request_id] = []
        return request_id

    def abort(self, request_id: str) -> None:
        self.core.abort_requests([request_id])
        self.alive.pop(request_id)
        del self.tokens[request_id]

    def step(self) -> None:
        outputs, model_ran = self.core.step()
        for news in outputs.values():
            for output in news.outputs:
                if output.request_id not in self.alive:
                    continue
                self.tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self._ended(output)
        if not model_ran:
            time.sleep(0.0005)

    def _ended(self, output: Any) -> None:
        prompt, tokens = self.alive.pop(output.request_id), self.tokens
        found = tokens.pop(output.request_id)
        self.told[output.request_id] = output.kv_transfer_params
        wanted = continuation(prompt, len(found) or NUM_TOKENS)
        # The token of a request that goes on elsewhere is that engine's to find.
        goes_on = output.request_id in self.passed_on
        if found != wanted and not goes_on:
            self.report.add(
                "wrong tokens",
                f"request {output.request_id} of {len(prompt)} tokens ended "
                f"({output.finish_reason}) with {found}: expected {wanted}",
            )

    def run(self, *others: "FakeEngine") -> bool:
        """Steps until nothing is left to do, others beside it; False when that never
        comes."""
        deadline = time.monotonic() + _MOST_SECONDS
        while self.alive or self.core.has_work():
            if time.monotonic() > deadline:
                self._tell_deadlock()
                return False
            self.step()
            for other in others:
                if other.core.has_work():
                    other.step()
        return True

    def _tell_deadlock(self) -> None:
        waiting = [
            f"{request.request_id} ({request.status.name})"
            for request in [*self.scheduler.running, *self.scheduler.waiting]
        ]
        if waiting:
            text = f"requests {', '.join(waiting)} make no progress"
        else:
            text = (
                "no request is left, but has_pending_push_work, "
                "has_pending_block_frees or a kept request asks for further steps"
            )
        self.report.add("no end", f"after {_MOST_SECONDS:g} s {text}")

    def forget_prefixes(self) -> None:
        """Empties the engine's own prefix cache, not the connector's."""
        if not self.core.reset_prefix_cache():
            self.report.add(
                "lost blocks", "the prefix cache cannot be emptied: blocks are in use"
            )

    def check_end(self) -> None:
        """Every transfer is over and every block is back."""
        self.worker.watch.check(self.watch)
        missing = self.num_free - self._num_free()
        if missing:
            self.report.add(
                "lost blocks",
                f"{missing} of {self.num_free} blocks are still taken, though nothing "
                "runs",
            )

    def shutdown(self) -> None:
        self.core.shutdown()


@contextmanager
def crashes_in(report: Report) -> Iterator[None]:
    """What the connector raises ends the check, and is reported."""
    try:
        yield
    except Exception as error:
        trace = traceback.extract_tb(error.__traceback__)[-6:]
        places = " > ".join(f"{Path(f.filename).name}:{f.lineno}" for f in trace)
        report.add("crash", f"{type(error).__name__}: {error} ({places})")


@contextmanager
def fake_engine(
    case: Case, subject: Subject, folder: Path, report: Report, **settings: Any
) -> Iterator[FakeEngine]:
    if not subject.serves_groups:
        settings["disable_hybrid_kv_cache_manager"] = True
    engine = FakeEngine(case, subject, folder, report, **settings)
    try:
        yield engine
    finally:
        engine.shutdown()


def _run_prompts(engine: FakeEngine, prompts: list[list[int]]) -> bool:
    for prompt in prompts:
        engine.add(prompt)
    return engine.run()


def check_bytes(case: Case, subject: Subject, folder: Path) -> Report:
    """Two engines in turn, each asked twice: what was saved comes back unchanged."""
    report = Report()
    prompts = random_prompts(_LENGTHS)
    # Local hits that end before the connector's, and within its blocks.
    prompts += [[*prompts[-1][:40], 3, 4, 5], [*prompts[-2], *prompts[0]]]
    for _ in range(2):
        with crashes_in(report), fake_engine(case, subject, folder, report) as engine:
            for _ in range(2):
                if not _run_prompts(engine, prompts):
                    return report
                engine.forget_prefixes()
            engine.check_end()
    if subject.expect in ("nothing", "peer"):
        if report.num_loaded:
            report.add("unexpected load", f"{report.num_loaded} tokens were loaded")
    elif not report.num_loaded:
        report.add(
            "no hit",
            f"{4 * sum(map(len, prompts))} tokens were asked for, most of them four "
            "times, and none was loaded: is the same prompt found again, by another "
            "engine with the same configuration too?",
        )
    return report


def check_pair(case: Case, subject: Subject, folder: Path) -> Report:
    """One engine computes prompts, and the other goes on with its pages: bytes and
    blocks of both. Does nothing for connectors that need no peer."""
    report = Report()
    if subject.expect != "peer":
        return report
    with (
        crashes_in(report),
        fake_engine(case, subject, folder, report) as first,
        fake_engine(case, subject, folder, report) as second,
    ):
        prompts = random_prompts(_LENGTHS)
        wish = {"do_remote_decode": True, "do_remote_prefill": False}
        ids = [first.add(prompt, 1, kv_transfer_params=wish) for prompt in prompts]
        first.passed_on.update(ids)
        while first.alive:
            first.step()
        for request_id, prompt in zip(ids, prompts, strict=True):
            told = first.told[request_id]
            if told is None and len(prompt) > BLOCK:
                report.add(
                    "nothing told",
                    f"request {request_id} of {len(prompt)} tokens with {wish} ended "
                    "without kv_transfer_params: nobody can go on with it",
                )
            second.add(prompt, kv_transfer_params=told)
        if second.run(first) and first.run(second):
            for engine in (first, second):
                engine.forget_prefixes()
                engine.check_end()
    if not report.num_loaded:
        report.add("no hit", "the second engine loaded nothing of the first")
    return report


def check_pressure(
    case: Case, subject: Subject, folder: Path, num_requests: int = 60
) -> Report:
    """A pool of two requests' size, aborts at any time: nothing is lost or wrong."""
    report, rng = Report(), random.Random(case.name)
    shared = random_prompts([30, 50, 64], seed=7)
    tails = random_prompts([rng.randrange(1, 30) for _ in range(num_requests)], seed=8)
    prompts = [rng.choice(shared) + tail for tail in tails]
    num_groups = 2 if case.kind in ("window", "states") else 1
    per_request = -(-(64 + 30 + NUM_TOKENS) // BLOCK) + 1
    pool = {
        "num_gpu_blocks_override": 1 + 2 * num_groups * per_request,
        "max_model_len": 112,
    }
    with (
        crashes_in(report),
        fake_engine(case, subject, folder, report, **pool) as engine,
    ):
        deadline = time.monotonic() + _MOST_SECONDS
        while prompts or engine.alive:
            if time.monotonic() > deadline:
                engine._tell_deadlock()
                return report
            while prompts and len(engine.alive) < 6:
                engine.add(prompts.pop())
            engine.step()
            if engine.alive and rng.random() < 0.05:
                engine.abort(rng.choice(sorted(engine.alive)))
        if engine.run():
            engine.forget_prefixes()
            engine.check_end()
    return report
