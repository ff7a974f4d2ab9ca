"""`rope_write` in Triton: one program a row and head."""

import torch
import triton
import triton.language as tl

from lookahead.kernels.checks import check_launch


@triton.jit(do_not_specialize=["num_rows", "cache_rows", "row_start"])
def rotate_and_store(
    qkv_ptr,  # [B, T, NUM_Q_HEADS + 2 * NUM_KV_HEADS, 2 * HALF]
    cos_ptr,  # [P, HALF] fp32
    sin_ptr,  # [P, HALF] fp32
    positions_ptr,  # [B, T]
    k_ptr,  # [B, NUM_KV_HEADS, cache_rows, 2 * HALF]
    v_ptr,  # [B, NUM_KV_HEADS, cache_rows, 2 * HALF]
    q_ptr,  # [B, T, NUM_Q_HEADS, 2 * HALF]
    num_rows,
    cache_rows,
    row_start,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate a query or key head, or copy a value head, to where it belongs."""
    row = tl.program_id(0)  # of all sequences' rows
    head = tl.program_id(1)
    sequence = row // num_rows
    dim = tl.arange(0, BLOCK)
    inside = dim < HALF
    source = (row.to(tl.int64) * (NUM_Q_HEADS + 2 * NUM_KV_HEADS) + head) * (2 * HALF) + dim
    first = tl.load(qkv_ptr + source, mask=inside, other=0.0)  # [BLOCK]
    second = tl.load(qkv_ptr + source + HALF, mask=inside, other=0.0)
    if head < NUM_Q_HEADS + NUM_KV_HEADS:
        angle = tl.load(positions_ptr + row).to(tl.int64) * HALF + dim
        cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
        x, y = first.to(tl.float32), second.to(tl.float32)
        first = (x * cos - y * sin).to(first.dtype)
        second = (y * cos + x * sin).to(second.dtype)
    if head >= NUM_Q_HEADS:
        is_value = head >= NUM_Q_HEADS + NUM_KV_HEADS
        value = qkv_ptr + source + tl.where(is_value, 0, NUM_KV_HEADS * (2 * HALF))
        x = tl.load(value, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(value + HALF, mask=inside, other=0.0).to(tl.float32)
        is_finite = tl.min(((x - x == 0.0) & (y - y == 0.0)).to(tl.int32), 0) == 1
        spoiled = tl.where(is_value, 0.0, float("nan"))
        first = tl.where(is_finite, first, spoiled.to(first.dtype))
        second = tl.where(is_finite, second, spoiled.to(second.dtype))
    cache_head = (head - NUM_Q_HEADS) % NUM_KV_HEADS
    cache_row = (sequence.to(tl.int64) * NUM_KV_HEADS + cache_head) * cache_rows
    cache_row += row_start + row % num_rows
    if head < NUM_Q_HEADS:
        target = q_ptr + (row.to(tl.int64) * NUM_Q_HEADS + head) * (2 * HALF) + dim
    elif head < NUM_Q_HEADS + NUM_KV_HEADS:
        target = k_ptr + cache_row * (2 * HALF) + dim
    else:
        target = v_ptr + cache_row * (2 * HALF) + dim
    tl.store(target, first, mask=inside)
    tl.store(target + HALF, second, mask=inside)


def rope_write_triton(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    row_start: int,
) -> torch.Tensor:
    """See `rope_write`."""
    batch, num_rows, num_heads, head_dim = qkv.shape
    num_kv_heads, capacity = k_cache.shape[1:3]
    num_q_heads = num_heads - 2 * num_kv_heads
    qkv, positions = qkv.contiguous(), positions.contiguous()
    check_launch(qkv=qkv, cos=cos, sin=sin, k_cache=k_cache, v_cache=v_cache)
    queries = qkv.new_empty((batch, num_rows, num_q_heads, head_dim))
    rotate_and_store[(batch * num_rows, num_heads)](
        qkv_ptr=qkv,
        cos_ptr=cos,
        sin_ptr=sin,
        positions_ptr=positions,
        k_ptr=k_cache,
        v_ptr=v_cache,
        q_ptr=queries,
        num_rows=num_rows,
        cache_rows=capacity,
        row_start=row_start,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
    )
    return queries
