"""What a batch needs of whoever runs its steps, and the simplest: each step is read once it has run.

`step_graph.py` has another one, for a GPU. Knows nothing of requests but where they begin and end.
"""

from typing import Protocol

from lookahead.row_budget import RowBudget
from lookahead.step import Step
from lookahead.step_numbers import StepNumbers
from lookahead.step_output import StepRecord


class StepRunner(Protocol):
    """Runs the steps of one `Step`, for one batch at a time.

    Attributes:
        step: what is run.
    """

    step: Step

    def start(
        self,
        sequence: int,
        prompt: list[int],
        limit: int,
        eos_ids: tuple[int, ...],
        in_pool: int = 0,
    ) -> None:
        """Begin a request; see `Step.start`. The prompt is to be in the cache before `run`."""

    def run(self, budget: RowBudget | None = None) -> StepNumbers | None:
        """Start a step, whose rows `budget` chooses; return the numbers of the oldest one that was not
        read, which may be this one, or None if there is none to read yet."""

    def stop(self, sequence: int) -> None:
        """End a request from the host; no numbers that are returned later are of it."""

    def end(self) -> None:
        """End all requests. Nothing of them runs, nor is told of, when it returns."""


class EagerStep:
    """A step that the host starts operation by operation, and waits for."""

    def __init__(self, step: Step, keep_records: bool = False, keep_logits: bool = False) -> None:
        """`keep_records`, `keep_logits`: have them among a step's numbers."""
        self.step = step
        self._keep_records = keep_records
        self._keep_logits = keep_logits

    def start(
        self,
        sequence: int,
        prompt: list[int],
        limit: int,
        eos_ids: tuple[int, ...],
        in_pool: int = 0,
    ) -> None:
        """See `StepRunner`."""
        self.step.start(sequence, prompt, limit, eos_ids, in_pool)

    def run(self, budget: RowBudget | None = None) -> StepNumbers:
        """See `StepRunner`; the numbers are of the step that was started."""
        records: list[StepRecord] = []
        output = self.step.run(
            records.append if self._keep_records else None, self._keep_logits, budget
        )
        numbers = self.step.packing.unpack(self.step.packing.pack(output).tolist())
        if output.logits is None:
            return numbers._replace(records=records)
        pairs = zip(output.logits, numbers.token_ids, strict=True)
        logits = [of_sequence[: len(ids)] for of_sequence, ids in pairs]
        return numbers._replace(records=records, logits=logits)

    def stop(self, sequence: int) -> None:
        """See `StepRunner`."""
        self.step.state.finished[sequence] = True

    def end(self) -> None:
        """See `StepRunner`."""
        self.step.state.end()
