"""What a draw is given beside logits: the warpers' numbers, and the history of each row."""

from typing import NamedTuple

import torch

# What stands where in `Warpers.values`.
(
    TEMPERATURE,
    TOP_K,
    TOP_P,
    MIN_P,
    REPETITION,
    PRESENCE,
    FREQUENCY,
    MIN_NEW,
    HAS_BIAS,
    NUM_VALUES,
) = range(10)


class Warpers(NamedTuple):
    """What is done to logits before a draw, on the device; see `SamplingConfig`.

    Attributes:
        values: [NUM_VALUES] float32. A warper that does nothing has TOP_K 0, TOP_P 1, MIN_P 0,
            REPETITION 1, PRESENCE, FREQUENCY, MIN_NEW and HAS_BIAS 0. TEMPERATURE 0 takes the
            largest; else it is so large that its inverse is a number.
        bias: [vocab] float32, added; -inf bans. Read if HAS_BIAS is not 0.
        seed: [1] int64, the bits of the stream's 64-bit seed.
    """

    values: torch.Tensor
    bias: torch.Tensor
    seed: torch.Tensor


class Histories(NamedTuple):
    """What stands before each row's next token: its sequence's text up to the current token, then the
    tokens on its path behind row 0.

    Attributes:
        text: [B, M] int32.
        lengths: [B] int32, index of the current token.
        prompt_lengths: [B] int32, tokens from this index on are new.
        samples: [B] int64, which of the answers to a prompt it is.
        eos_ids: [B, E] int64, ids that end a text, filled up with -1.
        tokens: [B, T] int32, the step's rows.
        parents: [T] int64, of each row, ascending; -1 for row 0.
        first_candidate: rows from 1 to before this one are not drawn.
    """

    text: torch.Tensor
    lengths: torch.Tensor
    prompt_lengths: torch.Tensor
    samples: torch.Tensor
    eos_ids: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    first_candidate: int

    def of_row(self, number: int) -> list[int]:
        """The ids before the next token of a row, by its number sequence * T + row; looks at data."""
        sequence, row = divmod(number, self.tokens.shape[1])
        path: list[int] = []
        while row > 0:
            path.insert(0, int(self.tokens[sequence, row]))
            row = int(self.parents[row])
        length = int(self.lengths[sequence])
        return self.text[sequence, : length + 1].tolist() + path
