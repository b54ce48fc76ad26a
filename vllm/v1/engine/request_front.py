"""From a caller's prompt to the core's requests: what both engines do on arrival."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.config import VllmConfig
from vllm.inputs import PromptType
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.input_processor import (
    InputProcessor,
    load_found,
    look_for_tokenizer,
)
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats


def start_core(
    vllm_config: VllmConfig,
    executor_class: type | None,
    log_stats: bool,
    **kind: Any,
) -> tuple[EngineCoreClient, Any]:
    """A core of this `kind` (see `make_client`), and the tokenizer or None, which a
    thread loads while the core starts. No core is left when this raises."""
    found = look_for_tokenizer(vllm_config.model_config)
    with ThreadPoolExecutor(max_workers=1) as pool:
        tokenizer = pool.submit(load_found, found)
        client = EngineCoreClient.make_client(
            vllm_config, executor_class, log_stats, **kind
        )
    try:
        return client, tokenizer.result()
    except BaseException:
        client.shutdown()
        raise


class RequestFront:
    """The part that both engines share: from a prompt to the core's requests."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        client: EngineCoreClient,
        tokenizer: Any,
        log_stats: bool = True,
    ) -> None:
        self.client = client
        self.input_processor = InputProcessor(vllm_config, tokenizer)
        self.output_processor = OutputProcessor(
            tokenizer,
            log_stats,
            stream_interval=vllm_config.scheduler_config.stream_interval,
        )

    def add(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        queue: RequestOutputCollector | None = None,
        **options: Any,
    ) -> None:
        """Checks a request and sends it to the core, as n requests where n
        continuations are asked for. When this raises, nothing of it is left
        anywhere."""
        self.output_processor.check_is_new(request_id)
        prepared = self.input_processor.process_inputs(
            request_id, prompt, params, **options
        )
        self.send(prepared, queue)

    def send(
        self,
        prepared: tuple[str | None, EngineCoreRequest],
        queue: RequestOutputCollector | None = None,
    ) -> None:
        """The second half of `add`, for what `input_processor.process_inputs` gave,
        which any thread may call."""
        text, request = prepared
        request_id, outputs = request.request_id, self.output_processor
        outputs.check_is_new(request_id)
        complete = request.sampling_params
        if complete is None or complete.n == 1:
            pairs = [(request_id, complete)]
            parent = None
        else:
            parent = ParentRequest(request_id, complete)
            pairs = [
                (c, parent.child_params(i)) for i, c in enumerate(parent.child_ids)
            ]
        try:
            for index, (child_id, child_params) in enumerate(pairs):
                request.request_id = child_id
                request.sampling_params = child_params
                outputs.add_request(request, text, parent, index, queue)
                self.client.add_request(request)
                request = _copy(request)
        except BaseException:
            self.abort([request_id])
            raise

    def abort(
        self, request_ids: Sequence[str], stats: IterationStats | None = None
    ) -> list[RequestOutput]:
        """Ends requests; returns the last outputs of those without a queue."""
        core_ids, last = self.output_processor.abort_requests(request_ids, stats)
        self.client.abort_requests(core_ids)
        return last


def _copy(request: Any) -> Any:
    """Another message of the same content: an in-process core keeps the first one."""
    return type(request)(
        *(getattr(request, name) for name in request.__struct_fields__)
    )
