"""The gated activation of the feed-forward layer: SiLU(gate) x up."""

import torch

from lookahead.kernels.checks import check_floating, choose

IMPLEMENTATIONS = {
    "torch": "silu_mul_ref:silu_mul_ref",
    "triton": "silu_mul_triton:silu_mul_triton",
    "numba": "silu_mul_numba:silu_mul_numba",
}


def silu_mul(gate_up: torch.Tensor, implementation: str = "torch") -> torch.Tensor:
    """gate * sigmoid(gate) * up, computed in float32 (float64 for float64 input) and rounded once.

    Args:
        gate_up: [..., 2 * intermediate]: gate in the first half, up in the second.
        implementation: which implementation runs.

    Returns:
        [..., intermediate] of the same dtype.

    Raises:
        ValueError: the last dimension is odd, or the implementation cannot take the tensor.
    """
    run = choose(IMPLEMENTATIONS, implementation)
    check_floating("gate_up", gate_up, "[..., 2 * intermediate]")
    if gate_up.shape[-1] % 2:
        raise ValueError(
            f"gate_up: expected an even last dimension, got shape {list(gate_up.shape)}"
        )
    return run(gate_up)
