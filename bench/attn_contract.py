"""Whether a verified row is the autoregressive row, bit for bit, on this machine.

A row of a step that may be emitted must have the bits that it would have alone, with the rows before it
committed. Knows how to lay the cache out either way; times nothing.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from attn_cases import AUTOREGRESSIVE, Attend, Case, Heads, Inputs, make_inputs

from lookahead.layout import LookaheadLayout

SHAPE = (15, 5, 15)
# Within a group of keys, at its end, and across the first tile's end.
LENGTHS = (1000, 4095, 62)


def alone(inputs: Inputs, path: Sequence[int], depth: int) -> Inputs:
    """The autoregressive row that `path[depth]` would be, for one sequence."""
    length, start = int(inputs.lengths[0]), inputs.row_start
    caches = [inputs.k_cache.clone(), inputs.v_cache.clone()]
    for cache in caches:
        rows = cache[:, :, [start + row for row in path[: depth + 1]]].clone()
        cache[:, :, start:] = float("nan")
        cache[:, :, length : length + depth] = rows[:, :, :depth]
        cache[:, :, start] = rows[:, :, depth]
    return replace(
        inputs,
        q=inputs.q[:, path[depth] : path[depth] + 1],
        k_cache=caches[0],
        v_cache=caches[1],
        lengths=inputs.lengths + depth,
        live_rows=torch.ones_like(inputs.live_rows),
    )


def compare_rows(
    case: Case, operation: Attend, device: torch.device, **options: Any
) -> tuple[int, int]:
    """Emittable rows whose bits differ from those of the row alone, and how many there are."""
    inputs, layout = make_inputs(case, device), case.layout
    bits = {2: torch.int16, 4: torch.int32}[case.dtype.itemsize]
    together = inputs.call(operation, layout, **options)().view(bits)
    one_row = LookaheadLayout(*AUTOREGRESSIVE)
    differing = total = 0
    for path in layout.candidate_paths:
        for depth, row in enumerate(path):
            by_itself = alone(inputs, path, depth).call(operation, one_row, **options)().view(bits)
            differing += not torch.equal(together[:, row : row + 1], by_itself)
            total += 1
    return differing, total


def check_contract(
    models: Sequence[Heads], dtype: torch.dtype, operation: Attend, device: torch.device
) -> dict[str, Any]:
    """Counts over heads and lengths, of the Triton kernel."""
    differing = total = 0
    for heads in models:
        for length in LENGTHS:
            case = Case(heads, SHAPE, length, dtype=dtype)
            counts = compare_rows(case, operation, device, implementation="triton")
            differing, total = differing + counts[0], total + counts[1]
    return {"shape": list(SHAPE), "rows": total, "rows_that_differ": differing}
