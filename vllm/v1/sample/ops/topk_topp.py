"""Greedy choice, top-k and top-p cuts, and random draws.

Every row is treated on its own: what a row gets does not depend on the others.
"""

import numpy as np
import torch
import torch.nn.functional as F

# Candidates looked at before the next, dearer attempt at a nucleus; then all tokens.
_NUCLEUS_WIDTHS = (64, 1024)
# Tokens whose probabilities are summed before a draw looks inside.
_CHUNK = 128


def greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, int64 [R]; the first of equal ones.

    Does not write `logits`. A row with NaN gives an index within range.
    """
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    if logits.element_size() == 2 and logits.shape[0]:
        # Bits of positive 16-bit floats are in the order of their values, and above
        # those of negative ones: 5 times as fast as a conversion to float32.
        bits = logits.view(torch.int16).numpy()
        chosen = np.argmax(bits, axis=-1)
        if (bits[np.arange(len(bits)), chosen] > 0).all():
            return torch.from_numpy(chosen)
    # numpy's float argmax is 7 to 16 times as fast as torch's on a CPU.
    return torch.from_numpy(np.argmax(logits.float().numpy(), axis=-1))


def keep_top_k_top_p_(
    probs: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Zeroes, in place, what is less likely than the k-th token, then what lies outside
    the smallest set of tokens with a share `top_p` of the rest.

    `probs` float32 [R, V], each row summing to 1; `top_k` int32 [R], V or more is off;
    `top_p` float32 [R], 1 is off. Ties with the last token that is kept are kept, and
    so is the most likely token.
    """
    num_rows, vocab_size = probs.shape
    floor = torch.zeros((num_rows, 1), device=probs.device)
    pending = torch.arange(num_rows, device=probs.device)
    if top_k is not None:
        is_cut = top_k < vocab_size
        rows, pending = pending[is_cut], pending[~is_cut]
        if rows.numel():
            share = None if top_p is None else top_p[rows]
            floor[rows] = _top_k_floor(_rows(probs, rows), top_k[rows], share)
    if top_p is not None:
        pending = pending[top_p[pending] < 1.0]
        for width in (*_NUCLEUS_WIDTHS, vocab_size):
            if pending.numel() == 0:
                break
            top = _largest(_rows(probs, pending), min(width, vocab_size))
            mass = top.cumsum(dim=-1, dtype=torch.float64)
            wanted = top_p[pending].double().unsqueeze(1)
            floor[pending] = _nucleus_floor(top, mass, wanted)
            pending = pending[(mass[:, -1:] < wanted).squeeze(1)]
    return probs.mul_(probs >= floor)


def _rows(probs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return probs if rows.numel() == probs.shape[0] else probs[rows]


def _largest(probs: torch.Tensor, width: int) -> torch.Tensor:
    """The `width` largest values of each row, in descending order."""
    if width == probs.shape[1] and probs.device.type == "cpu":
        # numpy sorts with vector instructions.
        return torch.from_numpy(-np.sort(-probs.numpy(), axis=-1))
    return probs.topk(width, dim=-1).values


def _top_k_floor(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor | None
) -> torch.Tensor:
    """The smallest probability that both cuts keep, float32 [R, 1]."""
    last = (top_k.long() - 1).unsqueeze(1)
    top = _largest(probs, int(top_k.max()))
    floor = top.gather(1, last)
    if top_p is None:
        return floor
    mass = top.cumsum(dim=-1, dtype=torch.float64)
    wanted = top_p.double().unsqueeze(1) * mass.gather(1, last)
    return torch.maximum(floor, _nucleus_floor(top, mass, wanted))


def _nucleus_floor(
    top: torch.Tensor, mass: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """The value at which the running sum `mass` of `top` reaches `wanted`: [R, 1]."""
    last = (mass < wanted).sum(dim=-1, keepdim=True).clamp_(max=top.shape[1] - 1)
    return top.gather(1, last)


def draw(probs: torch.Tensor, generators: dict[int, torch.Generator]) -> torch.Tensor:
    """Draws a token of each row in proportion to `probs` float32 [R, V]: int64 [R].

    Rows in `generators` use their own, one number each; others share torch's default.
    Tokens of probability 0 are never drawn; a row of NaN gives some valid token.
    """
    num_rows, vocab_size = probs.shape
    uniform = torch.rand(num_rows, dtype=torch.float64, device=probs.device)
    for row, generator in generators.items():
        uniform[row] = torch.rand(
            (), dtype=torch.float64, device=probs.device, generator=generator
        )
    if vocab_size % _CHUNK:
        probs = F.pad(probs, (0, _CHUNK - vocab_size % _CHUNK))
    chunks = probs.view(num_rows, -1, _CHUNK)
    chunk, rest = _invert(chunks.sum(dim=-1), uniform.unsqueeze(1), relative=True)
    inside = chunks[torch.arange(num_rows, device=probs.device), chunk.squeeze(1)]
    token, _ = _invert(inside, rest, relative=False)
    return (chunk * _CHUNK + token).squeeze(1).clamp_(max=vocab_size - 1)


def _invert(
    weights: torch.Tensor, target: torch.Tensor, relative: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index of each row whose running sum exceeds `target` float64 [R, 1]
    (times the row's sum if `relative`), and what of the target lies inside it."""
    mass = weights.cumsum(dim=-1, dtype=torch.float64)
    if relative:
        target = target * mass[:, -1:]
    index = (mass <= target).sum(dim=-1, keepdim=True)
    # Rounding may put the target at the very end: take the last token with a weight.
    index = torch.minimum(index, mass.argmax(dim=-1, keepdim=True))
    before = mass.gather(1, index) - weights.gather(1, index)
    return index, (target - before).clamp_(min=0.0)
