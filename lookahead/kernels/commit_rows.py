"""Accepted rows of a step to their places in the cache: keys and values of all layers at once."""

import torch

from lookahead.kernels.checks import INDEX_DTYPES, check_floating, check_tensor, choose

IMPLEMENTATIONS = {
    "torch": "commit_rows_ref:commit_rows_ref",
    "triton": "commit_rows_triton:commit_rows_triton",
    "numba": "commit_rows_numba:commit_rows_numba",
}


def commit_rows(
    data: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    row_start: int,
    implementation: str = "torch",
) -> None:
    """Copy index row_start + rows[b, i] of sequence b to index lengths[b] + i, for i < counts[b].

    Args:
        data: [layers, 2, B, num_kv_heads, C, head_dim], changed in place.
        rows: [B, M] int64, row numbers of the step, in order of position.
        counts: [B] int, 0..M.
        lengths: [B] int, committed lengths before.
        row_start: index of row 0.
        implementation: which implementation runs.

    Raises:
        ValueError: an argument does not fit, or the implementation cannot take it.
    """
    run = choose(IMPLEMENTATIONS, implementation)
    check_floating("data", data, "[layers, 2, B, num_kv_heads, C, head_dim]", rank=6)
    batch = data.shape[2]
    if rows.dim() != 2:
        raise ValueError(f"rows: expected [B, M], got shape {list(rows.shape)}")
    check_tensor("rows", rows, (batch, rows.shape[1]), data, (torch.int64,))
    for name, numbers in (("counts", counts), ("lengths", lengths)):
        check_tensor(name, numbers, (batch,), data, INDEX_DTYPES)
    run(data, rows, counts, lengths, row_start)
