"""`largest_logit` on a CPU."""

import numpy as np
import torch

from lookahead.kernels.simd import (
    larger,
    largest,
    load,
    load_one,
    not_a_number,
    pointer,
    same,
    total,
    zeros,
)
from lookahead.kernels.simd_types import LANES, TAGS, entry, kernel
from lookahead.kernels.team import meet, share, team_of


@kernel
def largest_of_row(row, size):
    """The first place of the largest of `size` numbers, that number, and whether all are numbers."""
    lowest = same(zeros(row), -np.inf)
    best, spoiled = lowest, zeros(row)
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        value = load(row + i)
        best = larger(value, best)
        spoiled = spoiled + not_a_number(value)
    most = largest(best)
    is_number = total(spoiled) == 0
    for i in range(whole, size):
        value = load_one(row + i)
        is_number = is_number and value == value
        most = max(most, value)
    place = 0
    while place < size - 1 and load_one(row + place) != most:
        place += 1
    return place, most, is_number


@entry
def _largest(thread, num_threads, counter, arrivals, tag, logits, stride, size, tokens, finite):
    begin, end = share(len(tokens), thread, num_threads)
    for row in range(begin, end):
        start = pointer(logits, tag) + row * stride
        tokens[row], most, is_number = largest_of_row(start, size)
        finite[row] = is_number and most - most == 0
    meet(counter, arrivals, num_threads)


def largest_logit_numba(
    logits: torch.Tensor, num_threads: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `largest_logit`. By as many threads as torch would use, unless told otherwise."""
    rows = logits.reshape(-1, logits.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    tokens = torch.empty(rows.shape[0], dtype=torch.int64)
    finite = torch.empty(rows.shape[0], dtype=torch.bool)
    team_of(num_threads or torch.get_num_threads()).run(
        _largest, TAGS[logits.dtype], rows.data_ptr(), rows.stride(0), rows.shape[1], tokens.numpy(),
        finite.numpy(),
    )  # fmt: skip
    return tokens.view(logits.shape[:-1]), finite.view(logits.shape[:-1])
