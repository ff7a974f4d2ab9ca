"""`rms_norm` and `add_rms_norm` on a CPU, a row at a time."""

import math

import torch
import torch.nn.functional as F

from lookahead.kernels.checks import wide_dtype
from lookahead.kernels.product_numba import filled_up
from lookahead.kernels.simd import fma, load, pointer, same, store, total, zeros
from lookahead.kernels.simd_types import LANES, TAGS, entry, kernel


@kernel
def add_row(x, residual, size):
    """residual += x, rounded; both pointers to `size` numbers, filled up to whole vectors."""
    for i in range(0, size, LANES):
        store(residual + i, load(x + i) + load(residual + i))


@kernel
def norm_row(x, weight, eps, size, out):
    """Normalise a row filled up with zeros to whole vectors; `weight` is as wide as the computation."""
    squares = zeros(x)
    for i in range(0, size, LANES):
        value = load(x + i)
        squares = fma(value, value, squares)
    scale = same(squares, 1.0 / math.sqrt(total(squares) / size + eps))
    for i in range(0, size, LANES):
        store(out + i, load(x + i) * scale * load(weight + i))


@entry
def _norm_rows(tag, wide_tag, x, residual, num_rows, size, stride, weight, eps, out):
    for row in range(num_rows):
        start = pointer(x, tag) + row * stride
        if residual:
            add_row(start, pointer(residual, tag) + row * stride, size)
            start = pointer(residual, tag) + row * stride
        norm_row(start, pointer(weight, wide_tag), eps, size, pointer(out, tag) + row * stride)


def rms_norm_numba(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `rms_norm`."""
    return _run(x, None, weight, eps)


def add_rms_norm_numba(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `add_rms_norm`."""
    total_rows = F.pad(residual, (0, -residual.shape[-1] % LANES)).contiguous().clone()
    normed = _run(x, total_rows, weight, eps)
    return normed, total_rows[..., : x.shape[-1]].contiguous()


def _run(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    size = x.shape[-1]
    padding = (0, -size % LANES)
    rows = F.pad(x, padding).contiguous()
    wide_weight = F.pad(weight.to(wide_dtype(x.dtype)), padding)
    out = torch.empty_like(rows)
    _norm_rows(
        TAGS[x.dtype], TAGS[wide_dtype(x.dtype)], rows.data_ptr(),
        0 if residual is None else residual.data_ptr(), rows.numel() // rows.shape[-1], size,
        filled_up(size), wide_weight.data_ptr(), eps, out.data_ptr(),
    )  # fmt: skip
    return out[..., :size].contiguous()
