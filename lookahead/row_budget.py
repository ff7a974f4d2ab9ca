"""How many rows of a step are worth their time, decided for each step by what was accepted so far.

Keeps rates, for each candidate by its recency and for each further token of it, and what the window
brought, and takes the shape with the most tokens expected a second. What is not run is watched too: a
candidate that would have been right is known once its step's tokens are. Knows no tensors; the text
does not depend on it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from lookahead.config import LookaheadConfig
from lookahead.layout import LookaheadLayout

# Rates at the beginning, and how many observations these count for. Means over chat, code and
# arithmetic with SmolLM2: the first tokens of the newest candidate, the second newest and so on where
# no newer one is right; a further token where those before it were; tokens that a window's n-grams
# bring a step.
FIRST_TOKEN = (0.25, 0.08, 0.05, 0.04)
FURTHER_TOKEN = 0.6
WINDOW_TOKENS = 0.3
OBSERVATIONS = 8.0
# What an observation still counts after the next.
DECAY = 0.97


@dataclass(frozen=True)
class StepShape:
    """Which rows a step has: the window or not, and so many candidates of so many tokens."""

    window: bool
    guesses: int
    depth: int


def fixed_shapes(config: LookaheadConfig) -> list[StepShape]:
    """Shapes of a step whose candidates the host does not see before: everything that the
    configuration has, its pool alone, one row; the largest first, none twice."""
    one_row = StepShape(window=False, guesses=0, depth=1)
    levels, guesses = config.ngram - 1, config.guesses
    pool_only = StepShape(window=False, guesses=guesses, depth=levels) if guesses else one_row
    everything = StepShape(window=True, guesses=guesses, depth=levels)
    return list(dict.fromkeys([everything if config.window else pool_only, pool_only, one_row]))


class Rate:
    """A mean that forgets."""

    def __init__(self, prior: float) -> None:
        self._sum, self._weight = prior * OBSERVATIONS, OBSERVATIONS

    def observe(self, value: float) -> None:
        self._sum = self._sum * DECAY + value
        self._weight = self._weight * DECAY + 1.0

    @property
    def value(self) -> float:
        return self._sum / self._weight


class RowBudget:
    """Chooses the shapes of one batch's steps.

    Attributes:
        shapes: how often each was chosen.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        seconds_by_rows: Sequence[float],
        sees_candidates: bool = True,
    ) -> None:
        """`seconds_by_rows[r]` is what a step of r rows takes; more rows than there are entries are not
        run. Where the host does not see candidates before a step (`sees_candidates`), a step has one of
        the `fixed_shapes`."""
        self.config = config
        self.shapes: Counter[StepShape] = Counter()
        self._seconds = seconds_by_rows
        self._levels = config.ngram - 1
        self._sees_candidates = sees_candidates
        self._first = [
            Rate(FIRST_TOKEN[min(rank, len(FIRST_TOKEN) - 1)]) for rank in range(config.guesses)
        ]
        # The first is not a rate: where a candidate's first token is right, so many are.
        self._further = [Rate(1.0), *(Rate(FURTHER_TOKEN) for _ in range(self._levels - 1))]
        self._window = Rate(WINDOW_TOKENS)
        self._has_window = config.window > 0
        self._base_rows = [
            LookaheadLayout.count_rows(window, config.ngram, 0) for window in (0, config.window)
        ]

    def choose(self, live: Sequence[int]) -> StepShape:
        """The shape for a step in which running sequences have, or may have, so many candidates. Beside
        a window candidates have its depth."""
        further = list(accumulate((rate.value for rate in self._further), mul))
        tokens = list(accumulate(further, initial=0.0))  # by depth, if the first token is right
        found = list(accumulate((rate.value for rate in self._first), initial=0.0))
        window = self._window.value
        best, most = StepShape(False, 0, 1), 0.0
        for shape in self._shapes_for(max(live, default=0)):
            hits = sum(found[min(each, shape.guesses)] for each in live)
            candidates = sum(min(each, shape.guesses) for each in live)
            rows = self._base_rows[shape.window] * len(live) + candidates * shape.depth
            if rows >= len(self._seconds):
                continue
            expected = len(live) * (1 + window * shape.window) + hits * tokens[shape.depth]
            if expected / self._seconds[rows] > most:
                most = expected / self._seconds[rows]
                best = shape
        # A window that is left behind would have to start anew: its n-grams are of consecutive steps.
        self._has_window = best.window
        self.shapes[best] += 1
        return best

    def _shapes_for(self, most_candidates: int) -> Iterator[StepShape]:
        """What there is to choose from, fewer rows first."""
        if not self._sees_candidates:
            for shape in reversed(fixed_shapes(self.config)):
                if self._has_window or not shape.window:
                    yield shape
            return
        for guesses in range(most_candidates + 1):
            for depth in range(1, self._levels + 1) if guesses else [1]:
                yield StepShape(False, guesses, depth)
            if self._has_window:
                yield StepShape(True, guesses, self._levels)

    @property
    def rates(self) -> dict[str, list[float]]:
        """What it counts on by now."""
        return {
            "first token of a candidate": [rate.value for rate in self._first],
            "each further token": [rate.value for rate in self._further[1:]],
            "tokens of the window's a step": [self._window.value] if self.config.window else [],
        }

    def observe(
        self, candidates: Sequence[Sequence[int]], emitted: Sequence[int], from_window: int
    ) -> None:
        """One sequence's step: the candidates that were looked up, run or not, the tokens that were
        emitted, and how many of these were accepted of an n-gram of the window's."""
        is_found = False
        missing = 0 if self._sees_candidates else len(self._first) - len(candidates)
        for candidate, first in zip([*candidates, *[[]] * missing], self._first, strict=False):
            right = 0
            for guessed, token in zip(candidate, emitted, strict=False):
                if guessed != token:
                    break
                right += 1
            first.observe(float(right > 0 and not is_found))
            is_found = is_found or right > 0
            known = min(len(emitted), len(candidate))
            for depth in range(1, min(right + 1, known)):
                self._further[depth].observe(float(right > depth))
        if self._has_window:
            self._window.observe(float(from_window))
