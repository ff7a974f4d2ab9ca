"""What can be configured, and what a valid configuration is.

Knows three frozen dataclasses: the model, lookahead decoding, and sampling. Knows nothing of files,
tensors or text; `models/checkpoint_config.py` reads a checkpoint into a `ModelConfig`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lookahead.errors import InputError

MODES = ("lookahead", "autoregressive")
DTYPE_NAMES = ("bfloat16", "float16", "float32", "float64")
MAX_SEED = 2**64 - 1
DEFAULT_STEP_ROWS = 128
MAX_STEP_ROWS = 65536  # far more than any chip computes at the price of one
MAX_COUNT = 2**31 - 1  # what 32-bit buffers can count
# At less than this temperature the largest logit is taken, whatever ties with it.
LEAST_TEMPERATURE = 1e-5
MAX_NUMBER = 1e30  # of a warper: what float32 holds a sum of, and its inverse


def check_whole(name: str, value: int, least: int, most: int = MAX_COUNT) -> None:
    """Raise InputError unless `value` is a whole number from `least` to `most`."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:
        is_count = most == MAX_COUNT and not (is_whole and value > most)
        expected = f"of at least {least}" if is_count else f"from {least} to {most}"
        raise InputError(f"{name} must be a whole number {expected}, got {value!r:.80}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `rope_type` is "default" or "llama3"; the last four matter for llama3 only."""

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """A LLaMA-family model. `eos_token_ids` are all the ids that end a text."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class LookaheadConfig:
    """Lookahead decoding: a window of W columns, n-grams of N tokens, G candidates a step.

    `window=0` leaves the window out, `guesses=0` the verification; both zero is autoregressive
    decoding. `prompt_ngrams` puts the prompt's n-grams into the pool before the first step. `seed`
    chooses the prompt tokens that the window starts with; it never changes the text. `adaptive` leaves
    out, step by step, the rows that are not worth their time by what was accepted so far.
    """

    window: int = 15
    ngram: int = 5
    guesses: int = 15
    prompt_ngrams: bool = True
    seed: int = 0
    adaptive: bool = False

    def __post_init__(self) -> None:
        check_whole("window", self.window, least=0)
        check_whole("ngram", self.ngram, least=2)
        check_whole("guesses", self.guesses, least=0)
        check_whole("seed", self.seed, least=0, most=MAX_SEED)


AUTOREGRESSIVE = LookaheadConfig(window=0, ngram=2, guesses=0, prompt_ngrams=False)


@dataclass(frozen=True)
class SamplingConfig:
    """How a token is chosen from the model's logits; by default greedily.

    The warpers apply in this order, each to what the one before left: repetition, presence and
    frequency penalty, logit bias, banned tokens, `min_new_tokens`, temperature, top-k, top-p, min-p.
    Each row's history is its sequence's text and the tokens on its own path. docs/sampling.md tells
    what each computes.

    Attributes:
        temperature: logits are divided by it; less than 1e-5 takes the largest, the lowest id on a tie.
        top_k: keep the so many most probable tokens; 0 or None keeps all, and 1 takes the largest.
        top_p: keep the fewest most probable tokens whose probabilities sum to at least this.
        min_p: keep tokens of at least this share of the largest probability.
        repetition_penalty: logits of tokens in the history are divided by it if positive, else
            multiplied.
        presence_penalty, frequency_penalty: taken from the logits of new tokens in the history, once,
            and as often as they are there.
        logit_bias: (token id, what is added to its logit) pairs, or a mapping of them; -inf bans.
        banned_tokens: ids that are never chosen.
        min_new_tokens: no end-of-text id is chosen before so many new tokens.
        seed: of the draws; text depends on it, and on nothing else that is random.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, least=0, most=MAX_SEED)
        check_whole("min_new_tokens", self.min_new_tokens, least=0)
        if self.top_k is not None:
            check_whole("top_k", self.top_k, least=0)
        check_real("temperature", self.temperature, "of at least 0", lambda value: value >= 0)
        for name, expected, is_right in (
            ("top_p", "above 0 and at most 1", lambda value: 0 < value <= 1),
            ("min_p", "from 0 to 1", lambda value: 0 <= value <= 1),
            ("repetition_penalty", "above 0", lambda value: value >= 1 / MAX_NUMBER),
            ("presence_penalty", "", lambda value: True),
            ("frequency_penalty", "", lambda value: True),
        ):
            if getattr(self, name) is not None:
                check_real(name, getattr(self, name), expected, is_right)
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        object.__setattr__(self, "banned_tokens", _token_ids(self.banned_tokens))

    @property
    def is_plain(self) -> bool:
        """Whether it is the largest logit that is chosen, as it comes from the model."""
        return self.takes_largest and not self.changes_logits

    @property
    def takes_largest(self) -> bool:
        """Whether it is the largest of the logits that is chosen, once they are changed."""
        return self.temperature < LEAST_TEMPERATURE or self.top_k == 1

    @property
    def changes_logits(self) -> bool:
        """Whether any warper before the temperature does something."""
        return bool(
            self.repetition_penalty not in (None, 1)
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.banned_tokens
            or self.min_new_tokens
        )


def check_real(
    name: str, value: float, expected: str, is_right: Callable[[float], bool] = lambda _: True
) -> None:
    """Raise InputError unless `value` is a finite number, of a size that float32 computes with, that
    `is_right`; `expected` names it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value != value or abs(value) == math.inf or not is_right(value):
        what = f"a finite number {expected}".rstrip()
        raise InputError(f"{name} must be {what}, got {value!r:.80}")
    if abs(value) > MAX_NUMBER:
        raise InputError(f"{name} must be at most {MAX_NUMBER:g} in size, got {value!r:.80}")


def _bias_pairs(given: Any) -> tuple[tuple[int, float], ...]:
    """Checked pairs, ids ascending."""
    expected = "logit_bias must be pairs of a token id and a number below infinity"
    try:
        pairs = tuple(given.items() if isinstance(given, Mapping) else given)
        if any(isinstance(value, str) for _, value in pairs):
            raise TypeError("text is no number")
        bias = {token: float(value) for token, value in pairs}
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{expected}, got {given!r:.80}") from None
    _token_ids(tuple(bias), "logit_bias")
    if len(bias) != len(pairs):
        raise InputError(f"{expected}, each id once, got {given!r:.80}")
    for token, value in bias.items():
        if math.isnan(value) or value == math.inf:
            raise InputError(f"{expected}, got {value} for token {token}")
        if value != -math.inf:
            check_real(f"logit_bias of token {token}", value, "")
    return tuple(sorted(bias.items()))


def _token_ids(given: Any, name: str = "banned_tokens") -> tuple[int, ...]:
    """Checked ids, ascending, each once."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InputError(f"{name} must be token ids, got {given!r:.80}")
    ids = tuple(given)
    for token in ids:
        check_whole(f"{name}: a token id", token, least=0)
    return tuple(sorted(set(ids)))
