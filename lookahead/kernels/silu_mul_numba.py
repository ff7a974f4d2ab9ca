"""`silu_mul` on a CPU, a row at a time."""

import torch
import torch.nn.functional as F

from lookahead.kernels.product_numba import filled_up
from lookahead.kernels.simd import keep_first, load, pointer, same, store
from lookahead.kernels.simd_exp import exp
from lookahead.kernels.simd_types import LANES, TAGS, entry, kernel


@kernel
def gate_row(gate_up, size, out):
    """out = silu(gate) * up for a row of `size` gates and as many ups; behind both, and behind out,
    there is room for a whole vector, which in out is filled with zeros."""
    for i in range(0, size, LANES):
        gate = load(gate_up + i)
        zero = same(gate, 0.0)
        value = gate / (exp(zero - gate) + same(gate, 1.0)) * load(gate_up + size + i)
        store(out + i, keep_first(value, size - i, zero))


@entry
def _gate_rows(tag, gate_up, num_rows, stride, size, out, out_stride):
    for row in range(num_rows):
        gate_row(pointer(gate_up, tag) + row * stride, size, pointer(out, tag) + row * out_stride)


def silu_mul_numba(gate_up: torch.Tensor) -> torch.Tensor:
    """See `silu_mul`."""
    shape, size = gate_up.shape[:-1], gate_up.shape[-1] // 2
    stride, out_stride = filled_up(2 * size) + LANES, filled_up(size)
    rows = F.pad(gate_up, (0, stride - 2 * size)).contiguous()
    out = gate_up.new_empty((*shape, out_stride))
    _gate_rows(
        TAGS[gate_up.dtype],
        rows.data_ptr(),
        shape.numel(),
        stride,
        size,
        out.data_ptr(),
        out_stride,
    )
    return out[..., :size].contiguous()
