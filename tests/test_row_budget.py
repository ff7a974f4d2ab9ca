"""Which rows seem worth their time: by hand, and against trying every shape."""

import itertools
import operator
import random

import pytest

from lookahead.config import LookaheadConfig
from lookahead.layout import LookaheadLayout
from lookahead.row_budget import DECAY, OBSERVATIONS, Rate, RowBudget, StepShape

FREE = [1.0] * 100
PLAIN = StepShape(window=False, guesses=0, depth=1)


def steep(slope: float) -> list[float]:
    """Each row beyond the first costs `slope` times the first."""
    return [1 + slope * max(rows - 1, 0) for rows in range(100)]


def told(budget, candidates, emitted, times=60, from_window=0, match=0):
    """One sequence whose candidates all fit their context so well."""
    count = len(candidates) if budget.sees_candidates else budget.config.guesses
    for _ in range(times):
        budget.choose([[match] * count])
        budget.observe(candidates, [match] * len(candidates), emitted, from_window)
    return budget


def chosen(budget, *counts, match=0):
    """The shape for sequences with so many candidates."""
    return budget.choose([[match] * count for count in counts])


def test_a_rate_begins_at_its_prior_and_forgets_it():
    rate = Rate(0.25)
    assert rate.value == 0.25
    rate.observe(1.0)
    assert rate.value == (0.25 * OBSERVATIONS * DECAY + 1) / (OBSERVATIONS * DECAY + 1)
    for _ in range(500):
        rate.observe(1.0)
    assert rate.value > 0.999


def test_free_rows_are_all_run():
    budget = RowBudget(LookaheadConfig(4, 5, 3), FREE)
    assert chosen(budget, 2) == StepShape(window=True, guesses=2, depth=4)
    assert chosen(budget, 0) == StepShape(window=True, guesses=0, depth=4)
    assert chosen(RowBudget(LookaheadConfig(0, 5, 3), FREE), 3) == StepShape(False, 3, 4)


def test_rows_as_dear_as_the_first_are_not_run():
    budget = RowBudget(LookaheadConfig(4, 5, 3), steep(1.0))
    assert chosen(budget, 3) == PLAIN
    assert budget.shapes == {PLAIN: 1}


def test_candidates_that_are_never_right_are_left_out_and_come_back_when_they_would_be():
    budget = RowBudget(LookaheadConfig(0, 3, 1), steep(0.05))
    assert chosen(budget, 1).guesses == 1
    told(budget, [[7, 8]], [5])
    assert chosen(budget, 1) == PLAIN
    # Nothing of them is run, but what they would have brought is seen.
    told(budget, [[5, 8]], [5])
    assert chosen(budget, 1).guesses == 1


def test_depth_follows_what_further_tokens_bring():
    budget = RowBudget(LookaheadConfig(0, 5, 1), steep(0.1))
    told(budget, [[1, 2, 3, 4]], [1, 2, 3, 4, 9])
    assert chosen(budget, 1) == StepShape(False, 1, 4)
    told(budget, [[1, 7, 7, 7]], [1, 2])
    assert chosen(budget, 1) == StepShape(False, 1, 1)


def test_candidates_are_judged_by_how_well_they_fit():
    budget = RowBudget(LookaheadConfig(0, 3, 1), steep(0.05))
    told(budget, [[7, 8]], [5], match=0)
    told(budget, [[5, 8]], [5, 8], match=2)
    assert chosen(budget, 1, match=0) == PLAIN
    assert chosen(budget, 1, match=2) == StepShape(False, 1, 2)
    assert chosen(budget, 1, 1, match=2) == StepShape(False, 1, 2)


def test_a_window_that_brings_nothing_is_left_until_all_begin_anew():
    budget = RowBudget(LookaheadConfig(4, 3, 2), steep(0.002))
    assert chosen(budget, 0).window
    told(budget, [], [5], times=300)
    assert not chosen(budget, 0).window
    told(budget, [], [5, 6], from_window=1)
    assert not chosen(budget, 0).window
    budget.begin()
    assert budget.rates == RowBudget(budget.config, FREE).rates
    assert chosen(budget, 0).window
    no_window = RowBudget(LookaheadConfig(0, 3, 2), FREE)
    no_window.begin()
    assert not chosen(no_window, 0).window


