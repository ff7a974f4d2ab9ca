"""`commit_rows` on a CPU: only what is accepted is copied."""

import numpy as np
import torch

from lookahead.kernels.simd_types import entry, kernel, whole_numbers

# Whole numbers, of which a copy keeps every bit.
_WHOLE = (torch.int64, torch.int32, torch.int16)


def bits_of(data: torch.Tensor) -> np.ndarray:
    """The same memory, as whole numbers of the bits: the widest that a head has no part of. The fewer
    there are to copy, the more of them are on their way from memory at once."""
    head_bytes = data.shape[5] * data.dtype.itemsize
    return data.view(next(whole for whole in _WHOLE if head_bytes % whole.itemsize == 0)).numpy()


@kernel
def copy_rows(data, sequence, rows, count, length, row_start):
    """One sequence's rows row_start + rows[i] to length + i, for i < count; `data` is as `bits_of`
    gives it."""
    for layer in range(data.shape[0]):
        for kind in range(2):
            for head in range(data.shape[3]):
                of_head = data[layer, kind, sequence, head]
                for place in range(count):
                    source, target = row_start + rows[place], length + place
                    for i in range(data.shape[5]):
                        of_head[target, i] = of_head[source, i]


@entry
def _commit(data, rows, counts, lengths, row_start):
    for sequence in range(len(counts)):
        copy_rows(data, sequence, rows[sequence], counts[sequence], lengths[sequence], row_start)


def commit_rows_numba(
    data: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    row_start: int,
) -> None:
    """See `commit_rows`. Numbers of one head lie side by side."""
    if data.stride(5) != 1:
        raise ValueError(f"data: expected its last stride to be 1, got strides {data.stride()}")
    _commit(
        bits_of(data), whole_numbers(rows), whole_numbers(counts), whole_numbers(lengths), row_start
    )
