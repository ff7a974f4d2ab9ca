"""The specification of `attend` in dense torch: any device, any floating dtype, float64 included.

Products and softmax are computed in float32 (float64 for float64 input) and rounded once at the end.
"""

from functools import lru_cache

import torch

from lookahead.kernels.checks import wide_dtype
from lookahead.kernels.sequences import attend_each
from lookahead.layout import RowTree


@lru_cache(maxsize=256)
def _hidden(layout: RowTree, device: torch.device) -> torch.Tensor:
    """[T, T] bool: the step keys that a row does not see."""
    return torch.tensor(layout.visibility, device=device).logical_not_()


def attend_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    layout: RowTree,
    row_start: int,
    live_rows: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """See `attend`. Reads the lengths on the host, so it is not for capture in a graph, and needs no
    bound of them."""
    hidden = _hidden(layout, q.device)

    def attend_one(sequence: int, length: int, live: int) -> torch.Tensor:
        prefix, rows = slice(0, length), slice(row_start, row_start + live)
        keys, values = k_cache[sequence], v_cache[sequence]
        return _attend_one(
            q[sequence, :live],
            (keys[:, prefix], keys[:, rows]),
            (values[:, prefix], values[:, rows]),
            hidden[:live, :live],
        )

    return attend_each(q, lengths, live_rows, attend_one)


def _attend_one(
    q: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    values: tuple[torch.Tensor, torch.Tensor],
    hidden: torch.Tensor,
) -> torch.Tensor:
    """One sequence: q [T, num_q_heads, head_dim]; keys and values of prefix [num_kv_heads, L, head_dim]
    and step rows [num_kv_heads, T, head_dim]; hidden [T, T] -> [T, num_q_heads, head_dim]."""
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, length = keys[0].shape[:2]
    dtype = wide_dtype(q.dtype)
    # The query heads of one key/value head become rows of one product: [num_kv_heads, group * T, D].
    packed = q.to(dtype).mul(head_dim**-0.5).transpose(0, 1)
    packed = packed.reshape(num_kv_heads, -1, head_dim)
    scores = torch.cat([packed @ part.to(dtype).mT for part in keys], dim=-1)
    local = scores.view(num_kv_heads, -1, num_rows, length + num_rows)[..., length:]
    local.masked_fill_(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    out = sum(
        part @ value.to(dtype)
        for part, value in zip(weights.split([length, num_rows], -1), values, strict=True)
    )
    return out.view(num_q_heads, num_rows, head_dim).transpose(0, 1).to(q.dtype)
