"""The (W, N, G) that is fastest here: tokens a step can be expected to yield over what it costs.

What a step costs is measured on this machine (`step_costs.py`); what it yields is a table, for that
depends on texts and hardly on machines. `row_budget.py` corrects it while a text grows.
"""

from dataclasses import dataclass
from typing import NamedTuple

from lookahead.config import LookaheadConfig
from lookahead.layout import LookaheadLayout
from lookahead.step_costs import StepCosts


class Yield(NamedTuple):
    """What a configuration yielded: tokens and rows a step, means over chat, code and arithmetic with
    SmolLM2-135M, 12 to 24 prompts of 128 tokens. Rows without a candidate were left out; without a
    window and with N = 8 those that did not seem worth their time, too."""

    window: int
    ngram: int
    guesses: int
    tokens: float
    rows: float


YIELDS = (
    Yield(0, 4, 2, 1.64, 4.2),
    Yield(0, 8, 4, 1.83, 4.7),
    Yield(4, 3, 2, 1.66, 10.6),
    Yield(4, 4, 3, 1.85, 17.1),
    Yield(5, 4, 5, 1.96, 22.2),
    Yield(7, 5, 7, 2.20, 39.6),
    Yield(10, 5, 10, 2.24, 54.9),
    Yield(15, 5, 15, 2.30, 79.3),
    Yield(20, 7, 20, 2.43, 152.7),
)


@dataclass(frozen=True)
class Tuning:
    """What was chosen and why.

    Attributes:
        config: the choice.
        costs: what steps cost here.
        tokens: tokens that a step of a sequence is expected to yield.
        ratio: time that a step is expected to take, over that of plain decoding.
    """

    config: LookaheadConfig
    costs: StepCosts
    tokens: float
    ratio: float

    @property
    def reason(self) -> str:
        """One line."""
        if not self.config.guesses:
            return "no other choice pays here, or fits max_step_rows: plain decoding"
        return (
            f"{self.tokens:.2f} tokens a step expected in {self.ratio:.2f} of the time of one row: "
            f"{self.tokens / self.ratio:.2f}x plain decoding"
        )


def tune(costs: StepCosts, max_step_rows: int, batch_size: int, leaves_out_rows: bool) -> Tuning:
    """Choose for steps of `batch_size` sequences with at most `max_step_rows` rows each.

    `leaves_out_rows` tells whether rows that hold no candidate cost nothing.
    """
    plain = costs.at(batch_size)
    best = Tuning(LookaheadConfig(0, 2, 0, adaptive=True), costs, 1.0, 1.0)
    for window, ngram, guesses, tokens, rows in YIELDS:
        all_rows = LookaheadLayout.count_rows(window, ngram, guesses)
        if all_rows > max_step_rows:
            continue
        run = rows if leaves_out_rows else all_rows
        ratio = costs.at(run * batch_size) / plain
        if tokens / ratio > best.tokens / best.ratio:
            config = LookaheadConfig(window, ngram, guesses, adaptive=True)
            best = Tuning(config, costs, tokens, ratio)
    return best
