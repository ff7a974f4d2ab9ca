"""`rope_write` on a CPU, a row at a time."""

import torch
import torch.nn.functional as F

from lookahead.kernels.checks import check_contiguous
from lookahead.kernels.product_numba import filled_up
from lookahead.kernels.simd import (
    finite_or_zero,
    fma,
    keep_first,
    load,
    load_one,
    pointer,
    splat,
    store,
    store_one,
    total,
    zeros,
)
from lookahead.kernels.simd_types import LANES, TAGS, entry, kernel, whole_numbers


@kernel
def rotate_head(head, cos, sin, half):
    """Rotate the pairs (i, i + half) of 2 * half numbers where they lie, rounded."""
    i = 0
    while i + LANES <= half:
        first, second = load(head + i), load(head + half + i)
        c, s = load(cos + i), load(sin + i)
        store(head + i, first * c - second * s)
        store(head + half + i, second * c + first * s)
        i += LANES
    while i < half:
        a, b = load_one(head + i), load_one(head + half + i)
        p, q = load_one(cos + i), load_one(sin + i)
        store_one(head + i, a * p - b * q)
        store_one(head + half + i, b * p + a * q)
        i += 1


@kernel
def write_head(head, size, cached):
    """Copy a key or value to the cache, 0 for what is not finite.

    Returns:
        0 if all numbers were finite, else NaN. Up to a vector behind `head` may be read.
    """
    spoiled = zeros(head)
    zero = spoiled
    none = total(zero)
    for i in range(0, size, LANES):
        value = keep_first(load(head + i), size - i, zero)
        spoiled = fma(value, zero, spoiled)
        if i + LANES <= size:
            store(cached + i, finite_or_zero(value))
        else:
            for j in range(i, size):
                number = load_one(head + j)
                store_one(cached + j, number if number - number == 0 else none)
    return total(spoiled)


@kernel
def write_row(
    qkv, num_kv_heads, group, head_dim, cos, sin, keys, values, head_stride, q, q_head_stride, q_stride,
):  # fmt: skip
    """Rotate one row's queries and keys, write keys and values to the cache, queries to `q`.

    Args:
        qkv: pointer to the row, query heads, then keys, then values; rotated where it lies.
        cos, sin: pointers to the row's half head_dim numbers.
        keys, values: pointers to the row's place in the cache for head 0, those of the next
            `head_stride` on.
        q: pointer to where the row's queries go; those of a key/value head's group are `q_stride`
            apart, of the next such head `q_head_stride`.
    """
    num_q_heads = num_kv_heads * group
    half = head_dim // 2
    for head in range(num_q_heads + num_kv_heads):
        rotate_head(qkv + head * head_dim, cos, sin, half)
    zero = zeros(qkv)
    spoiled = total(zero)
    for head in range(num_kv_heads):
        key = qkv + (num_q_heads + head) * head_dim
        spoiled += write_head(key, head_dim, keys + head * head_stride)
        value = key + num_kv_heads * head_dim
        spoiled += write_head(value, head_dim, values + head * head_stride)
    addend = splat(spoiled)
    for head in range(num_kv_heads):
        for member in range(group):
            source = qkv + (head * group + member) * head_dim
            target = q + head * q_head_stride + member * q_stride
            for i in range(0, head_dim, LANES):
                rotated = keep_first(load(source + i), head_dim - i, zero)
                store(target + i, rotated + addend)


@entry
def _write_rows(
    tag, wide_tag, qkv, batch, num_rows, stride, num_kv_heads, group, head_dim, cos, sin, positions,
    keys, values, capacity, row_start, q, q_stride,
):  # fmt: skip
    for sequence in range(batch):
        for row in range(num_rows):
            place = sequence * num_rows + row
            table = positions[sequence, row] * (head_dim // 2)
            cached = (sequence * num_kv_heads * capacity + row_start + row) * head_dim
            write_row(
                pointer(qkv, tag) + place * stride, num_kv_heads, group, head_dim,
                pointer(cos, wide_tag) + table, pointer(sin, wide_tag) + table,
                pointer(keys, tag) + cached, pointer(values, tag) + cached, capacity * head_dim,
                pointer(q, tag) + place * num_kv_heads * group * q_stride, group * q_stride,
                q_stride,
            )  # fmt: skip


def rope_write_numba(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    row_start: int,
) -> torch.Tensor:
    """See `rope_write`. Caches are contiguous."""
    check_contiguous(k_cache=k_cache, v_cache=v_cache, cos=cos, sin=sin)
    batch, num_rows, num_heads, head_dim = qkv.shape
    num_kv_heads, capacity = k_cache.shape[1:3]
    group = num_heads // num_kv_heads - 2
    rows = F.pad(qkv.flatten(2), (0, LANES)).contiguous()
    num_q_heads, q_stride = num_kv_heads * group, filled_up(head_dim)
    q = qkv.new_empty((batch, num_rows, num_q_heads, q_stride))
    _write_rows(
        TAGS[qkv.dtype], TAGS[cos.dtype], rows.data_ptr(), batch, num_rows, rows.shape[-1],
        num_kv_heads, group, head_dim, cos.data_ptr(), sin.data_ptr(), whole_numbers(positions),
        k_cache.data_ptr(), v_cache.data_ptr(), capacity, row_start, q.data_ptr(), q_stride,
    )  # fmt: skip
    return q[..., :head_dim].contiguous()
