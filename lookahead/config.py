"""What can be configured, and what a valid configuration is.

Knows three frozen dataclasses: the model, lookahead decoding, and sampling. Knows nothing of files,
tensors or text; `models/checkpoint_config.py` reads a checkpoint into a `ModelConfig`.
"""

import math
from dataclasses import dataclass

from lookahead.errors import InputError

MODES = ("lookahead", "autoregressive")
DTYPE_NAMES = ("bfloat16", "float16", "float32", "float64")
MAX_SEED = 2**64 - 1
MAX_STEP_ROWS = 65536  # far more than any chip computes at the price of one
MAX_COUNT = 2**31 - 1  # what 32-bit buffers can count


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
    """How a token is chosen. Only greedy decoding (temperature 0, nothing else set) exists yet."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, least=0, most=MAX_SEED)
        is_number = isinstance(self.temperature, int | float)
        if not is_number or not 0 <= self.temperature < math.inf:
            raise InputError(
                f"temperature must be a number of at least 0, got {self.temperature!r}; "
                "0 is greedy decoding"
            )
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if value is not None and not (name == "temperature" and value == 0):
                raise InputError(
                    f"{name} {value} asks for sampling, which does not exist yet; "
                    "leave it out for greedy decoding"
                )
