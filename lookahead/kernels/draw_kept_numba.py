"""What top-k, top-p and min-p leave of a row's weights, on a CPU, without sorting them."""

import numpy as np

from lookahead.kernels.simd_types import kernel
from lookahead.kernels.warpers import MIN_P, TOP_K, TOP_P

# Where to look for the most probable tokens: those with at least this share of the largest
# probability, and each time more where they do not suffice.
FIRST_SHARE, LAST_SHARE, NEXT_SHARE = 2.0**-7, 2.0**-60, 2.0**-7


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
def keep(weights, size, values, found, places):
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
