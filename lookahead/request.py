"""What may be asked of the engine beside (W, N, G), checked, and the requests that it comes to."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lookahead.config import MODES, LookaheadConfig, ModelConfig, SamplingConfig, check_whole
from lookahead.errors import InputError
from lookahead.layout import LookaheadLayout
from lookahead.prompt_ids import Prompt, prompt_ids
from lookahead.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
        sample: which of the answers to its prompt it asks for, from 0.
        logprobs: how many of the most probable tokens are told of each new one; None to tell no
            log-probabilities.
    """

    prompt: str
    token_ids: list[int]
    max_new_tokens: int
    mode: str
    seed: int
    sample: int
    logprobs: int | None
    eos_ids: tuple[int, ...]
    stops: tuple[str, ...]


@dataclass(frozen=True)
class Wishes:
    """What all requests of a batch share. Raises InputError for what no checkpoint could make right."""

    max_new_tokens: int
    mode: str
    sampling: SamplingConfig
    stop: Sequence[str]
    ignore_eos: bool
    num_samples: int
    logprobs: int | None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"mode {self.mode!r} is not known, expected {' or '.join(MODES)}")
        check_whole("max_new_tokens", self.max_new_tokens, least=1)
        check_whole("num_samples", self.num_samples, least=1)
        if self.logprobs is not None:
            check_whole("logprobs", self.logprobs, least=0)
        stop = self.stop  # no iterator, which can be read only once
        is_list = isinstance(stop, Collection) and not isinstance(stop, str)
        if not is_list or not all(isinstance(text, str) and text for text in stop):
            raise InputError(f"stop must be a list of non-empty strings, got {stop!r:.80}")
        if not isinstance(self.sampling, SamplingConfig):
            raise InputError(f"sampling must be a SamplingConfig, got {self.sampling!r:.80}")

    def requests(
        self, prompts: Sequence[Prompt], tokenizer: Tokenizer, config: ModelConfig, max_length: int
    ) -> list[Request]:
        """One request for each answer to each prompt. Raises InputError for a prompt that cannot be
        run, naming it, and for what does not go with this model."""
        check_vocabulary(self.sampling, self.logprobs, self.ignore_eos, config)
        requests = []
        for number, prompt in enumerate(prompts, start=1):
            try:
                ids = prompt_ids(prompt, tokenizer, config, max_length)
            except InputError as error:
                where = f"prompt {number} of {len(prompts)}: " if len(prompts) > 1 else ""
                raise InputError(f"{where}{error}") from error
            requests += [
                Request(
                    prompt=prompt if isinstance(prompt, str) else tokenizer.decode(ids),
                    token_ids=ids,
                    max_new_tokens=self.max_new_tokens,
                    mode=self.mode,
                    seed=self.sampling.seed,
                    sample=sample,
                    logprobs=self.logprobs,
                    eos_ids=() if self.ignore_eos else config.eos_token_ids,
                    stops=tuple(self.stop),
                )
                for sample in range(self.num_samples)
            ]
        return requests


def check_vocabulary(
    sampling: SamplingConfig, logprobs: int | None, ignore_eos: bool, config: ModelConfig
) -> None:
    """Raise InputError for ids that the model does not have, and for a ban on all that it has."""
    size = config.vocab_size
    biased = [token for token, _ in sampling.logit_bias]
    for name, ids in (("logit_bias", biased), ("banned_tokens", sampling.banned_tokens)):
        if ids and max(ids) >= size:
            raise InputError(
                f"{name}: token {max(ids)} is not in the vocabulary, expected 0..{size - 1}"
            )
    banned = {token for token, value in sampling.logit_bias if value == -math.inf}
    banned.update(sampling.banned_tokens)
    if sampling.min_new_tokens and not ignore_eos:
        banned.update(config.eos_token_ids)
    if len(banned) == size:
        raise InputError(
            f"all {size} tokens are banned by logit_bias, banned_tokens or min_new_tokens: leave at "
            "least one"
        )
    if logprobs is not None and logprobs > size:
        raise InputError(f"logprobs must be at most the vocabulary's {size}, got {logprobs}")


def check_rows(config: LookaheadConfig, max_step_rows: int) -> None:
    """Raise InputError for a (W, N, G) that takes more rows than a step may have."""
    shape = config.window, config.ngram, config.guesses
    num_rows = LookaheadLayout.count_rows(*shape)
    if num_rows > max_step_rows:
        ngram = min(config.ngram, max_step_rows // 2 + 1)
        size = fitting_size(ngram, max_step_rows)
        raise InputError(
            f"(window, ngram, guesses) = {shape} takes {num_rows} rows a step, more than "
            f"max_step_rows {max_step_rows}; {(size, ngram, size)} fits"
        )


def fitting_size(ngram: int, max_step_rows: int) -> int:
    """The largest window = guesses that fits with this ngram."""
    return max_step_rows // (2 * (ngram - 1))
