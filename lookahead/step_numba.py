"""What a step does beside the forward pass, on a CPU: the same as `step_ref.py`'s tensor operations.

A hundred small operations take longer than a millisecond, these loops a few microseconds. `step_ref.py`
is the specification; tests compare the two after every step.
"""

import torch

from lookahead.decode_state import DecodeState
from lookahead.drafting.context import CONTEXT
from lookahead.drafting.ngram_pool import OUTPUT, PROMPT, WINDOW, NgramPool
from lookahead.drafting.window import Window
from lookahead.kernels.simd_types import entry, kernel
from lookahead.layout_tensors import LayoutTensors
from lookahead.step_ref import Judgement
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
            for eos_id in eos_ids[sequence]:
                is_over = is_over or emitted[sequence, count] == eos_id
            all_finite = all_finite and finite[sequence, places[rows[sequence, count]]]
            count += 1
        counts[sequence] = count
        ends[sequence] = is_over or count >= room
        are_finite[sequence] = all_finite


def judge(
    state: DecodeState,
    numbers: LayoutTensors,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    finite: torch.Tensor,
    live: torch.Tensor,
) -> Judgement:
    """See `step_ref.judge`; `verdict.counts` are those that are emitted."""
    paths = numbers.paths
    batch, depth = tokens.shape[0], paths.shape[1]
    rows, emitted = torch.empty((2, batch, depth), dtype=torch.int64)
    counts, winners = torch.empty((2, batch), dtype=torch.int64)
    ends, are_finite = torch.empty((2, batch), dtype=torch.bool)
    _judge(
        tokens.numpy(), chosen.numpy(), finite.numpy(), numbers.logit_places.numpy(), paths.numpy(),
        live.numpy(), state.lengths.numpy(), state.limits.numpy(), state.finished.numpy(),
        state.eos_ids.numpy(), rows.numpy(), emitted.numpy(), counts.numpy(), winners.numpy(),
        ends.numpy(), are_finite.numpy(),
    )  # fmt: skip
    return Judgement(Verdict(rows, emitted, counts, winners), counts, ends, are_finite)


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


@kernel
def _insert_text(entries, origins, filled, text, first, behind, origin):
    """The n-grams of one sequence's text that start at first..behind-1, in order."""
    size = entries.shape[2]
    for start in range(first, behind):
        key = text[start]
        _insert(
            entries[key], origins[key], filled[key : key + 1], text[start + 1 : start + 1 + size],
            origin,
        )  # fmt: skip


@entry
def _learn(
    text, lengths, emitted, counts, ends, finished, next_tokens, window, steps, entries, origins,
    filled, gram, window_origin, output_origin,
):  # fmt: skip
    batch, levels, columns = window.shape
    guesses = entries.shape[2]
    for sequence in range(batch):
        finished[sequence] = ends[sequence]
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
            first = length + 1 - levels
            _insert_text(
                entries[sequence], origins[sequence], filled[sequence], text[sequence],
                max(first, 0), first + count, output_origin,
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
    state: DecodeState,
    window: Window,
    pool: NgramPool,
    judgement: Judgement,
    next_tokens: torch.Tensor,
) -> None:
    """See `step_ref.learn`; nothing moves in a sequence that was finished before."""
    gram = torch.empty(window.levels, dtype=torch.int32)
    _learn(
        state.tokens.numpy(), state.lengths.numpy(), judgement.verdict.emitted.numpy(),
        judgement.counts.numpy(), judgement.finished.numpy(), state.finished.numpy(),
        next_tokens.numpy(), window.tokens.numpy(), window.steps.numpy(), pool.entries.numpy(),
        pool.origins.numpy(), pool.counts.numpy(), gram.numpy(), WINDOW, OUTPUT,
    )  # fmt: skip


@entry
def _insert_prompt(entries, origins, filled, text, first, num_ngrams, origin):
    _insert_text(entries, origins, filled, text, first, num_ngrams, origin)


def insert_prompt(
    state: DecodeState, pool: NgramPool, sequence: int, num_tokens: int, in_pool: int = 0
) -> None:
    """See `step_ref.insert_prompt`."""
    _insert_prompt(
        pool.entries[sequence].numpy(), pool.origins[sequence].numpy(),
        pool.counts[sequence].numpy(), state.tokens[sequence].numpy(),
        max(in_pool - pool.continuation, 0), num_tokens - pool.continuation, PROMPT,
    )  # fmt: skip


@entry
def _order_by_context(
    entries, filled, text, lengths, candidates, origins, found, matches, marks, ordered,
    ordered_origins, ordered_matches, most,
):  # fmt: skip
    for sequence in range(len(found)):
        length, count = lengths[sequence], found[sequence]
        for number in range(count):
            matches[number] = marks[number] = 0
        for back in range(1, min(most, length, entries.shape[3] - 1) + 1):
            begin = text[sequence, length - back]
            for slot in range(filled[sequence, begin]):
                gram = entries[sequence, begin, slot]
                is_same = True
                for i in range(back):
                    is_same = is_same and gram[i] == text[sequence, length - back + 1 + i]
                for number in range(count):
                    is_next = is_same and gram[back] == candidates[sequence, number, 0]
                    if is_next and marks[number] < back:
                        marks[number] = back
                        matches[number] += 1
        place = 0
        for match in range(most, -1, -1):
            for number in range(count):
                if matches[number] == match:
                    for i in range(candidates.shape[2]):
                        ordered[sequence, place, i] = candidates[sequence, number, i]
                    ordered_origins[sequence, place] = origins[sequence, number]
                    ordered_matches[sequence, place] = match
                    place += 1


def order_by_context(
    pool: NgramPool,
    text: torch.Tensor,
    lengths: torch.Tensor,
    candidates: torch.Tensor,
    origins: torch.Tensor,
    found: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `drafting/context.py`."""
    ordered, ordered_origins = torch.zeros_like(candidates), torch.zeros_like(origins)
    matches, marks = torch.empty((2, candidates.shape[1]), dtype=torch.int64)
    ordered_matches = torch.zeros(origins.shape, dtype=torch.int64)
    _order_by_context(
        pool.entries.numpy(), pool.counts.numpy(), text.numpy(), lengths.numpy(), candidates.numpy(),
        origins.numpy(), found.numpy(), matches.numpy(), marks.numpy(), ordered.numpy(),
        ordered_origins.numpy(), ordered_matches.numpy(), CONTEXT,
    )  # fmt: skip
    return ordered, ordered_origins, ordered_matches
