"""Log-probabilities of chosen tokens, of the most likely ones, and ranks."""

import torch

from vllm.v1.outputs import LogprobsTensors


def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities, a new float32 tensor of the same shape."""
    return logits.log_softmax(dim=-1, dtype=torch.float32)


def token_ranks(logprobs: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """1 + the number of tokens that are more likely than `token_ids` [R]: int32 [R]."""
    own = logprobs.gather(1, token_ids.unsqueeze(1).long())
    return ((logprobs > own).sum(dim=-1) + 1).to(torch.int32)


def gather_logprobs(
    logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
) -> LogprobsTensors:
    """Column 0: the token of `token_ids` int [R]; then the `num_logprobs` most likely.

    `logprobs` float32 [R, V]. Ids are int32 [R, n + 1].
    """
    chosen = token_ids.unsqueeze(1).long()
    own = logprobs.gather(1, chosen)
    top = logprobs.topk(min(num_logprobs, logprobs.shape[1]), dim=-1)
    return LogprobsTensors(
        torch.cat((chosen, top.indices), dim=1).to(torch.int32),
        torch.cat((own, top.values), dim=1),
        token_ranks(logprobs, token_ids),
    )


def replace_logprob_tokens(
    tensors: LogprobsTensors,
    logprobs: torch.Tensor,
    wanted: dict[int, list[int]],
) -> LogprobsTensors:
    """Puts the tokens of `wanted` rows after column 0, instead of the most likely ones.

    Columns left over repeat column 0.
    """
    ids, values, ranks = tensors
    width = max(ids.shape[1], 1 + max(map(len, wanted.values())))
    missing = width - ids.shape[1]
    ids = torch.cat((ids, ids[:, :1].expand(-1, missing)), dim=1)
    values = torch.cat((values, values[:, :1].expand(-1, missing)), dim=1)
    for row, tokens in wanted.items():
        ids[row, 1:] = ids[row, 0]
        ids[row, 1 : 1 + len(tokens)] = torch.tensor(tokens, dtype=ids.dtype)
        values[row] = logprobs[row, ids[row].long()]
    return LogprobsTensors(ids, values, ranks)
