"""Rows of a step against matrices written by hand and against the rule in words."""

import itertools
import random

import pytest

from lookahead.layout import LookaheadLayout, RowTree

# By (W, N, G): row sees column, both in order of row number.
VISIBLE = {
    (3, 4, 2): """
        x.. ... ... ... ...
        xx. ... ... ... ...
        xxx ... ... ... ...
        x.. x.. ... ... ...
        xx. .x. ... ... ...
        xxx ..x ... ... ...
        x.. x.. x.. ... ...
        xx. .x. .x. ... ...
        xxx ..x ..x ... ...
        x.. ... ... x.. ...
        x.. ... ... xx. ...
        x.. ... ... xxx ...
        x.. ... ... ... x..
        x.. ... ... ... xx.
        x.. ... ... ... xxx
    """,
    (3, 2, 2): """
        x.. . .
        xx. . .
        xxx . .
        x.. x .
        x.. . x
    """,
    (1, 4, 1): """
        x . . ...
        x x . ...
        x x x ...
        x . . x..
        x . . xx.
        x . . xxx
    """,
    (1, 2, 1): """
        x .
        x x
    """,
    (2, 3, 0): """
        x. ..
        xx ..
        x. x.
        xx .x
    """,
    (0, 3, 2): """
        x .. ..
        x x. ..
        x xx ..
        x .. x.
        x .. xx
    """,
    (0, 2, 0): "x",
    (0, 5, 0): "x",
}
POSITIONS = {
    (3, 4, 2): [0, 1, 2, 1, 2, 3, 2, 3, 4, 1, 2, 3, 1, 2, 3],
    (3, 2, 2): [0, 1, 2, 1, 1],
    (1, 4, 1): [0, 1, 2, 1, 2, 3],
    (1, 2, 1): [0, 1],
    (2, 3, 0): [0, 1, 1, 2],
    (0, 3, 2): [0, 1, 2, 1, 2],
    (0, 2, 0): [0],
    (0, 5, 0): [0],
}
LOGIT_ROWS = {
    (3, 4, 2): [0, 6, 7, 8, 9, 10, 11, 12, 13, 14],
    (3, 2, 2): [0, 1, 2, 3, 4],
    (1, 4, 1): [0, 2, 3, 4, 5],
    (1, 2, 1): [0, 1],
    (2, 3, 0): [0, 2, 3],
    (0, 3, 2): [0, 1, 2, 3, 4],
    (0, 2, 0): [0],
    (0, 5, 0): [0],
}
LAST_LEVEL = {
    (3, 4, 2): [6, 7, 8],
    (3, 2, 2): [0, 1, 2],
    (1, 4, 1): [2],
    (1, 2, 1): [0],
    (2, 3, 0): [2, 3],
    (0, 3, 2): [],
    (0, 2, 0): [],
    (0, 5, 0): [],
}
CANDIDATE_PATHS = {
    (3, 4, 2): [(0, 9, 10, 11), (0, 12, 13, 14)],
    (3, 2, 2): [(0, 3), (0, 4)],
    (1, 4, 1): [(0, 3, 4, 5)],
    (1, 2, 1): [(0, 1)],
    (2, 3, 0): [(0,)],
    (0, 3, 2): [(0, 1, 2), (0, 3, 4)],
    (0, 2, 0): [(0,)],
    (0, 5, 0): [(0,)],
}
GRID = list(itertools.product(range(9), range(2, 7), range(7)))


@pytest.mark.parametrize("shape", VISIBLE, ids=str)
def test_by_hand(shape):
    layout = LookaheadLayout(*shape)
    drawn = [
        "".join("x" if is_seen else "." for is_seen in sees_of_row)
        for sees_of_row in layout.visibility
    ]
    assert drawn == VISIBLE[shape].replace(" ", "").split()
    assert layout.num_rows == LookaheadLayout.count_rows(*shape) == len(drawn)
    assert list(layout.depths) == POSITIONS[shape]
    assert list(layout.logit_rows) == LOGIT_ROWS[shape]
    assert list(layout.last_level_rows) == LAST_LEVEL[shape]
    assert list(layout.candidate_paths) == CANDIDATE_PATHS[shape]


