"""A request for n continuations: n child requests, and how their news become one."""

from vllm.outputs import CompletionOutput, PromptLogprobs
from vllm.sampling_params import RequestOutputKind, SamplingParams


class ParentRequest:
    """Fans a request out into `n` children with seeds of their own.

    Only the first child computes prompt logprobs; it also tells how much of the prompt
    was cached before this request.
    """

    def __init__(self, request_id: str, params: SamplingParams) -> None:
        self.request_id = request_id
        self.params = params
        self.child_ids = [f"{i}_{request_id}" for i in range(params.n)]
        self.unfinished_child_ids = set(self.child_ids)
        self.prompt_logprobs: PromptLogprobs | None = None
        self.num_cached_tokens: int | None = None
        self.max_num_generation_tokens = 0
        self._finals: dict[int, CompletionOutput] = {}

    @property
    def n(self) -> int:
        return self.params.n

    def child_params(self, index: int) -> SamplingParams:
        """The parameters of child `index`: one continuation, seed + index."""
        child = self.params.clone()
        child.n = 1
        if child.seed is not None:
            child.seed += index
        if index > 0 and child.prompt_logprobs is not None:
            child.prompt_logprobs = None
            child.skip_reading_prefix_cache = False
        return child

    def collect(
        self, child_id: str, output: CompletionOutput
    ) -> list[CompletionOutput]:
        """The outputs to show on this news of a child: itself, or with FINAL_ONLY all
        of them once the last has ended."""
        if output.finished():
            self.unfinished_child_ids.discard(child_id)
        if self.params.output_kind != RequestOutputKind.FINAL_ONLY:
            return [output]
        self._finals[output.index] = output
        if self.unfinished_child_ids:
            return []
        return [self._finals[index] for index in sorted(self._finals)]

    @property
    def finished(self) -> bool:
        return not self.unfinished_child_ids
