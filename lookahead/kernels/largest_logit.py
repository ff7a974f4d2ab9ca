"""The token of each row's largest logit, the lowest id on a tie."""

import torch

from lookahead.kernels.checks import check_floating, choose

IMPLEMENTATIONS = {
    "torch": "largest_logit_ref:largest_logit_ref",
    "triton": "largest_logit_ref:largest_logit_ref",  # one pass of the library's
    "numba": "largest_logit_numba:largest_logit_numba",
}


def largest_logit(
    logits: torch.Tensor, implementation: str = "torch"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the largest of each row.

    Args:
        logits: [..., vocab].
        implementation: which implementation runs.

    Returns:
        tokens [...] int64, and finite [...] bool: whether the largest logit is a finite number (it is
        not if any logit is NaN).

    Raises:
        ValueError: logits are no such tensor, or the implementation cannot take them.
    """
    run = choose(IMPLEMENTATIONS, implementation)
    check_floating("logits", logits, "[..., vocab]")
    return run(logits)
