"""Attention on a CPU has the same bits wherever a row runs."""

import pytest
import torch
from attention_cases import DTYPES, LAYOUTS, alone, differing_rows, make_case, same_bits

from lookahead.kernels.attn_mask_numba import BLOCK
from lookahead.layout import LookaheadLayout

ALL_DTYPES = (*DTYPES, torch.float64)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("offset", range(0, BLOCK, 3))
def test_every_row_is_the_autoregressive_row_to_the_bit(offset, dtype):
    """Three whole blocks before it, or none; paths that cross the end of a block among them, and rows
    of the window, that no step emits."""
    shapes = [(5, 4, 5), (0, 5, 2), (15, 5, 15), (1, 2, 2), (0, 5, 1), (0, 3, 8)]
    layout = LookaheadLayout(*shapes[offset % 6])
    length = offset + (3 * BLOCK if offset % 2 else 0)
    sizes = {"group": (1, 3, 4)[offset % 3], "head_dim": (64, 20, 80)[offset % 3], "gap": 9}
    case = make_case(layout, [length], **sizes).to(dtype)
    together = case.run("numba")
    for path, _ in layout.owned_paths:
        for depth, row in enumerate(path):
            single = alone(case, path, depth).run("numba")
            assert same_bits(together[:, row : row + 1], single), row


@pytest.mark.parametrize("layout", ["chunk", "tree", "broad tree"])
def test_so_is_every_row_of_any_tree(layout):
    case = make_case(LAYOUTS[layout], [BLOCK - 3], group=2, gap=80).to(torch.bfloat16)
    together = case.run("numba")
    for path, shared in case.layout.owned_paths:
        for depth in range(shared, len(path)):
            single = alone(case, path, depth).run("numba")
            assert same_bits(together[:, path[depth] : path[depth] + 1], single)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_another_order_differs(dtype):
    """What the tests above could not tell from canonical order would be no test."""
    case = make_case(LookaheadLayout(5, 4, 5), [3 * BLOCK + 7], gap=40).to(torch.float32).to(dtype)
    assert differing_rows(case, lambda each: each.run("numba")) == 0
    if dtype == torch.float32:
        assert differing_rows(case, lambda each: each.run("torch")) > 0


def test_a_cache_that_is_not_contiguous_is_refused():
    case = make_case(LAYOUTS["3,2,2"], [5]).to(torch.float32)
    with pytest.raises(ValueError, match=r"k_cache: expected a contiguous tensor"):
        type(case)(
            case.q, case.k_cache.mT.contiguous().mT, case.v_cache, case.lengths, case.layout,
            case.row_start, case.live_rows,
        ).run("numba")  # fmt: skip
