"""What `draw` is given in tests: warpers, histories, and what a drawn token may be."""

import torch

from lookahead.kernels import warpers as names
from lookahead.kernels.draw_ref import kept_weights, warped_scores
from lookahead.kernels.philox import uniform
from lookahead.kernels.warpers import NUM_VALUES, Histories, Warpers

# What a cumulative sum in float32 may be off, of the total.
SUM_ERROR = 1e-5


def make_warpers(vocab_size: int, seed: int = 0, bias: dict[int, float] | None = None, **values):
    """Warpers that do nothing at temperature 1, but for these."""
    numbers = torch.zeros(NUM_VALUES)
    for name in ("TEMPERATURE", "TOP_P", "REPETITION"):
        numbers[getattr(names, name)] = 1
    for name, value in values.items():
        numbers[getattr(names, name.upper())] = value
    dense = torch.zeros(vocab_size)
    for token, value in (bias or {}).items():
        numbers[names.HAS_BIAS] = 1
        dense[token] = value
    return Warpers(numbers, dense, torch.tensor([seed]))


def make_histories(
    texts, tokens, parents, first_candidate=1, prompt_lengths=None, samples=None, eos_ids=None
):
    """Sequences whose texts end with the current token, and one tree of rows for all of them."""
    text = torch.full((len(texts), max(map(len, texts)) + 8), 7, dtype=torch.int32)
    for sequence, ids in enumerate(texts):
        text[sequence, : len(ids)] = torch.tensor(ids)
    lengths = torch.tensor([len(ids) - 1 for ids in texts], dtype=torch.int32)
    return Histories(
        text=text,
        lengths=lengths,
        prompt_lengths=lengths + 1 if prompt_lengths is None else torch.tensor(prompt_lengths),
        samples=torch.tensor(samples or [0] * len(texts)),
        eos_ids=torch.tensor(eos_ids or [[-1]] * len(texts)),
        tokens=torch.tensor(tokens, dtype=torch.int32),
        parents=torch.tensor(parents),
        first_candidate=first_candidate,
    )


def one_row(text, **options) -> Histories:
    """A single sequence's current token alone."""
    return make_histories([text], [[text[-1]]], [-1], **options)


def check_drawn(token, logits, text, warpers, sample=0, prompt_length=None, eos_ids=()):
    """Whether the row behind `text` may draw this token: its place in the cumulative sum holds the
    row's random number, but for rounding."""
    prompt_length = len(text) if prompt_length is None else prompt_length
    scores = warped_scores(logits, text, text[prompt_length:], list(eos_ids), warpers)
    if warpers.values[names.TEMPERATURE] == 0:
        assert token == int(scores.argmax())
        return
    weights = kept_weights(scores, warpers).double()
    assert weights[token] > 0
    behind = float(weights[: token + 1].sum() / weights.sum())
    before = float(weights[:token].sum() / weights.sum())
    number = uniform(int(warpers.seed), sample, len(text))
    assert before - SUM_ERROR <= number <= behind + SUM_ERROR
