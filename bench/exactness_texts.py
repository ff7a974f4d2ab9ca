"""Two texts and the logits behind them, compared bit for bit."""

from dataclasses import dataclass
from typing import Any

import torch

from lookahead.compare import first_difference
from lookahead.results import TokenLogprob


@dataclass(frozen=True)
class Text:
    """New ids, the logits [new, vocab] that they are the choices of, and their log-probabilities if
    these were asked for."""

    token_ids: list[int]
    logits: torch.Tensor
    logprobs: list[TokenLogprob] | None = None


def compare_texts(plain: Text, other: Text) -> dict[str, Any]:
    """Where two texts part, with the margin between plain decoding's two best there; how many rows of
    logits up to there, the one that parts them included, differ by a bit; and of how many tokens before
    it the log-probabilities do, None where there are none."""
    place = first_difference(plain.token_ids, other.token_ids)
    count = len(plain.token_ids) if place is None else place + 1
    count = min(len(plain.logits), len(other.logits), count)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.logits.element_size()]
    bits = [text.logits[:count].contiguous().view(kind) for text in (plain, other)]
    margin = None
    if place is not None and place < len(plain.logits):
        best = plain.logits[place].float().topk(2).values
        margin = float(best[0] - best[1])
    return {
        "tokens": len(plain.token_ids),
        "identical": place is None,
        "first_difference": place,
        "margin": margin,
        "logits_compared": count,
        "logits_differ": int((bits[0] != bits[1]).any(1).sum()),
        "logprobs_differ": _count_logprobs(plain, other, place),
    }


def _count_logprobs(plain: Text, other: Text, place: int | None) -> int | None:
    if plain.logprobs is None or other.logprobs is None:
        return None
    pairs = list(zip(plain.logprobs[:place], other.logprobs[:place], strict=True))
    return sum(one != another for one, another in pairs)
