"""Trials of an operation's rows, on operations whose faults are known."""

import pytest
import torch

from lookahead.kernels.row_blocks import counts_to_try, fits, in_blocks, is_sound, pad_rows

ROWS = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))


def alone(rows):
    return (2 * rows, rows.sum(2))


def by_place(rows):
    return (rows * (1 + (torch.arange(rows.shape[1]) == 5)).view(1, -1, 1),)


def by_neighbour(rows):
    return (rows + 1e-3 * rows.nan_to_num().sum(1, keepdim=True),)


def by_neighbour_that_is_no_number(rows):
    return (rows + 0 * rows.sum(1, keepdim=True),)


def by_count(rows):
    return (rows * (1 if rows.shape[1] % 4 == 0 else 2),)


def by_calls(rows):
    return (rows * (1 if rows.shape[0] < 3 else 2),)


@pytest.mark.parametrize(
    ("operation", "sound"),
    [
        (alone, True),
        (by_place, False),
        (by_neighbour, False),
        (by_neighbour_that_is_no_number, False),
        (by_count, True),
        (by_calls, True),
    ],
)
def test_a_block_is_sound_where_a_row_depends_on_itself_alone(operation, sound):
    assert is_sound(operation, ROWS, 32) is sound
    assert is_sound(operation, ROWS, 1) is True


@pytest.mark.parametrize("count", [1, 3, 4, 31, 32, 36, 50])
def test_numbers_of_rows_that_have_the_bits_of_a_block(count):
    assert fits(alone, ROWS[:count], 1, 32)
    assert fits(by_count, ROWS[:count], 1, 32) is (count % 4 == 0)
    assert fits(by_calls, ROWS[:count], 2, 32)
    assert not fits(by_calls, ROWS[:count], 3, 32)


def test_rows_in_blocks_are_the_rows():
    seen = []

    def operation(rows):
        seen.append(rows.shape[1])
        return alone(rows)

    found = in_blocks(operation, ROWS[None, :50], 24)
    assert seen == [24, 24, 24]
    for mine, expected in zip(found, alone(ROWS[None, :50]), strict=True):
        assert torch.equal(mine, expected)


def test_filling_up():
    rows = ROWS[:6].view(2, 3, 3)
    filled = pad_rows(rows, 5)
    assert torch.equal(filled[:, :3], rows)
    assert not filled[:, 3:].any()
    assert torch.equal(pad_rows(rows[:, :1], 2), torch.cat([rows[:, :1]] * 2, dim=1))
    assert torch.equal(pad_rows(rows, 3), rows)
    assert list(counts_to_try(3, 4)) == [3, 4]
    assert list(counts_to_try(33, 16)) == [*range(33, 49)]
