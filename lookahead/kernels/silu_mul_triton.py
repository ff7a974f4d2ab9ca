"""`silu_mul` in Triton."""

import torch
import triton
import triton.language as tl

from lookahead.kernels.checks import check_launch

BLOCK = 1024


@triton.jit
def gate_rows(
    gate_up_ptr,  # [rows, 2 * INTERMEDIATE]
    out_ptr,  # [rows, INTERMEDIATE]
    INTERMEDIATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = gate * sigmoid(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INTERMEDIATE
    start = row * (2 * INTERMEDIATE) + column
    gate = tl.load(gate_up_ptr + start, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    up = tl.load(gate_up_ptr + start + INTERMEDIATE, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * INTERMEDIATE + column, value.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """See `silu_mul`."""
    gate_up = gate_up.contiguous()
    check_launch(gate_up=gate_up)
    intermediate = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], intermediate))
    gate_rows[(out.numel() // intermediate, triton.cdiv(intermediate, BLOCK))](
        gate_up_ptr=gate_up, out_ptr=out, INTERMEDIATE=intermediate, BLOCK=BLOCK
    )
    return out
