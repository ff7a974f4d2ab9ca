"""The window by hand, and against lists."""

import random

import torch

from lookahead.drafting.window import Window

CPU = torch.device("cpu")


def filled(*levels_of_sequences):
    """A window that holds [levels][columns] for each sequence, no step done."""
    tokens = torch.tensor(levels_of_sequences, dtype=torch.int32)
    window = Window(tokens.shape[0], tokens.shape[2], tokens.shape[1] + 1, CPU)
    window.tokens.copy_(tokens)
    return window


def harvested(window, next_tokens):
    """[(key, continuation, valid)] of each sequence, in order of columns."""
    keys, grams, valid = window.harvest(torch.tensor(next_tokens))
    batch, columns = len(next_tokens), len(next_tokens[0])
    assert keys.shape == valid.shape == (batch, columns)
    assert grams.shape == (batch, columns, window.levels)
    return [
        list(zip(*row, strict=True))
        for row in zip(keys.tolist(), grams.tolist(), valid.tolist(), strict=True)
    ]


def test_three_levels_by_hand():
    window = filled([[1, 2], [3, 4], [5, 6]])
    for number, is_valid in enumerate([False, False, True, True]):
        assert window.steps.tolist() == [number]
        if number == 0:
            expected = [[(1, [3, 5, 7], False), (2, [4, 6, 8], False)]]
            assert harvested(window, [[7, 8]]) == expected
        assert {item[2] for item in harvested(window, [[7, 8]])[0]} == {is_valid}
        window.shift(torch.tensor([[7 + 2 * number, 8 + 2 * number]]), torch.tensor([20 + number]))
        if number == 0:
            assert window.tokens.tolist() == [[[20, 4], [5, 6], [7, 8]]]
        if number == 2:
            assert window.tokens.tolist() == [[[22, 8], [9, 10], [11, 12]]]
            expected = [[(22, [9, 11, 0], True), (8, [10, 12, 1], True)]]
            assert harvested(window, [[0, 1]]) == expected


def test_bigrams_have_one_level():
    # The new tokens become level 0; with nothing drawn but that level, n-grams count at once.
    window = filled([[1, 2, 3]])
    assert harvested(window, [[4, 5, 6]]) == [[(1, [4], True), (2, [5], True), (3, [6], True)]]
    window.shift(torch.tensor([[4, 5, 6]]), torch.tensor([9]))
    assert window.tokens.tolist() == [[[9, 5, 6]]]
    assert harvested(window, [[7, 8, 7]]) == [[(9, [7], True), (5, [8], True), (6, [7], True)]]


def test_n_grams_count_from_step_n_minus_1_on():
    for ngram in range(2, 7):
        window = Window(1, 2, ngram, CPU)
        window.start(0, [1, 2, 3], seed=0)
        counted = []
        for _ in range(8):
            counted.append(harvested(window, [[4, 5]])[0][0][2])
            window.shift(torch.tensor([[4, 5]]), torch.tensor([6]))
        assert counted == [step >= ngram - 1 for step in range(1, 9)]


def test_start_draws_from_the_prompt():
    prompt = [11, 22, 33, 44]
    window = Window(2, 5, 4, CPU)
    window.tokens.fill_(7)
    window.steps.fill_(7)
    window.start(1, prompt, seed=3)
    assert window.tokens[0].unique().tolist() == [7]
    assert window.steps.tolist() == [7, 0]
    drawn = window.tokens[1].clone()
    assert drawn.shape == (3, 5)
    assert drawn[0, 0] == 44
    assert set(drawn.flatten().tolist()) == set(prompt)  # 14 draws of 4 tokens
    window.start(0, prompt, seed=3)
    assert torch.equal(window.tokens[0], drawn)
    window.start(0, prompt, seed=4)
    assert not torch.equal(window.tokens[0], drawn)
    assert window.tokens[0, 0, 0] == 44
    window.start(0, [5], seed=4)
    assert window.tokens[0].unique().tolist() == [5]


def test_drawing_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    Window(1, 5, 4, CPU).start(0, [1, 2, 3], seed=9)
    assert torch.equal(torch.rand(3), expected)


def test_without_columns_nothing_happens():
    window = Window(2, 0, 4, CPU)
    window.start(0, [1, 2], seed=0)
    assert window.tokens.shape == (2, 3, 0)
    assert harvested(window, [[], []]) == [[], []]


def test_random_steps_against_lists():
    draw = random.Random(0)
    for ngram in range(2, 6):
        for columns in range(1, 5):
            batch = 2
            window = Window(batch, columns, ngram, CPU)
            plain, steps = [], [0] * batch
            for sequence in range(batch):
                window.start(sequence, [1, 2, 3], seed=sequence)
                plain.append(window.tokens[sequence].tolist())
            for number in range(9):
                if number == 4:  # one sequence begins anew, the other goes on
                    window.start(1, [8, 9], seed=0)
                    plain[1], steps[1] = window.tokens[1].tolist(), 0
                new = [[draw.randrange(50) for _ in range(columns)] for _ in range(batch)]
                current = [draw.randrange(50) for _ in range(batch)]
                expected = [
                    [
                        (
                            plain[sequence][0][column],
                            [
                                *(level[column] for level in plain[sequence][1:]),
                                new[sequence][column],
                            ],
                            steps[sequence] + 1 >= ngram - 1,
                        )
                        for column in range(columns)
                    ]
                    for sequence in range(batch)
                ]
                assert harvested(window, new) == expected
                window.shift(torch.tensor(new), torch.tensor(current))
                for sequence in range(batch):
                    plain[sequence] = [*plain[sequence][1:], list(new[sequence])]
                    plain[sequence][0][0] = current[sequence]
                    steps[sequence] += 1
                assert window.tokens.tolist() == plain
                assert window.steps.tolist() == steps
