"""What a step does before the forward pass, on a CPU: candidates, their order, rows.

The same as `step_work.py`'s tensor operations and `drafting/context.py`; tests compare them.
"""

from lookahead.kernels.simd_types import entry, kernel


@kernel
def _count_matches(entries, filled, text, length, candidates, count, most, matches, marks):
    """`matches` [G], how well each of one sequence's candidates fits its context."""
    for number in range(count):
        matches[number] = marks[number] = 0
    for back in range(1, min(most, length, entries.shape[2] - 1) + 1):
        begin = text[length - back]
        for slot in range(filled[begin]):
            gram = entries[begin, slot]
            is_same = True
            for i in range(back):
                is_same = is_same and gram[i] == text[length - back + 1 + i]
            for number in range(count):
                is_next = is_same and gram[back] == candidates[number, 0]
                if is_next and marks[number] < back:
                    marks[number] = back
                    matches[number] += 1


@entry
def look_up(
    text, lengths, finished, entries, pool_origins, filled, most, candidates, origins, found, matches,
    fits, marks,
):  # fmt: skip
    """Candidates of each running sequence; those that fit up to `most` tokens before come first.

    Args:
        text, lengths, finished: of `DecodeState`.
        entries, pool_origins, filled: of `NgramPool`.
        most: tokens before the key that are looked at; 0 leaves the pool's order.
        candidates, origins, found, matches: [B, G, N-1] int32, [B, G] int8, [B] int32 and [B, G] int64,
            written.
        fits, marks: [G] int64, scratch.
    """
    for sequence in range(len(lengths)):
        length = lengths[sequence]
        key = text[sequence, length]
        count = 0 if finished[sequence] else filled[sequence, key]
        found[sequence] = count
        grams = entries[sequence, key]
        _count_matches(
            entries[sequence],
            filled[sequence],
            text[sequence],
            length,
            grams,
            count,
            most,
            fits,
            marks,
        )
        place = 0
        for fit in range(most, -1, -1):
            for number in range(count):
                if fits[number] == fit:
                    for i in range(grams.shape[1]):
                        candidates[sequence, place, i] = grams[number, i]
                    origins[sequence, place] = pool_origins[sequence, key, number]
                    matches[sequence, place] = fit
                    place += 1


@entry
def fill(
    text, lengths, finished, window, candidates, found, depths, logit_rows, guesses, levels, tokens,
    positions, committed, live, live_rows, wanted, places,
):  # fmt: skip
    """A step's rows; returns how many have logits.

    Args:
        text, lengths, finished: of `DecodeState`.
        window: [B, N-1, W] int32, without columns where it is not run.
        candidates, found: as `look_up` left them.
        depths, logit_rows: of `LayoutTensors`.
        guesses, levels: of its layout.
        tokens, positions: [B, T] int64, written; so are all below.
        committed: [B] int64, the lengths.
        live, live_rows: [B] int64, see `StepRows`.
        wanted: [B * K] int64, the first numbers are those of the live rows with logits.
        places: [B, K] int64, which of these each row with logits is.
    """
    count = 0
    for sequence in range(len(lengths)):
        length = lengths[sequence]
        committed[sequence] = length
        first = 0
        for level in range(window.shape[1]):
            for column in range(window.shape[2]):
                tokens[sequence, first] = window[sequence, level, column]
                first += 1
        if first == 0:
            tokens[sequence, 0] = text[sequence, length]
            first = 1
        live[sequence] = min(guesses, found[sequence])
        live_rows[sequence] = 0 if finished[sequence] else first + live[sequence] * levels
        for guess in range(guesses):
            for level in range(levels):
                tokens[sequence, first + guess * levels + level] = candidates[
                    sequence, guess, level
                ]
        for row in range(len(depths)):
            positions[sequence, row] = length + depths[row]
        for place in range(len(logit_rows)):
            if logit_rows[place] < live_rows[sequence]:
                wanted[count] = sequence * len(depths) + logit_rows[place]
                count += 1
            places[sequence, place] = max(count - 1, 0)
    return count
