"""Attention on a CPU by the library's fused kernel, in canonical key order.

Keys are numbered by absolute position and cut into blocks of BLOCK. A row that can be emitted sums the
whole blocks below the committed length in one call, and in another the block that it stands in: its
keys are gathered along the row's own path to their absolute places, the places behind the row hidden.
Both calls have the shape that they have for the autoregressive row, with a number of rows that gives
the same bits (`row_blocks.py`), and the two results are merged. So an emitted row's bits depend on its
own path only, as long as its position lies in the block of the committed length: further a step must
not emit. The other rows of a window take what follows the whole blocks in one call, in any order.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from lookahead.kernels.fused_attention import attend_rows, fused
from lookahead.kernels.row_blocks import CPU_BLOCKS
from lookahead.kernels.sequences import attend_each
from lookahead.layout import LookaheadLayout, RowTree

BLOCK = 64


def attend_canonical(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    layout: RowTree,
    row_start: int,
    live_rows: torch.Tensor,
) -> torch.Tensor:
    """See `attend`. Partial sums are rounded to q's dtype. The output of a candidate's row, or of any
    row of another tree, is undefined where it stands beyond the block of the committed length."""
    if q.device.type != "cpu":
        raise ValueError(f"q: expected a tensor on a CPU, got one on {q.device}")
    group = q.shape[2] // k_cache.shape[1]

    def attend_one(sequence: int, length: int, live: int) -> torch.Tensor:
        places = _places(layout, live, length, row_start, group, q.dtype)
        return _attend_one(q[sequence, :live], k_cache[sequence], v_cache[sequence], places)

    return attend_each(q, lengths, live_rows, attend_one)


class _Paths(NamedTuple):
    """The live rows of a step: those on paths that can be emitted, and the others, 1..window-1.

    `rows` [P, M] are the rows of each path, filled up with row 0; number `sources[i]` of them is row
    `targets[i]`. `sees` [window - 1, window] says which of the window's rows another row sees.
    """

    rows: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    window: int
    sees: torch.Tensor


@lru_cache(maxsize=256)
def _paths(layout: RowTree, live: int) -> _Paths:
    if isinstance(layout, LookaheadLayout):
        window = min(layout.num_window_rows, live)
        all_paths = layout.candidate_paths
    else:
        window = 1
        all_paths = tuple(path for path, _ in layout.owned_paths)
    paths = [[row for row in path if row < live] for path in all_paths]
    paths = [path for path in paths if len(path) > 1] or [[0]]
    longest = max(map(len, paths))
    sources: dict[int, int] = {}
    for number, path in enumerate(paths):
        for depth, row in enumerate(path):
            sources.setdefault(row, number * longest + depth)
    sees = [layout.visibility[row][:window] for row in range(1, window)]
    return _Paths(
        torch.tensor([path + [0] * (longest - len(path)) for path in paths]),
        torch.tensor(list(sources.values())),
        torch.tensor(list(sources)),
        window,
        torch.tensor(sees, dtype=torch.bool).view(-1, window),
    )


class _Places(NamedTuple):
    """Where the keys of a step's rows stand.

    `prefix` keys lie in whole blocks. `gathered` are P * BLOCK places of the block that follows, along
    each path, with `own_mask` [1, 1, rows, BLOCK], then those of the other rows, with `others_mask`. A
    mask has a row for each query head of a key/value head.
    """

    paths: _Paths
    prefix: int
    gathered: torch.Tensor
    own_mask: torch.Tensor
    others_mask: torch.Tensor


@lru_cache(maxsize=64)
def _places(
    layout: RowTree, live: int, length: int, row_start: int, group: int, dtype: torch.dtype
) -> _Places:
    paths = _paths(layout, live)
    prefix = length // BLOCK * BLOCK
    offset = length - prefix
    num_paths, longest = paths.rows.shape
    own = torch.full((num_paths, BLOCK), row_start)
    own[:, :offset] = torch.arange(prefix, length)
    fitting = min(longest, BLOCK - offset)
    own[:, offset : offset + fitting] += paths.rows[:, :fitting]
    depths = torch.arange(longest + max(CPU_BLOCKS)).unsqueeze(1)  # rows to fill up with, too
    is_hidden = torch.arange(BLOCK) > offset + depths
    num_others = paths.window + -(offset + paths.window) % 16  # a whole number of vectors
    others = torch.full((offset + num_others,), row_start)
    others[:offset] = torch.arange(prefix, length)
    others[offset : offset + paths.window] += torch.arange(paths.window)
    others_hidden = torch.ones(paths.window - 1, offset + num_others, dtype=torch.bool)
    others_hidden[:, :offset] = False
    others_hidden[:, offset : offset + paths.window] = ~paths.sees

    def mask(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.repeat_interleave(group, dim=0)
        return torch.zeros(1, 1, *hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))

    gathered = own.flatten() if paths.window == 1 else torch.cat([own.flatten(), others])
    return _Places(paths, prefix, gathered, mask(is_hidden), mask(others_hidden))


def _attend_one(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, places: _Places
) -> torch.Tensor:
    """One sequence's live rows: q [T, num_q_heads, head_dim], caches [num_kv_heads, C, head_dim]."""
    if len(q) == 1:
        return _attend_single(q, k_cache, v_cache, places)
    paths, num_kv_heads = places.paths, len(k_cache)
    # The query heads of a key/value head become rows: [T, group, num_kv_heads, head_dim].
    q = q.unflatten(1, (num_kv_heads, -1)).transpose(1, 2).contiguous()
    gathered = [part.index_select(1, places.gathered) for part in (k_cache, v_cache)]
    num_own = len(paths.rows) * BLOCK
    keys, values = (
        part[:, :num_own].unflatten(1, (-1, BLOCK)).transpose(0, 1) for part in gathered
    )
    own = q[paths.rows].flatten(1, 2).transpose(1, 2)  # [P, num_kv_heads, M * group, head_dim]
    found = attend_rows(own, keys, values, places.own_mask)
    own_out, own_weight = (
        part.transpose(1, 2).reshape(-1, *q.shape[1 : part.dim()]) for part in found
    )
    out, weight = torch.empty_like(q), own_weight.new_empty(q.shape[:-1])
    out[paths.targets] = own_out[paths.sources]
    weight[paths.targets] = own_weight[paths.sources]
    if paths.window > 1:
        keys, values = (part[None, :, num_own:] for part in gathered)
        others = slice(1, paths.window)
        rows = q[others].flatten(0, 1).transpose(0, 1)[None]
        found = fused(rows, keys, values, places.others_mask)
        out[others], weight[others] = (
            part[0].transpose(0, 1).reshape(-1, *q.shape[1 : part.dim()]) for part in found
        )
    if places.prefix:
        rows = q.flatten(0, 1).transpose(0, 1)[None]
        found = _attend_prefix(rows, k_cache, v_cache, places.prefix)
        first, first_weight = (
            part[0].transpose(0, 1).reshape(q.shape[: part.dim()]) for part in found
        )
        out = _merge(first, first_weight, out, weight)
    return out.transpose(1, 2).flatten(1, 2)


