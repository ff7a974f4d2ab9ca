"""Attention by torch's own operation over the whole context at once: fast, but in no fixed order."""

from functools import lru_cache

import torch
import torch.nn.functional as F

from lookahead.layout import RowTree


def attend_sdpa(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    layout: RowTree,
    row_start: int,
    live_rows: torch.Tensor,
) -> torch.Tensor:
    """See `attend`. The step's keys and values are copied behind the committed ones, to places
    lengths[b] + row below `row_start`, where nothing is kept."""
    outputs = []
    counts = zip(lengths.tolist(), live_rows.tolist(), strict=True)
    for sequence, (length, live) in enumerate(counts):
        if not live:
            outputs.append(torch.zeros_like(q[0]))
            continue
        keys, values = (
            _in_order(part[sequence : sequence + 1], length, row_start, live)
            for part in (k_cache, v_cache)
        )
        found = F.scaled_dot_product_attention(
            q[sequence : sequence + 1, :live].transpose(1, 2),
            keys,
            values,
            attn_mask=_mask(layout, live, length, q.dtype, q.device) if live > 1 else None,
            enable_gqa=True,
        )
        out = found[0].transpose(0, 1)
        outputs.append(
            out if live == q.shape[1] else F.pad(out, (0, 0, 0, 0, 0, q.shape[1] - live))
        )
    return torch.stack(outputs) if len(outputs) > 1 else outputs[0].unsqueeze(0)


def _in_order(cache: torch.Tensor, length: int, row_start: int, live: int) -> torch.Tensor:
    """[1, num_kv_heads, length + live, head_dim] of a cache, committed keys and then the step's."""
    if length + live > row_start:  # no room between them
        return torch.cat([cache[:, :, :length], cache[:, :, row_start : row_start + live]], dim=2)
    cache[:, :, length : length + live] = cache[:, :, row_start : row_start + live]
    return cache[:, :, : length + live]


@lru_cache(maxsize=64)
def _mask(
    layout: RowTree, live: int, length: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[live, length + live]: 0 where a row sees a key, else -infinity."""
    hidden = ~torch.tensor(layout.visibility)[:live, :live]
    mask = torch.zeros(live, length + live, dtype=dtype)
    mask[:, length:].masked_fill_(hidden, float("-inf"))
    return mask.to(device)