def test_every_row_is_where_the_rule_says():
    for window, ngram, guesses in GRID:
        layout = LookaheadLayout(window, ngram, guesses)
        parents = {}
        for level, column in itertools.product(range(ngram - 1), range(window)):
            row = layout.window_row(level, column)
            assert layout.depths[row] == level + column
            if level:
                parents[row] = layout.window_row(level - 1, column)
            else:
                parents[row] = layout.window_row(0, column - 1) if column else -1
        if not window:
            parents[0] = -1
        for guess, depth in itertools.product(range(guesses), range(ngram - 1)):
            row = layout.candidate_row(guess, depth)
            assert layout.depths[row] == 1 + depth
            parents[row] = layout.candidate_row(guess, depth - 1) if depth else 0
        assert [parents[row] for row in range(layout.num_rows)] == list(layout.parents)
        rows = (window + guesses) * (ngram - 1) + (window == 0)
        assert layout.num_rows == layout.count_rows(window, ngram, guesses) == rows
        assert layout.num_window_rows == rows - guesses * (ngram - 1)


def test_every_row_sees_one_key_a_position():
    for shape in GRID:
        layout = LookaheadLayout(*shape)
        for row, sees in enumerate(layout.visibility):
            seen = [key for key, is_seen in enumerate(sees) if is_seen]
            assert (seen[0], seen[-1]) == (0, row)
            assert sorted(layout.depths[key] for key in seen) == list(range(layout.depths[row] + 1))
            assert [layout.depths[key] for key in layout.path(row)] == list(range(len(seen)))
            assert set(layout.path(row)) == set(seen)


def test_logits_are_taken_where_they_are_needed_and_nowhere_else():
    for window, ngram, guesses in GRID:
        layout = LookaheadLayout(window, ngram, guesses)
        needed = {0, *(layout.window_row(ngram - 2, column) for column in range(window))}
        for path in layout.candidate_paths:
            needed.update(path)
        assert list(layout.logit_rows) == sorted(needed)


def test_fewer_candidates_are_the_same_rows_cut_short():
    for window, ngram, guesses in GRID:
        whole = LookaheadLayout(window, ngram, guesses)
        for fewer in range(guesses):
            layout = LookaheadLayout(window, ngram, fewer)
            assert layout.parents == whole.parents[: layout.num_rows]


def test_any_tree():
    draw = random.Random(0)
    for _ in range(50):
        num_rows = draw.randint(1, 12)
        parents = [-1, *(draw.randrange(row) for row in range(1, num_rows))]
        tree = RowTree(parents)
        assert tree.num_rows == num_rows
        for row in range(num_rows):
            path = [row]
            while path[0] != 0:
                path.insert(0, parents[path[0]])
            assert tree.path(row) == tuple(path)
            assert tree.depths[row] == len(path) - 1
            assert tree.visibility[row] == tuple(key in path for key in range(num_rows))


def test_a_chain_is_causal():
    chain = RowTree.chain(4)
    assert chain.parents == (-1, 0, 1, 2)
    assert chain.depths == (0, 1, 2, 3)
    assert chain.visibility == tuple(tuple(key <= row for key in range(4)) for row in range(4))


def test_layouts_are_equal_where_their_rows_mean_the_same():
    tree = RowTree([-1, 0, 0, 1, 0, 4])
    assert tree == RowTree([-1, 0, 0, 1, 0, 4])
    assert hash(tree) == hash(RowTree([-1, 0, 0, 1, 0, 4]))
    assert tree != RowTree([-1, 0, 0, 1, 0, 0])
    assert tree != (-1, 0, 0, 1, 0, 4)
    layout = LookaheadLayout(2, 3, 1)
    assert layout == LookaheadLayout(2, 3, 1)
    assert hash(layout) == hash(LookaheadLayout(2, 3, 1))
    assert layout != LookaheadLayout(2, 3, 2)
    assert layout != tree
    assert tree.parents == layout.parents
    chunk, candidate = RowTree.chain(5), LookaheadLayout(0, 5, 1)
    assert chunk.parents == candidate.parents
    assert chunk != candidate


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], "row 0 must be the root"),
        ([0], "row 0 must be the root"),
        ([-2, 0], "row 0 must be the root"),
        ([-1, 1], r"row 1 needs a parent in 0\.\.0, got 1"),
        ([-1, 0, 5], r"row 2 needs a parent in 0\.\.1, got 5"),
        ([-1, 0, -1], r"row 2 needs a parent in 0\.\.1, got -1"),
    ],
)
def test_what_is_no_tree_is_refused(parents, message):
    with pytest.raises(ValueError, match=message):
        RowTree(parents)
