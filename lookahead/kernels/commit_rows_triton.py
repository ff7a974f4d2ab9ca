"""`commit_rows` in Triton: one program a head of a layer's keys or values; only accepted rows move."""

import torch
import triton
import triton.language as tl

from lookahead.kernels.checks import check_can_run

# Rows that are copied at once; a step accepts few, a chunk of a prompt commits many.
BLOCK_ROWS = 16


@triton.jit(
    do_not_specialize=[
        "layer_stride", "kind_stride", "sequence_stride", "head_stride", "num_rows", "row_start",
    ]
)  # fmt: skip
def copy_rows(
    data_ptr,  # [layers, 2, B, NUM_KV_HEADS, C, HEAD_DIM], heads and what is in them without gaps
    rows_ptr,  # [B, num_rows] int64
    counts_ptr,  # [B]
    lengths_ptr,  # [B]
    layer_stride,
    kind_stride,
    sequence_stride,
    head_stride,
    num_rows,
    row_start,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Accepted rows of one head lie behind the committed ones: no program reads what another writes."""
    part = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    head = (part % NUM_KV_HEADS).to(tl.int64)
    kind = (part // NUM_KV_HEADS % 2).to(tl.int64)
    layer = (part // NUM_KV_HEADS // 2).to(tl.int64)
    data_ptr += layer * layer_stride + kind * kind_stride
    data_ptr += sequence * sequence_stride + head * head_stride
    count = tl.load(counts_ptr + sequence).to(tl.int32)
    length = tl.load(lengths_ptr + sequence).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)[None, :]
    for first in tl.range(0, count, BLOCK_R):
        offset = first + tl.arange(0, BLOCK_R)  # [R]
        is_accepted = offset < count
        row = tl.load(rows_ptr + sequence * num_rows + offset, mask=is_accepted, other=0)
        inside = is_accepted[:, None] & (dim < HEAD_DIM)
        source = (row_start + row)[:, None] * HEAD_DIM + dim
        moved = tl.load(data_ptr + source, mask=inside, other=0.0)  # [R, D]
        target = (length + offset)[:, None] * HEAD_DIM + dim
        tl.store(data_ptr + target, moved, mask=inside)


def commit_rows_triton(
    data: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    row_start: int,
) -> None:
    """See `commit_rows`. Committed positions lie below `row_start`; rows of one head side by side."""
    head_dim = data.shape[5]
    if data.stride(5) != 1 or data.stride(4) != head_dim:
        raise ValueError(
            f"data: expected last strides [{head_dim}, 1], got strides {data.stride()}"
        )
    check_can_run("triton", data.device, data.dtype)
    num_layers, _, batch, num_kv_heads = data.shape[:4]
    copy_rows[(num_layers * 2 * num_kv_heads, batch)](
        data_ptr=data,
        rows_ptr=rows.contiguous(),
        counts_ptr=counts.contiguous(),
        lengths_ptr=lengths.contiguous(),
        layer_stride=data.stride(0),
        kind_stride=data.stride(1),
        sequence_stride=data.stride(2),
        head_stride=data.stride(3),
        num_rows=rows.shape[1],
        row_start=row_start,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_R=BLOCK_ROWS,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,  # one would spill on wide heads
    )
