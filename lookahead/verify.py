"""The acceptance rule: which rows of a step were right, and so which tokens it emits.

Row 0 is accepted; any other row is accepted if its parent is and its token equals the model's choice at
its parent. The deepest accepted row wins, the lowest on a tie. Knows nothing of how choices are made
(greedy or drawn) or where candidates came from.
"""

from typing import NamedTuple

import torch


class Verdict(NamedTuple):
    """What a step yields for each sequence; D is the number of rows of a path.

    Attributes:
        rows: [B, D] int64, the winning path; its first `counts` rows are accepted.
        emitted: [B, D] int, the model's choice at each of those rows: the accepted tokens, then the
            bonus token; the first `counts` are emitted.
        counts: [B] int64, 1..D.
        winner: [B] int64, index of the winning path.
    """

    rows: torch.Tensor
    emitted: torch.Tensor
    counts: torch.Tensor
    winner: torch.Tensor


def verify(
    tokens: torch.Tensor, choices: torch.Tensor, paths: torch.Tensor, live_paths: torch.Tensor
) -> Verdict:
    """Apply the rule along each path from row 0.

    Args:
        tokens: [B, T] int, the step's row tokens.
        choices: [B, T] int, the model's next token after each row; read at rows on paths only.
        paths: [P, D] int64, rows of each path, beginning with row 0.
        live_paths: [B] int, paths from this number on hold no candidate.
    """
    num_paths = paths.shape[0]
    guessed = tokens[:, paths[:, 1:]]
    chosen = choices[:, paths]  # [B, P, D]
    is_live = torch.arange(num_paths, device=paths.device) < live_paths.unsqueeze(1)
    right = (guessed == chosen[:, :, :-1]) & is_live.unsqueeze(2)
    accepted = right.cumprod(2).sum(2)  # [B, P]
    depth, winner = accepted.max(1)
    sequence = torch.arange(tokens.shape[0], device=paths.device)
    return Verdict(paths[winner], chosen[sequence, winner], depth + 1, winner)
