"""The specification of `commit_rows` in torch, of a shape that does not depend on the counts."""

import torch


def commit_rows_ref(
    data: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    row_start: int,
) -> None:
    """See `commit_rows`."""
    source = rows + row_start
    offsets = torch.arange(rows.shape[1], device=rows.device)
    position = lengths.unsqueeze(1) + offsets
    # A row that is not accepted is copied onto itself.
    target = torch.where(offsets < counts.unsqueeze(1), position, source)
    batch = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
    data[:, :, batch, :, target] = data[:, :, batch, :, source]
