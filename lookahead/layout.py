"""The rows of a step: the one definition of their numbers, parents, depths and visibility.

The rows that a step runs through the model form a tree rooted at row 0, the current token. A row's
position is the committed length plus its depth; it sees the committed prefix, its ancestors and itself,
so exactly one key for each absolute position up to its own. Everything else that needs to know where a
row stands asks here. Imports no torch: tensors of these numbers are made where they are used.
"""

from collections.abc import Sequence
from functools import cached_property


class RowTree:
    """Any tree of rows. `parents[r] < r` is the parent of row r; row 0 is the root with parent -1."""

    def __init__(self, parents: Sequence[int]) -> None:
        self.parents = tuple(parents)
        if not self.parents or self.parents[0] != -1:
            raise ValueError(
                f"row 0 must be the root with parent -1, got parents {self.parents[:4]}"
            )
        for row, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < row:
                raise ValueError(f"row {row} needs a parent in 0..{row - 1}, got {parent}")

    @staticmethod
    def chain(num_rows: int) -> "LookaheadLayout":
        """A chunk of plain text: each row's parent is the row before it, as in level 0 of a window."""
        return LookaheadLayout(num_rows, ngram=2, guesses=0)

    @property
    def _key(self) -> tuple[int, ...]:
        return self.parents

    def __eq__(self, other: object) -> bool:
        """Whether the rows mean the same; equal parents are not enough, since the rows of a chunk may
        form the tree of a candidate."""
        return type(self) is type(other) and self._key == getattr(other, "_key", None)

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def num_rows(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each row; its position is the committed length plus this."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    def path(self, row: int) -> tuple[int, ...]:
        """Rows from the root down to `row`: the step's rows that `row` sees, by position."""
        rows = [row]
        while self.parents[rows[-1]] >= 0:
            rows.append(self.parents[rows[-1]])
        return tuple(reversed(rows))

    @cached_property
    def owned_paths(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """For each leaf, its path from the root and how many rows of that path belong to earlier
        leaves' paths: the rest are the path's own, so every row is the own row of one path."""
        owned: set[int] = set()
        paths = []
        for leaf in sorted(set(range(self.num_rows)) - set(self.parents)):
            path = self.path(leaf)
            paths.append((path, len(owned.intersection(path))))
            owned.update(path)
        return tuple(paths)

    @cached_property
    def visibility(self) -> tuple[tuple[bool, ...], ...]:
        """`visibility[row][key]`: whether `row` sees the key of row `key` (among the step's rows)."""
        paths = (frozenset(self.path(row)) for row in range(self.num_rows))
        return tuple(tuple(key in path for key in range(self.num_rows)) for path in paths)


class LookaheadLayout(RowTree):
    """The rows of one lookahead step for (W, N, G), in closed form.

    First the window, `levels` x `window` rows, level by level (the current token alone without a
    window), then `guesses` candidates of `levels` rows each. W = 0 and G = 0 is the single row of
    autoregressive decoding.
    """

    def __init__(self, window: int, ngram: int, guesses: int) -> None:
        self.window = window
        self.guesses = guesses
        self.levels = ngram - 1
        self.num_window_rows = self.levels * window or 1
        num_rows = self.count_rows(window, ngram, guesses)
        super().__init__([self._parent(row) for row in range(num_rows)])

    @property
    def _key(self) -> tuple[int, ...]:
        return self.window, self.levels, self.guesses

    @staticmethod
    def count_rows(window: int, ngram: int, guesses: int) -> int:
        """Rows of a step with that many columns, tokens in an n-gram and candidates."""
        return ((ngram - 1) * window or 1) + (ngram - 1) * guesses

    def _parent(self, row: int) -> int:
        if row < self.num_window_rows:
            # Level 0 is a chain from the current token; a deeper level hangs below its own column.
            return row - self.window if row >= self.window > 0 else row - 1
        depth = (row - self.num_window_rows) % self.levels
        return row - 1 if depth else 0

    def window_row(self, level: int, column: int) -> int:
        return level * self.window + column

    def candidate_row(self, candidate: int, depth: int) -> int:
        return self.num_window_rows + candidate * self.levels + depth

    @cached_property
    def last_level_rows(self) -> tuple[int, ...]:
        """The W rows whose next tokens complete n-grams; none without a window."""
        return tuple(self.window_row(self.levels - 1, column) for column in range(self.window))

    @cached_property
    def logit_rows(self) -> tuple[int, ...]:
        """Rows whose logits a step needs, ascending: row 0, the last level, the candidates."""
        candidates = range(self.num_window_rows, self.num_rows)
        return tuple(sorted({0, *self.last_level_rows, *candidates}))

    @cached_property
    def candidate_paths(self) -> tuple[tuple[int, ...], ...]:
        """For each candidate the rows of its path from row 0; with G = 0 the path of row 0 alone."""
        return tuple(
            (0, *(self.candidate_row(candidate, depth) for depth in range(self.levels)))
            for candidate in range(self.guesses)
        ) or ((0,),)
