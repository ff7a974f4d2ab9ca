"""The specification of `rope_write` in torch."""

import torch


def rope_write_ref(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    row_start: int,
) -> torch.Tensor:
    """See `rope_write`."""
    num_rows, num_heads = qkv.shape[1:3]
    num_kv_heads = k_cache.shape[1]
    rotated, values = qkv.split([num_heads - num_kv_heads, num_kv_heads], dim=2)
    first, second = rotated.to(cos.dtype).chunk(2, dim=-1)
    row_cos, row_sin = cos[positions].unsqueeze(2), sin[positions].unsqueeze(2)
    rotated = torch.cat(
        [first * row_cos - second * row_sin, second * row_cos + first * row_sin], dim=-1
    ).to(qkv.dtype)
    queries, keys = rotated.split([num_heads - 2 * num_kv_heads, num_kv_heads], dim=2)
    # 0 where all of a row is finite, else NaN
    spoiled = sum((part * 0.0).sum((2, 3), keepdim=True) for part in (keys, values))
    written = slice(row_start, row_start + num_rows)
    for cache, rows in ((k_cache, keys), (v_cache, values)):
        cache[:, :, written] = rows.nan_to_num(0.0, 0.0, 0.0).transpose(1, 2)
    return queries + spoiled
