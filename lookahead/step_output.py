"""What a step tells: as tensors, and one sequence's step as plain numbers.

Knows nothing of how a step runs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class StepOutput(NamedTuple):
    """What a step emitted.

    Attributes:
        emitted: [B, D] int64; the first counts[b] are new tokens of sequence b, the rest undefined.
        counts: [B] int64; 0 for a sequence that was finished before.
        finished: [B] bool, after the step.
        finite: [B] bool, whether the logits that were used are finite.
        logits: [B, D, vocab] those that each emitted token is the choice of; None unless asked for.
        candidates, origins, found: [B, G, N-1], [B, G] and [B], what was looked up and how many, run or
            not.
        winner: [B], the candidate that was accepted, if any of its tokens was.
        rows: [B], rows that were run.
        matches: [B, G] int64, how well each candidate fits its context; None if that was not looked at.
        path: [B, D] int64, rows of the winning path; those of the first counts[b] tokens are accepted.
        packed: [B, M] int64, the numbers that the host reads (`step_numbers.py`), where the step packs
            them itself.
    """

    emitted: torch.Tensor
    counts: torch.Tensor
    finished: torch.Tensor
    finite: torch.Tensor
    logits: torch.Tensor | None
    candidates: torch.Tensor
    origins: torch.Tensor
    found: torch.Tensor
    winner: torch.Tensor
    rows: torch.Tensor
    matches: torch.Tensor | None
    path: torch.Tensor
    packed: torch.Tensor | None = None


@dataclass(frozen=True)
class StepRecord:
    """One sequence's step as plain numbers, for `trace=`.

    `sequence` is its place in the batch, or the number of its prompt; `tokens`, `parents` and
    `positions` are the live rows; `candidates` and `origins` (of `ORIGINS`) what was looked up, most
    recent first; `accepted` the rows of the winning path that were kept; `winner` the candidate they
    belong to, None if no candidate token was kept.
    """

    sequence: int
    length: int
    tokens: list[int]
    parents: list[int]
    positions: list[int]
    candidates: list[list[int]]
    origins: list[str]
    accepted: list[int]
    winner: int | None
    emitted: list[int]
