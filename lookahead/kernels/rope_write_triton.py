"""`rope_write` in Triton: one program a row, for a row spoils its queries by its keys and values."""

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
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rotate a row's query and key heads, and write keys and values to where they belong."""
    row = tl.program_id(0)  # of all sequences' rows
    sequence = row // num_rows
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    num_rotated: tl.constexpr = NUM_Q_HEADS + NUM_KV_HEADS
    in_head = dim < HALF
    inside = (head < num_rotated + NUM_KV_HEADS) & in_head
    source = qkv_ptr + row.to(tl.int64) * (num_rotated + NUM_KV_HEADS) * (2 * HALF)
    source += head * (2 * HALF) + dim
    x = tl.load(source, mask=inside, other=0.0)  # [H, D]
    y = tl.load(source + HALF, mask=inside, other=0.0)
    angle = tl.load(positions_ptr + row).to(tl.int64) * HALF + dim
    cos = tl.load(cos_ptr + angle, mask=in_head, other=0.0)  # [1, D]
    sin = tl.load(sin_ptr + angle, mask=in_head, other=0.0)
    wide_x, wide_y = x.to(tl.float32), y.to(tl.float32)
    first = tl.where(head < num_rotated, (wide_x * cos - wide_y * sin).to(x.dtype), x)
    second = tl.where(head < num_rotated, (wide_y * cos + wide_x * sin).to(x.dtype), y)

    is_stored = head >= NUM_Q_HEADS
    first_is_finite = first - first == 0.0
    second_is_finite = second - second == 0.0
    is_right = (first_is_finite & second_is_finite) | ~is_stored
    row_is_right = tl.min(tl.min(is_right.to(tl.int32), 1), 0) == 1
    spoiled = tl.where(row_is_right, 0.0, float("nan")).to(x.dtype)
    first = tl.where(is_stored, tl.where(first_is_finite, first, 0.0), first + spoiled)
    second = tl.where(is_stored, tl.where(second_is_finite, second, 0.0), second + spoiled)

    is_query = inside & (head < NUM_Q_HEADS)
    target = q_ptr + row.to(tl.int64) * NUM_Q_HEADS * (2 * HALF) + head * (2 * HALF) + dim
    tl.store(target, first, mask=is_query)
    tl.store(target + HALF, second, mask=is_query)
    cache_head = (head - NUM_Q_HEADS + NUM_KV_HEADS) % NUM_KV_HEADS
    cache_row = (sequence.to(tl.int64) * NUM_KV_HEADS + cache_head) * cache_rows
    cache_row += row_start + row % num_rows
    place = cache_row * (2 * HALF) + dim
    is_key = inside & is_stored & (head < num_rotated)
    tl.store(k_ptr + place, first, mask=is_key)
    tl.store(k_ptr + place + HALF, second, mask=is_key)
    is_value = inside & (head >= num_rotated)
    tl.store(v_ptr + place, first, mask=is_value)
    tl.store(v_ptr + place + HALF, second, mask=is_value)


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
    rotate_and_store[(batch * num_rows,)](
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
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK_D=triton.next_power_of_2(head_dim // 2),
        num_warps=8,
    )
    return queries
