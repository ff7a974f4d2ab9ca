"""Attention by torch's own operation over the whole context at once: fast, but in no fixed order."""

from functools import lru_cache

import torch
import torch.nn.functional as F

from lookahead.kernels.sequences import attend_each
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

    def attend_one(sequence: int, length: int, live: int) -> torch.Tensor:
        one = slice(sequence, sequence + 1)
        keys, values = (
            _in_order(part[one], length, row_start, live) for part in (k_cache, v_cache)
        )
        found = F.scaled_dot_product_attention(
            q[one, :live].transpose(1, 2),
            keys,
            values,
            attn_mask=_mask(layout, live, length, q.dtype, q.device) if live > 1 else None,
            enable_gqa=True,
        )
        return found[0].transpose(0, 1)

    return attend_each(q, lengths, live_rows, attend_one)


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
