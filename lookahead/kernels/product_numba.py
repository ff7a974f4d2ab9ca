"""Matrix products on a CPU: y = x @ weight.T + bias by `tile.multiply`.

A weight is packed once for the order in which it is read: LANES features side by side, then the next
inner index, or pair of them. An output's bits depend on its row, its feature's weights and nothing
else.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from lookahead.kernels.checks import wide_dtype
from lookahead.kernels.simd import ask, pointer
from lookahead.kernels.simd_types import LANES, LINE, TAGS, entry, kernel
from lookahead.kernels.team import Team, meet, share
from lookahead.kernels.tile import TILE_VECTORS, multiplies_pairs, multiply, size_of


class Packed(NamedTuple):
    """A weight [out, in] as [vectors, links, LANES, width], zeros where it is filled up, and its bias
    [vectors * LANES] in the type that is computed in."""

    weight: torch.Tensor
    bias: torch.Tensor
    out_size: int
    in_size: int

    @property
    def num_vectors(self) -> int:
        return self.weight.shape[0]

    @property
    def num_links(self) -> int:
        return self.weight.shape[1]


def filled_up(size: int) -> int:
    """The next multiple of LANES."""
    return -(-size // LANES) * LANES


def link_width(dtype: torch.dtype) -> int:
    """Inner indices of one link of a sum's chain."""
    return 2 if multiplies_pairs(dtype) else 1


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
    """Lay out a weight [out, in]."""
    out_size, in_size = weight.shape
    width = link_width(weight.dtype)
    full = F.pad(weight, (0, -in_size % width, 0, -out_size % LANES))
    packed = full.view(full.shape[0] // LANES, LANES, -1, width).transpose(1, 2).contiguous()
    wide_bias = torch.zeros(full.shape[0], dtype=wide_dtype(weight.dtype))
    if bias is not None:
        wide_bias[:out_size] = bias
    return Packed(packed, wide_bias, out_size, in_size)


@kernel
def share_of_vectors(num_vectors, thread, num_threads):
    """The vectors of features that are this thread's: the first and the one behind the last."""
    first, last = share(-(-num_vectors // TILE_VECTORS), thread, num_threads)
    return first * TILE_VECTORS, min(last * TILE_VECTORS, num_vectors)


@kernel
def multiply_share(
    thread, num_threads, tag, wide_tag, x, x_stride, num_rows, weight, bias, num_vectors, num_links,
    width, y, y_stride, following,
):  # fmt: skip
    """This thread's features of a product; tensors are given by address. `following` is that of the
    weights which this thread needs next."""
    first, last = share_of_vectors(num_vectors, thread, num_threads)
    if first >= last or num_rows == 0:
        return
    # Other threads wrote most of the rows: all their lines at once, instead of one after the other.
    rows = pointer(x, tag)
    row_bytes = x_stride * size_of(rows)
    for row in range(num_rows):
        for line in range(0, num_links * width * size_of(rows), LINE):
            ask(x + row * row_bytes + line)
    w_step = LANES * width
    w_stride = num_links * w_step
    multiply(
        rows, x_stride, num_rows, pointer(weight, tag) + first * w_stride, w_step,
        w_stride, last - first, num_links, pointer(bias, wide_tag) + first * LANES, 0,
        pointer(y, tag) + first * LANES, y_stride, pointer(following, tag),
    )  # fmt: skip


@entry
def _product(thread, num_threads, counter, arrivals, *arguments):
    multiply_share(thread, num_threads, *arguments)
    meet(counter, arrivals, num_threads)


def product(team: Team, x: torch.Tensor, packed: Packed, y: torch.Tensor) -> None:
    """Write x [rows, in] times the weight to y [rows, filled_up(out)].

    Both are of the weight's dtype, each row contiguous; where links are pairs and `in` is odd, a row of
    x is followed by a zero.
    """
    dtype = packed.weight.dtype
    team.run(
        _product, TAGS[dtype], TAGS[wide_dtype(dtype)], x.data_ptr(), x.stride(0), x.shape[0],
        packed.weight.data_ptr(), packed.bias.data_ptr(), packed.num_vectors, packed.num_links,
        link_width(dtype), y.data_ptr(), y.stride(0), packed.weight.data_ptr(),
    )  # fmt: skip
