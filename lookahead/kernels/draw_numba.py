"""`draw` on a CPU: rows are drawn as they are reached, for each takes a pass over the vocabulary."""

import numpy as np
import torch

from lookahead.kernels.draw_kept_numba import keep
from lookahead.kernels.largest_logit_numba import largest_of_row
from lookahead.kernels.philox import KEY_STEPS, MULTIPLIERS, ROUNDS
from lookahead.kernels.simd import load, load_one, pointer, same, store, total
from lookahead.kernels.simd_exp import exp_to_one
from lookahead.kernels.simd_types import LANES, TAGS, entry, kernel, whole_numbers
from lookahead.kernels.warpers import (
    FREQUENCY,
    HAS_BIAS,
    MIN_NEW,
    MIN_P,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Histories,
    Warpers,
)

_MULTIPLIERS = tuple(np.uint64(each) for each in MULTIPLIERS)
_KEY_STEPS = tuple(np.uint64(each) for each in KEY_STEPS)
_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@kernel
def _uniform(seed, sample, position):
    """See `philox.uniform`."""
    bits = np.uint64(seed)
    key, other_key = bits & _WORD, bits >> _HALF
    first, second = np.uint64(position), np.uint64(0)
    third, fourth = np.uint64(sample), np.uint64(0)
    for _ in range(ROUNDS):
        product, other = _MULTIPLIERS[0] * first, _MULTIPLIERS[1] * third
        first, second = (other >> _HALF) ^ second ^ key, other & _WORD
        third, fourth = (product >> _HALF) ^ fourth ^ other_key, product & _WORD
        key, other_key = (key + _KEY_STEPS[0]) & _WORD, (other_key + _KEY_STEPS[1]) & _WORD
    return np.float32(np.int64(first >> np.uint64(8))) * np.float32(2.0**-24)


@kernel
def _count(counts, token, is_new):
    """Twice how often a token is among the new ones, and one more if it is there at all."""
    counts[token] = (counts[token] | 1) + 2 * is_new


@kernel
def _penalise(scores, counts, token, values):
    """A token's penalties, the first time it is met; clears its count."""
    count = counts[token]
    if count == 0:
        return
    counts[token] = 0
    score, penalty = scores[token], values[REPETITION]
    score = score / penalty if score > 0 else score * penalty
    if count > 1:
        score = score - values[PRESENCE]
    scores[token] = score - values[FREQUENCY] * np.float32(count >> 1)


@kernel
def _fill_scores(row, text, length, path, depth, num_new, eos_ids, values, bias, scores, counts):
    """A row's logits behind the warpers before the temperature; `counts` is zeros, before and after."""
    size = len(bias)
    for token in range(size):
        scores[token] = np.float32(load_one(row + token))
    for place in range(size, len(scores)):
        scores[place] = -np.inf
    if values[REPETITION] != 1 or values[PRESENCE] != 0 or values[FREQUENCY] != 0:
        num_tokens = length + 1 + depth
        for i in range(length + 1):
            _count(counts, text[i], i >= num_tokens - num_new)
        for i in range(depth):
            _count(counts, path[i], length + 1 + i >= num_tokens - num_new)
        for i in range(length + 1):
            _penalise(scores, counts, text[i], values)
        for i in range(depth):
            _penalise(scores, counts, path[i], values)
    if values[HAS_BIAS] != 0:
        for token in range(size):
            scores[token] = scores[token] + bias[token]
    if num_new < values[MIN_NEW]:
        for token in eos_ids:
            if token >= 0:
                scores[token] = -np.inf


@kernel
def _weigh(start, size, most, temperature):
    """Scores to weights, the largest 1."""
    top, factor = same(load(start), most), same(load(start), 1 / temperature)
    for i in range(0, size, LANES):
        store(start + i, exp_to_one((load(start + i) - top) * factor))


