"""Memory that a compiled forward pass works in: buffers for so many rows and threads."""

import torch

from lookahead.kernels.simd_types import LANES
from lookahead.models.forward_numba import Buffers, Sizes


class RowBuffers:
    """Grows with the most rows that were asked for.

    Attributes:
        addresses: of the buffers; others once they have grown.
    """

    def __init__(self, sizes: Sizes, dtype: torch.dtype, wide: torch.dtype) -> None:
        """`dtype` is the model's, `wide` what its numbers are computed in."""
        self._sizes, self._dtype, self._wide = sizes, dtype, wide
        self._capacity = self._num_threads = 0
        self.addresses = Buffers(*[0] * len(Buffers._fields))

    def make_room(self, num_rows: int, num_threads: int) -> None:
        """Have buffers for so many rows and threads; new ones begin as zeros."""
        if num_rows <= self._capacity and num_threads == self._num_threads:
            return
        self._capacity, self._num_threads = num_rows, num_threads
        sizes = self._sizes
        num_q_heads = sizes.num_kv_heads * sizes.group

        def rows(stride: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_rows * stride, dtype=dtype)

        self._tensors = [
            rows(sizes.hidden_stride, self._dtype),
            rows(sizes.hidden_stride, self._dtype),
            rows(sizes.qkv_stride, self._dtype),
            rows(num_q_heads * sizes.head_stride, self._dtype),
            rows(num_q_heads * sizes.head_stride, self._wide),
            rows(num_q_heads, self._wide),
            rows(num_q_heads * LANES, self._wide),
            rows(sizes.attended_stride, self._dtype),
            rows(sizes.hidden_stride, self._dtype),
            rows(sizes.gate_up_stride, self._dtype),
            rows(sizes.activated_stride, self._dtype),
            torch.zeros(num_threads * sizes.scratch_bytes, dtype=torch.uint8),
        ]
        self.addresses = Buffers(*(tensor.data_ptr() for tensor in self._tensors))
