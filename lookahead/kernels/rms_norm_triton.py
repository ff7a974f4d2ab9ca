"""`rms_norm` and `add_rms_norm` in Triton: one program a row, so a row's bits depend on it alone."""

import torch
import triton
import triton.language as tl

from lookahead.kernels.checks import check_launch


@triton.jit(do_not_specialize=["eps"])
def normalise_rows(
    x_ptr,  # [rows, HIDDEN]
    residual_ptr,  # [rows, HIDDEN]; None without a residual
    weight_ptr,  # [HIDDEN]
    out_ptr,  # [rows, HIDDEN]
    sum_ptr,  # [rows, HIDDEN]; None without a residual
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """out = x / sqrt(mean(x ** 2) + eps) * weight, for x or the rounded x + residual."""
    start = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    x = tl.load(x_ptr + start + column, mask=inside, other=0.0)  # [BLOCK]
    if ADD:
        residual = tl.load(residual_ptr + start + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + start + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + start + column, (wide * scale * weight).to(x.dtype), mask=inside)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `rms_norm`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, None, weight, out, None, eps)
    return out


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `add_rms_norm`."""
    x, residual = x.contiguous(), residual.contiguous()
    check_launch(residual=residual)
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, out, total, eps)
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    check_launch(x=x, weight=weight)
    hidden = x.shape[-1]
    block = triton.next_power_of_2(hidden)
    normalise_rows[(x.numel() // hidden,)](
        x_ptr=x,
        residual_ptr=residual,
        weight_ptr=weight,
        out_ptr=out,
        sum_ptr=total,
        eps=eps,
        HIDDEN=hidden,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=min(16, max(1, block // 512)),
    )
