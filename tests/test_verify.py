"""The acceptance rule by hand and against the rule written out with lists; the choice of a token."""

import math
import random

import pytest
import torch

from lookahead.kernels.largest_logit import largest_logit
from lookahead.layout import LookaheadLayout
from lookahead.verify import verify


def run_verify(tokens, choices, paths, live):
    """[[row tokens]], [[choices]], paths, [live paths] -> accepted rows, emitted tokens, winner."""
    verdict = verify(
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(choices),
        torch.tensor(paths),
        torch.tensor(live, dtype=torch.int32),
    )
    assert verdict.rows.shape == verdict.emitted.shape == (len(tokens), len(paths[0]))
    return [
        (rows[:count], emitted[:count], winner)
        for rows, emitted, count, winner in zip(
            *(part.tolist() for part in (verdict.rows, verdict.emitted, verdict.counts)),
            verdict.winner.tolist(),
            strict=True,
        )
    ]


# W = 0, N = 4, G = 2: row 0 is the current token 9, candidate g is rows 1-3, candidate h rows 4-6.
PATHS = [[0, 1, 2, 3], [0, 4, 5, 6]]


@pytest.mark.parametrize(
    ("g", "h", "choices", "rows", "emitted", "winner"),
    [
        # choices: after row 0, after g's three rows, after h's three rows
        ([1, 2, 3], [4, 5, 6], [7, 0, 0, 0, 0, 0, 0], [0], [7], 0),
        ([1, 2, 3], [4, 5, 6], [1, 7, 0, 0, 0, 0, 0], [0, 1], [1, 7], 0),
        ([1, 2, 3], [4, 5, 6], [1, 2, 7, 0, 0, 0, 0], [0, 1, 2], [1, 2, 7], 0),
        ([1, 2, 3], [4, 5, 6], [1, 2, 3, 7, 0, 0, 0], [0, 1, 2, 3], [1, 2, 3, 7], 0),
        ([1, 2, 3], [4, 5, 6], [4, 0, 0, 0, 5, 6, 7], [0, 4, 5, 6], [4, 5, 6, 7], 1),
        # a right token behind a wrong one is not accepted
        ([1, 2, 3], [4, 5, 6], [0, 2, 3, 7, 0, 0, 0], [0], [0], 0),
        ([1, 2, 3], [4, 5, 6], [1, 0, 3, 7, 0, 0, 0], [0, 1], [1, 0], 0),
        # the deeper one wins, whichever comes first
        ([1, 2, 3], [1, 5, 6], [1, 5, 0, 0, 5, 7, 0], [0, 4, 5], [1, 5, 7], 1),
        ([1, 5, 3], [1, 2, 6], [1, 5, 7, 0, 5, 0, 0], [0, 1, 2], [1, 5, 7], 0),
        # a tie goes to the lower row, also between equal candidates
        ([1, 2, 3], [1, 5, 6], [1, 7, 0, 0, 7, 0, 0], [0, 1], [1, 7], 0),
        ([1, 2, 3], [1, 2, 3], [1, 2, 3, 7, 2, 3, 7], [0, 1, 2, 3], [1, 2, 3, 7], 0),
    ],
)
def test_by_hand(g, h, choices, rows, emitted, winner):
    assert run_verify([[9, *g, *h]], [choices], PATHS, [2]) == [(rows, emitted, winner)]


def test_a_dead_path_is_not_accepted():
    tokens, choices = [[9, 1, 2, 3, 4, 5, 6]], [[4, 0, 0, 0, 5, 6, 7]]
    assert run_verify(tokens, choices, PATHS, [2]) == [([0, 4, 5, 6], [4, 5, 6, 7], 1)]
    assert run_verify(tokens, choices, PATHS, [1]) == [([0], [4], 0)]
    tokens, choices = [[9, 1, 2, 3, 4, 5, 6]], [[1, 2, 3, 8, 5, 6, 7]]
    assert run_verify(tokens, choices, PATHS, [1]) == [([0, 1, 2, 3], [1, 2, 3, 8], 0)]
    assert run_verify(tokens, choices, PATHS, [0]) == [([0], [1], 0)]