def test_what_a_window_that_is_kept_brought_is_not_forgotten():
    budget = told(RowBudget(LookaheadConfig(4, 3, 2), FREE), [], [5, 6], from_window=1)
    rates = budget.rates
    budget.begin()
    assert budget.rates == rates


def test_a_window_that_brings_tokens_is_kept():
    budget = RowBudget(LookaheadConfig(4, 3, 2), steep(0.02))
    for _ in range(60):
        assert chosen(budget, 0).window
        budget.observe([], [], [5, 6], 1)


def test_where_candidates_are_not_seen_there_are_rows_for_all_or_none():
    config = LookaheadConfig(0, 4, 3)
    budget = RowBudget(config, steep(0.01), sees_candidates=False)
    assert chosen(budget, 3) == StepShape(False, 3, 3)
    told(budget, [[1, 2, 3]], [1, 2, 3, 4])
    assert chosen(budget, 3) == StepShape(False, 3, 3)
    # A candidate that is missing counts as one that is wrong.
    told(budget, [], [1], times=300)
    assert chosen(budget, 3) == PLAIN


def by_trying(budget, config, matches, seconds):
    """Tokens a second of every shape, worked out from the layout and the rates one by one."""
    rates = budget.rates
    first = [rates[f"first token of a candidate that fits {fit} tokens before"] for fit in range(3)]
    further = [
        rates[f"each further token of one that fits {fit} tokens before"] for fit in range(3)
    ]
    window_tokens = rates["tokens of the window's a step"]
    speeds = {}
    shapes = itertools.product([False, True], range(config.guesses + 1), range(1, config.ngram))
    for has_window, guesses, depth in shapes:
        if has_window and (not config.window or depth != config.ngram - 1):
            continue
        rows, expected = 0, 0.0
        for each in matches:
            run = min(len(each), guesses)
            columns = config.window if has_window else 0
            rows += LookaheadLayout.count_rows(columns, depth + 1, run)
            expected += 1
            for rank, fit in enumerate(each[:run]):
                chains = itertools.accumulate([1.0, *further[fit][: depth - 1]], operator.mul)
                expected += first[fit][rank] * sum(chains)
            expected += window_tokens[0] if has_window else 0
        if rows < len(seconds):
            speeds[StepShape(has_window, guesses, depth)] = expected / seconds[rows]
    return speeds


def test_the_choice_is_the_best_of_all_shapes():
    draw = random.Random(5)
    seen = set()
    for _ in range(200):
        config = LookaheadConfig(draw.choice([0, 2, 4]), draw.randint(2, 5), draw.randint(1, 4))
        seconds = list(itertools.accumulate(draw.random() / 5 for _ in range(draw.randint(9, 60))))
        seconds = [1 + value for value in seconds]
        budget = RowBudget(config, seconds)

        def fits(config=config):
            count = draw.randint(0, config.guesses)
            return sorted((draw.randrange(3) for _ in range(count)), reverse=True)

        for _ in range(draw.randint(0, 30)):
            matches = fits()
            grams = [[draw.randrange(2) for _ in range(config.ngram - 1)] for _ in matches]
            emitted = [draw.randrange(2) for _ in range(draw.randint(1, config.ngram))]
            budget.choose([matches])
            budget.observe(grams, matches, emitted, draw.randrange(2) if config.window else 0)
        matches = [fits() for _ in range(draw.randint(1, 3))]
        has_window = budget.has_window
        speeds = by_trying(budget, config, matches, seconds)
        if not has_window:
            speeds = {shape: speed for shape, speed in speeds.items() if not shape.window}
        shape = budget.choose(matches)
        if not shape.guesses and not shape.window:
            shape = PLAIN
        assert speeds[shape] == pytest.approx(max(speeds.values()))
        seen.add(shape)
    assert len(seen) > 15
