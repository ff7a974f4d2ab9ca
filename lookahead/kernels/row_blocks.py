"""The rule by which a row has the same bits however many rows run beside it.

Libraries choose instructions and the order of sums by the shape of a whole call. The cure is one fixed
block of rows: within calls of that shape a row's bits may depend on nothing but the row, and calls of
other shapes are used where they have the block's bits, else filled up or cut. Which do is found out by
trial, on data made to cancel, since ordinary sums hide a changed order under rounding. So the rule
follows from what an operation is, never from timing. Knows no operation.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F

GPU_BLOCKS = (128,)  # below which a GPU is idle
ALIGNMENT = 64

# [calls, rows, ...] -> tensors of [calls, rows, ...]
Operation = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
# Operations of one kind, and rows [count, ...] for each, as many as are asked for.
DrawTrials = Callable[[int], Sequence[tuple[Operation, torch.Tensor]]]


class RowRule:
    """Which numbers of rows have the bits of a block, for operations of one kind."""

    def __init__(self, blocks: Sequence[int], draw: DrawTrials) -> None:
        """`blocks` are numbers of rows to try for the block, the first that will do is taken."""
        self._blocks = blocks
        self._draw = draw
        self._fitting: dict[tuple[int, int], int | None] = {}

    @cached_property
    def block(self) -> int | None:
        """Rows of the block; None if a row depends on its neighbours in all of them."""
        trials = self._draw(max(self._blocks))
        return next(
            (block for block in self._blocks if all(is_sound(*trial, block) for trial in trials)),
            None,
        )

    def fitting(self, calls: int, count: int) -> int | None:
        """The least number of rows, at least `count`, that has the block's bits in so many calls at
        once; None if the calls must be made one by one, or the rows cut into blocks."""
        if (calls, count) not in self._fitting:
            self.prepare([count], calls)
        return self._fitting[calls, count]

    def prepare(self, counts: Iterable[int], calls: int = 1) -> None:
        """Find `fitting` for these counts now."""
        missing = sorted(count for count in set(counts) if (calls, count) not in self._fitting)
        block = self.block
        if not missing or block is None:
            return
        trials = self._draw(max(missing) + block)
        expected = [in_blocks(operation, rows[None], block) for operation, rows in trials]
        tried: dict[int, bool] = {}
        for count in missing:
            self._fitting[calls, count] = None
            for padded in range(count, -(-count // block) * block + 1):
                if padded not in tried:
                    tried[padded] = all(
                        fits(operation, rows[:padded], calls, each)
                        for (operation, rows), each in zip(trials, expected, strict=True)
                    )
                if tried[padded]:
                    self._fitting[calls, count] = padded
                    break

    def run(self, operation: Operation, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The operation by the rule, rows [calls, count, ...]; calls of a number that must be cut are
        the caller's to make one by one."""
        calls, count = rows.shape[:2]
        padded = self.fitting(calls, count)
        if padded == count:
            return operation(aligned(rows))
        if padded is not None:
            return tuple(part[:, :count] for part in operation(pad_rows(rows, padded)))
        assert self.block is not None
        assert calls == 1, "cut the calls first"
        return in_blocks(operation, rows, self.block)


def is_sound(operation: Operation, rows: torch.Tensor, block: int) -> bool:
    """Whether in calls of `block` rows a row's bits depend on it alone: not on its place, nor on its
    neighbours, be they zeros, large or no numbers. `rows`: [at least block, ...]."""
    rows = rows[:block]
    if block == 1:
        return True
    expected = operation(rows[None])
    turned = torch.arange(block).roll(block // 2 + 1)
    if not same_bits(operation(rows[None, turned]), _take(expected, turned)):
        return False
    large = 100 * rows.roll(1, 0)
    large[1::2] = float("nan")
    for place in (0, block - 1):
        for neighbours in (torch.zeros_like(rows), large.clone()):
            neighbours[place] = rows[0]
            found = operation(neighbours[None])
            if not same_bits(_take(found, [place]), _take(expected, [0])):
                return False
    return True


def fits(
    operation: Operation, rows: torch.Tensor, calls: int, expected: tuple[torch.Tensor, ...]
) -> bool:
    """Whether `calls` calls at once of as many rows as `rows` has give the expected bits."""
    found = operation(rows.expand(calls, *rows.shape).contiguous())
    first = tuple(part[:, : len(rows)] for part in expected)
    return all(
        same_bits(tuple(part[call : call + 1] for part in found), first) for call in (0, calls - 1)
    )


def in_blocks(operation: Operation, rows: torch.Tensor, block: int) -> tuple[torch.Tensor, ...]:
    """One call's rows [1, rows, ...], a block at a time, the last filled up with zeros."""
    parts = []
    for start in range(0, rows.shape[1], block):
        part = rows[:, start : start + block]
        count = part.shape[1]
        parts.append([each[:, :count] for each in operation(pad_rows(part, block))])
    return tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where a tensor of its own would begin: libraries may look at the address too."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def pad_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[calls, rows, ...] -> [calls, count, ...], filled up: one row with itself, more with zeros."""
    missing = count - rows.shape[1]
    if not missing:
        return aligned(rows.contiguous())
    if rows.shape[1] == 1:
        return torch.cat([rows] * count, dim=1)
    return F.pad(rows, [0, 0] * (rows.dim() - 2) + [0, missing])


def same_bits(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> bool:
    """Whether tensors of equal shapes and dtypes are the same, signs of zeros included."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(first, second, strict=True)
    )


def _take(
    tensors: tuple[torch.Tensor, ...], rows: torch.Tensor | list[int]
) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[:, rows] for tensor in tensors)
