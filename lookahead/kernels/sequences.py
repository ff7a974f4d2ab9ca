"""Attention of a batch as that of its sequences, for implementations that read lengths on the host."""

from collections.abc import Callable

import torch
import torch.nn.functional as F


def attend_each(
    q: torch.Tensor,
    lengths: torch.Tensor,
    live_rows: torch.Tensor,
    attend_one: Callable[[int, int, int], torch.Tensor],
) -> torch.Tensor:
    """`attend_one` is given a sequence, its length and its number of live rows, at least 1, and returns
    [live, num_q_heads, head_dim]; dead rows become 0. Returns [B, T, num_q_heads, head_dim]."""
    outputs = []
    counts = zip(lengths.tolist(), live_rows.tolist(), strict=True)
    for sequence, (length, live) in enumerate(counts):
        out = attend_one(sequence, length, live) if live else q.new_zeros(0, *q.shape[2:])
        missing = q.shape[1] - live
        outputs.append(F.pad(out, (0, 0, 0, 0, 0, missing)) if missing else out)
    return torch.stack(outputs) if len(outputs) > 1 else outputs[0].unsqueeze(0)
