"""Which rows seem worth their time: by hand, and against trying every shape."""

import itertools
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


def told(budget, candidates, emitted, times=60, from_window=0):
    for _ in range(times):
        budget.observe(candidates, emitted, from_window)
    return budget


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
    assert budget.choose([2]) == StepShape(window=True, guesses=2, depth=4)
    assert budget.choose([0]) == StepShape(window=True, guesses=0, depth=4)
    assert RowBudget(LookaheadConfig(0, 5, 3), FREE).choose([3]) == StepShape(False, 3, 4)


def test_rows_as_dear_as_the_first_are_not_run():
    budget = RowBudget(LookaheadConfig(4, 5, 3), steep(1.0))
    assert budget.choose([3]) == PLAIN
    assert budget.shapes == {PLAIN: 1}


def test_candidates_that_are_never_right_are_left_out_and_come_back_when_they_would_be():
    budget = RowBudget(LookaheadConfig(0, 3, 1), steep(0.05))
    assert budget.choose([1]).guesses == 1
    told(budget, [[7, 8]], [5])
    assert budget.choose([1]) == PLAIN
    # Nothing of them is run, but what they would have brought is seen.
    told(budget, [[5, 8]], [5])
    assert budget.choose([1]).guesses == 1


def test_depth_follows_what_further_tokens_bring():
    budget = RowBudget(LookaheadConfig(0, 5, 1), steep(0.1))
    assert told(budget, [[1, 2, 3, 4]], [1, 2, 3, 4, 9]).choose([1]) == StepShape(False, 1, 4)
    assert told(budget, [[1, 7, 7, 7]], [1, 2]).choose([1]) == StepShape(False, 1, 1)


def test_a_window_that_brings_nothing_is_left_for_good():
    budget = RowBudget(LookaheadConfig(4, 3, 2), steep(0.002))
    assert budget.choose([0]).window
    told(budget, [], [5], times=300)
    assert not budget.choose([0]).window
    told(budget, [], [5, 6], from_window=1)
    assert not budget.choose([0]).window


def test_a_window_that_brings_tokens_is_kept():
    budget = RowBudget(LookaheadConfig(4, 3, 2), steep(0.02))
    for _ in range(60):
        assert budget.choose([0]).window
        budget.observe([], [5, 6], 1)


def test_where_candidates_are_not_seen_there_are_rows_for_all_or_none():
    config = LookaheadConfig(0, 4, 3)
    budget = RowBudget(config, steep(0.01), sees_candidates=False)
    assert budget.choose([3]) == StepShape(False, 3, 3)
    told(budget, [[1, 2, 3]], [1, 2, 3, 4])
    assert budget.choose([3]) == StepShape(False, 3, 3)
    # A candidate that is missing counts as one that is wrong.
    told(budget, [], [1], times=300)
    assert budget.choose([3]) == PLAIN


def by_trying(budget, config, live, seconds):
    """Tokens a second of the best shape, each shape's worked out from the layout."""
    rates = budget.rates
    first, further = rates["first token of a candidate"], rates["each further token"]
    window_tokens = rates["tokens of the window's a step"]
    speeds = {}
    shapes = itertools.product([False, True], range(config.guesses + 1), range(1, config.ngram))
    for has_window, guesses, depth in shapes:
        if has_window and (not config.window or depth != config.ngram - 1):
            continue
        rows, expected = 0, 0.0
        for each in live:
            run = min(each, guesses)
            columns = config.window if has_window else 0
            rows += LookaheadLayout.count_rows(columns, depth + 1, run)
            chain = 1.0
            tokens = [chain]
            for rate in further[: depth - 1]:
                chain *= rate
                tokens.append(chain)
            expected += 1 + sum(first[:run]) * sum(tokens)
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
        for _ in range(draw.randint(0, 30)):
            grams = [
                [draw.randrange(2) for _ in range(config.ngram - 1)] for _ in range(config.guesses)
            ]
            emitted = [draw.randrange(2) for _ in range(draw.randint(1, config.ngram))]
            budget.observe(grams, emitted, draw.randrange(2) if config.window else 0)
        live = [draw.randint(0, config.guesses) for _ in range(draw.randint(1, 3))]
        speeds = by_trying(budget, config, live, seconds)
        chosen = budget.choose(live)
        if not chosen.guesses and not chosen.window:
            chosen = PLAIN
        assert speeds[chosen] == pytest.approx(max(speeds.values()))
        seen.add(chosen)
    assert len(seen) > 15
