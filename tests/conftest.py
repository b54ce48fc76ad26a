"""What holds for every test process: without a GPU, Triton kernels are interpreted.

`@triton.jit` reads the variable where a kernel is defined, so it is set before any test
module is imported.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
