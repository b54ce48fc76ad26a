"""Tests of whole engines take one thread: models this small gain little from two, and
threads that wait for each other on a busy machine take up to ten times as long."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
