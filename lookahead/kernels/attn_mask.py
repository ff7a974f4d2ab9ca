"""Attention of a step's rows over the committed prefix and their own paths.

`attend` checks its arguments and runs the named implementation. It knows a row tree and a cache; it
does not know what the rows are for. No mask tensor is an argument: the tree says what is visible.
"""

import torch

from lookahead.kernels.checks import (
    INDEX_DTYPES,
    check_caches,
    check_floating,
    check_numbers,
    check_tensor,
    choose,
)
from lookahead.layout import RowTree

IMPLEMENTATIONS = {
    "torch": "attn_mask_ref:attend_ref",
    "triton": "attn_mask_launch:attend_triton",
    "numba": "attn_mask_numba:attend_numba",
}


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    layout: RowTree,
    *,
    row_start: int,
    live_rows: torch.Tensor,
    longest: int | None = None,
    implementation: str = "torch",
) -> torch.Tensor:
    """Softmax attention, scaled by head_dim ** -0.5, of T step rows of each sequence.

    Row r of sequence b sees the keys of positions 0..lengths[b]-1, at those indices of the cache, and
    the keys of its path in `layout`, where row k's key lies at index `row_start + k`. Nothing else of
    the cache is read. Query head h uses key/value head h // (num_q_heads // num_kv_heads).

    Keys and values that are read must be finite, which `rope_write` sees to, and so must their products
    with queries in float32: an implementation may give a key that a row does not see weight 0. A query
    may hold NaN; it spoils its own row alone.

    Args:
        q: [B, T, num_q_heads, head_dim], float16, bfloat16, float32 or float64.
        k_cache, v_cache: [B, num_kv_heads, C, head_dim] of q's dtype.
        lengths: [B] int, committed length of each sequence, at most `longest`.
        layout: the tree of the T rows.
        row_start: index of row 0's key in the cache; row_start + T <= C.
        live_rows: [B] int; rows from this number on are dead: no live row may have one on its path,
            their queries and keys are not read and their output is 0.
        longest: what no length is above, by default `row_start`. It bounds the work that is launched
            and changes no bit of what comes out.
        implementation: "torch" is the specification, "triton" the kernel, "numba" that for a CPU.

    Returns:
        [B, T, num_q_heads, head_dim] of q's dtype.

    Raises:
        ValueError: an argument does not fit, or the implementation cannot take it; says which, what was
            expected and what it got. Numbers in `lengths` and `live_rows` are checked on a CPU only.
    """
    run = choose(IMPLEMENTATIONS, implementation)
    check_floating("q", q, "[B, T, num_q_heads, head_dim]", rank=4)
    check_floating("k_cache", k_cache, "[B, num_kv_heads, C, head_dim]", rank=4)
    batch, num_rows, num_q_heads = q.shape[:3]
    num_kv_heads = k_cache.shape[1]
    if not isinstance(layout, RowTree):
        raise ValueError(f"layout: expected a RowTree, got {type(layout).__name__}")
    if layout.num_rows != num_rows:
        raise ValueError(f"layout: expected {num_rows} rows as q has, got {layout.num_rows}")
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"q: expected a multiple of {num_kv_heads} heads as k_cache has, got {num_q_heads}"
        )
    check_caches(k_cache, v_cache, q, row_start)
    longest = row_start if longest is None else longest
    if type(longest) is not int or not 0 <= longest <= row_start:
        raise ValueError(f"longest: expected 0..{row_start}, got {longest!r:.80}")
    for name, counts, most in (("lengths", lengths, longest), ("live_rows", live_rows, num_rows)):
        check_tensor(name, counts, (batch,), q, INDEX_DTYPES)
        check_numbers(name, counts, 0, most)
    return run(q, k_cache, v_cache, lengths, layout, row_start, live_rows, longest)
