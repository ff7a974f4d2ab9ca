"""Two texts and the logits behind them, compared bit for bit."""

from typing import Any

import torch

from lookahead.compare import first_difference


def compare_texts(
    plain: tuple[list[int], torch.Tensor], other: tuple[list[int], torch.Tensor]
) -> dict[str, Any]:
    """Where two texts part, with the margin between plain decoding's two best there, and how many rows
    of logits up to there, the one that parts them included, differ by a bit."""
    place = first_difference(plain[0], other[0])
    count = min(len(plain[1]), len(other[1]), len(plain[0]) if place is None else place + 1)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[plain[1].element_size()]
    bits = [logits[:count].contiguous().view(kind) for logits in (plain[1], other[1])]
    margin = None
    if place is not None and place < len(plain[1]):
        best = plain[1][place].float().topk(2).values
        margin = float(best[0] - best[1])
    return {
        "tokens": len(plain[0]),
        "identical": place is None,
        "first_difference": place,
        "margin": margin,
        "logits_compared": count,
        "logits_differ": int((bits[0] != bits[1]).any(1).sum()),
    }
