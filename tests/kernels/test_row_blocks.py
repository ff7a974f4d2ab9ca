"""Trials of an operation's rows, on operations whose faults are known."""

import pytest
import torch

from lookahead.kernels.row_blocks import RowRule, fits, in_blocks, is_sound, pad_rows, same_bits

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
    def does_fit(operation, calls):
        return fits(operation, ROWS[:count], calls, in_blocks(operation, ROWS[None], 32))

    assert does_fit(alone, 1)
    assert does_fit(by_count, 1) is (count % 4 == 0)
    assert does_fit(by_calls, 2)
    assert not does_fit(by_calls, 3)


def rule(operation, blocks=(32, 24, 1)):
    return RowRule(blocks, lambda count: [(operation, torch.randn(count, 3))])


@pytest.mark.parametrize(
    ("operation", "block", "fitting"),
    [
        (alone, 32, {(1, 1): 1, (1, 33): 33, (7, 5): 5}),
        (by_place, 1, {(1, 1): 1, (1, 5): 5, (1, 6): None}),
        (by_count, 32, {(1, 1): 4, (1, 5): 8, (1, 32): 32, (1, 33): 36, (3, 2): 4}),
        (by_calls, 32, {(1, 3): 3, (2, 3): 3, (3, 3): None}),
    ],
)
def test_the_rule_is_what_trials_say(operation, block, fitting):
    found = rule(operation)
    assert found.block == block
    assert {each: found.fitting(*each) for each in fitting} == fitting


def test_there_may_be_no_block():
    found = rule(by_neighbour, blocks=(32, 8))
    assert found.block is None
    found.prepare([1, 2])  # nothing to find


@pytest.mark.parametrize("operation", [alone, by_count, by_place])
@pytest.mark.parametrize("count", [1, 2, 5, 6, 31, 32, 33, 50])
def test_by_the_rule_a_row_is_what_it_is_alone(operation, count):
    found = rule(operation)
    together = found.run(operation, ROWS[None, :count])
    for row in range(count):
        single = found.run(operation, ROWS[None, row : row + 1])
        assert same_bits(single, tuple(part[:, row : row + 1] for part in together))


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


def test_bits_are_more_than_values():
    zeros = torch.zeros(2)
    assert same_bits((zeros,), (zeros.clone(),))
    assert not same_bits((zeros,), (-zeros,))
    assert same_bits((zeros / 0,), (zeros / 0,))
