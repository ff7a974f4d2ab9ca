"""How many rows of a step are worth their time, decided for each step by what was accepted so far.

Keeps rates, for each candidate by its recency and for each further token of it, and what the window
brought, and takes the shape with the most tokens expected a second. What is not run is watched too: a
candidate that would have been right is known once its step's tokens are. Knows no tensors; the text
does not depend on it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import mul

from lookahead.config import LookaheadConfig
from lookahead.layout import LookaheadLayout

# Rates at the beginning, and how many observations these count for. Means over chat, code and
# arithmetic with SmolLM2, by how well a candidate fits its context (`drafting/context.py`): the first
# tokens of the first candidate, the second and so on where no earlier one is right; a further token
# where those before it were; tokens that a window's n-grams bring a step.
FIRST_TOKEN = ((0.12, 0.07, 0.05, 0.04), (0.4, 0.2, 0.1, 0.1), (0.6, 0.2, 0.1, 0.1))
FURTHER_TOKEN = (0.55, 0.65, 0.75)
WINDOW_TOKENS = 0.3
# Where contexts are not looked at.
ANY_FIRST_TOKEN, ANY_FURTHER_TOKEN = ((0.25, 0.08, 0.05, 0.04),), (0.6,)
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
        sees_candidates: whether the host sees candidates before a step.
        has_window: whether the window is still run.
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
        self._shapes_for = cache(self._list_shapes)  # making them takes longer than choosing
        self.sees_candidates = sees_candidates
        first = FIRST_TOKEN if sees_candidates else ANY_FIRST_TOKEN
        further = FURTHER_TOKEN if sees_candidates else ANY_FURTHER_TOKEN
        self._first = [
            [Rate(priors[min(rank, len(priors) - 1)]) for rank in range(config.guesses)]
            for priors in first
        ]
        # The first is not a rate: where a candidate's first token is right, so many are.
        self._further = [
            [Rate(1.0), *(Rate(prior) for _ in range(self._levels - 1))] for prior in further
        ]
        self._window = Rate(WINDOW_TOKENS)
        self.has_window = config.window > 0
        self._base_rows = [
            LookaheadLayout.count_rows(window, config.ngram, 0) for window in (0, config.window)
        ]

    def begin(self) -> None:
        """Every sequence that is to run begins a request, and so a window: one that was left behind is
        there again. What it would bring to these texts is as open as at first."""
        if self.config.window and not self.has_window:
            self.has_window = True
            self._window = Rate(WINDOW_TOKENS)

    def choose(self, matches: Sequence[Sequence[int]]) -> StepShape:
        """The shape for a step of running sequences.

        Args:
            matches: for each sequence, how well each of its candidates fits its context, best first.
                Where candidates are not seen, 0 for each that there may be.
        """
        most_guesses = max(map(len, matches), default=0)
        shapes = self._shapes_for(most_guesses, self.has_window)
        if len(shapes) == 1:  # no candidate, nor a window
            self.shapes[shapes[0]] += 1
            return shapes[0]
        window = self._window.value
        # gained[depth][guesses]: tokens expected beyond the first of each sequence.
        gained = self._gains(matches, most_guesses)
        best, most = StepShape(False, 0, 1), 0.0
        for shape in shapes:
            candidates = sum(min(len(each), shape.guesses) for each in matches)
            rows = self._base_rows[shape.window] * len(matches) + candidates * shape.depth
            if rows >= len(self._seconds):
                continue
            expected = len(matches) * (1 + window * shape.window)
            expected += gained[shape.depth][shape.guesses]
            if expected / self._seconds[rows] > most:
                most = expected / self._seconds[rows]
                best = shape
        # A window that is left behind has to begin anew: its n-grams are of consecutive steps.
        self.has_window = best.window
        self.shapes[best] += 1
        return best

    def _list_shapes(self, most_candidates: int, has_window: bool) -> list[StepShape]:
        """What there is to choose from, fewer rows first."""
        if not self.sees_candidates:
            fixed = reversed(fixed_shapes(self.config))
            return [shape for shape in fixed if has_window or not shape.window]
        shapes = []
        for guesses in range(most_candidates + 1):
            depths = range(1, self._levels + 1) if guesses else [1]
            shapes += [StepShape(False, guesses, depth) for depth in depths]
            if has_window:
                shapes.append(StepShape(True, guesses, self._levels))
        return shapes

    def _gains(self, matches: Sequence[Sequence[int]], most_guesses: int) -> list[list[float]]:
        """Tokens expected of candidates, by their depth and then by their number."""
        further = [list(accumulate((rate.value for rate in rates), mul)) for rates in self._further]
        tokens = [list(accumulate(chain, initial=0.0)) for chain in further]  # by depth
        gained = [[0.0] * (most_guesses + 1) for _ in range(self._levels + 1)]
        for each in matches:
            first = [self._first[match][rank].value for rank, match in enumerate(each)]
            for depth, sums in enumerate(gained):
                total = 0.0
                for guesses in range(1, most_guesses + 1):
                    if guesses <= len(each):
                        total += first[guesses - 1] * tokens[each[guesses - 1]][depth]
                    sums[guesses] += total
        return gained

    @property
    def rates(self) -> dict[str, list[float]]:
        """What it counts on by now."""
        rates = {}
        for match, (first, further) in enumerate(zip(self._first, self._further, strict=True)):
            fit = f" that fits {match} tokens before" if len(self._first) > 1 else ""
            rates[f"first token of a candidate{fit}"] = [rate.value for rate in first]
            rates[f"each further token of one{fit}"] = [rate.value for rate in further[1:]]
        rates["tokens of the window's a step"] = [self._window.value] if self.config.window else []
        return rates

    def observe(
        self,
        candidates: Sequence[Sequence[int]],
        matches: Sequence[int],
        emitted: Sequence[int],
        from_window: int,
    ) -> None:
        """What came of one sequence's step.

        Args:
            candidates: those that were found, run or not, in the order of `matches`.
            matches: how well each fits its context; 0 where that is not looked at.
            emitted: the new tokens.
            from_window: how many of these were accepted of an n-gram of the window's.
        """
        is_found = False
        ranked = list(zip(candidates, matches, strict=True))
        if not self.sees_candidates:  # then one that is missing counts as one that is wrong
            ranked += [([], 0)] * (self.config.guesses - len(candidates))
        for rank, (candidate, match) in enumerate(ranked):
            right = 0
            for guessed, token in zip(candidate, emitted, strict=False):
                if guessed != token:
                    break
                right += 1
            self._first[match][rank].observe(float(right > 0 and not is_found))
            is_found = is_found or right > 0
            known = min(len(emitted), len(candidate))
            for depth in range(1, min(right + 1, known)):
                self._further[match][depth].observe(float(right > depth))
        if self.has_window:
            self._window.observe(float(from_window))
