"""Latent attention in Triton is the format's own decoding, attended to in float64:
over whole contexts, over selected states, and through the backends."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.cpu_attention_cases import Options, visible, weigh
from tests.kernels.packed_cases import SCALES
from tests.triton.attention_cases import DEVICE, TOLERANCE, on_device
from tests.v1.attention.test_mla_attention import (
    HEADS,
    LATENT_FORMATS,
    REAL,
    LatentBatch,
)
from tests.v1.kv_formats.helpers import AXIS_ORDERS, make_pages
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.ops.triton_batch import Masks, Requests
from vllm.v1.attention.ops.triton_latent_calls import (
    latent_attention,
    serves,
    sparse_attention,
)
from vllm.v1.attention.ops.triton_paged import dot_dtype
from vllm.v1.kv_formats import by_name

UNUSED_BLOCK = 1 << 30
# (tokens of this step, tokens cached after it)
BATCH = [(1, 40), (9, 25), (3, 3)]
SCALE = 0.05
SMALL = (64, 32)
NAMED = [
    n
    for n in LATENT_FORMATS
    if by_name(n).resolve(torch.bfloat16) is by_name(n) and not by_name(n).alias_of
]
RECORDS = [name for name in NAMED if by_name(name).latent]
REQUESTS = ((1, 40), (3, 21), (1, 1), (2, 2))
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
OPTIONS = [
    Options(),
    Options(sliding_window=7),
    Options(soft_cap=3.0),
    Options(causal=False),
]


@dataclass(kw_only=True)
class Latents:
    """Requests over pages of NaN in which the format wrote their latents."""

    name: str
    dtype: torch.dtype = torch.float32
    sizes: tuple[int, int] = REAL
    heads: int = 3
    page: int = 16
    order: str = "LBHNC"

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.fmt = by_name(self.name)
        lora, size = self.sizes[0], sum(self.sizes)
        blocks = [-(-length // self.page) for _, length in REQUESTS]
        ids = torch.randperm(sum(blocks) + 2).int()
        cell = self.fmt.layout(size, 0, self.dtype).nbytes
        _, self.pages = make_pages(self.order, len(ids), 1, self.page, cell)
        self.pages.fill_(0xFF)
        self.table = torch.full((len(blocks), max(blocks)), UNUSED_BLOCK).int()
        self.latents, used = [], 0
        for row, count in enumerate(blocks):
            length = REQUESTS[row][1]
            self.table[row, :count] = ids[used : used + count]
            used += count
            at = torch.arange(length)
            block = self.table[row].long()[at // self.page]
            key = torch.randn(length, 1, size).to(self.dtype)
            slots = block * self.page + at % self.page
            self.fmt.store(self.pages, slots, key, None, SCALES)
            ids_of = self.table[row, :count].long()
            key, _ = self.fmt.load(
                self.pages, ids_of, length, size, 0, torch.float32, SCALES
            )
            self.latents.append(key.double().expand(-1, self.heads, -1))
        self.lora = lora
        self.starts = torch.tensor([0, *(n for n, _ in REQUESTS)]).cumsum(0).int()
        tokens = int(self.starts[-1])
        self.query = torch.randn(tokens, self.heads, size).to(self.dtype)

    def requests(self) -> Requests:
        return Requests(
            query_start_loc=self.starts.to(DEVICE),
            seq_lens=torch.tensor([n for _, n in REQUESTS]).int().to(DEVICE),
            block_table=self.table.to(DEVICE),
            max_query_len=max(n for n, _ in REQUESTS),
            max_seq_len=max(n for _, n in REQUESTS),
        )

    def out(self) -> torch.Tensor:
        shape = (*self.query.shape[:2], self.lora)
        return torch.full(shape, float("nan"), dtype=self.dtype, device=DEVICE)

    def expected(self, seen: list[torch.Tensor], soft_cap: float = 0.0) -> torch.Tensor:
        """[T, heads, lora] where `seen` [new, length] says what queries see."""
        outputs = []
        for row, key in enumerate(self.latents):
            query = self.query[self.starts[row] : self.starts[row + 1]].double()
            logits = torch.einsum("qhd,khd->hqk", query, key) * SCALE
            if soft_cap:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            logits = logits.masked_fill(~seen[row], -torch.inf)
            outputs.append(weigh(logits, key[..., : self.lora], Options()))
        return torch.cat(outputs)

    def check(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        error = (out.cpu().double() - expected).abs().max() / expected.abs().max()
        tolerance = TOLERANCE[dot_dtype(self.fmt, self.dtype)]
        assert error <= max(tolerance, TOLERANCE[self.dtype]), f"{error:.2e}"

    def attend(self, options: Options = OPTIONS[0], splits: int = 1) -> None:
        """Checks the kernel over whole contexts."""
        out, window = self.out(), options.sliding_window
        masks = Masks(
            causal=options.causal,
            sliding_window=window if window > 0 else None,
            soft_cap=options.soft_cap,
        )
        latent_attention(
            out,
            self.query.to(DEVICE),
            on_device(self.pages),
            self.fmt,
            self.requests(),
            SCALE,
            masks,
            SCALES.k,
            splits,
        ).run()
        seen = [visible(n, length, options) for n, length in REQUESTS]
        self.check(out, self.expected(seen, options.soft_cap))

    def attend_selected(self, count: int = 24, splits: int = 1) -> None:
        """Checks the kernel over a random selection, with gaps and positions that are
        in no context."""
        tokens = len(self.query)
        selected, seen = torch.full((tokens, count), -1), []
        for row, (new, length) in enumerate(REQUESTS):
            seen.append(torch.zeros(new, length, dtype=torch.bool))
            for i in range(new):
                chosen = torch.randperm(length - new + i + 1)[: count - 1]
                seen[row][i, chosen] = True
                at = torch.randperm(count)[: len(chosen)]
                selected[self.starts[row] + i, at] = chosen
                free = (selected[self.starts[row] + i] < 0).nonzero()[0]
                selected[self.starts[row] + i, free] = length
        out = self.out()
        sparse_attention(
            out,
            self.query.to(DEVICE),
            on_device(self.pages),
            self.fmt,
            self.requests(),
            selected.int().to(DEVICE),
            SCALE,
            SCALES.k,
            splits,
        ).run()
        self.check(out, self.expected(seen))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("splits", [1, 3])
def test_attention_is_that_of_the_format(name: str, splits: int) -> None:
    kind = (NAMED.index(name) + splits) % len(DTYPES)
    options = OPTIONS[(NAMED.index(name) + splits) % len(OPTIONS)]
    Latents(name=name, dtype=DTYPES[kind]).attend(options, splits)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 16, 20])
@pytest.mark.parametrize("page", [16, 64])
def test_attention_is_that_of_the_format_everywhere(
    name: str, dtype: torch.dtype, heads: int, page: int
) -> None:
    options = OPTIONS[(NAMED.index(name) + heads + page // 16) % len(OPTIONS)]
    latents = Latents(name=name, dtype=dtype, heads=heads, page=page)
    latents.attend(options)
    latents.attend_selected(splits=2)


@pytest.mark.parametrize("name", [n for n in NAMED if serves(by_name(n), 96, 64)])
def test_other_latents(name: str) -> None:
    latents = Latents(name=name, sizes=SMALL, heads=5, page=64)
    latents.attend(OPTIONS[1])
    latents.attend_selected(splits=2)


@pytest.mark.parametrize("name", [*RECORDS, "bfloat16", "int4_per_token_head"])
def test_selected_states(name: str) -> None:
    dtype = torch.float32 if name != "fp8_ds_mla" else torch.bfloat16
    Latents(name=name, dtype=dtype).attend_selected()


@pytest.mark.parametrize("order", AXIS_ORDERS)
def test_pages_in_every_axis_order(order: str) -> None:
    latents = Latents(name="fp8_ds_mla", order=order)
    latents.attend()
    latents.attend_selected()


def test_a_rotation_across_both_parts_is_refused() -> None:
    assert not serves(by_name("int4_per_token_head"), 64, 48)
    with pytest.raises(ValueError, match="no Triton kernel for int4_per_token_head"):
        Latents(name="int4_per_token_head", sizes=(48, 16)).attend()


def test_formats_of_a_model_are_refused() -> None:
    assert not serves(by_name("deepseek_v4"), 512, 448)
    assert not serves(by_name("nvfp4"), 576, 512)


class TritonLatents(LatentBatch):
    """The batch of the CPU's tests, through TRITON_MLA."""

    backend = TritonMLABackend


