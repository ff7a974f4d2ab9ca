"""Whether a library computes a row by the same arithmetic however many rows run beside it.

Libraries choose instructions and the order of sums by the shape of a whole call. The cure is one fixed
block of rows: within calls of that shape a row's bits may depend on nothing but the row, which
`is_sound` checks; other shapes may be used where `fits` finds the block's bits. Both want data made to
cancel, since ordinary sums hide a changed order under rounding. Knows no operation.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

ALIGNMENT = 64
# [calls, rows, ...] -> tensors of [calls, rows, ...]
Operation = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def is_sound(operation: Operation, rows: torch.Tensor, block: int) -> bool:
    """Whether in calls of `block` rows a row's bits depend on it alone: not on its place, nor on its
    neighbours, be they zeros, large or no numbers. `rows`: [at least block, ...]."""
    rows = rows[:block]
    if block == 1:
        return True
    expected = operation(rows[None])
    turned = torch.arange(block).roll(block // 2 + 1)
    if not _same(operation(rows[None, turned]), _take(expected, turned)):
        return False
    for place in {0, block // 2, block - 1}:
        for neighbours in (torch.zeros_like(rows), 100 * rows.roll(1, 0), rows * float("nan")):
            neighbours[place] = rows[0]
            found = operation(neighbours[None])
            if not _same(_take(found, [place]), _take(expected, [0])):
                return False
    return True


def fits(operation: Operation, rows: torch.Tensor, calls: int, block: int) -> bool:
    """Whether `calls` calls at once of as many rows as `rows` has give the bits of blocks."""
    found = operation(rows.expand(calls, *rows.shape).contiguous())
    expected = in_blocks(operation, rows[None], block)
    return all(_same(_call(found, call), expected) for call in (0, calls - 1))


def counts_to_try(count: int, block: int) -> range:
    """Numbers of rows that `count` rows may be filled up to: no more than whole blocks."""
    return range(count, -(-count // block) * block + 1)


def in_blocks(operation: Operation, rows: torch.Tensor, block: int) -> tuple[torch.Tensor, ...]:
    """One call's rows [1, rows, ...], a block at a time, the last filled up with zeros."""
    parts = []
    for start in range(0, rows.shape[1], block):
        part = rows[:, start : start + block]
        count = part.shape[1]
        found = operation(pad_rows(part, block))
        parts.append([each[:, :count] for each in found])
    return tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where a tensor of its own would begin: libraries may look at the address too."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def pad_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[calls, rows, ...] -> [calls, count, ...], filled up: one row with itself, more with zeros."""
    missing = count - rows.shape[1]
    if rows.shape[1] == 1:
        return torch.cat([rows] * count, dim=1)
    return F.pad(rows, [0, 0] * (rows.dim() - 2) + [0, missing]) if missing else rows.contiguous()


def _take(
    tensors: tuple[torch.Tensor, ...], rows: torch.Tensor | list[int]
) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[:, rows] for tensor in tensors)


def _call(tensors: tuple[torch.Tensor, ...], call: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[call : call + 1] for tensor in tensors)


def _same(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
