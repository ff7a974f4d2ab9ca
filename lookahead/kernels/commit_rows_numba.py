"""`commit_rows` on a CPU: only what is accepted is copied."""

import torch

from lookahead.kernels.simd import load_one, pointer, store_one
from lookahead.kernels.simd_types import TAGS, entry, whole_numbers


@entry
def _commit(tag, data, sizes, strides, rows, counts, lengths, row_start):
    for sequence in range(len(counts)):
        for place in range(counts[sequence]):
            source = (row_start + rows[sequence, place]) * strides[4]
            target = (lengths[sequence] + place) * strides[4]
            for layer in range(sizes[0]):
                for kind in range(2):
                    for head in range(sizes[3]):
                        start = pointer(data, tag) + (
                            layer * strides[0]
                            + kind * strides[1]
                            + sequence * strides[2]
                            + head * strides[3]
                        )
                        for i in range(sizes[5]):
                            store_one(start + (target + i), load_one(start + (source + i)))


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
        TAGS[data.dtype], data.data_ptr(), tuple(data.shape), data.stride(), whole_numbers(rows),
        whole_numbers(counts), whole_numbers(lengths), row_start,
    )  # fmt: skip