@pytest.mark.parametrize(
    ("name", "absorb_up_to"), [("auto", 1), *((name, 8) for name in LATENT_FORMATS)]
)
def test_both_forms_attend_to_decoded_latents(name: str, absorb_up_to: int) -> None:
    batch = TritonLatents(name, BATCH, REAL)
    batch.impl.absorb_up_to = absorb_up_to
    out, expected = batch.run().double(), batch.expected()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["auto", "int4_per_token_head"])
def test_a_latent_without_a_kernel_goes_through_torch(name: str) -> None:
    batch = TritonLatents(name, BATCH, (48, 16))
    out, expected = batch.run().double(), batch.expected()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


class SelectedLatents(LatentBatch):
    """The same batch through FLASHMLA_SPARSE, everything before a token selected."""

    backend = FlashMLASparseBackend

    def run(self) -> torch.Tensor:
        longest = max(context for _, context in self.requests)
        selected = []
        for new, context in self.requests:
            for last in range(context - new, context):
                row = torch.full((longest,), -1, dtype=torch.int32)
                row[: last + 1] = torch.arange(last + 1)
                selected.append(row)
        buffer = torch.cat([torch.stack(selected), torch.zeros(3, longest).int()])
        self.layer.indexer = SimpleNamespace(topk_indices_buffer=buffer)
        return super().run()


@pytest.mark.parametrize("name", [*RECORDS, "auto"])
def test_selecting_everything_is_attention(name: str) -> None:
    batch = SelectedLatents(name, [(1, 20), (3, 9), (1, 1)], REAL)
    out, expected = batch.run().double(), batch.expected()
    assert out.shape[1] == HEADS
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_a_layer_without_an_indexer_is_named() -> None:
    batch = SelectedLatents("fp8_ds_mla", [(1, 3)], REAL)
    batch.layer.indexer = None
    with pytest.raises(ValueError, match="layer layer has no indexer"):
        LatentBatch.run(batch)


@pytest.mark.parametrize(
    "asked", [{"sliding_window": 8}, {"logits_soft_cap": 30.0}], ids=str
)
def test_a_selection_is_the_only_mask(asked: dict) -> None:
    with pytest.raises(ValueError, match="not supported over selected latents"):
        SelectedLatents("fp8_ds_mla", [(1, 3)], REAL, **asked)
