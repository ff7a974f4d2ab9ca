"""Matrix products whose rows do not depend on how many rows run together.

The rule is `row_blocks.py`'s, tried for each shape. On a CPU weights are laid out as the library wants
them, once. Knows nothing of layers.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lookahead.kernels.row_blocks import CPU_BLOCKS, GPU_BLOCKS, Operation, RowRule, aligned

# A trial's weights repeat so many features: what it looks at are the rows.
TRIAL_FEATURES = 64


class Product:
    """A function of rows, [..., in] -> [..., out]: x @ weight.T + bias.

    Keeps the weight it is given only where the library has no layout of its own for it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, exact: bool) -> None:
        self.exact = exact
        self._run = _runner(weight, bias, exact)
        self._out_size, self._in_size = weight.shape
        self._has_bias = bias is not None
        self._dtype, self._device = weight.dtype, weight.device
        self._known_rule: tuple[int, RowRule] | None = None

    @property
    def row_block(self) -> int | None:
        """Rows of the block whose bits all calls have; None if they have none in common."""
        return self._rule.block if self.exact else None

    def prepare(self, counts: Iterable[int]) -> None:
        """Try these numbers of rows now rather than when they first come."""
        if self.exact:
            self._rule.prepare(counts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self._in_size)
        rule = self._rule if self.exact else None
        if rule is None or rule.block is None:
            out = self._run(rows)
        elif rule.fitting(1, rows.shape[0]) == rows.shape[0]:  # as `run` does, with less around it
            out = self._run(aligned(rows))
        else:
            out = rule.run(_as_operation(self._run), rows[None])[0][0]
        return out.view(*x.shape[:-1], self._out_size)

    @property
    def _rule(self) -> RowRule:
        num_threads = torch.get_num_threads()
        if self._known_rule is None or self._known_rule[0] != num_threads:
            sizes = (self._out_size, self._in_size, self._has_bias)
            kind = _Kind(*sizes, self._dtype, self._device, num_threads)
            self._known_rule = num_threads, _rule(kind)
        return self._known_rule[1]


def _runner(
    weight: torch.Tensor, bias: torch.Tensor | None, exact: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The fastest product [rows, in] -> [rows, out] that there is for this weight."""
    # float32 gains nothing by a layout but that two rows have the bits of many: plain ones are sixteen.
    if _can_be_laid_out(weight.device, weight.dtype) and (exact or weight.dtype != torch.float32):
        # The number of rows is a hint: laid out for one row, all numbers of rows are fast.
        laid_out = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)
        pointwise = torch.ops.mkldnn._linear_pointwise
        return lambda rows: pointwise(rows, laid_out, bias, "none", [], "")
    return lambda rows: F.linear(rows, weight, bias)


@cache
def _can_be_laid_out(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN's layouts, under names of its own, and this CPU the arithmetic."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    operations = torch.ops.mkldnn
    if not all(hasattr(operations, n) for n in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    if dtype == torch.float32:
        return True
    names = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    is_supported = getattr(operations, names.get(dtype, ""), None)
    return is_supported is not None and bool(is_supported())


class _Kind(NamedTuple):
    """What, beside the number of rows, the library may choose its arithmetic by."""

    out_size: int
    in_size: int
    has_bias: bool
    dtype: torch.dtype
    device: torch.device
    num_threads: int


@cache
def _rule(kind: _Kind) -> RowRule:
    blocks = CPU_BLOCKS if kind.device.type == "cpu" else GPU_BLOCKS
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
        wide = torch.float64 if kind.dtype == torch.float64 else torch.float32
        noise = torch.randn(kind.out_size, generator=generator, dtype=torch.float64)
        bias = (8 * torch.finfo(wide).eps * noise).to(kind.device, kind.dtype)
    return _as_operation(_runner(weight, bias, exact=True)), rows.to(kind.device, kind.dtype)
