"""Attention on a CPU by the library's fused kernel, in canonical key order.

Keys are numbered by absolute position and cut into blocks of BLOCK. A row that can be emitted sums the
whole blocks below the committed length in one call, and in another the block that it stands in: its
keys are gathered along the row's own path to their absolute places, the places behind the row hidden.
Both calls have the shape that they have for the autoregressive row, with a number of rows that gives
the same bits (`row_blocks.py`), and the two results are merged. So an emitted row's bits depend on its
own path only, as long as its position lies in the block of the committed length: further a step must
not emit. The other rows of a window take what follows the whole blocks in one call, in any order.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lookahead.kernels.row_blocks import (
    Operation,
    aligned,
    counts_to_try,
    fits,
    in_blocks,
    is_sound,
    pad_rows,
)
from lookahead.layout import LookaheadLayout, RowTree

BLOCK = 64
ROW_BLOCKS = (32, 24, 16, 8, 1)


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
    outputs = []
    counts = zip(lengths.tolist(), live_rows.tolist(), strict=True)
    for sequence, (length, live) in enumerate(counts):
        out = q.new_zeros(0, *q.shape[2:])
        if live:
            caches = k_cache[sequence], v_cache[sequence]
            group = q.shape[2] // k_cache.shape[1]
            places = _places(layout, live, length, row_start, group, q.dtype)
            out = _attend_one(q[sequence, :live], *caches, places)
        outputs.append(
            out if live == q.shape[1] else F.pad(out, (0, 0, 0, 0, 0, q.shape[1] - live))
        )
    return torch.stack(outputs) if len(outputs) > 1 else outputs[0].unsqueeze(0)


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
    depths = torch.arange(longest + ROW_BLOCKS[0]).unsqueeze(1)  # rows to fill up with, too
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
    found = _attend_rows(own, keys, values, places.own_mask)
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
        found = _fused(rows, keys, values, places.others_mask)
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
    out, weight = _attend_rows(rows, keys, values, places.own_mask)
    if places.prefix:
        first, first_weight = _attend_prefix(rows, k_cache, v_cache, places.prefix)
        out = _merge(first, first_weight, out, weight)
    return out.reshape(q.shape)


def _attend_prefix(
    rows: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, prefix: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_attend_rows` of [1, num_kv_heads, rows, head_dim] over the first keys."""
    return _attend_rows(rows, k_cache[None, :, :prefix], v_cache[None, :, :prefix])


def _merge(
    first: torch.Tensor, first_weight: torch.Tensor, out: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Two partial outputs [..., head_dim] by the logarithms of their weights [...].

    Made of operations whose every element is rounded alone: sigmoid's and lerp's depend on its place.
    """
    share = (first_weight - weight).exp_().add_(1.0).reciprocal_().unsqueeze(-1)
    wide, first_wide = out.to(share.dtype), first.to(share.dtype)
    return (wide - first_wide).mul_(share).add_(first_wide).to(out.dtype)


def _fused(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [calls, num_kv_heads, rows, head_dim], keys and values [calls, num_kv_heads, keys, head_dim] ->
    (output like q, logarithm of the sum of weights [calls, num_kv_heads, rows]).

    The operation behind `scaled_dot_product_attention`, for that does not tell the logarithms.
    """
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, attn_mask=mask
    )
    return found[0], found[1]


def is_available() -> bool:
    """Whether this torch has the operation that `attend_canonical` needs."""
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def _attend_rows(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_fused` with a number of rows that gives the bits of a block; of the mask [1, 1, rows, keys] as
    many rows as are needed are used."""
    calls, num_kv_heads, count, head_dim = q.shape
    num_keys = keys.shape[2]
    has_mask = mask is not None
    kind = _Kind(num_kv_heads, num_keys, head_dim, q.dtype, has_mask, torch.get_num_threads())
    padded = _fitting_count(kind, calls, count)
    if padded == count:
        return _fused(aligned(q), keys, values, None if mask is None else mask[:, :, :count])
    if padded is not None:
        mask = None if mask is None else mask[:, :, :padded]
        out, weight = _fused(
            pad_rows(q.transpose(1, 2), padded).transpose(1, 2), keys, values, mask
        )
        return out[:, :, :count], weight[:, :, :count]
    if calls > 1:
        parts = [
            _attend_rows(q[[call]], keys[[call]], values[[call]], mask) for call in range(calls)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    block = _row_block(kind)
    starts = iter(range(0, count, block))

    def run(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start = next(starts)
        part = None if mask is None else mask[:, :, start : start + block]
        found = _fused(rows.transpose(1, 2), keys, values, part)
        return found[0].transpose(1, 2), found[1].transpose(1, 2)

    found = in_blocks(run, q.transpose(1, 2), block)
    return found[0].transpose(1, 2), found[1].transpose(1, 2)


class _Kind(NamedTuple):
    """What, beside the numbers of calls and rows, the library may choose its arithmetic by."""

    num_kv_heads: int
    num_keys: int
    head_dim: int
    dtype: torch.dtype
    has_mask: bool
    num_threads: int


@cache
def _row_block(kind: _Kind) -> int:
    """The largest block of rows in which a row's bits depend on it alone."""
    operation, draw = _trial(kind)
    return next(block for block in ROW_BLOCKS if is_sound(operation, draw(block), block))


@cache
def _fitting_count(kind: _Kind, calls: int, count: int) -> int | None:
    """The least number of rows, at least `count`, that gives the bits of a block; None if a call must
    be cut."""
    operation, draw = _trial(kind)
    block = _row_block(kind)
    for padded in counts_to_try(count, block):
        if fits(operation, draw(padded), calls, block):
            return padded
    return None


def _trial(kind: _Kind) -> tuple[Operation, Callable[[int], torch.Tensor]]:
    """An operation of this kind over keys and values that cancel, and rows for it."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    half = kind.num_keys // 2
    place = torch.randperm(kind.num_keys, generator=generator)
    shape = (1, kind.num_kv_heads, kind.num_keys, kind.head_dim)
    keys, values = draw(*shape), draw(*shape)
    keys[:, :, place[half : 2 * half]] = keys[:, :, place[:half]]
    values[:, :, place[half : 2 * half]] = -values[:, :, place[:half]]
    keys, values = keys.to(kind.dtype), values.to(kind.dtype)
    mask = None
    if kind.has_mask:
        mask = torch.zeros(1, 1, 1, kind.num_keys, dtype=kind.dtype)
        mask[..., place[[0, half]]] = float("-inf")

    def operation(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls, count = rows.shape[:2]
        row_mask = None if mask is None else mask.expand(-1, -1, count, -1).contiguous()
        all_keys, all_values = (part.expand(calls, -1, -1, -1) for part in (keys, values))
        out, weight = _fused(rows.transpose(1, 2), all_keys, all_values, row_mask)
        return out.transpose(1, 2), weight.transpose(1, 2)

    return operation, lambda count: draw(count, kind.num_kv_heads, kind.head_dim).to(kind.dtype)