def _attend_single(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, places: _Places
) -> torch.Tensor:
    """`_attend_one` for one row, whose heads already lie as they should."""
    rows = q.unflatten(1, (len(k_cache), -1))  # [1, num_kv_heads, group, head_dim]
    keys, values = (part.index_select(1, places.gathered)[None] for part in (k_cache, v_cache))
    out, weight = attend_rows(rows, keys, values, places.own_mask)
    if places.prefix:
        first, first_weight = _attend_prefix(rows, k_cache, v_cache, places.prefix)
        out = _merge(first, first_weight, out, weight)
    return out.reshape(q.shape)


def _attend_prefix(
    rows: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, prefix: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_rows` of [1, num_kv_heads, rows, head_dim] over the first keys."""
    return attend_rows(rows, k_cache[None, :, :prefix], v_cache[None, :, :prefix])


def _merge(
    first: torch.Tensor, first_weight: torch.Tensor, out: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Two partial outputs [..., head_dim] by the logarithms of their weights [...].

    Made of operations whose every element is rounded alone: sigmoid's and lerp's depend on its place.
    """
    share = (first_weight - weight).exp_().add_(1.0).reciprocal_().unsqueeze(-1)
    wide, first_wide = out.to(share.dtype), first.to(share.dtype)
    return (wide - first_wide).mul_(share).add_(first_wide).to(out.dtype)
