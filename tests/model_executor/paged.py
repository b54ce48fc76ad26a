"""Runs a model over real pages, without an engine: one request, one block table."""

import torch

from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_formats import by_name
from vllm.v1.page_planning import packed_spec

BLOCK_SIZE = 16


class PagedRunner:
    """Holds the pages of one request; `step` feeds its next tokens."""

    def __init__(
        self, model: torch.nn.Module, vllm_config: VllmConfig, max_tokens: int
    ) -> None:
        self.model, self.config = model, vllm_config
        self.layers = vllm_config.compilation_config.static_forward_context
        self.num_blocks = -(-max_tokens // BLOCK_SIZE)
        # Blocks in reverse, so that a wrong block table is noticed.
        self.blocks = torch.arange(self.num_blocks - 1, -1, -1, dtype=torch.int32)
        self.done = 0
        self.specs = {}
        for name, layer in self.layers.items():
            raw = layer.get_kv_cache_spec(vllm_config)
            spec = packed_spec(
                layer.attn_backend,
                raw,
                by_name(layer.kv_cache_dtype),
                name,
                layer.model_dtype,
            )
            self.specs[name] = spec = spec.copy_with_new_block_size(BLOCK_SIZE)
            shape = (
                self.num_blocks,
                spec.num_heads,
                spec.num_states,
                spec.state_content_size_bytes,
            )
            pages = torch.zeros(shape, dtype=torch.uint8)
            layer.kv_cache = pages.view(spec.dtype)

    @torch.inference_mode()
    def step(self, ids: list[int]) -> torch.Tensor:
        """Logits [len(ids), vocabulary] of the next tokens of the request."""
        start, end = self.done, self.done + len(ids)
        positions = torch.arange(start, end)
        slots = self.blocks[positions // BLOCK_SIZE].long() * BLOCK_SIZE
        slots += positions % BLOCK_SIZE
        starts = torch.tensor([0, len(ids)], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([end], dtype=torch.int32),
            num_reqs=1,
            num_actual_tokens=len(ids),
            max_query_len=len(ids),
            max_seq_len=end,
            block_table_tensor=self.blocks[None],
            slot_mapping=slots,
        )
        metadata = {}
        for name, layer in self.layers.items():
            builder = layer.attn_backend.get_builder_cls()(
                self.specs[name], [name], self.config, torch.device("cpu")
            )
            metadata[name] = builder.build(0, common)
        with set_forward_context(
            metadata, self.config, slot_mapping=dict.fromkeys(self.layers, slots)
        ):
            hidden = self.model(torch.tensor(ids), positions)
        self.done = end
        return self.model.compute_logits(hidden)
