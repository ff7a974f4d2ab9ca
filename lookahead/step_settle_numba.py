"""What a step does after the forward pass, on a CPU: judge, commit, learn, and tell the host.

The same as `step_ref.py`, `commit_rows` and `NumberPacking.pack`; tests compare them after every step.
"""

from lookahead.kernels.commit_rows_numba import copy_rows
from lookahead.kernels.simd_types import entry, kernel


@kernel
def _judge(
    sequence, tokens, chosen, finite, places, logit_places, paths, live, lengths, limits, finished,
    eos_ids, path, emitted, counts, winners, ends, are_finite,
):  # fmt: skip
    """The longest accepted path, cut at the text's end."""
    winner, deepest = 0, 0
    for candidate in range(min(live[sequence], len(paths))):
        depth = 0
        while depth + 1 < paths.shape[1]:
            choice = chosen[places[sequence, logit_places[paths[candidate, depth]]]]
            if tokens[sequence, paths[candidate, depth + 1]] != choice:
                break
            depth += 1
        if depth > deepest:
            winner, deepest = candidate, depth
    winners[sequence] = winner
    for depth in range(paths.shape[1]):
        row = paths[winner, depth]
        path[sequence, depth] = row
        emitted[sequence, depth] = chosen[places[sequence, logit_places[row]]]
    room = limits[sequence] - lengths[sequence] - 1
    most = 0 if finished[sequence] else min(deepest + 1, room)
    count, is_over, all_finite = 0, bool(finished[sequence]), True
    while count < most and not is_over:
        for eos_id in eos_ids[sequence]:
            is_over = is_over or emitted[sequence, count] == eos_id
        place = places[sequence, logit_places[path[sequence, count]]]
        all_finite = all_finite and finite[place]
        count += 1
    counts[sequence] = count
    ends[sequence] = is_over or count >= room
    are_finite[sequence] = all_finite


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


@kernel
def _learn(
    sequence, count, text, lengths, emitted, largest, places, last_level_places, window, steps, entries,
    origins, filled, gram, window_origin, output_origin,
):  # fmt: skip
    """Append `count` emitted tokens to a sequence's text, insert n-grams, first the window's, then the
    text's, and shift the window."""
    levels, columns = window.shape[1:]
    guesses, size = entries.shape[2:]
    length = lengths[sequence]
    for i in range(count):
        text[sequence, length + 1 + i] = emitted[sequence, i]
    if guesses:
        if steps[sequence] >= levels - 1:
            for column in range(columns):
                for level in range(1, levels):
                    gram[level - 1] = window[sequence, level, column]
                gram[levels - 1] = largest[places[last_level_places[column]]]
                key = window[sequence, 0, column]
                _insert(
                    entries[sequence, key], origins[sequence, key],
                    filled[sequence, key : key + 1], gram, window_origin,
                )  # fmt: skip
        first = length + 1 - size
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
            window[sequence, levels - 1, column] = largest[places[last_level_places[column]]]
        window[sequence, 0, 0] = text[sequence, length + count]
        steps[sequence] += 1


@kernel
def _pack(
    packed, num_counts, observed, emitted, count, is_over, is_finite, num_rows, winner, candidates,
    origins, found, matches, window_origin,
):  # fmt: skip
    """One sequence's numbers where `NumberPacking` has them; what has no meaning there is left."""
    guesses, size = candidates.shape
    packed[0], packed[1], packed[2], packed[3] = count, is_over, is_finite, num_rows
    for i in range(count):
        packed[num_counts + i] = emitted[i]
    if observed == len(packed):  # nobody observes candidates
        return
    packed[observed] = found
    is_windows = guesses > 0 and count > 1 and origins[winner] == window_origin
    packed[observed + 1] = count - 1 if is_windows else 0
    for guess in range(found):
        packed[observed + 2 + guess] = matches[guess]
        for i in range(size):
            packed[observed + 2 + guesses + guess * size + i] = candidates[guess, i]


@entry
def settle(
    sources, row_start, tokens, chosen, finite, largest, places, logit_places, last_level_places, paths,
    live, live_rows, text, lengths, limits, finished, eos_ids, cache, window, steps, entries,
    pool_origins, filled, candidates, origins, found, matches, path, emitted, counts, winners, ends,
    are_finite, gram, packed, num_counts, observed, window_origin, output_origin,
):  # fmt: skip
    """Judge each sequence's rows, commit and learn what is accepted, and pack what the host reads.

    Args:
        sources: a tag, for what is compiled to be kept under all that it is compiled of.
        row_start: index of row 0 in the cache.
        tokens, places, live, live_rows: as `fill` left them.
        chosen, finite, largest: [n] int64, bool and int64, of the rows with logits.
        logit_places, last_level_places, paths: of `LayoutTensors`.
        text, lengths, limits, finished, eos_ids: of `DecodeState`, changed.
        cache: [layers, 2, B, num_kv_heads, C, head_dim] whole numbers of the bits, changed.
        window, steps: of `Window`, without columns where it is not run, changed.
        entries, pool_origins, filled: of `NgramPool`, changed.
        candidates, origins, found, matches: as `look_up` left them.
        path, emitted, counts, winners, ends, are_finite: as in `StepOutput`, written.
        gram: [N-1] int32, scratch.
        packed, num_counts, observed: [B, M] int64, written, and where in a row of it ids begin, and
            what a budget observes; see `NumberPacking`.
        window_origin, output_origin: what the pool keeps of where an n-gram was seen.
    """
    for sequence in range(len(lengths)):
        _judge(
            sequence, tokens, chosen, finite, places, logit_places, paths, live, lengths, limits,
            finished, eos_ids, path, emitted, counts, winners, ends, are_finite,
        )  # fmt: skip
        count = counts[sequence]
        finished[sequence] = ends[sequence]
        if count:
            copy_rows(cache, sequence, path[sequence], count, lengths[sequence], row_start)
            _learn(
                sequence, count, text, lengths, emitted, largest, places[sequence], last_level_places,
                window, steps, entries, pool_origins, filled, gram, window_origin, output_origin,
            )  # fmt: skip
        _pack(
            packed[sequence], num_counts, observed, emitted[sequence], count, ends[sequence],
            are_finite[sequence], live_rows[sequence], winners[sequence], candidates[sequence],
            origins[sequence], found[sequence], matches[sequence], window_origin,
        )  # fmt: skip


@entry
def insert_prompt(entries, origins, filled, text, first, behind, origin):
    """The n-grams of one sequence's prompt that start at first..behind-1, in order."""
    _insert_text(entries, origins, filled, text, first, behind, origin)
