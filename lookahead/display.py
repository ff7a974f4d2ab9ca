"""What people see of a run: text as it comes, a line about each answer, and how two modes compare."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import cycle
from typing import TYPE_CHECKING

from lookahead.interrupts import interrupts_wait
from lookahead.results import Result

if TYPE_CHECKING:
    from lookahead.batch import Batch
    from lookahead.tokenizer import Tokenizer

# Of a terminal, in turn for the tokens of a step.
COLOURS = (36, 33, 32, 35, 34, 31)


def show(
    batch: Batch,
    silent: bool,
    on_complete: Callable[[int, Result], None] | None = None,
    with_summary: bool = True,
) -> tuple[list[Result], bool]:
    """Run a batch to its end, or to Ctrl-C; returns the results, and whether it was that.

    Prints answers in order of the prompts unless `silent`, and a summary behind each if `with_summary`;
    calls `on_complete` with each one's number and result, in that order, as soon as it is there.
    """
    display, is_interrupted = Display(batch, silent, on_complete, with_summary), False
    try:
        for _ in batch:
            display.update()
        display.update()  # what ended without text
    except KeyboardInterrupt:
        is_interrupted = True
        batch.close()
        display.update()
    return batch.results, is_interrupted


class Display:
    """Prints the first answer that is not complete as its text comes, and the others when their turn
    comes; a summary behind each if asked for."""

    def __init__(
        self,
        batch: Batch,
        silent: bool,
        on_complete: Callable[[int, Result], None] | None,
        with_summary: bool,
    ) -> None:
        """`silent` leaves out the text, `with_summary` tells a line about each answer."""
        self._with_summary = with_summary
        self._batch = batch
        self._on_complete = on_complete
        self._silent = silent
        self._colours = cycle(COLOURS if sys.stdout.isatty() else (None,))
        self._num_samples = 1 + max((each.request.sample for each in batch.answers), default=0)
        self._turn = 0
        self._shown = 0  # characters of the answer whose turn it is

    def update(self) -> None:
        answers = self._batch.answers
        while self._turn < len(answers):
            answer = answers[self._turn]
            # What was shown is noted first: Ctrl-C may come while it is printed.
            text, self._shown = answer.text[self._shown :], len(answer.text)
            self._print(text, next(self._colours))
            if not answer.is_done:
                break
            with interrupts_wait():  # an answer that is complete is told whole, and once
                self._complete(self._turn)
                self._turn, self._shown = self._turn + 1, 0

    def _complete(self, number: int) -> None:
        answers, result = self._batch.answers, self._batch.result(number)
        self._print("\n", None)
        if self._with_summary:
            where = numbered_line(number, len(answers), self._num_samples)
            print(f"{where}{summary(result)}", file=sys.stderr)
        if self._on_complete is not None:
            self._on_complete(number, result)

    def _print(self, text: str, colour: int | None) -> None:
        if text and not self._silent:
            colored = text if colour is None else f"\033[{colour}m{text}\033[0m"
            print(colored, end="", flush=True)


def numbered_line(number: int, count: int, num_samples: int = 1) -> str:
    """Which prompt, and which of the answers to it, a line is about, where there are several."""
    parts = []
    if count > num_samples:
        parts.append(f"prompt {number // num_samples + 1} of {count // num_samples}")
    if num_samples > 1:
        parts.append(f"sample {number % num_samples + 1} of {num_samples}")
    return f"{', '.join(parts)}: " if parts else ""


def summary(result: Result) -> str:
    shape = (
        f" {(result.window, result.ngram, result.guesses)}" if result.mode == "lookahead" else ""
    )
    ms_per_step = 1000 * result.decode_seconds / max(result.steps, 1)
    return (
        f"{result.mode}{shape}: {result.new_tokens} tokens, {result.steps} steps, "
        f"{result.tokens_per_step:.2f} tokens/step, {ms_per_step:.1f} ms/step, "
        f"{result.tokens_per_second:.1f} tokens/s "
        f"({result.device}, {result.dtype}, ended by {result.finish_reason})"
    )


def comparison(result: Result, other: Result, tokenizer: Tokenizer) -> str:
    speed = ""
    if other.new_tokens:
        ratio = result.tokens_per_second / other.tokens_per_second
        speed = f"; lookahead runs at {ratio:.2f}x the speed of autoregressive"
    if result.difference is None:
        return f"identical ids{speed}"
    place, ids, logits = (
        result.difference.place, result.difference.token_ids, result.difference.logits
    )  # fmt: skip
    tokens = ["the end" if i is None else f"{i} {tokenizer.decode([i])!r}" for i in ids]
    seen = [
        ", ".join("unknown" if value is None else f"{value:.6g}" for value in row) for row in logits
    ]
    why = "" if result.inexact_reason is None else f" ({result.inexact_reason})"
    return (
        f"different ids from new token {place} on{why}: lookahead gives {tokens[0]}, autoregressive "
        f"{tokens[1]}; their logits are {seen[0]} in lookahead, {seen[1]} in autoregressive{speed}"
    )
