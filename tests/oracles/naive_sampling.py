"""The distribution of the next token, in plain Python: each warper as its name says, on lists.

Knows nothing of tensors nor of the engine under test. Options have the names and meanings of
`SamplingConfig`.
"""

import math
from collections.abc import Sequence


def naive_probabilities(
    logits: Sequence[float],
    text: Sequence[int],
    prompt_length: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Sequence[tuple[int, float]] = (),
    banned_tokens: Sequence[int] = (),
    min_new_tokens: int = 0,
    eos_ids: Sequence[int] = (),
) -> list[float]:
    """Probability of each id behind `text`, whose first `prompt_length` ids are the prompt."""
    scores, new = list(logits), text[prompt_length:]
    for token in set(text):
        up = scores[token] > 0
        scores[token] *= 1 / repetition_penalty if up else repetition_penalty
    for token in set(new):
        scores[token] -= presence_penalty + frequency_penalty * new.count(token)
    for token, bias in logit_bias:
        scores[token] += bias
    for token in [*banned_tokens, *(eos_ids if len(new) < min_new_tokens else ())]:
        scores[token] = -math.inf
    best = max(scores)
    weights = {i: math.exp((score - best) / temperature) for i, score in enumerate(scores)}
    ranked = sorted(weights, key=lambda token: (-weights[token], token))
    if top_k:
        ranked = ranked[:top_k]
    kept, so_far = [], 0.0
    total = sum(weights[token] for token in ranked)
    for token in ranked:
        if so_far >= top_p * total:
            break
        kept.append(token)
        so_far += weights[token]
    kept = [token for token in kept if weights[token] >= min_p * weights[ranked[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]
