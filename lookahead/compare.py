"""Lookahead beside autoregressive decoding of one prompt, and what each saw where they part."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from lookahead.results import Difference, Result
from lookahead.stream import OnLogits, Stream

# Begins a stream in a mode, with such a callable.
Start = Callable[[str, OnLogits], Stream]


def compared(result: Result, other: Result, start: Start) -> Result:
    """A lookahead result with the autoregressive one beside it; where ids differ, both modes run again
    as far as the first that does."""
    place = first_difference(result.token_ids, other.token_ids)
    difference = None
    if place is not None:
        ids = [
            each.token_ids[place] if place < each.new_tokens else None for each in (result, other)
        ]
        logits = [_logits_at(start, each.mode, place) for each in (result, other)]
        pairs = [
            [None if row is None or token is None else float(row[token]) for token in ids]
            for row in logits
        ]
        difference = Difference(place, ids, pairs)
    return replace(result, autoregressive=other, identical=place is None, difference=difference)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The first place where two texts differ, one being longer included; None for equal ones."""
    for place, (mine, its) in enumerate(zip(first, second, strict=False)):
        if mine != its:
            return place
    return None if len(first) == len(second) else min(len(first), len(second))


def _logits_at(start: Start, mode: str, place: int) -> torch.Tensor | None:
    """[vocab], what the new token at `place` is the choice of; None if the text ends before it."""
    rows: list[torch.Tensor] = []
    count = 0

    def keep(logits: torch.Tensor) -> None:
        nonlocal count
        if count <= place < count + len(logits):
            rows.append(logits[place - count].clone())
        count += len(logits)

    with start(mode, keep) as stream:
        for _ in stream:
            if rows:
                break
    return rows[0] if rows else None
