"""An engine's workers without a model: layers that store states and read them back.

Knows what the real worker does around a forward pass, and does the same. What is wrong
is reported in words; nothing is raised for it.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.testing.kv_connector.cases import Case, in_rows
from vllm.testing.kv_connector.diagnosis import Read, wrong_states
from vllm.testing.kv_connector.report import Report
from vllm.testing.kv_connector.states import (
    AttentionStates,
    RecurrentStates,
    extend,
    names_of,
    picks,
)
from vllm.testing.kv_connector.watch import WorkerWatch
from vllm.v1.attention.ops.blocks import BlockCopier
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.kv_cache_init import (
    allocate_pages,
    byte_view,
    is_recurrent,
    state_views,
    typed_view,
)
from vllm.v1.worker.kv_connector import ConnectorSteps

VOCABULARY = 900


def next_token(name: int) -> int:
    """What the model that does not exist says after a prefix."""
    return 2 + name % VOCABULARY


@dataclass
class KnownRequest:
    """What a worker knows of a request. `names` are those of its prefixes."""

    tokens: list[int]
    block_ids: list[list[int]]
    names: list[int] = field(default_factory=list)

    def refresh(self) -> None:
        if not self.names:
            self.names = names_of(self.tokens)
        for token in self.tokens[len(self.names) :]:
            self.names.append(extend(self.names[-1], token))


class FakeLayer(nn.Module):
    """Stores the states of a step's tokens, then reads what attention would read."""

    def __init__(
        self,
        name: str,
        index_of: dict[str, int],
        spec: Any,
        states: AttentionStates | RecurrentStates,
        complain: Callable[[Callable[[], str | None]], None],
        requests: Callable[[], Iterator[tuple[str, list[int]]]],
    ) -> None:
        super().__init__()
        self.layer_name, self.index_of, self.states = name, index_of, states
        self.window = getattr(spec, "sliding_window", None)
        self.complain, self.requests = complain, requests

    def forward(self, reads: Sequence[Read]) -> torch.Tensor:
        """`first` of a read is where its new tokens start."""
        if isinstance(self.states, AttentionStates):
            self._attend(self.states, reads)
        else:
            self._go_on(self.states, reads)
        return torch.empty(0)

    def _attend(self, states: AttentionStates, reads: Sequence[Read]) -> None:
        index = self.index_of[self.layer_name]
        new = [states.slots(r.block_ids, r.first, r.end) for r in reads]
        names = [name for r in reads for name in r.names[r.first : r.end]]
        states.write(torch.cat(new), picks(names, index))
        whole = [replace(r, first=self._first_read(r.first)) for r in reads]
        slots = [states.slots(r.block_ids, r.first, r.end) for r in whole]
        names = [name for r in whole for name in r.names[r.first : r.end]]
        if states.holds(torch.cat(slots), picks(names, index)):
            return
        for read in whole:
            self.complain(
                partial(
                    wrong_states,
                    self.layer_name,
                    states,
                    self.index_of,
                    read,
                    self.requests,
                )
            )

    def _first_read(self, position: int) -> int:
        """The first token that attention at a position reads."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def _go_on(self, states: RecurrentStates, reads: Sequence[Read]) -> None:
        index = self.index_of[self.layer_name]
        for read in reads:
            before = read.first - 1
            if before < 0:
                continue
            block_id = read.block_ids[states.place(before)]
            (wanted,) = picks(read.names[before : before + 1], index).tolist()
            if not states.matches(block_id, wanted):
                self.complain(partial(self._wrong_start, states, read, block_id))
        for read in reads:
            for position in states.positions(read.first, read.end):
                (chosen,) = picks(read.names[position : position + 1], index).tolist()
                states.write(read.block_ids[states.place(position)], chosen)

    def _wrong_start(self, states: RecurrentStates, read: Read, block_id: int) -> str:
        return (
            f"layer {self.layer_name} goes on from a wrong recurrent state of request "
            f"{read.request_id}, after token {read.first - 1}, in block {block_id}: "
            f"{self._whose(states, block_id)}"
        )

    def _whose(self, states: RecurrentStates, block_id: int) -> str:
        held = states.held(block_id)
        for request_id, names in self.requests():
            for other, index in self.index_of.items():
                found = picks(names, index).tolist()
                if held in found:
                    return (
                        f"it may be that of layer {other}, of request {request_id}, "
                        f"after token {found.index(held)}"
                    )
        return "it is none that this engine stored"


class FakeWorker:
    """Pages in memory, a connector, and layers instead of a model."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        case: Case,
        plan: KVCacheConfig,
        report: Report,
        compares: bool,
    ) -> None:
        self.vllm_config, self.report = vllm_config, report
        self.compares = compares
        self.requests: dict[str, KnownRequest] = {}
        self.everyone: dict[str, list[int]] = {}
        self.loaded: dict[str, range] = {}
        self.group_of = {
            name: group_id
            for group_id, group in enumerate(plan.kv_cache_groups)
            for name in group.layer_names
        }
        connector = KVConnectorFactory.create_connector(
            vllm_config, KVConnectorRole.WORKER, plan
        )
        self.watch = WorkerWatch(connector, report)
        self.steps = ConnectorSteps(connector)
        with connector.get_mem_pool_context():
            self.caches, self.layers = self._make_layers(case, plan)
        context = vllm_config.compilation_config.static_forward_context
        context.clear()
        context.update(self.layers)
        self.steps.register(self.caches, self.layers)

    def _make_layers(
        self, case: Case, plan: KVCacheConfig
    ) -> tuple[dict[str, Any], dict[str, FakeLayer]]:
        index_of = {name: i for i, name in enumerate(self.group_of)}
        caches: dict[str, Any] = {}
        layers: dict[str, FakeLayer] = {}
        generator = torch.Generator().manual_seed(3)
        for name, pages in allocate_pages(plan, torch.device("cpu")).items():
            # What nobody wrote is told from everything else.
            backing = pages.backing.view(torch.uint8)
            backing.random_(0, 256, generator=generator)
            states: AttentionStates | RecurrentStates
            if is_recurrent(pages.spec):
                caches[name] = state_views(pages)
                states = RecurrentStates(pages.spec, caches[name])
            else:
                view = byte_view(pages, case.layout)
                caches[name] = typed_view(view, pages.spec.dtype, name)
                states = AttentionStates(case.fmt, pages.spec, view)
            layers[name] = FakeLayer(
                name, index_of, pages.spec, states, self.complain, self._prefixes
            )
        return {name: caches[name] for name in self.group_of}, layers

    def complain(self, text: Callable[[], str | None]) -> None:
        """Reports wrong bytes, unless the connector's are its own anyway. The words are
        found when they are wanted: looking whose bytes these are takes long."""
        if not self.compares:
            return
        if self.report.is_full("wrong bytes"):
            self.report.add("wrong bytes", "")
        elif (words := text()) is not None:
            self.report.add("wrong bytes", words)

    def _prefixes(self) -> Iterator[tuple[str, list[int]]]:
        yield from self.everyone.items()

    # --- a step -----------------------------------------------------------------------

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """One step, as the real worker does it."""
        self.steps.handle_preemptions(step)
        for request_id in step.finished_req_ids:
            self.requests.pop(request_id, None)
            self.loaded.pop(request_id, None)
        starts = self._take_in(step)
        self._prepare_blocks(step)
        if not step.total_num_scheduled_tokens:
            news = self.steps.without_forward(step)
            return ModelRunnerOutput(
                **(vars(EMPTY_MODEL_RUNNER_OUTPUT) | {"kv_connector_output": news})
            )
        metadata = dict.fromkeys(self.layers, step)
        with (
            set_forward_context(metadata, self.vllm_config) as context,
            self.steps.around_forward(step, context) as news,
        ):
            for name, layer in self.layers.items():
                layer(self._reads(name, step, starts))
        rows = [
            self._sample(request_id, starts[request_id] + num_tokens)
            for request_id, num_tokens in step.num_scheduled_tokens.items()
        ]
        ids = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=rows,
            kv_connector_output=news,
        )

    def _prepare_blocks(self, step: SchedulerOutput) -> None:
        tensors = {
            tensor.data_ptr(): tensor
            for cache in self.caches.values()
            for tensor in (cache if isinstance(cache, list) else [cache])
        }
        for tensor in tensors.values():
            for block_id in step.new_block_ids_to_zero or ():
                tensor[block_id] = 0
        BlockCopier(list(tensors.values())).copy(step.kv_cache_block_copies or [])

    def _take_in(self, step: SchedulerOutput) -> dict[str, int]:
        """Learns of requests; where each of the step's requests starts."""
        starts = {}
        for new in step.scheduled_new_reqs:
            prompt = list(new.prompt_token_ids or [])
            groups = [list(group) for group in new.block_ids]
            self.requests[new.req_id] = KnownRequest(prompt, groups)
            starts[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            request, blocks = self.requests[request_id], cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                request.tokens = list(cached.all_token_ids[request_id])
                request.names = []
                request.block_ids = [list(group) for group in blocks or ()]
            elif blocks is not None:
                for group, ids in zip(request.block_ids, blocks, strict=True):
                    group.extend(ids)
            starts[request_id] = cached.num_computed_tokens[i]
        for request_id in starts:
            request = self.requests[request_id]
            request.refresh()
            self.everyone[request_id] = request.names
        return starts

    def _reads(
        self, name: str, step: SchedulerOutput, starts: Mapping[str, int]
    ) -> list[Read]:
        return [
            Read(
                request_id=request_id,
                block_ids=self.requests[request_id].block_ids[self.group_of[name]],
                names=self.requests[request_id].names,
                first=starts[request_id],
                end=starts[request_id] + num_tokens,
                loaded=self.loaded.get(request_id, range(0)),
            )
            for request_id, num_tokens in step.num_scheduled_tokens.items()
        ]

    def _sample(self, request_id: str, end: int) -> list[int]:
        request = self.requests[request_id]
        if end < len(request.tokens):
            return []
        token = next_token(request.names[end - 1])
        request.tokens.append(token)
        return [token]


class FakeExecutor(Executor):
    """One fake worker, as if it were in another process: what it is told and what it
    answers is pickled on the way."""

    def __init__(
        self, vllm_config: VllmConfig, case: Case, report: Report, compares: bool
    ) -> None:
        self.case, self.report, self.compares = case, report, compares
        self.worker: FakeWorker | None = None
        super().__init__(vllm_config)

    def _init_executor(self) -> None:
        return

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        raise NotImplementedError(f"a fake worker does not know {method}")

    def check_health(self) -> None:
        return

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [self.case.specs()]

    def get_layer_formats(self) -> dict[str, str]:
        return self.case.layer_formats()

    def get_kv_cache_layout(self) -> str | None:
        return self.case.layout.name

    def determine_available_memory(self) -> list[int]:
        return [self.vllm_config.cache_config.kv_cache_memory_bytes or 0]

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any]:
        told = self._worker.steps.connector.get_handshake_metadata()
        return {} if told is None else {(0, 0): told}

    @property
    def _worker(self) -> FakeWorker:
        if self.worker is None:
            raise RuntimeError("the fake worker has no plan yet")
        return self.worker

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        self._initialize_workers(kv_cache_configs)

    def _initialize_workers(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        (plan,) = kv_cache_configs
        is_apart = not any(tensor.block_stride for tensor in plan.kv_cache_tensors)
        if self.case.layout.block_outermost and is_apart:
            plan = in_rows(plan)
        plan.kv_cache_layout = self.case.layout.name
        self.worker = FakeWorker(
            self.vllm_config, self.case, plan, self.report, self.compares
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        step = self._sent(scheduler_output, "the orders of a step")
        return self._sent(self._worker.execute(step), "the news of a step")

    def _sent(self, message: Any, what: str) -> Any:
        try:
            return pickle.loads(pickle.dumps(message))
        except Exception as error:
            self.report.add(
                "not picklable",
                f"{what} cannot be sent to another process ({error}): workers may "
                "live in one",
            )
            return message

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.watch.shut_down()
