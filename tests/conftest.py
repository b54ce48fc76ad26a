"""What holds for every test process: without a GPU, Triton kernels are interpreted,
and what a test draws at random depends on its name alone. And the fixture of tests that
hold for every instruction set of the CPU kernels.

`@triton.jit` reads the variable where a kernel is defined, so it is set before any test
module is imported.
"""

import os
import random
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from vllm.v1.attention.ops import cpu_kernels


@pytest.fixture(autouse=True)
def drawn_by_name(request: pytest.FixtureRequest) -> None:
    """A test draws the same numbers alone, among others and in any order."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(params=cpu_kernels.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that this processor has, in turn; then the best again."""
    try:
        yield cpu_kernels.choose_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    finally:
        cpu_kernels.choose_isa(None)
