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
from lookahead.errors import InputError
from lookahead.logprobs import token_logprobs
from lookahead.prefill import prefill
from lookahead.results import Chunk, Result
from lookahead.row_budget import RowBudget
from lookahead.step import Step
from lookahead.step_numbers import StepNumbers
from lookahead.step_output import StepRecord
from lookahead.step_runner import StepRunner

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
        steps: StepRunner,
        answers: Sequence[Answer],
        choice: str = "given",
        budget: RowBudget | None = None,
        trace: Trace | None = None,
        on_logits: OnLogits | None = None,
    ) -> None:
        """`steps` has no request, and keeps what `trace` and `on_logits` are given; `answers` are yet
        to be begun; `choice` tells why (W, N, G) are what they are; `budget` chooses each step's rows;
        `trace` is given each request's steps, its number in `sequence`."""
        self._steps = steps
        self.answers = list(answers)
        self._choice = choice
        self.budget = budget
        self._trace = trace
        self._on_logits = on_logits
        self._num_begun = 0
        self._running: dict[int, int] = {}  # sequence -> number of the request
        # By sequence: the prompt that its cache begins with.
        self._prompts: dict[int, list[int]] = {}
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
        if self._running:  # else the next batch may have them
            self._steps.end()
        self._running.clear()
        self._ready.clear()

    def run_to_end(self) -> list[Result]:
        """Read every chunk that is left."""
        with self:
            for _ in self:
                pass
        return self.results

    @property
    def step(self) -> Step:
        """The step that its requests run."""
        return self._steps.step

    @property
    def is_done(self) -> bool:
        return all(answer.is_done for answer in self.answers)

    def result(self, number: int) -> Result:
        """One request's result so far."""
        return self.answers[number].result(
            self._steps.step.model, self._steps.step.config, self._choice
        )

    @property
    def results(self) -> list[Result]:
        """Every request's result so far."""
        return [self.result(number) for number in range(len(self.answers))]

    def __next__(self) -> tuple[int, Chunk]:
        while not self._ready and not self.is_done:
            self._ready = self.advance()
        if not self._ready:
            raise StopIteration
        return self._ready.pop(0)

    def advance(self) -> list[tuple[int, Chunk]]:
        """Begin the requests that can, and run a step; returns the chunks that are not read yet, which
        may be none."""
        try:
            self._begin()
            self._advance()
        except BaseException:
            self.close()  # whatever went wrong, the engine is free for the next request
            raise
        ready, self._ready = self._ready, []
        return ready

    def _begin(self) -> None:
        """Prefill requests into the sequences that are free."""
        if self.budget is not None and not self._running:
            self.budget.begin()
        for sequence in range(self._steps.step.state.lengths.shape[0]):
            if sequence not in self._running and self._num_begun < len(self.answers):
                self._running[sequence] = self._num_begun
                self._num_begun += 1
                self._start(sequence, self.answers[self._running[sequence]])

    @torch.inference_mode()
    def _start(self, sequence: int, answer: Answer) -> None:
        began = time.perf_counter()
        step, ids, kept = self._steps.step, answer.request.token_ids, answer.kept
        step.sampler.start(sequence, len(ids), answer.request.sample)
        self._steps.start(sequence, ids, answer.limit, answer.request.eos_ids, kept.in_pool)
        text = step.state.tokens[sequence, : len(ids) - 1]
        in_cache = kept.in_cache or self._share_prompt(sequence, ids)
        cache = step.kv_cache.sequence(sequence)
        answer.prefilled_tokens = prefill(step.model, cache, text, in_cache)
        self._prompts[sequence] = ids
        answer.is_prefilled = True
        answer.prefill_seconds = time.perf_counter() - began

    def _share_prompt(self, sequence: int, ids: list[int]) -> int:
        """Take over the cache of a prompt that was run before, by this sequence or another; returns how
        many of its tokens are there now."""
        for source, prompt in self._prompts.items():
            if prompt == ids:
                if source != sequence:
                    self._steps.step.kv_cache.copy(source, sequence, len(ids) - 1)
                return len(ids) - 1
        return 0

    def _advance(self) -> None:
        """Start steps of every request that is running until the numbers of one can be read."""
        began = time.perf_counter()
        numbers = None
        while numbers is None:
            numbers = self._steps.run(self.budget)
        seconds = time.perf_counter() - began
        if self._trace is not None:
            of_sequence = dict(self._running)  # the callable may close the batch
            for record in numbers.records:
                self._trace(replace(record, sequence=of_sequence[record.sequence]))
        for sequence, number in list(self._running.items()):
            is_running = sequence in self._running
            if is_running and numbers.token_ids[sequence]:  # else the step was started before
                self._take(sequence, number, numbers, seconds)

    def _take(self, sequence: int, number: int, numbers: StepNumbers, seconds: float) -> None:
        """Give a request what a step, which took so many seconds, emitted for it."""
        answer, ids = self.answers[number], numbers.token_ids[sequence]
        if self.budget is not None:
            found, from_window = numbers.candidates[sequence], numbers.from_window[sequence]
            self.budget.observe(found, numbers.matches[sequence], ids, from_window)
        answer.steps += 1
        answer.rows += numbers.rows[sequence]
        answer.decode_seconds += seconds
        if not numbers.finite[sequence]:
            raise self._not_finite(number)
        if answer.request.logprobs is not None:
            logits = numbers.logits[sequence]
            answer.logprobs += token_logprobs(logits, ids, answer.request.logprobs)
        if self._on_logits is not None:
            self._on_logits(number, numbers.logits[sequence])
            if answer.is_done:  # the callable closed the batch
                return
        chunk = answer.take(ids, numbers.finished[sequence])
        if chunk.text or chunk.token_ids:
            self._ready.append((number, chunk))
        if answer.is_done:
            del self._running[sequence]
            if not numbers.finished[sequence]:
                # A stop string is found here; the device does not know of it.
                self._steps.stop(sequence)

    def _not_finite(self, number: int) -> InputError:
        prompt = f" of prompt {number + 1}" if len(self.answers) > 1 else ""
        after = f"after {self.answers[number].num_tokens} new tokens{prompt}"
        step = self._steps.step
        if step.sampler.changes_logits:
            return InputError(
                f"no token can be drawn {after}: the largest logit is not a finite number behind "
                "logits_processor, penalties, logit_bias and banned_tokens; leave a token that may be "
                "chosen, and check that all are numbers, the checkpoint's too"
            )
        return InputError(
            f"the model's logits are not finite {after}: its weights hold NaN or infinity, or overflow "
            f"in {dtype_name(step.model.dtype)}; check the checkpoint or take another dtype"
        )
