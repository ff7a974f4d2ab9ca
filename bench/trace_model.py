"""A model whose choices are recorded, and a model whose choices are those that were recorded.

Both run the model's own forward pass, head and argmax; the second then gives the recorded tokens
instead. Only steps choose, so that a prompt's prefill is neither recorded nor forced. One sequence.
Knows nothing of files, and nothing of decoding but that a step's live rows come first.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from trace_file import RecordedRun

from lookahead.kv_cache import KVCache
from lookahead.layout import RowTree
from lookahead.models.llama import Llama

Choices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class RowsDiffer(Exception):
    """A step has other rows than the recorded one. Says which."""


def check_of(tokens: torch.Tensor, lengths: torch.Tensor, live_rows: torch.Tensor) -> int:
    """A number that tells these live rows and where they stand from others."""
    live = tokens[0, : int(live_rows[0])].tolist()
    words = " ".join(map(str, [int(lengths[0]), *live]))
    return zlib.crc32(words.encode()) >> 1  # as many bits as a signed number has


class Recorder:
    """Keeps checks and answers of all steps."""

    def __init__(self, model: Llama) -> None:
        self._model_choose = model.choose
        self.checks: list[int] = []
        self.answers: list[list[int]] = []

    def choose(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: RowTree,
        cache: KVCache,
        lengths: torch.Tensor,
        live_rows: torch.Tensor,
        rows: torch.Tensor,
        kept: dict | None = None,
    ) -> Choices:
        """See `Llama.choose`."""
        given = (tokens, positions, layout, cache, lengths, live_rows, rows)
        found = self._model_choose(*given, kept)
        self.checks.append(check_of(tokens, lengths, live_rows))
        self.answers.append(found[1][rows < live_rows].tolist())
        return found


class Forcer:
    """Gives the answers of the run that `begin` names.

    What is forced lies on the model's device, and the step's number too, so that the host waits for
    nothing, unless rows are checked.
    """

    def __init__(self, model: Llama, runs: Sequence[RecordedRun], most_logits: int) -> None:
        """Room for these runs, with at most so many rows with logits in a step's layout."""
        self._model_choose = model.choose
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

    def choose(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: RowTree,
        cache: KVCache,
        lengths: torch.Tensor,
        live_rows: torch.Tensor,
        rows: torch.Tensor,
        kept: dict | None = None,
    ) -> Choices:
        """See `Llama.choose`; the logits are still the model's. Raises RowsDiffer where rows are
        checked."""
        if self._checks is not None:
            number, self._checked = self._checked, self._checked + 1
            if self._checks[number : number + 1] != [check_of(tokens, lengths, live_rows)]:
                raise RowsDiffer(f"step {number} has other rows than the recorded one")
        given = (tokens, positions, layout, cache, lengths, live_rows, rows)
        logits, _, finite = self._model_choose(*given, kept)
        answers = self._answers.index_select(0, self._step.clamp(max=len(self._answers) - 1))
        self._step += 1
        return logits, answers[0, : len(rows)], finite


@contextmanager
def watched(model: Llama, watcher: Recorder | Forcer) -> Iterator[None]:
    """Within it the model's steps go through the watcher."""
    with patch.object(model, "choose", watcher.choose):
        yield
