"""Insertion into the n-gram pool in Triton: what `NgramPool.insert` does with the n-grams of a step.

Takes the n-grams from where they stand, window and text, so that nothing is gathered first. Launched by
`step_triton.py`, which knows whose buffers these are.
"""

import triton
import triton.language as tl


@triton.jit
def _ngram_tokens(
    item, element, window_ptr, next_ptr, text_ptr, emitted_ptr, columns, levels, first, length,
    behind, IS_PROMPT: tl.constexpr,
):  # fmt: skip
    """Tokens `element` (0 is the key) of n-grams `item`, as tiles that broadcast: first those of the
    window's columns, then those of the text that start at `first`, `first` + 1, ...

    The text stands at `text_ptr` up to index `length`, what follows it at `emitted_ptr`; nothing is
    read of n-grams that start before 0, or at `behind` or later.
    """
    inside = element <= levels
    start = first + item - columns
    in_text = inside & (item >= columns) & (start >= 0) & (start < behind)
    at = start + element
    tokens = tl.load(text_ptr + at, mask=in_text & (at <= length), other=0)
    if not IS_PROMPT:
        fresh = tl.load(emitted_ptr + (at - length - 1), mask=in_text & (at > length), other=0)
        in_window = inside & (item < columns)
        is_new = in_window & (element == levels)
        is_old = in_window & (element < levels)
        old = tl.load(window_ptr + element * columns + item, mask=is_old, other=0)
        new = tl.load(next_ptr + item, mask=is_new, other=0)
        # At most one of the four was read, the others are 0.
        tokens += fresh.to(tl.int32) + old + new.to(tl.int32)
    return tokens


@triton.jit(
    do_not_specialize=[
        "first_sequence", "text_size", "path_rows", "columns", "levels", "guesses", "vocab_size",
        "num_items", "prompt_first", "prompt_behind",
    ]
)  # fmt: skip
def insert_ngrams(
    text_ptr,  # [B, text_size] int32
    lengths_ptr,  # [B] int32, before the step
    emitted_ptr,  # [B, path_rows] int64; None for a prompt, as are the next five
    counts_ptr,  # [B] int64, emitted
    next_ptr,  # [B, columns] int64
    window_ptr,  # [B, levels, columns] int32
    steps_ptr,  # [B] int32
    entries_ptr,  # [B, vocab_size, guesses, levels] int32, changed; so are the next two
    origins_ptr,  # [B, vocab_size, guesses] int8
    filled_ptr,  # [B, vocab_size] int32
    first_sequence,
    text_size,
    path_rows,
    columns,
    levels,
    guesses,
    vocab_size,
    num_items,
    prompt_first,
    prompt_behind,
    IS_PROMPT: tl.constexpr,
    WINDOW_ORIGIN: tl.constexpr,
    TEXT_ORIGIN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """One of the items that are inserted together: the last one with a key writes all of the key's
    slots, the others do nothing, so no program reads what another writes."""
    sequence = (first_sequence + tl.program_id(1)).to(tl.int64)
    text_ptr += sequence * text_size
    length = tl.load(lengths_ptr + sequence)
    if IS_PROMPT:
        first, behind = prompt_first, prompt_behind
    else:
        count = tl.load(counts_ptr + sequence).to(tl.int32)
        first = length + 1 - levels
        behind = first + count
        emitted_ptr += sequence * path_rows
        next_ptr += sequence * columns
        window_ptr += sequence * levels * columns
    item = tl.arange(0, BLOCK_M)  # [M]
    element = tl.arange(0, BLOCK_E)  # [E] of an n-gram, the key and its continuation
    tokens = _ngram_tokens(
        item[:, None], element[None, :], window_ptr, next_ptr, text_ptr, emitted_ptr, columns,
        levels, first, length, behind, IS_PROMPT,
    )  # fmt: skip
    keys = tl.sum(tl.where(element[None, :] == 0, tokens, 0), 1)
    start = first + item - columns
    is_valid = (item >= columns) & (item < num_items) & (start >= 0) & (start < behind)
    if not IS_PROMPT:
        # A column counts once every level above its key came from the model.
        window_counts = (tl.load(steps_ptr + sequence) >= levels - 1) & (count > 0)
        is_valid = is_valid | ((item < columns) & window_counts)
    own = tl.program_id(0)
    key = tl.sum(tl.where(item == own, keys, 0), 0).to(tl.int64)
    usable = is_valid & (keys == key)
    if tl.max(tl.where(usable, item, -1), 0) != own:
        return

    slots_ptr = entries_ptr + (sequence * vocab_size + key) * guesses * levels
    marks_ptr = origins_ptr + (sequence * vocab_size + key) * guesses
    slot = tl.arange(0, BLOCK_G)  # [G]
    filled = tl.load(filled_ptr + sequence * vocab_size + key)
    stays = slot < filled
    # A continuation's tokens at their elements of an n-gram, so that the two compare.
    in_gram = (element >= 1) & (element <= levels)
    place = slot[:, None] * levels + element[None, :] - 1
    old = tl.load(slots_ptr + place, mask=stays[:, None] & in_gram[None, :], other=0)
    marks = tl.load(marks_ptr + slot, mask=stays, other=0)
    tokens = tl.where(in_gram[None, :], tokens, 0)
    tl.debug_barrier()  # all slots are read before one is written

    written = 0
    newest = own
    while (newest >= 0) & (written < guesses):
        gram = tl.sum(tl.where(item[:, None] == newest, tokens, 0), 0)  # [E]
        tl.store(slots_ptr + written * levels + element - 1, gram, mask=in_gram)
        origin = tl.where(newest < columns, WINDOW_ORIGIN, TEXT_ORIGIN)
        tl.store(marks_ptr + written, origin.to(tl.int8))
        usable = usable & (tl.max((tokens != gram[None, :]).to(tl.int32), 1) > 0)
        stays = stays & (tl.max((old != gram[None, :]).to(tl.int32), 1) > 0)
        newest = tl.max(tl.where(usable, item, -1), 0)
        written += 1
    behind_new = written + tl.cumsum(stays.to(tl.int32), 0) - 1  # [G] where a slot goes
    stays_in = stays & (behind_new < guesses)
    target = behind_new[:, None] * levels + element[None, :] - 1
    tl.store(slots_ptr + target, old, mask=stays_in[:, None] & in_gram[None, :])
    tl.store(marks_ptr + behind_new, marks, mask=stays_in)
    now = tl.minimum(written + tl.sum(stays.to(tl.int32), 0), guesses)
    tl.store(filled_ptr + sequence * vocab_size + key, now)
