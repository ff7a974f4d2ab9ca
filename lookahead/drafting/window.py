"""The lookahead window: W columns by N-1 levels of guesses that each step moves one token on.

Knows how the window starts, which n-grams a step completes and how it shifts. Where the rows stand is
`layout.py`'s business; where n-grams go is the pool's.
"""

import torch


class Window:
    """The window of each sequence.

    Attributes:
        levels, columns: N-1 and W.
        tokens: [B, N-1, W] int32; level 0, column 0 is the current token.
        steps: [B] int32, steps since the start.
    """

    def __init__(self, batch_size: int, window: int, ngram: int, device: torch.device) -> None:
        self.levels, self.columns = ngram - 1, window
        self.tokens = torch.zeros(
            (batch_size, self.levels, window), dtype=torch.int32, device=device
        )
        self.steps = torch.zeros(batch_size, dtype=torch.int32, device=device)

    def start(self, sequence: int, prompt: list[int], seed: int) -> None:
        """Fill one sequence's window with prompt tokens drawn by a generator of this seed."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(len(prompt), self.tokens.shape[1:], generator=generator)
        self.tokens[sequence] = torch.tensor(prompt, dtype=torch.int32)[drawn].to(
            self.tokens.device
        )
        self.tokens[sequence, 0, :1] = prompt[-1]
        self.steps[sequence] = 0

    def harvest(self, next_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The n-grams completed by a step: each column's level 0 keys the levels above and a new token.

        Args:
            next_tokens: [B, W] int, the model's next token after each row of the last level.

        Returns:
            keys [B, W] int32, grams [B, W, N-1] int32, valid [B, W] bool. They count only once every
            level above the key came from the model, which is from step N-1 of a request on.
        """
        columns = torch.cat([self.tokens, next_tokens.to(torch.int32).unsqueeze(1)], dim=1)
        valid = (self.steps >= self.levels - 1).unsqueeze(1).expand(next_tokens.shape)
        return columns[:, 0], columns[:, 1:].transpose(1, 2), valid

    def shift(self, next_tokens: torch.Tensor, current: torch.Tensor) -> None:
        """Move every level down by one, whatever was accepted; `next_tokens` become the last level and
        the new current token ([B] int) takes level 0, column 0."""
        new_level = next_tokens.to(torch.int32).unsqueeze(1)
        self.tokens.copy_(torch.cat([self.tokens[:, 1:], new_level], dim=1))
        self.tokens[:, 0, :1] = current.to(torch.int32).unsqueeze(1)
        self.steps += 1
