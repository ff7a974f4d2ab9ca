"""A step's numbers on their way to the host, worked out by hand."""

import torch

from lookahead.config import LookaheadConfig
from lookahead.drafting.ngram_pool import OUTPUT, WINDOW
from lookahead.step_numbers import NumberPacking, StepNumbers
from lookahead.step_output import StepOutput


def output(depth=3):
    """Three sequences of (W, N, G) = (1, 3, 2): two tokens of the window's n-gram and one more, one
    token of a plain one and one more, and nothing."""
    emitted = torch.tensor([[7, 8, 9], [5, 6, -5], [-1, -2, -3]])
    return StepOutput(
        emitted=emitted[:, :depth],
        counts=torch.tensor([3, 2, 0]).clamp(max=depth),
        finished=torch.tensor([False, True, True]),
        finite=torch.tensor([True, False, True]),
        logits=None,
        candidates=torch.tensor([[[1, 2], [7, 8]], [[5, 0], [-9, -9]], [[-9, -9]] * 2]).int(),
        origins=torch.tensor([[OUTPUT, WINDOW], [OUTPUT, WINDOW], [WINDOW, WINDOW]]).to(torch.int8),
        found=torch.tensor([2, 1, 0], dtype=torch.int32),
        winner=torch.tensor([1, 0, 0]),
        rows=torch.tensor([6, 4, 0], dtype=torch.int32),
        matches=torch.tensor([[2, 0], [1, -9], [-9, -9]]),
        path=torch.zeros((3, depth), dtype=torch.int64),
    )


def carried(packing, step, dropped=()):
    packed = packing.pack(step)
    assert packed.dtype == torch.int64
    assert packed.shape == (3, packing.size)
    return packing.unpack(packed.tolist(), dropped)


def test_what_is_told():
    packing = NumberPacking(LookaheadConfig(1, 3, 2, adaptive=True), 3)
    assert packing.size == 4 + 3 + 2 + 2 + 4
    assert carried(packing, output()) == StepNumbers(
        token_ids=[[7, 8, 9], [5, 6], []],
        finished=[False, True, True],
        finite=[True, False, True],
        rows=[6, 4, 0],
        candidates=[[[1, 2], [7, 8]], [[5, 0]], []],
        matches=[[2, 0], [1], []],
        from_window=[2, 0, 0],
    )


def test_of_a_dropped_sequence_nothing_is_told():
    packing = NumberPacking(LookaheadConfig(1, 3, 2, adaptive=True), 3)
    assert carried(packing, output(), {0, 1}) == StepNumbers(
        token_ids=[[], [], []],
        finished=[False, False, True],
        finite=[True, True, True],
        rows=[0, 0, 0],
        candidates=[[], [], []],
        matches=[[], [], []],
        from_window=[0, 0, 0],
    )


def test_where_contexts_are_not_looked_at_nothing_fits():
    packing = NumberPacking(LookaheadConfig(1, 3, 2, adaptive=True), 3)
    numbers = carried(packing, output()._replace(matches=None))
    assert numbers.matches == [[0, 0], [0], []]
    assert numbers.candidates == [[[1, 2], [7, 8]], [[5, 0]], []]


def test_candidates_are_left_out_where_nobody_observes_them():
    packing = NumberPacking(LookaheadConfig(1, 3, 2), 3)
    assert packing.size == 4 + 3
    numbers = carried(packing, output())
    assert numbers.token_ids == [[7, 8, 9], [5, 6], []]
    assert numbers.candidates == [[], [], []]
    assert numbers.from_window == [0, 0, 0]


def test_a_step_of_one_row_has_the_same_places():
    packing = NumberPacking(LookaheadConfig(1, 3, 2, adaptive=True), 3)
    numbers = carried(packing, output(depth=1))
    assert numbers.token_ids == [[7], [5], []]
    assert numbers.candidates == [[[1, 2], [7, 8]], [[5, 0]], []]
    assert numbers.from_window == [0, 0, 0]


def test_without_candidates_there_are_none():
    packing = NumberPacking(LookaheadConfig(1, 3, 0, adaptive=True), 3)
    step = output()._replace(
        candidates=torch.zeros((3, 0, 2), dtype=torch.int32),
        origins=torch.zeros((3, 0), dtype=torch.int8),
        found=torch.zeros(3, dtype=torch.int32),
        matches=None,
    )
    numbers = carried(packing, step)
    assert numbers.candidates == [[], [], []]
    assert numbers.from_window == [0, 0, 0]
