"""Log-probabilities of emitted tokens from the logits that a step keeps."""

import math

import torch

from lookahead.kernels.checks import wide_dtype
from lookahead.results import TokenLogprob


def token_logprobs(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprob]:
    """For logits [count, vocab] and the token that was chosen from each row.

    Each row by itself, so that its bits do not depend on how many a step emitted.
    """
    return [_of_row(row, token, num_top) for row, token in zip(logits, token_ids, strict=True)]


def _of_row(row: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    logprobs = torch.log_softmax(row.to(wide_dtype(row.dtype)), dim=0)
    top: list[tuple[int, float]] = []
    if num_top:
        least = logprobs.topk(num_top).values[-1]
        ids = (logprobs >= least).nonzero().squeeze(1).tolist()
        pairs = zip(ids, logprobs[ids].tolist(), strict=True)
        # One of probability zero has no logarithm that JSON could hold.
        possible = [pair for pair in pairs if math.isfinite(pair[1])]
        top = sorted(possible, key=lambda pair: (-pair[1], pair[0]))[:num_top]
    return TokenLogprob(token, float(logprobs[token]), top)
