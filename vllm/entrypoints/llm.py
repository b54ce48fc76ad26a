"""Offline use: prompts in, continuations out, in one call.

Knows prompts and parameters; everything else is the engine's.
"""

import difflib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import PromptType, TokensPrompt
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.transformers_utils.chat_template import load_chat_template, render_chat
from vllm.utils.text_utils import short_repr
from vllm.v1.engine.input_processor import check_text
from vllm.v1.engine.llm_engine import LLMEngine

logger = init_logger(__name__)

# Arguments that callers of other releases pass, and that nothing here acts on.
_WITHOUT_EFFECT = frozenset(
    {
        "allowed_local_media_path",
        "compilation_config",
        "config_format",
        "cpu_offload_gb",
        "disable_async_output_proc",
        "disable_custom_all_reduce",
        "limit_mm_per_prompt",
        "max_seq_len_to_capture",
        "mm_processor_kwargs",
        "swap_space",
    }
)

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, ready to generate. Arguments are those of EngineArgs.

    `kv_cache_memory_bytes` takes a number or a size such as "256MiB". Raises
    ValueError, in one sentence, for what cannot be served.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: Any = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        seed: int = 0,
        max_model_len: int | None = None,
        kv_cache_dtype: str = "auto",
        kv_cache_memory_bytes: int | str | None = None,
        gpu_memory_utilization: float = 0.92,
        block_size: int | None = None,
        enable_prefix_caching: bool = True,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enforce_eager: bool = False,
        disable_log_stats: bool = True,
        **kwargs: Any,
    ) -> None:
        given = {
            name: value
            for name, value in locals().items()
            if name not in ("self", "kwargs", "__class__")
        }
        engine_args = EngineArgs(**given, **_known(kwargs))
        self.llm_engine = LLMEngine.from_engine_args(engine_args)
        self._request_ids = itertools.count()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer; None with skip_tokenizer_init."""
        return self.llm_engine.get_tokenizer()

    @property
    def model_config(self) -> Any:
        return self.llm_engine.model_config

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that the checkpoint recommends."""
        return SamplingParams.from_optional(
            **self.model_config.get_diff_sampling_param()
        )

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: LoRARequest | None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt: text, token ids, or a dict of either.

        One SamplingParams serves all prompts, a list one each; None is
        `get_default_sampling_params()`. Returns one output per prompt, in their order.
        Raises VLLMValidationError, before anything is computed, when a prompt or its
        parameters cannot be served.
        """
        given = _as_prompts(prompts)
        params = self._params_per_prompt(sampling_params, len(given))
        if priority is not None and len(priority) != len(given):
            raise ValueError(
                f"{len(priority)} priorities for {len(given)} prompts: give one each"
            )
        ids = self._add_all(given, params, lora_request, priority, tokenization_kwargs)
        return self._run(ids, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: LoRARequest | None = None,
        chat_template: str | Path | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of a list of them.

        `chat_template` is a template or the path of one; the model's own by default.
        """
        tokenizer = self.get_tokenizer()
        if tokenizer is None:
            raise ValueError("chat needs a tokenizer: leave out skip_tokenizer_init")
        template = load_chat_template(chat_template)
        prompts = []
        for conversation in _as_conversations(messages):
            text = render_chat(
                tokenizer,
                conversation,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            check_text(text, "messages")
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append(TokensPrompt(prompt_token_ids=ids, prompt=text))
        return self.generate(prompts, sampling_params, use_tqdm, lora_request)

    def beam_search(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Not built in: always raises ValueError."""
        raise ValueError(
            "beam search is not supported: use generate with SamplingParams(n=...) and "
            "choose by cumulative_logprob"
        )

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forgets cached prefixes; False while blocks are in use."""
        return self.llm_engine.reset_prefix_cache(
            reset_running_requests, reset_connector
        )

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of every worker, or `method(worker, …)` where the core runs in
        this process; results in order of rank."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Calls `func(model)` where each worker keeps its model; results by rank.

        Raises ValueError when the engine core runs in another process, which functions
        do not reach.
        """
        if not self.llm_engine.runs_in_process:
            raise ValueError(
                "apply_model needs the engine core in this process: set "
                "VLLM_ENABLE_V1_MULTIPROCESSING=0"
            )
        return self.collective_rpc("apply_model", args=(func,))

    def shutdown(self) -> None:
        """Stops the engine and frees its memory."""
        self.llm_engine.shutdown()

    # --- inside -----------------------------------------------------------------------

    def _params_per_prompt(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [_final_only(params)] * count
        if not isinstance(params, Sequence) or not all(
            isinstance(one, SamplingParams) for one in params
        ):
            raise ValueError(
                f"sampling_params {short_repr(params)} are not supported: expected "
                "SamplingParams, or a list with one for each prompt"
            )
        if len(params) != count:
            raise ValueError(
                f"{len(params)} sampling_params for {count} prompts: give one for all, "
                "or one each"
            )
        return [_final_only(p) for p in params]

    def _add_all(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams],
        lora_request: LoRARequest | None,
        priority: Sequence[int] | None,
        tokenization_kwargs: dict[str, Any] | None,
    ) -> list[str]:
        """Adds every prompt, or none of them."""
        ids: list[str] = []
        try:
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                request_id = str(next(self._request_ids))
                self.llm_engine.add_request(
                    request_id,
                    prompt,
                    one,
                    lora_request=lora_request,
                    tokenization_kwargs=tokenization_kwargs,
                    priority=priority[i] if priority else 0,
                )
                ids.append(request_id)
        except BaseException:
            self.llm_engine.abort_request(ids)
            raise
        return ids

    def _run(
        self, ids: Sequence[str], use_tqdm: bool | Callable[..., tqdm]
    ) -> list[RequestOutput]:
        """Steps until the requests have ended; leaves none behind when interrupted."""
        outputs: dict[str, RequestOutput] = {}
        progress = _Progress(len(ids), use_tqdm)
        try:
            while len(outputs) < len(ids):
                for output in self.llm_engine.step():
                    if output.finished:
                        outputs[output.request_id] = output
                        progress.add(output)
        except BaseException:
            self.llm_engine.abort_request([i for i in ids if i not in outputs])
            raise
        finally:
            progress.close()
        return [outputs[request_id] for request_id in ids]


class _Progress:
    """A bar of finished prompts, with token rates."""

    def __init__(self, total: int, use_tqdm: bool | Callable[..., tqdm]) -> None:
        self._bar: Any = None
        self._num_input = self._num_output = 0
        if use_tqdm:
            make = use_tqdm if callable(use_tqdm) else tqdm
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)

    def add(self, output: RequestOutput) -> None:
        if self._bar is None:
            return
        self._num_input += len(output.prompt_token_ids or ())
        self._num_output += sum(len(c.token_ids) for c in output.outputs)
        seconds = max(self._bar.format_dict["elapsed"], 1e-9)
        self._bar.set_postfix_str(
            f"input {self._num_input / seconds:.1f} tokens/s, "
            f"output {self._num_output / seconds:.1f} tokens/s",
            refresh=False,
        )
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _final_only(params: SamplingParams) -> SamplingParams:
    """The same parameters for an output that comes once, at the end."""
    params = params.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def _as_prompts(prompts: Any) -> list[PromptType]:
    """A list of prompts: a text, a dict or a list of token ids is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    is_bytes = isinstance(prompts, (bytes, bytearray, memoryview))
    if is_bytes or not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts of type {type(prompts).__name__} are not supported: expected "
            "text, token ids, a prompt dict, or a list of these"
            + ("; decode them" if is_bytes else "")
        )
    given = list(prompts)
    if given and all(isinstance(item, int) for item in given):
        return [given]
    return given


def _as_conversations(messages: Any) -> list[Messages]:
    """A list of conversations: a list of messages is one."""

    def is_conversation(given: Any) -> bool:
        return isinstance(given, (list, tuple)) and all(
            isinstance(message, Mapping) for message in given
        )

    if messages and is_conversation(messages):
        return [messages]
    if isinstance(messages, (list, tuple)) and all(map(is_conversation, messages)):
        return list(messages)
    raise ValueError(
        f"messages {short_repr(messages)} are no conversation: expected a list of "
        "messages such as [{'role': 'user', 'content': 'Hello'}], or a list of such "
        "lists"
    )


def _known(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the engine has; those without effect are named once."""
    idle = sorted(_WITHOUT_EFFECT & set(kwargs))
    if idle:
        logger.warning_once("LLM: %s accepted, without effect here", ", ".join(idle))
    names = [field.name for field in fields(EngineArgs)]
    known = {k: v for k, v in kwargs.items() if k not in _WITHOUT_EFFECT}
    for name in known:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f": did you mean {close[0]}?" if close else ": leave it out"
            raise ValueError(f"LLM has no argument {name!r}{hint}")
    return known
