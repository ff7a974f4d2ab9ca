"""From logits to a token. Greedy is the only draw there is: the most likely token."""

import torch


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The token of the largest logit, the lowest id on a tie.

    Args:
        logits: [..., vocab].

    Returns:
        tokens [...] int64, and finite [...] bool: whether the largest logit is a finite number (it is
        not if any logit is NaN).
    """
    largest, tokens = logits.max(dim=-1)
    return tokens, largest.isfinite()
