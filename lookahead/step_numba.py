"""What a step does beside the forward pass, on a CPU: the same as `step.py`'s tensor operations.

A hundred small operations take longer than a millisecond, these loops a few microseconds. `step.py` and
the files that it calls are the specification; tests compare the two after every step.
"""

import torch

from lookahead.drafting.ngram_pool import NgramPool
from lookahead.drafting.window import Window
from lookahead.kernels.simd_types import entry, kernel
from lookahead.verify import Verdict


@entry
def _judge(
    tokens, choices, finite, places, paths, live, lengths, limits, finished, eos_ids, rows, emitted,
    counts, winners, ends, are_finite,
):  # fmt: skip
    for sequence in range(len(lengths)):
        winner, deepest = 0, 0
        for path in range(min(live[sequence], len(paths))):
            depth = 0
            while depth + 1 < paths.shape[1]:
                choice = choices[sequence, places[paths[path, depth]]]
                if tokens[sequence, paths[path, depth + 1]] != choice:
                    break
                depth += 1
            if depth > deepest:
                winner, deepest = path, depth
        winners[sequence] = winner
        for depth in range(paths.shape[1]):
            rows[sequence, depth] = paths[winner, depth]
            emitted[sequence, depth] = choices[sequence, places[paths[winner, depth]]]
        room = limits[sequence] - lengths[sequence] - 1
        most = 0 if finished[sequence] else min(deepest + 1, room)
        count, is_over, all_finite = 0, bool(finished[sequence]), True
        while count < most and not is_over:
            for eos_id in eos_ids:
                is_over = is_over or emitted[sequence, count] == eos_id
            all_finite = all_finite and finite[sequence, places[rows[sequence, count]]]
            count += 1
        counts[sequence] = count
        ends[sequence] = is_over or count >= room
        are_finite[sequence] = all_finite


def judge(
    tokens: torch.Tensor,
    choices: torch.Tensor,
    finite: torch.Tensor,
    places: torch.Tensor,
    paths: torch.Tensor,
    live: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    finished: torch.Tensor,
    eos_ids: torch.Tensor,
) -> tuple[Verdict, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The verdict on a step's rows, how many tokens are emitted, who is finished then, and whether the
    logits that were used are finite: `Step._judge`. `verdict.counts` are those that are emitted."""
    batch, depth = tokens.shape[0], paths.shape[1]
    rows, emitted = torch.empty((2, batch, depth), dtype=torch.int64)
    counts, winners = torch.empty((2, batch), dtype=torch.int64)
    ends, are_finite = torch.empty((2, batch), dtype=torch.bool)
    _judge(
        tokens.numpy(), choices.numpy(), finite.numpy(), places.numpy(), paths.numpy(), live.numpy(),
        lengths.numpy(), limits.numpy(), finished.numpy(), eos_ids.numpy(), rows.numpy(),
        emitted.numpy(), counts.numpy(), winners.numpy(), ends.numpy(), are_finite.numpy(),
    )  # fmt: skip
    return Verdict(rows, emitted, counts, winners), counts, ends, are_finite


@kernel
def _insert(entries, origins, counts, gram, origin):
    """One n-gram to the front of a key's slots; equal ones leave, the last falls out."""
    guesses, size = entries.shape
    place = 0
    while place < counts[0]:
        is_same = True
        for i in range(size):
            is_same = is_same and entries[place, i] == gram[i]
        if is_same:
            break
        place += 1
    if place == counts[0]:
        if counts[0] < guesses:
            counts[0] += 1
        else:
            place -= 1
    for slot in range(place, 0, -1):
        for i in range(size):
            entries[slot, i] = entries[slot - 1, i]
        origins[slot] = origins[slot - 1]
    for i in range(size):
        entries[0, i] = gram[i]
    origins[0] = origin


@entry
def _learn(
    text, lengths, emitted, counts, next_tokens, window, steps, entries, origins, filled, gram,
    window_origin, output_origin,
):  # fmt: skip
    batch, levels, columns = window.shape
    guesses = entries.shape[2]
    for sequence in range(batch):
        length, count = lengths[sequence], counts[sequence]
        if count == 0:  # finished before
            continue
        for i in range(count):
            text[sequence, length + 1 + i] = emitted[sequence, i]
        if guesses:
            if steps[sequence] >= levels - 1:
                for column in range(columns):
                    for level in range(1, levels):
                        gram[level - 1] = window[sequence, level, column]
                    gram[levels - 1] = next_tokens[sequence, column]
                    key = window[sequence, 0, column]
                    _insert(
                        entries[sequence, key], origins[sequence, key],
                        filled[sequence, key : key + 1], gram, window_origin,
                    )  # fmt: skip
            for start in range(length + 1 - levels, length + 1 - levels + count):
                if start >= 0:
                    key = text[sequence, start]
                    _insert(
                        entries[sequence, key], origins[sequence, key],
                        filled[sequence, key : key + 1],
                        text[sequence, start + 1 : start + 1 + levels], output_origin,
                    )  # fmt: skip
        lengths[sequence] = length + count
        if columns:
            for level in range(levels - 1):
                for column in range(columns):
                    window[sequence, level, column] = window[sequence, level + 1, column]
            for column in range(columns):
                window[sequence, levels - 1, column] = next_tokens[sequence, column]
            window[sequence, 0, 0] = text[sequence, length + count]
            steps[sequence] += 1


def learn(
    text: torch.Tensor,
    lengths: torch.Tensor,
    verdict: Verdict,
    counts: torch.Tensor,
    next_tokens: torch.Tensor,
    window: Window,
    pool: NgramPool,
    origins: tuple[int, int],
) -> None:
    """Append what was emitted to the text, insert the window's n-grams and the text's into the pool,
    and shift the window: `Step._learn`. `origins` are those of the window's and the text's n-grams."""
    gram = torch.empty(window.tokens.shape[1], dtype=torch.int32)
    _learn(
        text.numpy(), lengths.numpy(), verdict.emitted.numpy(), counts.numpy(), next_tokens.numpy(),
        window.tokens.numpy(), window.steps.numpy(), pool.entries.numpy(), pool.origins.numpy(),
        pool.counts.numpy(), gram.numpy(), *origins,
    )  # fmt: skip
