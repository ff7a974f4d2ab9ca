"""What the host learns of a step, and how it travels: one tensor of whole numbers, copied at once.

Knows which number stands where; knows nothing of who asked for the step, nor when it is read.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from lookahead.config import LookaheadConfig
from lookahead.drafting.ngram_pool import WINDOW
from lookahead.step_output import StepOutput, StepRecord

# Before the ids of each sequence: how many were emitted, finished, finite, rows.
NUM_COUNTS = 4


class StepNumbers(NamedTuple):
    """What one step emitted, on the host; each list has an entry a sequence.

    Attributes:
        token_ids: new tokens, at least one, or none for a sequence of which nothing is said: it was
            over before, or it was stopped or started anew while the step ran.
        finished: whether the sequence is over, after the step.
        finite: whether the logits that were used are finite.
        rows: rows that were run.
        candidates: n-grams that were found for the step, run or not; none unless they are observed.
        matches: how well each of these fits its context; 0 where that is not looked at.
        from_window: how many tokens were accepted of an n-gram of the window's; 0 unless observed.
        records: of the sequences that ran, where they were asked for.
        logits: [count, vocab] of each sequence's tokens; empty unless they were asked for.

    Of what nothing is said of it is not finished, finite, and of no rows.
    """

    token_ids: list[list[int]]
    finished: list[bool]
    finite: list[bool]
    rows: list[int]
    candidates: list[list[list[int]]]
    matches: list[list[int]]
    from_window: list[int]
    records: Sequence[StepRecord] = ()
    logits: Sequence[torch.Tensor] = ()


class NumberPacking:
    """Where each number of a step stands in a row of `size` for each sequence.

    What a row budget observes is among them if the configuration is adaptive.

    Attributes:
        size: numbers of a sequence.
        observed: where what a budget observes begins among them; `size` if it is not there.
    """

    def __init__(self, config: LookaheadConfig, path_rows: int) -> None:
        """`path_rows` is the most tokens that a step emits for a sequence."""
        self._path_rows = path_rows
        self._guesses, self._continuation = config.guesses, config.ngram - 1
        self._is_observed = config.adaptive
        num_observed = 2 + self._guesses * config.ngram if self._is_observed else 0
        self.observed = NUM_COUNTS + path_rows
        self.size = self.observed + num_observed

    def pack(self, output: StepOutput) -> torch.Tensor:
        """[B, size] int64; a sequence of tensor operations whose shapes depend on no data, and none
        where the step packs its numbers itself."""
        if output.packed is not None:
            return output.packed
        emitted = output.emitted
        counts = (output.counts, output.finished, output.finite, output.rows)
        parts = [part.unsqueeze(1) for part in counts]
        # A step without candidates emits one token; the place of the others stays.
        missing = self._path_rows - emitted.shape[1]
        parts += [emitted, emitted.new_zeros((emitted.shape[0], missing))]
        if self._is_observed:
            parts += [output.found.unsqueeze(1), self._from_window(output).unsqueeze(1)]
            matches = torch.zeros_like(output.origins) if output.matches is None else output.matches
            parts += [matches, output.candidates.flatten(1)]
        return torch.cat([part.long() for part in parts], dim=1)

    def _from_window(self, output: StepOutput) -> torch.Tensor:
        """[B] int64."""
        if not self._guesses:
            return torch.zeros_like(output.counts)
        origin = output.origins.gather(1, output.winner.unsqueeze(1)).squeeze(1)
        is_windows = (origin == WINDOW) & (output.counts > 1)
        return is_windows * (output.counts - 1)

    def unpack(self, packed: Sequence[Sequence[int]], dropped: Collection[int] = ()) -> StepNumbers:
        """The numbers of a step from the rows of `pack`; of the `dropped` sequences nothing is said."""
        numbers = StepNumbers([], [], [], [], [], [], [])
        for sequence, row in enumerate(packed):
            count, is_finished, is_finite, num_rows = row[:NUM_COUNTS]
            is_dropped = sequence in dropped
            observed = [] if is_dropped else row[self.observed :]
            numbers.token_ids.append(
                [] if is_dropped else list(row[NUM_COUNTS : NUM_COUNTS + count])
            )
            numbers.finished.append(bool(is_finished) and not is_dropped)
            numbers.finite.append(bool(is_finite) or is_dropped)
            numbers.rows.append(0 if is_dropped else num_rows)
            candidates = self._candidates(observed)
            numbers.candidates.append(candidates)
            numbers.matches.append(list(observed[2 : 2 + len(candidates)]))
            numbers.from_window.append(observed[1] if observed else 0)
        return numbers

    def _candidates(self, observed: Sequence[int]) -> list[list[int]]:
        """Those that were found."""
        if not observed:
            return []
        size, first = self._continuation, 2 + self._guesses
        starts = range(first, first + size * observed[0], size)
        return [list(observed[start : start + size]) for start in starts]
