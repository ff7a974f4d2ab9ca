"""Products whose rows have the same bits however many run together, whatever the library does."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

from lookahead.kernels.row_blocks import same_bits
from lookahead.models import products
from lookahead.models.products import Product

BLOCKS = (32, 24, 16, 8, 1)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# out, in
SIZES = ((24, 16), (5, 7), (96, 48), (576, 1536), (960, 576))
COUNTS = (1, 2, 3, 5, 8, 15, 16, 17, 30, 31, 32, 33, 47, 64, 65, 100, 128, 129)


def cancelling(out_size: int, in_size: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and rows of which every other one's sums would be 0: what is left shows their order."""
    generator = torch.Generator().manual_seed(1)
    half = in_size // 2
    rows = torch.randn(num_rows, in_size, generator=generator)
    weight = torch.randn(out_size, in_size, generator=generator)
    rows[::2, half : 2 * half] = rows[::2, :half]
    weight[:, half : 2 * half] = -weight[:, :half]
    rows[::2, 2 * half :] = 0.0
    return rows, weight


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out_size", "in_size"), SIZES)
def test_every_number_of_rows_gives_the_same_bits(out_size, in_size, dtype, has_bias):
    rows, weight = cancelling(out_size, in_size, 130)
    size = 8 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    bias = (size * torch.randn(out_size).double()).to(dtype) if has_bias else None
    product = Product(weight.to(dtype), bias, BLOCKS)
    rows = rows.to(dtype)
    alone = torch.cat([product(rows[row : row + 1]) for row in range(len(rows))])
    for count in COUNTS:
        assert same_bits((product(rows[:count]),), (alone[:count],)), count
        assert same_bits((product(rows[-count:]),), (alone[-count:],)), count
    assert torch.equal(product(rows.view(2, 65, -1)), alone.view(2, 65, -1))
    assert product.row_block in BLOCKS


@pytest.mark.parametrize("blocks", [BLOCKS, None])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_numbers(dtype, blocks):
    generator = torch.Generator().manual_seed(0)
    rows, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 4, 40), (24, 40), (24,))
    )
    product = Product(weight, bias, blocks)
    expected = F.linear(rows.double(), weight.double(), bias.double())
    eps = torch.finfo(dtype).eps
    bound = (
        eps * expected.abs()
        + 8
        * torch.finfo(torch.float32).eps
        * rows.double().abs().sum(-1, keepdim=True)
        * weight.double().abs().max()
    )
    assert ((product(rows).double() - expected).abs() <= bound).all()
    assert (product.row_block is None) == (blocks is None)


def planted(fault):
    """A library with a fault: an operation that is given the true product and the rows."""

    def runner(weight, bias):
        return lambda rows: fault((rows.unsqueeze(1) * weight).double().sum(2), rows)

    return runner


def by_place(out, rows):
    """As where the last rows of a call, that fill no register, are summed in another order."""
    out = out.clone()
    out[len(out) // 4 * 4 :] += 2**-20
    return out


def by_count(out, rows):
    return out + 2**-20 * (len(rows) // 8)


@pytest.mark.parametrize(
    ("fault", "block", "calls"),
    [
        (by_place, 32, {1: [4], 4: [4], 5: [8], 30: [32], 33: [36], 64: [64]}),
        (by_count, 32, {1: [32], 31: [32], 32: [32], 33: [33], 40: [32, 32]}),
        (lambda out, rows: out + torch.arange(len(out)).unsqueeze(1), 1, {1: [1], 3: [1, 1, 1]}),
        (lambda out, rows: out + rows.sum(), 1, {1: [1], 2: [1, 1]}),
    ],
)
def test_a_faulty_library_is_worked_around(fault, block, calls, monkeypatch):
    """Rows are filled up, or calls cut, so that each row's bits are those of the block's."""
    seen = []

    def noted(out, rows):
        seen.append(len(rows))
        return fault(out, rows)

    monkeypatch.setattr(products, "_runner", planted(noted))
    monkeypatch.setattr(products, "_rule", cache(products._rule.__wrapped__))  # learns anew
    product = Product(torch.randn(12, 10), None, BLOCKS)
    assert product.row_block == block
    rows = torch.randn(70, 10)
    for count, expected in calls.items():
        product.prepare([count])
        seen.clear()
        out = product(rows[:count])
        assert seen == expected, count
        if block > 1:
            assert torch.equal(out[:1], product(rows[:1]))
