"""`draw` on a CPU: rows are drawn as they are reached, for each takes a pass over the vocabulary."""

import numpy as np
import torch

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

# Where to look for the most probable tokens: those with at least this share of the largest
# probability, and each time more where they do not suffice.
FIRST_SHARE, LAST_SHARE, NEXT_SHARE = 2.0**-7, 2.0**-60, 2.0**-7

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
def _sum(weights, size, least):
    """Of the weights whose bits are at least `least`; bits of numbers that are not negative are in the
    numbers' order."""
    bits = weights.view(np.int32)
    sums = (0.0, 0.0, 0.0, 0.0)  # each waits for itself alone
    whole = size // 4 * 4
    for i in range(0, whole, 4):
        sums = (
            sums[0] + (weights[i] if bits[i] >= least else 0.0),
            sums[1] + (weights[i + 1] if bits[i + 1] >= least else 0.0),
            sums[2] + (weights[i + 2] if bits[i + 2] >= least else 0.0),
            sums[3] + (weights[i + 3] if bits[i + 3] >= least else 0.0),
        )
    for i in range(whole, size):
        sums = (sums[0] + (weights[i] if bits[i] >= least else 0.0), sums[1], sums[2], sums[3])
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


@kernel
def _gather(weights, size, share, found, places):
    """Weights of at least `share`, and their places; returns how many there are."""
    count = 0
    for i in range(size):
        if weights[i] >= share:
            found[count], places[count] = weights[i], i
            count += 1
    return count


@kernel
def _cut(found, places, count, least, num_equal):
    """Keep what is larger than the number of bits `least`, and the first `num_equal` of those equal to
    it; returns how many there are."""
    bits, kept = found.view(np.int32), 0
    for i in range(count):
        is_equal = bits[i] == least
        if bits[i] > least or (is_equal and num_equal > 0):
            num_equal -= is_equal
            found[kept], places[kept] = found[i], places[i]
            kept += 1
    return kept


@kernel
def _cut_to_number(found, places, count, number):
    """Keep the `number` largest."""
    bits, least, above = found.view(np.int32), 0, 0
    for bit in range(30, -1, -1):
        at_least = 0
        for i in range(count):
            at_least += bits[i] >= least + (1 << bit)
        if at_least >= number:
            least += 1 << bit
    for i in range(count):
        above += bits[i] > least
    return _cut(found, places, count, least, number - above)


@kernel
def _cut_to_sum(found, places, count, sum_):
    """Keep the fewest, largest first, that sum to `sum_`."""
    least = 0
    for bit in range(30, -1, -1):
        if _sum(found, count, least + (1 << bit)) >= sum_:
            least += 1 << bit
    above, num_equal = _sum(found, count, least + 1), 0
    for i in range(count):
        if found.view(np.int32)[i] == least and above < sum_:
            above += found[i]
            num_equal += 1
    return _cut(found, places, count, least, num_equal)


@kernel
def _keep(weights, size, values, found, places):
    """Leave the weights that top-k, top-p and min-p keep; `found` and `places` have room for all."""
    top_k, top_p, min_p = int(values[TOP_K]), np.float64(values[TOP_P]), values[MIN_P]
    has_top_k = 0 < top_k < size
    total_weight = 0.0 if has_top_k else _sum(weights, size, 0)
    share = min(np.float32(FIRST_SHARE), min_p) if min_p > 0 else np.float32(FIRST_SHARE)
    while True:
        count = _gather(weights, size, share, found, places)
        if has_top_k:
            is_enough = count >= top_k
        else:
            is_enough = top_p == 1 or _sum(found, count, 0) >= top_p * total_weight
        if is_enough or share == 0:
            break
        share = share * np.float32(NEXT_SHARE) if share > LAST_SHARE else np.float32(0)
    if has_top_k:
        count = _cut_to_number(found, places, count, top_k)
        total_weight = _sum(found, count, 0)
    if top_p < 1:
        count = _cut_to_sum(found, places, count, top_p * total_weight)
    for i in range(size):
        weights[i] = 0
    for i in range(count):
        if found[i] >= min_p:
            weights[places[i]] = found[i]


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
        _keep(scores, size, values, found, places)
    return _pick(start, len(scores), number, sums), True


@entry
def _draw(
    tag, float_tag, logits, stride, rows, text, lengths, prompt_lengths, samples, eos_ids, tokens,
    parents, first_candidate, values, bias, seed, scores, scores_at, chosen, possible,
):  # fmt: skip
    size, step_rows = len(bias), tokens.shape[1]
    counts = np.zeros(size, dtype=np.int32)
    found, places = np.empty(size, dtype=np.float32), np.empty(size, dtype=np.int32)
    sums = np.empty(len(scores) // LANES, dtype=np.float32)
    drawn = np.empty(step_rows, dtype=np.int64)
    path = np.empty(step_rows, dtype=np.int64)
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
        length = lengths[sequence]
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `draw`. Rows that are not reached keep what was chosen."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    tokens, possible = chosen.clone(), torch.ones(len(chosen), dtype=torch.bool)
    size = logits.shape[1]
    scores = np.empty(-(-size // LANES) * LANES, dtype=np.float32)
    _draw(
        TAGS[logits.dtype], TAGS[torch.float32], logits.data_ptr(), logits.stride(0), rows.numpy(),
        histories.text.numpy(), whole_numbers(histories.lengths),
        whole_numbers(histories.prompt_lengths), whole_numbers(histories.samples),
        histories.eos_ids.numpy(), whole_numbers(histories.tokens), histories.parents.numpy(),
        histories.first_candidate, warpers.values.numpy(), warpers.bias.numpy(),
        warpers.seed.numpy(), scores, scores.ctypes.data, tokens.numpy(), possible.numpy(),
    )  # fmt: skip
    return tokens, possible
