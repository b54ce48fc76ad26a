"""Latent attention over pages equals naive attention over expanded, decoded latents."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.v1.attention.paged_batch import UNUSED_BLOCK, naive_attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import reference
from vllm.v1.attention.backends.mla.common import MLACommonBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.mla.reference import MLAReferenceImpl
from vllm.v1.attention.ops import cpu_kernels, cpu_latent
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.kv_formats import KVScales, all_formats, by_name

LATENT_FORMATS = [fmt.name for fmt in all_formats() if fmt.latent_capable]
HEADS, NOPE, V, BLOCK = 3, 24, 20, 16
REAL = (512, 64)
SMALL = (48, 16)
# (tokens of this step, tokens cached after it)
MIXED = [(1, 40), (33, 33), (1, 7), (9, 57), (5, 5), (1, 1)]


class LatentBatch:
    """Random latents written in two steps into pages full of noise."""

    backend: type[MLACommonBackend] = CPUMLABackend

    def __init__(
        self,
        name: str,
        requests: list[tuple[int, int]],
        sizes: tuple[int, int] = SMALL,
        dtype: torch.dtype = torch.float32,
        scales: KVScales | None = None,
        flat_heads: bool = True,
        torch_only: bool = False,
        **impl: Any,
    ) -> None:
        self.lora, self.rope = sizes
        self.requests, self.dtype = requests, dtype
        self.scales = scales or KVScales()
        self.generator = torch.Generator().manual_seed(5)
        self.fmt = by_name(name).resolve(dtype)
        self.window = impl.get("sliding_window")
        impl_cls: Any = MLAReferenceImpl if torch_only else self.backend.get_impl_cls()
        self.impl = impl_cls(
            HEADS,
            self.lora + self.rope,
            0.11,
            kv_cache_dtype=name,
            kv_lora_rank=self.lora,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=self.rope,
            v_head_dim=V,
            **impl,
        )
        weight = self._random(HEADS, NOPE + V, self.lora) * self.lora**-0.5
        self.layer = SimpleNamespace(
            layer_name="layer",
            kv_cache_dtype=name,
            _k_scale_float=self.scales.k,
            _v_scale_float=self.scales.v,
            W_KV=weight,
            W_UK_T=weight[:, :NOPE],
            W_UV=weight[:, NOPE:].transpose(1, 2),
        )
        self.latents = [self._random(c, 1, self.lora + self.rope) for _, c in requests]
        self.queries = [self._random(n, HEADS, NOPE + self.rope) for n, _ in requests]
        self._allocate(flat_heads)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def _allocate(self, flat_heads: bool) -> None:
        size = self.lora + self.rope
        self.spec = MLAAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=1,
            head_size=size,
            dtype=self.fmt.storage_dtype(self.dtype),
            kv_quant_mode=self.fmt.mode,
        ).packed(self.fmt, self.dtype)
        widths = [-(-c // BLOCK) for _, c in self.requests]
        num_blocks = sum(widths) + 2
        shape = (num_blocks, BLOCK, self.spec.state_content_size_bytes)
        noise = torch.randint(
            0, 256, shape, generator=self.generator, dtype=torch.uint8
        )
        self.kv_cache = noise.view(self.spec.dtype)
        if not flat_heads:
            self.kv_cache = self.kv_cache.unsqueeze(1)
        order = torch.randperm(num_blocks, generator=self.generator).int()
        table = torch.full((len(widths), max(widths) + 1), UNUSED_BLOCK)
        self.block_table, used = table.int(), 0
        for row, width in enumerate(widths):
            self.block_table[row, :width] = order[used : used + width]
            used += width

    def _slots(self, row: int, start: int, end: int) -> torch.Tensor:
        at = torch.arange(start, end)
        return self.block_table[row].long()[at // BLOCK] * BLOCK + at % BLOCK

    def _store(self, row: int, start: int, end: int) -> None:
        self.impl.do_kv_cache_update(
            self.layer,
            self.latents[row][start:end],
            None,
            self.kv_cache,
            self._slots(row, start, end),
        )

    def run(self) -> torch.Tensor:
        """[T, Hq, V] of this step's tokens."""
        for row, (query_len, context) in enumerate(self.requests):
            if context > query_len:
                self._store(row, 0, context - query_len)
            self._store(row, context - query_len, context)
        starts = torch.tensor([0, *(n for n, _ in self.requests)]).cumsum(0).int()
        slots = [self._slots(r, c - n, c) for r, (n, c) in enumerate(self.requests)]
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([c for _, c in self.requests], dtype=torch.int32),
            num_reqs=len(self.requests),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(n for n, _ in self.requests),
            max_seq_len=max(c for _, c in self.requests),
            block_table_tensor=self.block_table,
            slot_mapping=torch.cat(slots),
        )
        builder = self.backend.get_builder_cls()(
            self.spec, ["layer"], None, torch.device("cpu")
        )
        query = torch.cat(self.queries)
        output = query.new_full((len(query), HEADS, V), torch.nan)
        metadata = builder.build(0, common)
        return self.impl.forward(
            self.layer, query, None, None, self.kv_cache, metadata, output
        )

    def expected(self) -> torch.Tensor:
        rows = []
        for query, latent, (query_len, context) in zip(
            self.queries, self.latents, self.requests, strict=True
        ):
            stored, _ = self.fmt.roundtrip(latent, None, self.scales)
            both = torch.einsum(
                "tl,hol->tho",
                stored[:, 0, : self.lora].double(),
                self.layer.W_KV.double(),
            )
            rope = stored[..., self.lora :].double().expand(-1, HEADS, -1)
            rows.append(
                naive_attention(
                    query,
                    torch.cat([both[..., :NOPE], rope], dim=-1),
                    both[..., NOPE:],
                    first_position=context - query_len,
                    scale=0.11,
                    sliding_window=self.window,
                )
            )
        return torch.cat(rows)


