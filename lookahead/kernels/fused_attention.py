"""The library's fused attention on a CPU, for numbers of rows that have the same bits.

Knows queries, keys and values as they are given; which keys a row is to see is `attn_mask_cpu.py`'s
business.
"""

from functools import cache
from typing import NamedTuple

import torch

from lookahead.kernels.row_blocks import (
    Operation,
    aligned,
    counts_to_try,
    fits,
    in_blocks,
    is_sound,
    pad_rows,
)

ROW_BLOCKS = (32, 24, 16, 8, 1)
TRIAL_OUTPUTS = 256
# Queries of a trial: so large that the rounding of a score of 0 decides its weight.
LARGE = 100.0


def fused(
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
    """Whether this torch has the operation."""
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def attend_rows(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused` with a number of rows that gives the bits of a block; of the mask [1, 1, rows, keys] as
    many rows as are needed are used."""
    calls, num_kv_heads, count, head_dim = q.shape
    num_keys = keys.shape[2]
    has_mask = mask is not None
    kind = _Kind(num_kv_heads, num_keys, head_dim, q.dtype, has_mask, torch.get_num_threads())
    padded = _fitting_count(kind, calls, count)
    if padded == count:
        return fused(aligned(q), keys, values, None if mask is None else mask[:, :, :count])
    if padded is not None:
        mask = None if mask is None else mask[:, :, :padded]
        out, weight = fused(pad_rows(q.transpose(1, 2), padded).transpose(1, 2), keys, values, mask)
        return out[:, :, :count], weight[:, :, :count]
    if calls > 1:
        parts = [
            attend_rows(q[[call]], keys[[call]], values[[call]], mask) for call in range(calls)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    block = _row_block(kind)
    starts = iter(range(0, count, block))

    def run(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start = next(starts)
        part = None if mask is None else mask[:, :, start : start + block]
        found = fused(rows.transpose(1, 2), keys, values, part)
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
    trials = _trials(kind, max(ROW_BLOCKS))
    return next(block for block in ROW_BLOCKS if all(is_sound(*trial, block) for trial in trials))


@cache
def _fitting_count(kind: _Kind, calls: int, count: int) -> int | None:
    """The least number of rows, at least `count`, that gives the bits of a block; None if a call must
    be cut."""
    block = _row_block(kind)
    trials = _trials(kind, count + block)
    for padded in counts_to_try(count, block):
        if all(fits(operation, rows[:padded], calls, block) for operation, rows in trials):
            return padded
    return None


def _trials(kind: _Kind, num_rows: int) -> list[tuple[Operation, torch.Tensor]]:
    """Operations of this kind and rows for them; several where one would have few outputs."""
    num_seeds = -(-TRIAL_OUTPUTS // (kind.num_kv_heads * kind.head_dim))
    return [trial for seed in range(num_seeds) for trial in _trial(kind, num_rows, seed)]


def _trial(kind: _Kind, num_rows: int, seed: int) -> list[tuple[Operation, torch.Tensor]]:
    """One whose scores cancel but for their rounding, which is large, and one whose values do."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    rows = draw(num_rows, kind.num_kv_heads, kind.head_dim)
    keys, values = (draw(1, kind.num_kv_heads, kind.num_keys, kind.head_dim) for _ in range(2))
    first, second = _pairs(kind.head_dim, generator)
    cancelling_rows, cancelling_keys = LARGE * rows, keys.clone()
    cancelling_rows[..., second] = cancelling_rows[..., first]
    cancelling_keys[..., second] = -cancelling_keys[..., first]
    early, late = _pairs(kind.num_keys, generator)
    keys[:, :, late] = keys[:, :, early]
    cancelling_values = values.clone()
    cancelling_values[:, :, late] = -values[:, :, early]
    hidden = [int(early[0]), int(late[0])]
    return [
        (_operation(kind, cancelling_keys, values, hidden), cancelling_rows.to(kind.dtype)),
        (_operation(kind, keys, cancelling_values, hidden), rows.to(kind.dtype)),
    ]


def _pairs(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """0..size-1 in two halves of random order; of an odd size one is left out."""
    place, half = torch.randperm(size, generator=generator), size // 2
    return place[:half], place[half : 2 * half]


def _operation(
    kind: _Kind, keys: torch.Tensor, values: torch.Tensor, hidden: list[int]
) -> Operation:
    keys, values = keys.to(kind.dtype), values.to(kind.dtype)

    def operation(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls, count = rows.shape[:2]
        mask = None
        if kind.has_mask:
            mask = torch.zeros(1, 1, count, kind.num_keys, dtype=kind.dtype)
            mask[..., hidden] = float("-inf")
        all_keys, all_values = (part.expand(calls, -1, -1, -1) for part in (keys, values))
        out, weight = fused(rows.transpose(1, 2), all_keys, all_values, mask)
        return out.transpose(1, 2), weight.transpose(1, 2)

    return operation
