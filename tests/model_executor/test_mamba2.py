"""The scan of Mamba-2 against its recurrence, and the states that a step touches."""

from typing import Any

import pytest
import torch

from vllm.model_executor.layers.mamba.ssd import ScanInputs, scan, step
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import (
    Mamba2AttentionMetadata,
    Mamba2AttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import MambaSpec

HEADS, SIZE, GROUPS, STATES = 6, 4, 3, 5


def inputs(tokens: int) -> ScanInputs:
    torch.manual_seed(3)
    return ScanInputs(
        x=torch.randn(tokens, HEADS, SIZE),
        dt=torch.rand(tokens, HEADS),
        b=torch.randn(tokens, GROUPS, STATES),
        c=torch.randn(tokens, GROUPS, STATES),
        a=-torch.rand(HEADS) * 3,
        d=torch.randn(HEADS),
    )


def recurrence(
    given: ScanInputs, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, head by head and token by token, in float64."""
    x, dt, b, c = (t.double() for t in (given.x, given.dt, given.b, given.c))
    state, y = state.double().clone(), torch.empty_like(x)
    for t in range(len(x)):
        for h in range(HEADS):
            g = h // (HEADS // GROUPS)
            left = torch.exp(dt[t, h] * given.a[h].double())
            state[h] = left * state[h] + dt[t, h] * torch.outer(x[t, h], b[t, g])
            y[t, h] = state[h] @ c[t, g] + given.d[h].double() * x[t, h]
    return y, state


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64])
def test_the_chunked_scan_is_the_recurrence(chunk_size: int) -> None:
    given, start = inputs(37), torch.randn(HEADS, SIZE, STATES)
    y, state = scan(given, start, chunk_size)
    wanted, last = recurrence(given, start)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.double(), last, rtol=1e-4, atol=1e-4)


def test_a_step_is_a_scan_of_one_token_for_each_sequence() -> None:
    given, starts = inputs(4), torch.randn(4, HEADS, SIZE, STATES)
    y, states = step(given, starts)
    for i in range(4):
        wanted, last = recurrence(given.tokens(i, i + 1), starts[i])
        torch.testing.assert_close(y[i].double(), wanted[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states[i].double(), last, rtol=1e-5, atol=1e-5)


def test_strong_decay_over_a_long_chunk_stays_finite() -> None:
    given = inputs(256)
    strong = ScanInputs(**{**vars(given), "a": torch.full((HEADS,), -50.0)})
    y, state = scan(strong, torch.zeros(HEADS, SIZE, STATES), 256)
    assert y.isfinite().all() and state.isfinite().all()


def built(mode: str, query_lens: list[int], seq_lens: list[int]) -> Any:
    """Request r has the blocks 10 r, 10 r + 1, … of 4 tokens each."""
    spec = MambaSpec(
        block_size=4, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    rows = torch.arange(len(query_lens))[:, None]
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(query_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=10 * rows + torch.arange(10),
        slot_mapping=torch.arange(sum(query_lens)),
    )
    config: Any = None
    builder = Mamba2AttentionMetadataBuilder(spec, ["a"], config, torch.device("cpu"))
    return builder.build(0, common)


def segments(metadata: Mamba2AttentionMetadata) -> list[tuple[int, int, int, int]]:
    return [(s.start, s.stop, s.source, s.target) for s in metadata.segments]


# A new prompt of 6, a decode at 8, 5 more tokens after 6, a new prompt of 1.
BATCH = ([6, 1, 5, 1], [6, 9, 11, 1])


@pytest.mark.parametrize(
    ("mode", "decode", "prefills"),
    [
        ("none", (6, 10, 10), [(0, 6, -1, 0), (7, 12, 20, 20), (12, 13, -1, 30)]),
        ("align", (6, 11, 12), [(0, 6, -1, 1), (7, 12, 21, 22), (12, 13, -1, 30)]),
        (
            "all",
            (6, 11, 12),
            [
                (0, 4, -1, 0),
                (4, 6, 0, 1),
                (7, 9, 21, 21),
                (9, 12, 21, 22),
                (12, 13, -1, 30),
            ],
        ),
    ],
)
def test_states_come_from_the_token_before_and_go_where_the_last_token_lies(
    mode: str, decode: tuple[int, int, int], prefills: list[tuple[int, ...]]
) -> None:
    metadata = built(mode, *BATCH)
    assert metadata.decode_tokens.tolist() == [decode[0]]
    assert metadata.decode_sources.tolist() == [decode[1]]
    assert metadata.decode_targets.tolist() == [decode[2]]
    assert segments(metadata) == prefills