@kernel
def _pick(start, size, number, sums):
    """The first place at which the cumulative sum exceeds `number` of the total; summed up vector by
    vector, in order, and then one by one inside of the vector in which it is."""
    running = np.float32(0)
    for i in range(0, size, LANES):
        running = running + total(load(start + i))
        sums[i // LANES] = running
    bound = number * running
    vector = 0
    while vector < size // LANES - 1 and not sums[vector] > bound:
        vector += 1
    running = sums[vector - 1] if vector else np.float32(0)
    picked = 0
    for i in range(vector * LANES, (vector + 1) * LANES):
        weight = load_one(start + i)
        running = running + weight
        if weight > 0:
            picked = i
            if running > bound:
                break
    return picked


@kernel
def _draw_row(start, size, values, number, scores, sums, found, places):
    """A token for a row's scores, and whether there is one."""
    token, most, is_number = largest_of_row(start, size)
    if not is_number or most - most != 0:  # infinity, or nothing is left
        return 0, False
    if values[TEMPERATURE] == 0:
        return token, True
    _weigh(start, len(scores), most, values[TEMPERATURE])
    if 0 < values[TOP_K] < size or values[TOP_P] < 1 or values[MIN_P] > 0:
        keep(scores, size, values, found, places)
    return _pick(start, len(scores), number, sums), True


@entry
def _draw(
    tag, float_tag, logits, stride, rows, text, lengths, prompt_lengths, samples, eos_ids, tokens,
    parents, first_candidate, values, bias, seed, scores, scores_at, counts, sums, found, places, drawn,
    path, chosen, possible,
):  # fmt: skip
    size, step_rows = len(bias), tokens.shape[1]
    for place in range(len(rows)):
        sequence, row = rows[place] // step_rows, rows[place] % step_rows
        if 0 < row < first_candidate:
            continue
        parent = parents[row]
        if row > 0:
            drawn[row] = -1
            if drawn[parent] != tokens[sequence, row]:
                continue
        depth, above = 0, row
        while above > 0:
            depth += 1
            above = parents[above]
        above = row
        for i in range(depth - 1, -1, -1):
            path[i] = tokens[sequence, above]
            above = parents[above]
        length = np.int64(lengths[sequence])
        num_new = length + 1 + depth - prompt_lengths[sequence]
        _fill_scores(
            pointer(logits, tag) + place * stride, text[sequence], length, path, depth, num_new,
            eos_ids[sequence], values, bias, scores, counts,
        )  # fmt: skip
        number = _uniform(seed[0], samples[sequence], length + 1 + depth)
        chosen[place], possible[place] = _draw_row(
            pointer(scores_at, float_tag), size, values, number, scores, sums, found, places
        )
        drawn[row] = chosen[place] if possible[place] else -1


def draw_numba(
    logits: torch.Tensor,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    histories: Histories,
    warpers: Warpers,
    kept: dict,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `draw`. Rows that are not reached keep what was chosen."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    step_rows = histories.tokens.shape[1]
    if "scratch" not in kept:
        kept["scratch"] = _scratch(logits.shape[1])
    scratch = kept["scratch"]
    if step_rows not in kept:
        kept[step_rows] = tuple(np.empty((2, step_rows), dtype=np.int64))
    tokens, possible = chosen.clone(), torch.ones(len(chosen), dtype=torch.bool)
    _draw(
        TAGS[logits.dtype], TAGS[torch.float32], logits.data_ptr(), logits.stride(0), rows.numpy(),
        histories.text.numpy(), histories.lengths.numpy(), histories.prompt_lengths.numpy(),
        histories.samples.numpy(), histories.eos_ids.numpy(), whole_numbers(histories.tokens),
        histories.parents.numpy(), histories.first_candidate, warpers.values.numpy(),
        warpers.bias.numpy(), warpers.seed.numpy(), *scratch, *kept[step_rows], tokens.numpy(),
        possible.numpy(),
    )  # fmt: skip
    return tokens, possible


def _scratch(size: int) -> tuple:
    """Scores and their address, counts, sums, found and places, for a vocabulary of this size."""
    scores = np.empty(-(-size // LANES) * LANES, dtype=np.float32)
    return (
        scores, scores.ctypes.data, np.zeros(size, dtype=np.int32),
        np.empty(len(scores) // LANES, dtype=np.float32), np.empty(size, dtype=np.float32),
        np.empty(size, dtype=np.int32),
    )  # fmt: skip
