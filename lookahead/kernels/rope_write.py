"""Rotary embedding of a step's queries and keys, and the write of keys and values into the cache."""

import torch

from lookahead.kernels.checks import (
    INDEX_DTYPES,
    check_caches,
    check_floating,
    check_numbers,
    check_tensor,
    choose,
    wide_dtype,
)

IMPLEMENTATIONS = {
    "torch": "rope_write_ref:rope_write_ref",
    "triton": "rope_write_triton:rope_write_triton",
    "numba": "rope_write_numba:rope_write_numba",
}


def rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    row_start: int,
    implementation: str = "torch",
) -> torch.Tensor:
    """Rotate queries and keys by their positions; store keys and values of row r at row_start + r.

    Element i of a head is paired with element i + head_dim / 2. Computed in the dtype of the tables and
    rounded once. Of keys and values, elements that are not finite are stored as 0 and the queries of
    their row become NaN: the row spoils itself, and in `attend` nobody meets an infinity with weight 0.

    Args:
        qkv: [B, T, num_q_heads + 2 * num_kv_heads, head_dim]: query, key and value heads in this order.
        cos, sin: [P, head_dim / 2], float32 (float64 for float64 input); row p is for position p < P.
        positions: [B, T] int, position of each row.
        k_cache, v_cache: [B, num_kv_heads, C, head_dim] of qkv's dtype, written in place.
        row_start: cache index of row 0; row_start + T <= C.
        implementation: which implementation runs.

    Returns:
        The rotated queries [B, T, num_q_heads, head_dim].

    Raises:
        ValueError: an argument does not fit; says which, what was expected and what it got. The
            numbers in `positions` are checked on a CPU only.
    """
    run = choose(IMPLEMENTATIONS, implementation)
    check_floating("qkv", qkv, "[B, T, num_q_heads + 2 * num_kv_heads, head_dim]", rank=4)
    check_floating("k_cache", k_cache, "[B, num_kv_heads, C, head_dim]", rank=4)
    batch, num_rows, num_heads, head_dim = qkv.shape
    num_kv_heads = k_cache.shape[1]
    if num_heads <= 2 * num_kv_heads:
        raise ValueError(
            f"qkv: expected more than {2 * num_kv_heads} heads for {num_kv_heads} key/value heads, "
            f"got {num_heads}"
        )
    if head_dim % 2:
        raise ValueError(f"qkv: expected an even head_dim, got {head_dim}")
    check_caches(k_cache, v_cache, qkv, row_start)
    check_floating("cos", cos, "[P, head_dim / 2]", rank=2)
    wide = wide_dtype(qkv.dtype)
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, (cos.shape[0], head_dim // 2), qkv, (wide,))
    check_tensor("positions", positions, (batch, num_rows), qkv, INDEX_DTYPES)
    check_numbers("positions", positions, 0, cos.shape[0] - 1)
    return run(qkv, cos, sin, positions, k_cache, v_cache, row_start)
