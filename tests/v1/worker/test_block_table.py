"""Block tables hold kernel blocks; slots are those of a naive lookup."""

import numpy as np
import pytest
import torch

from vllm.v1.worker.block_table import (
    BlockTable,
    MultiGroupBlockTable,
    block_table_width,
)

CPU = torch.device("cpu")


def table(block_size=32, kernel=16, reqs=5, blocks=9, tokens=256) -> BlockTable:
    return BlockTable(block_size, reqs, blocks, tokens, False, CPU, kernel, 1)


@pytest.mark.parametrize(
    ("block_size", "kernel"), [(16, 16), (32, 16), (48, 16), (8, 8)]
)
def test_slots_equal_a_naive_lookup(block_size, kernel):
    rng = np.random.default_rng(0)
    made = table(block_size, kernel)
    rows = {row: rng.choice(10_000, 6, replace=False).tolist() for row in range(5)}
    for row, ids in rows.items():
        made.add_row(ids[:2], row)
        made.append_row(ids[2:], row)
    req_indices = np.sort(rng.integers(0, 5, 200))
    positions = rng.integers(0, 6 * block_size, 200)
    made.compute_slot_mapping(req_indices, positions)
    got = made.commit_slot_mapping(200)
    assert got.dtype == torch.int64
    # Kernel blocks of a manager block follow one another, so slots are those of
    # manager blocks.
    for row, position, slot in zip(req_indices, positions, got.tolist(), strict=True):
        block, offset = divmod(int(position), block_size)
        assert slot == rows[row][block] * block_size + offset


def test_rows_move_swap_and_clear():
    made = table()
    made.add_row([1, 2, 3], 0)
    made.add_row([4], 1)
    made.swap_row(0, 1)
    made.move_row(1, 2)
    made.move_row(0, 1)
    made.clear_row(0)
    got = made.commit_block_table(3)
    assert got.dtype == torch.int32
    assert made.num_blocks_per_row[:3].tolist() == [0, 2, 6]
    assert got[0].count_nonzero() == 0
    assert got[1, :6].tolist() == [8, 9, 0, 0, 0, 0]
    assert got[2, :6].tolist() == [2, 3, 4, 5, 6, 7]


def test_replacing_a_row_forgets_the_old_blocks():
    made = table()
    made.add_row([5, 6, 7], 0)
    made.add_row([9], 0)
    assert made.num_blocks_per_row[0] == 2
    assert made.get_numpy_array()[0, :2].tolist() == [18, 19]


def test_width_is_aligned_to_whole_vectors_of_tokens():
    assert block_table_width(86, 48, 16) == 264
    assert block_table_width(8, 16, 16) == 8
    assert block_table_width(9, 16, 16) == 16


def test_kernel_blocks_must_divide_manager_blocks():
    with pytest.raises(ValueError, match="16 tokens do not divide blocks of 40"):
        table(block_size=40)


def test_a_row_beyond_the_maximum_length_is_refused():
    made = table(blocks=4)
    with pytest.raises(ValueError, match="maximum model length"):
        made.add_row(list(range(5)), 0)


def test_groups_have_tables_of_their_own():
    made = MultiGroupBlockTable(3, 64, False, CPU, [16, 64], [16, 16], [8, 2])
    made.add_row(([1, 2], [3]), 0)
    made.compute_slot_mapping(np.zeros(2, dtype=np.int64), np.array([0, 17]))
    assert made[0].slot_mapping.np[:2].tolist() == [16, 33]
    assert made[1].slot_mapping.np[:2].tolist() == [192, 209]
    made.clear()
    assert made[1].num_blocks_per_row.tolist() == [0, 0, 0]
