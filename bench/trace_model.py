"""A model whose choices are recorded, and a model whose choices are those that were recorded.

Both run the model's own forward pass, head and argmax; the second then gives the recorded tokens in
place of those. Only steps choose tokens, so that a prompt's prefill is neither recorded nor forced.
One sequence. Knows nothing of files, and nothing of decoding but that a step's live rows come first.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
from trace_file import RecordedRun

from lookahead.kv_cache import KVCache
from lookahead.layout import LookaheadLayout
from lookahead.models.llama import Llama

# Logits, chosen tokens, and whether the logits are finite; see `Llama.choose`.
Choices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class RowsDiffer(Exception):
    """A step has other rows than the recorded one. Says which."""


class _Rows(NamedTuple):
    """What the last forward pass was given."""

    tokens: torch.Tensor
    layout: LookaheadLayout
    lengths: torch.Tensor
    live_rows: torch.Tensor

    @property
    def check(self) -> int:
        """A number that tells these rows and where they stand from others."""
        live = self.tokens[0, : int(self.live_rows[0])].tolist()
        words = " ".join(map(str, [int(self.lengths[0]), *live]))
        return zlib.crc32(words.encode()) >> 1  # as many bits as a signed number has

    @property
    def logit_count(self) -> int:
        """Rows with logits that are live, the first of them."""
        live = int(self.live_rows[0])
        return sum(row < live for row in self.layout.logit_rows)


class _Watched:
    """A model whose steps' rows are seen."""

    def __init__(self, model: Llama) -> None:
        self._model_choose = model.choose

    def choose(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: LookaheadLayout,
        cache: KVCache,
        lengths: torch.Tensor,
        live_rows: torch.Tensor,
        rows: torch.Tensor,
    ) -> Choices:
        """See `Llama.choose`."""
        choices = self._model_choose(tokens, positions, layout, cache, lengths, live_rows, rows)
        return self._changed(_Rows(tokens, layout, lengths, live_rows), choices)

    def _changed(self, rows: _Rows, choices: Choices) -> Choices:
        """What takes the place of the model's choices at these rows."""
        raise NotImplementedError


class Recorder(_Watched):
    """Keeps checks and answers of the steps since the last `clear`."""

    def __init__(self, model: Llama) -> None:
        super().__init__(model)
        self.clear()

    def clear(self) -> None:
        self.checks: list[int] = []
        self.answers: list[list[int]] = []

    def _changed(self, rows: _Rows, choices: Choices) -> Choices:
        self.checks.append(rows.check)
        self.answers.append(choices[1][: rows.logit_count].tolist())
        return choices


class Forcer(_Watched):
    """Gives the answers of the run that `begin` names, anything at rows that are dead.

    What is forced lies on the model's device, and the step's number too, so that the host waits for
    nothing, unless rows are checked.
    """

    def __init__(self, model: Llama, runs: Sequence[RecordedRun], most_logits: int) -> None:
        """Room for these runs, with at most so many rows with logits in a step's layout."""
        super().__init__(model)
        self.most_logits = most_logits
        steps = max(run.steps for run in runs)
        self._answers = torch.zeros((steps, most_logits), dtype=torch.int64, device=model.device)
        self._step = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._checks: list[int] | None = None
        self._checked = 0

    def begin(self, run: RecordedRun, is_checked: bool) -> None:
        """The next step is the run's first."""
        padded = [row + [0] * (self.most_logits - len(row)) for row in run.answers]
        self._answers[: run.steps] = torch.tensor(padded, device=self._answers.device)
        self._step.zero_()
        self._checks, self._checked = (run.checks if is_checked else None), 0

    def _changed(self, rows: _Rows, choices: Choices) -> Choices:
        """Raises RowsDiffer where rows are checked."""
        if self._checks is not None:
            number, self._checked = self._checked, self._checked + 1
            if self._checks[number : number + 1] != [rows.check]:
                raise RowsDiffer(f"step {number} has other rows than the recorded one")
        logits, tokens, finite = choices
        answers = self._answers.index_select(0, self._step.clamp(max=len(self._answers) - 1))
        self._step += 1
        return logits, answers[0, : len(tokens)], finite


@contextmanager
def watched(model: Llama, watcher: Recorder | Forcer) -> Iterator[None]:
    """Within it the model's steps go through the watcher."""
    with patch.object(model, "choose", watcher.choose):
        yield
