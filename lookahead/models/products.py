"""Matrix products whose rows do not depend on how many rows run together.

The rule is `row_blocks.py`'s, tried for each shape. Knows nothing of layers.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lookahead.kernels.checks import wide_dtype
from lookahead.kernels.row_blocks import Operation, RowRule

# A trial's weights repeat so many features: what it looks at are the rows.
TRIAL_FEATURES = 64


class Product:
    """A function of rows, [..., in] -> [..., out]: x @ weight.T + bias."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, blocks: Sequence[int] | None
    ) -> None:
        """`blocks` are numbers of rows whose bits all calls may be made to have; None runs calls as
        they are."""
        self._run = _runner(weight, bias)
        self._out_size, self._in_size = weight.shape
        self._rule = None
        if blocks is not None:
            has_bias = bias is not None
            kind = _Kind(self._out_size, self._in_size, has_bias, weight.dtype, weight.device)
            self._rule = _rule(kind, tuple(blocks))

    @property
    def row_block(self) -> int | None:
        """Rows of the block whose bits all calls have; None if they have none in common."""
        return self._rule.block if self._rule else None

    def prepare(self, counts: Iterable[int]) -> None:
        """Try these numbers of rows now rather than when they first come."""
        if self._rule:
            self._rule.prepare(counts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self._in_size)
        if self._rule is None or self._rule.block is None:
            out = self._run(rows)
        else:
            out = self._rule.run(_as_operation(self._run), rows[None])[0][0]
        return out.view(*x.shape[:-1], self._out_size)


def _runner(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A product [rows, in] -> [rows, out] by the library."""
    return lambda rows: F.linear(rows, weight, bias)


class _Kind(NamedTuple):
    """What, beside the number of rows, the library may choose its arithmetic by."""

    out_size: int
    in_size: int
    has_bias: bool
    dtype: torch.dtype
    device: torch.device


@cache
def _rule(kind: _Kind, blocks: tuple[int, ...]) -> RowRule:
    return RowRule(blocks, lambda num_rows: _trials(kind, num_rows))


def _as_operation(run: Callable[[torch.Tensor], torch.Tensor]) -> Operation:
    return lambda rows: (run(rows[0])[None],)


def _trials(kind: _Kind, num_rows: int) -> list[tuple[Operation, torch.Tensor]]:
    """Products of this kind and rows for them; several where one would have few outputs."""
    return [_trial(kind, num_rows, seed) for seed in range(max(1, TRIAL_FEATURES // kind.out_size))]


def _trial(kind: _Kind, num_rows: int, seed: int) -> tuple[Operation, torch.Tensor]:
    """A product of this kind, and rows; every other one's sums cancel but for their rounding."""
    generator = torch.Generator().manual_seed(seed)
    half = kind.in_size // 2
    place = torch.randperm(kind.in_size, generator=generator)
    first, second = place[:half], place[half : 2 * half]
    rows = torch.randn(num_rows, kind.in_size, generator=generator)
    weight = torch.randn(TRIAL_FEATURES, kind.in_size, generator=generator)
    cancelling = rows[::2]
    cancelling[:, second] = cancelling[:, first]
    cancelling[:, place[2 * half :]] = 0.0  # an odd one out
    weight[:, second] = -weight[:, first]
    weight = weight.to(kind.device, kind.dtype)
    weight = weight.repeat(-(-kind.out_size // TRIAL_FEATURES), 1)[: kind.out_size].contiguous()
    bias = None
    if kind.has_bias:
        # Of the size of what is left of a sum, so that it shows when it is added.
        wide = wide_dtype(kind.dtype)
        noise = torch.randn(kind.out_size, generator=generator, dtype=torch.float64)
        bias = (8 * torch.finfo(wide).eps * noise).to(kind.device, kind.dtype)
    return _as_operation(_runner(weight, bias)), rows.to(kind.device, kind.dtype)
