"""Root mean square normalisation, alone and behind the addition of a residual."""

import torch

from lookahead.kernels.checks import check_floating, check_tensor, choose

IMPLEMENTATIONS = {
    "torch": "rms_norm_ref:rms_norm_ref",
    "triton": "rms_norm_triton:rms_norm_triton",
    "numba": "rms_norm_numba:rms_norm_numba",
}
ADD_IMPLEMENTATIONS = {
    "torch": "rms_norm_ref:add_rms_norm_ref",
    "triton": "rms_norm_triton:add_rms_norm_triton",
    "numba": "rms_norm_numba:add_rms_norm_numba",
}


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, implementation: str = "torch"
) -> torch.Tensor:
    """x / sqrt(mean(x ** 2) + eps) * weight over the last dimension, computed in float32 (float64 for
    float64 input) and rounded once.

    Args:
        x: [..., hidden].
        weight: [hidden] of x's dtype.
        eps: added to the mean square.
        implementation: which implementation runs.

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: weight does not fit x, or the implementation cannot take them.
    """
    run = choose(IMPLEMENTATIONS, implementation)
    check_floating("x", x, "[..., hidden]")
    check_tensor("weight", weight, (x.shape[-1],), x)
    return run(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    implementation: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream and normalise the rounded sum.

    Args:
        x, residual: [..., hidden] of one dtype.
        weight, eps, implementation: as for `rms_norm`.

    Returns:
        (the normalised sum, the sum), each of x's shape and dtype.

    Raises:
        ValueError: residual or weight does not fit x, or the implementation cannot take them.
    """
    run = choose(ADD_IMPLEMENTATIONS, implementation)
    check_floating("x", x, "[..., hidden]")
    check_tensor("residual", residual, tuple(x.shape), x)
    check_tensor("weight", weight, (x.shape[-1],), x)
    return run(x, residual, weight, eps)