@pytest.mark.parametrize("name", LATENT_FORMATS)
@pytest.mark.parametrize("absorb_up_to", [1, 8, 1 << 30])
@pytest.mark.parametrize("torch_only", [True, False], ids=["torch", "kernels"])
def test_both_forms_attend_to_decoded_latents(
    name: str, absorb_up_to: int, torch_only: bool
) -> None:
    batch = LatentBatch(name, MIXED, REAL, torch_only=torch_only)
    batch.impl.absorb_up_to = absorb_up_to
    torch.testing.assert_close(
        batch.run().double(), batch.expected(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.skipif(not cpu_kernels.available(), reason="no compiled kernels")
@pytest.mark.parametrize("name", LATENT_FORMATS)
def test_every_format_has_a_kernel_for_the_real_latent(name: str) -> None:
    assert cpu_latent.serves(by_name(name).resolve(torch.bfloat16), sum(REAL), REAL[0])


@pytest.mark.parametrize("flat_heads", [True, False])
def test_the_axis_of_the_single_head_is_optional(flat_heads: bool) -> None:
    batch = LatentBatch("auto", MIXED, flat_heads=flat_heads)
    torch.testing.assert_close(
        batch.run().double(), batch.expected(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("absorb_up_to", [1, 1 << 30], ids=["expanded", "absorbed"])
def test_the_result_does_not_depend_on_how_much_memory_a_chunk_may_take(
    absorb_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LatentBatch("int8_per_token_head", [(50, 170), (1, 90)])
    whole.impl.absorb_up_to = absorb_up_to
    expected = whole.run()
    sizes = HEADS * (NOPE + SMALL[1] + V) * 4
    monkeypatch.setattr(reference, "_MAX_EXPANDED_BYTES", 40 * sizes)
    pieces = LatentBatch("int8_per_token_head", [(50, 170), (1, 90)])
    pieces.impl.absorb_up_to = absorb_up_to
    assert pieces.impl._max_chunk_states(50) == (40 if absorb_up_to == 1 else 8192)
    torch.testing.assert_close(pieces.run(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [1, 8, 17])
@pytest.mark.parametrize("absorb_up_to", [1, 1 << 30], ids=["expanded", "absorbed"])
def test_windows(window: int, absorb_up_to: int) -> None:
    batch = LatentBatch("auto", MIXED, sliding_window=window)
    batch.impl.absorb_up_to = absorb_up_to
    torch.testing.assert_close(
        batch.run().double(), batch.expected(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("sizes", [SMALL, REAL])
def test_a_layers_scale_applies_to_the_latent(
    name: str, sizes: tuple[int, int]
) -> None:
    batch = LatentBatch(name, MIXED, sizes, scales=KVScales(k=0.37, v=5.0))
    torch.testing.assert_close(
        batch.run().double(), batch.expected(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("absorb_up_to", [1, 1 << 30], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("torch_only", [True, False], ids=["torch", "kernels"])
@pytest.mark.parametrize("name", ["auto", "int4_per_token_head"])
def test_16_bit_models(
    name: str, dtype: torch.dtype, absorb_up_to: int, torch_only: bool
) -> None:
    batch = LatentBatch(name, MIXED, REAL, dtype, torch_only=torch_only)
    batch.impl.absorb_up_to = absorb_up_to
    found, expected = batch.run(), batch.expected()
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() < 0.02 * expected.abs().max()


def test_long_queries_are_expanded_and_short_ones_absorbed() -> None:
    assert CPUMLABackend.get_impl_cls() is CPUMLAImpl
    impl = CPUMLAImpl(
        128,
        576,
        1.0,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    q = impl.absorb_up_to

    def absorbed(n: int) -> int:
        return n * (2 * 512 + 64)

    def expanded(n: int) -> int:
        return n * (128 + 64 + 128) + 512 * (128 + 128)

    assert absorbed(q) <= expanded(q) and absorbed(q + 1) > expanded(q + 1)
