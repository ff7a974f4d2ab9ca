"""`draw` in torch: the specification of the warpers, their order, and the draw."""

import math

import torch

from lookahead.kernels.philox import uniform
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


def warped_scores(
    logits: torch.Tensor,
    history: list[int],
    new_tokens: list[int],
    eos_ids: list[int],
    warpers: Warpers,
) -> torch.Tensor:
    """The warpers before the temperature.

    Args:
        logits: [vocab].
        history: the whole text before the token that is drawn.
        new_tokens: the part of it behind the prompt.
        eos_ids: ids that end a text.
        warpers: see there.

    Returns:
        [vocab] float32, on the device of the logits.
    """
    values = warpers.values
    scores = logits.float()
    vocab_size, device = scores.shape[0], scores.device
    seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    seen[torch.tensor(history, dtype=torch.int64, device=device)] = True
    new = torch.tensor(new_tokens, dtype=torch.int64, device=device)
    counts = torch.bincount(new, minlength=vocab_size).float()
    penalty = values[REPETITION]
    penalised = torch.where(scores > 0, scores / penalty, scores * penalty)
    scores = torch.where(seen, penalised, scores)
    scores = scores - values[PRESENCE] * (counts > 0) - values[FREQUENCY] * counts
    if values[HAS_BIAS]:
        scores = scores + warpers.bias
    if len(new_tokens) < values[MIN_NEW]:
        scores = scores.clone()
        scores[[token for token in eos_ids if token >= 0]] = -math.inf
    return scores


def kept_weights(scores: torch.Tensor, warpers: Warpers) -> torch.Tensor:
    """[vocab] float32: exp((score - largest) / temperature) of tokens that top-k, top-p and min-p keep,
    0 for the others. Among equal ones those of lower ids stay."""
    values = warpers.values
    weights = torch.exp((scores - scores.max()) / values[TEMPERATURE])
    order = torch.argsort(weights, descending=True, stable=True)
    ranked = weights[order]
    rank = torch.arange(ranked.shape[0], device=ranked.device)
    kept = torch.ones_like(rank, dtype=torch.bool)
    if values[TOP_K] > 0:
        kept &= rank < values[TOP_K]
    if values[TOP_P] < 1:
        before = (ranked * kept).double().cumsum(0) - ranked
        kept &= before < values[TOP_P].double() * (ranked * kept).double().sum()
    kept &= ranked >= values[MIN_P]  # of the largest, which is 1
    return torch.zeros_like(weights).scatter_(0, order, ranked * kept)


def pick(weights: torch.Tensor, number: float) -> int:
    """The first id at which the cumulative sum, in order of ids, exceeds `number` of the total."""
    sums = weights.cumsum(0)
    behind = (sums > number * sums[-1]).nonzero()
    return int(behind[0] if len(behind) else weights.nonzero()[-1])


def draw_ref(
    logits: torch.Tensor,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    histories: Histories,
    warpers: Warpers,
    kept: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `draw`. Every row is drawn, whether it is reached or not."""
    tokens, possible = chosen.clone(), torch.ones_like(chosen, dtype=torch.bool)
    step_rows = histories.tokens.shape[1]
    seed = int(warpers.seed)
    for place, number in enumerate(rows.tolist()):
        sequence, row = divmod(number, step_rows)
        if 0 < row < histories.first_candidate:
            continue
        history = histories.of_row(number)
        new_tokens = history[int(histories.prompt_lengths[sequence]) :]
        eos_ids = histories.eos_ids[sequence].tolist()
        scores = warped_scores(logits[place], history, new_tokens, eos_ids, warpers)
        largest = scores.max()
        possible[place] = bool(largest.isfinite())
        if not possible[place]:
            continue
        if warpers.values[TEMPERATURE] == 0:
            tokens[place] = (scores == largest).nonzero()[0]
            continue
        share = uniform(seed, int(histories.samples[sequence]), len(history))
        tokens[place] = pick(kept_weights(scores, warpers), share)
    return tokens, possible
