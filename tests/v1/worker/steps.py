"""A worker on a tiny model, and a scheduler simple enough to be obviously right."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.core.sched.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.executor.abstract import Executor

VOCAB = 130
MAX_LEN = 96
MiB = 1 << 20


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def save_tiny_llama(folder: Path) -> PreTrainedModel:
    """A random Llama on disk, and the same model as Hugging Face computes it."""
    config = LlamaConfig(num_hidden_layers=5, head_dim=32, **SIZES)
    return _save(LlamaForCausalLM, config, folder)


def save_tiny_qwen(folder: Path) -> PreTrainedModel:
    """The same of a Qwen2 with two global and two windowed layers."""
    config = Qwen2Config(
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=2,
        **SIZES,
    )
    return _save(Qwen2ForCausalLM, config, folder)


def _save(model_cls, config, folder: Path) -> PreTrainedModel:
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = model_cls(config).float().eval()
    for parameter in model.parameters():  # far from ties
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return model


def make_config(folder: Path, cache_dtype: str = "auto", **model) -> VllmConfig:
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            **{
                "dtype": "float32",
                "max_model_len": MAX_LEN,
                "skip_tokenizer_init": True,
                **model,
            },
        ),
        cache_config=CacheConfig(
            block_size=16, cache_dtype=cache_dtype, kv_cache_memory_bytes=4 * MiB
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_LEN, max_num_seqs=8, max_num_batched_tokens=64
        ),
        device_config=DeviceConfig(device="cpu"),
    )
    current_platform.check_and_update_config(config)
    return config


def start(config: VllmConfig) -> Executor:
    """An executor whose workers have their KV cache."""
    executor = Executor.get_class(config)(config)
    specs = executor.get_kv_cache_specs()
    memory = executor.determine_available_memory()
    executor.initialize_from_config(get_kv_cache_configs(config, specs, memory))
    return executor


@dataclass
class Seq:
    req_id: str
    prompt: list[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: tuple[list[int], ...] = ()
    known: bool = False
    resumed: bool = False

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]


class Steps:
    """Drives an executor by hand: `step({"a": 5})` computes five tokens of a."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        runner = executor.driver_worker.model_runner
        groups = runner.kv_cache_config.kv_cache_groups
        self.block_sizes = [group.kv_cache_spec.block_size for group in groups]
        # Handed out from the end, so that a wrong table is noticed.
        self.free = list(range(1, runner.kv_cache_config.num_blocks))
        self.seqs: dict[str, Seq] = {}
        self.finished: set[str] = set()
        self.preempted: set[str] = set()

    def add(self, req_id: str, prompt: list[int], **params) -> None:
        settings = SamplingParams(**{"temperature": 0.0, **params})
        self.seqs[req_id] = Seq(req_id, prompt, settings)

    def finish(self, req_id: str) -> Seq:
        seq = self.seqs.pop(req_id)
        self._free(seq)
        self.finished.add(req_id)
        return seq

    def preempt(self, req_id: str) -> None:
        seq = self.seqs[req_id]
        self._free(seq)
        seq.computed, seq.resumed = 0, True
        self.preempted.add(req_id)

    def _free(self, seq: Seq) -> None:
        for ids in seq.blocks:
            self.free += ids
        seq.blocks = ()

    def _grow(self, seq: Seq, end: int) -> tuple[list[int], ...] | None:
        """Blocks that were added, one list a group."""
        if not seq.blocks:
            seq.blocks = tuple([] for _ in self.block_sizes)
        added = tuple([] for _ in self.block_sizes)
        for ids, more, size in zip(seq.blocks, added, self.block_sizes, strict=True):
            while len(ids) * size < end:
                more.append(self.free.pop())
                ids.append(more[-1])
        return added if any(added) else None

    def schedule(self, counts: dict[str, int], **fields) -> SchedulerOutput:
        new, cached = [], CachedRequestData.make_empty()
        for req_id, count in counts.items():
            seq = self.seqs[req_id]
            added = self._grow(seq, seq.computed + count)
            if not seq.known:
                new.append(
                    NewRequestData(
                        req_id,
                        seq.prompt,
                        [],
                        seq.params,
                        None,
                        tuple(list(ids) for ids in seq.blocks),
                        seq.computed,
                        None,
                    )
                )
                seq.known = True
                continue
            cached.req_ids.append(req_id)
            cached.new_token_ids.append([])
            cached.num_computed_tokens.append(seq.computed)
            cached.num_output_tokens.append(len(seq.output))
            if seq.resumed:
                cached.resumed_req_ids.add(req_id)
                cached.all_token_ids[req_id] = seq.tokens
                added = tuple(list(ids) for ids in seq.blocks)
                seq.resumed = False
            cached.new_block_ids.append(added)
        output = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict(counts),
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0] * len(self.block_sizes),
            finished_req_ids=self.finished,
            free_encoder_mm_hashes=[],
            preempted_req_ids=self.preempted,
            **fields,
        )
        self.finished, self.preempted = set(), set()
        return output

    def step(self, counts: dict[str, int], **fields):
        output = self.executor.execute_model(self.schedule(counts, **fields))
        for req_id, count in counts.items():
            seq = self.seqs[req_id]
            complete = seq.computed + count == len(seq.tokens)
            got = output.sampled_token_ids[output.req_id_to_index[req_id]]
            assert len(got) == int(complete)
            seq.computed += count
            seq.output += got
        return output

    def run(self, num_tokens: int, chunk: int = 64) -> dict[str, list[int]]:
        """Outputs once every request has `num_tokens` of them; prompts in chunks."""
        while any(len(s.output) < num_tokens for s in self.seqs.values()):
            budget, counts = 64, {}
            for req_id, seq in self.seqs.items():
                left = len(seq.tokens) - seq.computed
                if len(seq.output) < num_tokens and budget:
                    counts[req_id] = min(left, chunk, budget)
                    budget -= counts[req_id]
            self.step(counts)
        return {req_id: seq.output for req_id, seq in self.seqs.items()}
