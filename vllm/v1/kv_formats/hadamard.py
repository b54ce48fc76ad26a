"""Walsh-Hadamard rotations of head vectors, block-diagonal where they must be.

A head size d is cut into blocks of b, its largest power-of-two divisor, and every block
is rotated by the Sylvester matrix of size b. Powers of two are one block.
"""

import random
from functools import lru_cache

import torch

from vllm.utils.math_utils import largest_power_of_2_divisor

RHT_SEED = 0x9E3779B9
_MASK = 0xFFFFFFFF
_TWISTER_WORDS = 624


def block_size(head_size: int) -> int:
    """b: the largest power of two that divides the head size."""
    return largest_power_of_2_divisor(head_size)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Unnormalised block Hadamard transform of the last axis of a float tensor.

    Applying it twice multiplies by b. A butterfly: every vector sees the same additions
    in the same order whatever the batch is.
    """
    shape, block = x.shape, block_size(x.shape[-1])
    step = 1
    while step < block:
        pairs = x.reshape(*shape[:-1], shape[-1] // (2 * step), 2, step)
        low, high = pairs.unbind(-2)
        x = torch.stack((low + high, low - high), dim=-2)
        step *= 2
    return x.reshape(shape)


@lru_cache(maxsize=64)
def _sign_list(size: int, seed: int) -> tuple[float, ...]:
    # The generator is the standard 32-bit Mersenne twister seeded by init_genrand;
    # random.Random only offers the array seeding, so the state is filled in by hand.
    state = [seed & _MASK]
    for i in range(1, _TWISTER_WORDS):
        state.append((1812433253 * (state[-1] ^ (state[-1] >> 30)) + i) & _MASK)
    twister = random.Random()
    twister.setstate((3, (*state, _TWISTER_WORDS), None))
    draws = [twister.getrandbits(32) & 0xFFFFFF for _ in range(size)]
    return tuple(1.0 if 2 * draw < 1 << 24 else -1.0 for draw in draws)


def rht_signs(head_size: int) -> torch.Tensor:
    """Float32 [head_size] of +-1: one stream for a block, repeated for every block."""
    block = block_size(head_size)
    return torch.tensor(_sign_list(block, RHT_SEED)).repeat(head_size // block)


def rht(x: torch.Tensor) -> torch.Tensor:
    """Randomised Hadamard transform of the last axis: hadamard(signs * x)."""
    return hadamard(x * rht_signs(x.shape[-1]).to(x))


def inverse_rht(y: torch.Tensor) -> torch.Tensor:
    """Undoes `rht`: signs * hadamard(y) / b."""
    return hadamard(y) * (rht_signs(y.shape[-1]) / block_size(y.shape[-1])).to(y)
