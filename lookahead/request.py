"""What may be asked of the engine beside (W, N, G), checked, and the requests that it comes to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lookahead.config import MODES, ModelConfig, SamplingConfig, check_whole
from lookahead.errors import InputError
from lookahead.prompt_ids import Prompt, prompt_ids
from lookahead.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """A checked request."""

    prompt: str
    token_ids: list[int]
    max_new_tokens: int
    mode: str
    seed: int
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

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"mode {self.mode!r} is not known, expected {' or '.join(MODES)}")
        check_whole("max_new_tokens", self.max_new_tokens, least=1)
        stop = self.stop
        is_list = isinstance(stop, Iterable) and not isinstance(stop, str)
        if not is_list or not all(isinstance(text, str) and text for text in stop):
            raise InputError(f"stop must be a list of non-empty strings, got {stop!r:.80}")
        if not isinstance(self.sampling, SamplingConfig):
            raise InputError(f"sampling must be a SamplingConfig, got {self.sampling!r:.80}")

    def requests(
        self, prompts: Sequence[Prompt], tokenizer: Tokenizer, config: ModelConfig, max_length: int
    ) -> list[Request]:
        """One request a prompt. Raises InputError for a prompt that cannot be run, naming it."""
        requests = []
        for number, prompt in enumerate(prompts, start=1):
            try:
                ids = prompt_ids(prompt, tokenizer, config, max_length)
            except InputError as error:
                where = f"prompt {number} of {len(prompts)}: " if len(prompts) > 1 else ""
                raise InputError(f"{where}{error}") from error
            requests.append(
                Request(
                    prompt=prompt if isinstance(prompt, str) else tokenizer.decode(ids),
                    token_ids=ids,
                    max_new_tokens=self.max_new_tokens,
                    mode=self.mode,
                    seed=self.sampling.seed,
                    eos_ids=() if self.ignore_eos else config.eos_token_ids,
                    stops=tuple(self.stop),
                )
            )
        return requests
