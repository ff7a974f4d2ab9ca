"""The specification of `largest_logit` in torch."""

import torch


def largest_logit_ref(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `largest_logit`."""
    largest, tokens = logits.max(dim=-1)
    return tokens, largest.isfinite()
