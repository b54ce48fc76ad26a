"""Bytes of latent records against encoders written from the definitions, in numpy.

Every number is rounded by searching all codes of its type; nothing of the package but
`store` is used.
"""

import math

import numpy as np
import pytest
import torch

from vllm.v1.kv_formats import by_name

F32 = np.float32
STATES, SLOT = 4, 2
E4M3 = np.array(
    [
        (c & 7) * 2.0**-9 if c < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 7)
        for c in range(127)
    ]
)
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest(x: float, levels: np.ndarray, sign_bit: int) -> int:
    """The code of the nearest level, ties to the even code, saturating."""
    size = abs(float(x))
    distance = np.abs(levels - size)
    best = np.flatnonzero(distance == distance.min())
    code = int(best[0] if len(best) == 1 or best[0] % 2 == 0 else best[1])
    return code | (sign_bit if math.copysign(1.0, float(x)) < 0 else 0)


def e4m3(values: np.ndarray) -> bytes:
    return bytes(nearest(x, E4M3, 0x80) for x in values)


def bf16(values: np.ndarray) -> bytes:
    """Values that bfloat16 holds exactly."""
    return (values.astype(F32).view(np.uint32) >> 16).astype("<u2").tobytes()


def latent(size: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Normal numbers that bfloat16 holds exactly; some zero and some large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator).mul_(scale)
    x[5::97], x[3::101] = 0.0, x[3::101] * 40
    return x.to(torch.bfloat16).float().numpy()


def stored(name: str, key: np.ndarray) -> bytes:
    """The page of four states after a store into slot 2; other bytes are 0xEE."""
    fmt = by_name(name)
    width = fmt.layout(len(key), 0, torch.bfloat16).nbytes
    pages = torch.full((1, 1, STATES, width), 0xEE, dtype=torch.uint8)
    tensor = torch.from_numpy(key).to(torch.bfloat16).view(1, 1, -1)
    fmt.store(pages, torch.tensor([SLOT]), tensor, None)
    return pages.numpy().tobytes()


def expect(page: bytes, parts: dict[int, bytes]) -> None:
    """The parts lie at their offsets in the page, and no other byte was written."""
    wanted = bytearray(b"\xee" * len(page))
    for offset, part in parts.items():
        wanted[offset : offset + len(part)] = part
    assert page == bytes(wanted)


@pytest.mark.parametrize("seed", [0, 1])
def test_dense(seed: int) -> None:
    x = latent(576, seed)
    expect(stored("bfloat16", x), {SLOT * 1152: bf16(x)})


@pytest.mark.parametrize("seed", [0, 1])
def test_fp8_per_tensor(seed: int) -> None:
    x = latent(576, seed, 10.0)
    expect(stored("fp8", x), {SLOT * 576: e4m3(np.clip(x, -448, 448))})


@pytest.mark.parametrize("seed", [0, 1])
def test_fp8_ds_mla(seed: int) -> None:
    x = latent(576, seed)
    tiles = x[:512].reshape(4, 128)
    tiny = np.finfo(F32).tiny
    scales = np.maximum(np.abs(tiles).max(1) / F32(448), tiny).astype(F32)
    codes = b"".join(e4m3(t / s) for t, s in zip(tiles, scales, strict=True))
    record = codes + scales.astype("<f4").tobytes() + bf16(x[512:])
    assert len(record) == 656
    expect(stored("fp8_ds_mla", x), {SLOT * 656: record})


@pytest.mark.parametrize("seed", [0, 1])
def test_nvfp4_ds_mla(seed: int) -> None:
    x = latent(576, seed)
    groups = x[:512].reshape(32, 16)
    wanted = np.maximum(np.abs(groups).max(1) / F32(6), F32(2.0**-9))
    scale_codes = e4m3(wanted)
    scales = E4M3[list(scale_codes)].astype(F32)
    nibbles = [
        nearest(v * (F32(1) / s), E2M1, 8)
        for group, s in zip(groups, scales, strict=True)
        for v in group
    ]
    packed = bytes(
        lo | hi << 4 for lo, hi in zip(nibbles[::2], nibbles[1::2], strict=True)
    )
    permuted = bytes(scale_codes[4 * (p & 7) + (p >> 3)] for p in range(32))
    record = packed + e4m3(np.clip(x[512:], -448, 448)) + permuted
    assert len(record) == 352
    expect(stored("nvfp4_ds_mla", x), {SLOT * 352: record})


@pytest.mark.parametrize("seed", [0, 1])
def test_deepseek_v4(seed: int) -> None:
    x = latent(512, seed)
    tiles = x[:448].reshape(7, 64)
    amax = np.maximum(np.abs(tiles).max(1), 1e-4)
    exponents = [math.ceil(math.log2(a / 448)) for a in amax]
    codes = b"".join(e4m3(t / 2.0**e) for t, e in zip(tiles, exponents, strict=True))
    scales = bytes(e + 127 for e in exponents) + b"\0"
    page = stored("deepseek_v4", x)
    assert len(page) == STATES * 584
    data = codes + bf16(x[448:])
    expect(page, {SLOT * 576: data, STATES * 576 + SLOT * 8: scales})


@pytest.mark.parametrize("name", ["dsa_indexer", "dsa_indexer_ue8m0"])
def test_indexer(name: str) -> None:
    x = latent(128)
    scale = np.maximum(np.abs(x).max(), F32(1e-4)) / F32(448)
    if name.endswith("ue8m0"):
        scale = F32(2.0 ** math.ceil(math.log2(scale)))
    page = stored(name, x)
    assert len(page) == STATES * 132
    word = np.array([scale], "<f4").tobytes()
    expect(page, {SLOT * 128: e4m3(x / scale), STATES * 128 + SLOT * 4: word})


def test_int8_per_token_head_has_one_scale_and_an_empty_word() -> None:
    x = latent(576)
    scale = max(np.abs(x).max() / F32(127), F32(1e-6))
    shifted = x * (F32(1) / scale)
    codes = np.trunc(shifted + np.where(shifted >= 0, 0.5, -0.5)).clip(-128, 127)
    word = np.array([scale, 0.0], "<f4").tobytes()
    record = codes.astype(np.int8).tobytes() + word
    assert len(record) == 584
    expect(stored("int8_per_token_head", x), {SLOT * 584: record})


def test_fp8_per_token_head_has_one_scale_and_an_empty_word() -> None:
    x = latent(576)
    scale = max(np.abs(x).max() / F32(448), F32(1e-6))
    codes = e4m3(np.clip(x * (F32(1) / scale), -448, 448))
    word = np.array([scale, 0.0], "<f4").tobytes()
    expect(stored("fp8_per_token_head", x), {SLOT * 584: codes + word})


def test_int4_per_token_head_has_one_scale_and_an_empty_word() -> None:
    page = stored("int4_per_token_head", latent(576))
    record = page[SLOT * 296 : (SLOT + 1) * 296]
    assert len(page) == STATES * 296
    assert record[288:292] != b"\xee" * 4 and record[292:] == bytes(4)
    assert page[: SLOT * 296] == b"\xee" * (SLOT * 296)
