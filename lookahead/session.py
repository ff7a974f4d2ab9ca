"""One request, decoded a step at a time by a caller that looks at logits, and may change them.

For people's own sampling code: what a step emitted, the logits that it came from, the path that was
accepted. Knows nothing of how a step runs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from lookahead.batch import Trace
from lookahead.results import Result
from lookahead.step_output import StepRecord
from lookahead.stream import OnLogits, Stream


@dataclass(frozen=True)
class SessionStep:
    """What one step came to.

    Attributes:
        token_ids: the new tokens, at least one: those of `path` behind the current token, then the
            model's own next one. A stop string's are among them.
        text: what was released of them; less where a character or a stop string may go on.
        logits: [len(token_ids), vocab] of the model's dtype, on its device: those that each token is
            the choice of, as the model gave them.
        path: tokens of the rows that were accepted, the current token first: the text that each row of
            `logits` stands behind ends with them.
        record: everything about the step: its rows, its candidates and where these came from.
        finish_reason: why the text ends with this step; None if it goes on.
    """

    token_ids: list[int]
    text: str
    logits: torch.Tensor
    path: list[int]
    record: StepRecord
    finish_reason: str | None


class Session:
    """Iterator over a request's steps. `close()`, or leaving a `with` block, ends it early."""

    def __init__(self, start: Callable[[Trace, OnLogits], Stream]) -> None:
        """`start` begins the request, which is to give each step's record and logits away."""
        self._record: StepRecord
        self._logits: torch.Tensor
        self._stream = start(self._keep_record, self._keep_logits)

    def _keep_record(self, record: StepRecord) -> None:
        self._record = record

    def _keep_logits(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def step(self) -> SessionStep | None:
        """Run the next step; None when the text has ended."""
        if self._stream.is_done:
            return None
        chunks = self._stream.batch.advance()
        record = self._record
        return SessionStep(
            token_ids=record.emitted,
            text="".join(chunk.text for _, chunk in chunks),
            logits=self._logits,
            path=[record.tokens[row] for row in record.accepted],
            record=record,
            finish_reason=self.result.finish_reason if self._stream.is_done else None,
        )

    def __iter__(self) -> Iterator[SessionStep]:
        while (step := self.step()) is not None:
            yield step

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the request here, if it has not ended by itself."""
        self._stream.close()

    @property
    def is_done(self) -> bool:
        return self._stream.is_done

    @property
    def result(self) -> Result:
        """The request so far; `finish_reason` is "interrupted" until it has ended by itself."""
        return self._stream.result
