"""What a request yields: the result with its figures, and the chunks of a stream."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Chunk:
    """What one step added: its text, and its token ids."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities where one new token stands, of the model itself, before any warper.

    Attributes:
        token_id, logprob: the token, and the natural logarithm of its probability.
        top: (token id, its log-probability) of the most probable tokens, largest first, the lowest id
            first among equal ones; none whose probability is zero.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Difference:
    """Where two texts part.

    Attributes:
        place: number of the first new token that differs, from 0.
        token_ids: lookahead's and autoregressive decoding's token there; None where a text has ended.
        logits: in either mode, in this order, the logits of both tokens.
    """

    place: int
    token_ids: list[int | None]
    logits: list[list[float | None]]


@dataclass(frozen=True)
class Result:
    """A finished, or interrupted, request.

    Attributes:
        token_ids: new tokens, an end-of-text id included; none of a stop string's.
        text: their text without end-of-text ids; up to the stop string where there is one.
        tokens_per_step: new_tokens / steps, the step compression.
        tokens_per_second: new_tokens / decode_seconds.
        finish_reason: "eos", "stop", "length", "context" or "interrupted".
        choice: why (W, N, G) are what they are: "given", or what was expected of them on this machine.
        adaptive: whether rows were left out, step by step, that did not seem worth their time.
        rows_per_step: rows that were run for this request, the current token's included.
        seed, sample: what the draws depend on beside the prompt: see `SamplingConfig`; and which of the
            answers to the prompt it is.
        exact: whether the ids are promised to be those of autoregressive decoding to the bit.
        inexact_reason: why not; None where they are.
        row_block: each matrix product has the bits of calls of a block of rows that depends on its
            shape, this is the smallest; None where they have no such block.
        autoregressive, identical, difference: with a comparison, the other mode's result, whether the
            ids are the same, and where they part if they are not.
        logprobs: of each new token, if they were asked for.
    """

    prompt: str
    text: str
    token_ids: list[int]
    prompt_tokens: int
    new_tokens: int
    steps: int
    tokens_per_step: float
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    finish_reason: str
    mode: str
    device: str
    dtype: str
    window: int
    ngram: int
    guesses: int
    choice: str
    adaptive: bool
    rows_per_step: float
    seed: int
    sample: int
    exact: bool
    inexact_reason: str | None
    row_block: int | None
    logprobs: list[TokenLogprob] | None = None
    autoregressive: "Result | None" = None
    identical: bool | None = None
    difference: Difference | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; log-probabilities and the comparison's keys only where they were asked
        for."""
        values = asdict(self)
        if self.logprobs is None:
            del values["logprobs"]
        if self.autoregressive is None:
            del values["autoregressive"], values["identical"], values["difference"]
        else:
            values["autoregressive"] = self.autoregressive.to_dict()
        return values