def test_sequences_do_not_mix():
    tokens = [[9, 1, 2, 3, 4, 5, 6]] * 4
    choices = [
        [4, 0, 0, 0, 5, 6, 7],
        [1, 2, 0, 0, 0, 0, 0],
        [4, 0, 0, 0, 5, 6, 7],
        [8, 0, 0, 0, 0, 0, 0],
    ]
    assert run_verify(tokens, choices, PATHS, [2, 2, 1, 2]) == [
        ([0, 4, 5, 6], [4, 5, 6, 7], 1),
        ([0, 1, 2], [1, 2, 0], 0),
        ([0], [4], 0),
        ([0], [8], 0),
    ]


def test_without_candidates_row_0_speaks():
    assert run_verify([[9, 4], [8, 4]], [[4, 1], [3, 1]], [[0]], [0, 0]) == [
        ([0], [4], 0),
        ([0], [3], 0),
    ]


def test_rows_off_the_paths_do_not_matter():
    # W = 2, N = 3, G = 1: rows 0-3 are the window, 4 5 the candidate.
    paths = LookaheadLayout(2, 3, 1).candidate_paths
    assert paths == ((0, 4, 5),)
    for other in range(3):
        assert run_verify(
            [[9, other, other, other, 1, 2]], [[1, other, other, other, 2, 7]], paths, [1]
        ) == [([0, 4, 5], [1, 2, 7], 0)]


def plain_verify(tokens, choices, parents, live_rows):
    """Deepest accepted row, lowest on a tie, from the rule; its path and what it emits."""
    paths = {0: [0]}
    for row in live_rows:
        parent = parents[row]
        if parent in paths and tokens[row] == choices[parent]:
            paths[row] = [*paths[parent], row]
    best = min(paths, key=lambda row: (-len(paths[row]), row))
    return paths[best], [tokens[row] for row in paths[best][1:]] + [choices[best]]


def test_random_candidates_against_the_rule():
    draw = random.Random(0)
    depths = set()
    for _ in range(400):
        shape = (draw.randrange(3), draw.randint(2, 5), draw.randrange(5))
        layout = LookaheadLayout(*shape)
        batch = draw.randint(1, 3)
        rows = range(layout.num_rows)
        tokens = [[draw.randrange(2) for _ in rows] for _ in range(batch)]
        choices = [[draw.randrange(2) for _ in rows] for _ in range(batch)]
        live = [draw.randint(0, layout.guesses) for _ in range(batch)]
        actual = run_verify(tokens, choices, layout.candidate_paths, live)
        for sequence in range(batch):
            live_rows = rows[layout.num_window_rows :][: live[sequence] * layout.levels]
            expected = plain_verify(tokens[sequence], choices[sequence], layout.parents, live_rows)
            accepted, emitted, winner = actual[sequence]
            assert (accepted, emitted) == expected
            if len(accepted) > 1:
                assert accepted[1] == layout.candidate_row(winner, 0)
            depths.add(len(accepted))
    assert depths == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("implementation", ["torch", "numba"])
def test_greedy_takes_the_lowest_id_on_a_tie(implementation):
    logits = torch.tensor([[[0.0, 3.0, 3.0], [2.0, 2.0, 2.0]], [[-1.0, -2.0, -0.5], [0.0, 1, 0]]])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        tokens, finite = largest_logit(logits.to(dtype), implementation)
        assert tokens.tolist() == [[1, 0], [2, 1]]
        assert finite.tolist() == [[True, True], [True, True]]


@pytest.mark.parametrize("implementation", ["torch", "numba"])
@pytest.mark.parametrize("padding", [0, 13, 16, 29, 64])
def test_greedy_tells_logits_that_are_not_finite(padding, implementation):
    """Before and behind what fills a row up."""
    nan, inf = math.nan, math.inf
    logits = [[nan, 1, 2], [1, 2, nan], [1, inf, 2], [-inf, -inf, -inf], [-inf, 1, -inf], [0, 1, 2]]
    rows = torch.tensor(logits)
    for first in (True, False):
        parts = [rows, torch.full((6, padding), -inf)]
        _, finite = largest_logit(torch.cat(parts if first else parts[::-1], 1), implementation)
        assert finite.tolist() == [False, False, False, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_implementations_agree(dtype):
    generator = torch.Generator().manual_seed(0)
    for size in (1, 7, 16, 33, 1000, 49152):
        logits = torch.randn(5, size + 3, generator=generator).to(dtype)[:, :size]
        expected = largest_logit(logits)
        for mine, its in zip(largest_logit(logits, "numba"), expected, strict=True):
            assert torch.equal(mine, its)
