"""Requests through a step's sequences: each takes one until it ends, then the next request takes it.

Knows which request runs in which sequence and what each step costs. What a request's ids come to is
`answer.py`'s business; what was asked for was checked before (`engine.py`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from lookahead.answer import Answer
from lookahead.devices import dtype_name
from lookahead.drafting.ngram_pool import WINDOW
from lookahead.errors import InputError
from lookahead.prefill import prefill
from lookahead.results import Chunk, Result
from lookahead.row_budget import RowBudget
from lookahead.step import Step, StepOutput, StepRecord

# Called with a request's number and, for each of its steps, the logits [count, vocab] that the step's
# tokens are the choices of.
OnLogits = Callable[[int, torch.Tensor], None]
Trace = Callable[[StepRecord], None]


class Batch:
    """Iterator over (number of a request, its chunk), step by step; `results` tells what was emitted so
    far, in the order of the requests.

    `answers` has each request's own. They begin in their order as sequences become free. `close()`, or
    leaving a `with` block, ends all of them early.
    """

    def __init__(
        self,
        step: Step,
        answers: Sequence[Answer],
        choice: str = "given",
        budget: RowBudget | None = None,
        trace: Trace | None = None,
        on_logits: OnLogits | None = None,
    ) -> None:
        """`answers` are yet to be begun; `choice` tells why (W, N, G) are what they are; `budget`
        chooses each step's rows; `trace` is given each request's steps, its number in `sequence`."""
        self._step = step
        self.answers = list(answers)
        self._choice = choice
        self.budget = budget
        self._trace = trace
        self._on_logits = on_logits
        self._num_begun = 0
        self._running: dict[int, int] = {}  # sequence -> number of the request
        self._ready: list[tuple[int, Chunk]] = []

    def __iter__(self) -> "Batch":
        return self

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the requests that have not ended by themselves."""
        for answer in self.answers:
            answer.interrupt()
        for sequence in self._running:
            self._step.state.finished[sequence] = True
        self._running.clear()
        self._ready.clear()

    def run_to_end(self) -> list[Result]:
        """Read every chunk that is left."""
        with self:
            for _ in self:
                pass
        return self.results

    @property
    def is_done(self) -> bool:
        return all(answer.is_done for answer in self.answers)

    @property
    def results(self) -> list[Result]:
        model, config = self._step.model, self._step.config
        return [answer.result(model, config, self._choice) for answer in self.answers]

    def __next__(self) -> tuple[int, Chunk]:
        try:
            while not self._ready and not self.is_done:
                self._begin()
                self._advance()
        except BaseException:
            self.close()  # whatever went wrong, the engine is free for the next request
            raise
        if not self._ready:
            raise StopIteration
        return self._ready.pop(0)

    def _begin(self) -> None:
        """Prefill requests into the sequences that are free."""
        for sequence in range(self._step.state.lengths.shape[0]):
            if sequence not in self._running and self._num_begun < len(self.answers):
                self._running[sequence] = self._num_begun
                self._num_begun += 1
                self._start(sequence, self.answers[self._running[sequence]])

    @torch.inference_mode()
    def _start(self, sequence: int, answer: Answer) -> None:
        began = time.perf_counter()
        step, ids = self._step, answer.request.token_ids
        step.start(sequence, ids, answer.limit, answer.request.eos_ids)
        text = step.state.tokens[sequence, : len(ids) - 1]
        prefill(step.model, step.kv_cache.sequence(sequence), text)
        answer.prefill_seconds = time.perf_counter() - began

    def _advance(self) -> None:
        """Run one step of every request that is running."""
        began = time.perf_counter()
        trace = None if self._trace is None else self._traced
        output = self._step.run(trace, self._on_logits is not None, self.budget)
        counts, finished, finite, rows = torch.stack(
            [output.counts, output.finished.long(), output.finite.long(), output.rows.long()]
        ).tolist()
        emitted = output.emitted.tolist()
        if self.budget is not None:
            self._observe(self.budget, output, emitted, counts)
        seconds = time.perf_counter() - began
        for sequence, number in list(self._running.items()):
            answer, count = self.answers[number], counts[sequence]
            answer.steps += 1
            answer.rows += rows[sequence]
            answer.decode_seconds += seconds
            if not finite[sequence]:
                raise self._not_finite(number)
            if self._on_logits is not None:
                assert output.logits is not None
                self._on_logits(number, output.logits[sequence, :count])
            chunk = answer.take(emitted[sequence][:count], bool(finished[sequence]))
            if chunk.text or chunk.token_ids:
                self._ready.append((number, chunk))
            if answer.is_done:
                # A stop string is found here; the device does not know of it.
                self._step.state.finished[sequence] = True
                del self._running[sequence]

    def _observe(
        self, budget: RowBudget, output: StepOutput, emitted: list[list[int]], counts: list[int]
    ) -> None:
        """Tell the budget what came of the step."""
        candidates, origins = output.candidates.tolist(), output.origins.tolist()
        found, winners = output.found.tolist(), output.winner.tolist()
        for number, sequence in enumerate(sorted(self._running)):
            count = counts[sequence]
            is_windows = count > 1 and origins[sequence][winners[sequence]] == WINDOW
            budget.observe(
                number,
                candidates[sequence][: found[sequence]],
                emitted[sequence][:count],
                count - 1 if is_windows else 0,
            )

    def _traced(self, record: StepRecord) -> None:
        assert self._trace is not None
        self._trace(replace(record, sequence=self._running[record.sequence]))

    def _not_finite(self, number: int) -> InputError:
        prompt = f" of prompt {number + 1}" if len(self.answers) > 1 else ""
        dtype = dtype_name(self._step.model.dtype)
        return InputError(
            f"the model's logits are not finite after {self.answers[number].num_tokens} new tokens"
            f"{prompt}: its weights hold NaN or infinity, or overflow in {dtype}; check the checkpoint "
            "or take another dtype"
        )
