"""The specification of `rms_norm` and `add_rms_norm` in torch."""

import torch


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `rms_norm`."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight.to(wide.dtype)).to(x.dtype)


def add_rms_norm_ref(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `add_rms_norm`."""
    total = x + residual
    return rms_norm_ref(total, weight, eps), total
