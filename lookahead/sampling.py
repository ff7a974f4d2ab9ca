"""From a step's logits to its tokens, where they are not simply the largest.

Puts a `SamplingConfig` where the draw reads it, on the device, and gives each row its history. What a
draw computes is `kernels/draw.py`'s business; which of the drawn tokens are accepted is `verify.py`'s.
"""

from collections.abc import Callable, Sequence

import torch

from lookahead.config import SamplingConfig
from lookahead.decode_state import DecodeState
from lookahead.errors import InputError
from lookahead.kernels.draw import draw
from lookahead.kernels.warpers import (
    FREQUENCY,
    HAS_BIAS,
    MIN_NEW,
    MIN_P,
    NUM_VALUES,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Histories,
    Warpers,
)
from lookahead.layout_tensors import LayoutTensors

# A top-p below it keeps what it keeps, the most probable token, and is not 0 in float32.
LEAST_SHARE = 1e-30

# Takes logits [n, vocab] and, for each row, the ids that stand before its next token; returns logits of
# the same shape and dtype. See docs/sampling.md for what it must not do.
LogitsProcessor = Callable[[torch.Tensor, Sequence[Sequence[int]]], torch.Tensor]


class Sampler:
    """The draws of a batch's sequences.

    Attributes:
        config: how tokens are chosen; greedily at first.
        prompt_lengths: [B] int32, tokens of each sequence's text that are not new.
        samples: [B] int64, which of the answers to its prompt each sequence is.
    """

    def __init__(
        self, batch_size: int, vocab_size: int, device: torch.device, implementation: str
    ) -> None:
        """`implementation` names that of `draw`."""
        self._implementation = implementation
        self._warpers = Warpers(
            torch.zeros(NUM_VALUES, device=device),
            torch.zeros(vocab_size, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        self.prompt_lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.samples = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._processor: LogitsProcessor | None = None
        self._kept: dict = {}
        self.config = SamplingConfig()

    def use(self, config: SamplingConfig, processor: LogitsProcessor | None = None) -> None:
        """Choose tokens like this from now on; all that is on the device stays where it is."""
        self.config = config
        self._processor = processor
        values, bias, seed = self._warpers
        given = {
            TEMPERATURE: 0.0 if config.takes_largest else config.temperature,
            TOP_K: config.top_k or 0,
            TOP_P: 1.0 if config.top_p is None else max(config.top_p, LEAST_SHARE),
            MIN_P: config.min_p or 0.0,
            REPETITION: config.repetition_penalty or 1.0,
            PRESENCE: config.presence_penalty or 0.0,
            FREQUENCY: config.frequency_penalty or 0.0,
            MIN_NEW: config.min_new_tokens,
            HAS_BIAS: bool(config.logit_bias or config.banned_tokens),
        }
        values.copy_(torch.tensor([float(given[place]) for place in range(NUM_VALUES)]))
        dense = torch.zeros(bias.shape)
        for token, value in config.logit_bias:
            dense[token] = value
        dense[list(config.banned_tokens)] = -torch.inf
        bias.copy_(dense)
        bits = config.seed - (1 << 64) if config.seed >> 63 else config.seed
        seed.fill_(bits)

    @property
    def changes_logits(self) -> bool:
        """Whether what is drawn from may be something else than the model's logits."""
        return self._processor is not None or self.config.changes_logits

    @property
    def is_needed(self) -> bool:
        """Whether tokens are something else than the largest of the model's logits."""
        return self._processor is not None or not self.config.is_plain

    def start(self, sequence: int, prompt_length: int, sample: int) -> None:
        """Begin a sequence's answer, the `sample`-th of those to its prompt."""
        self.prompt_lengths[sequence] = prompt_length
        self.samples[sequence] = sample

    def choose(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        chosen: torch.Tensor,
        tokens: torch.Tensor,
        numbers: LayoutTensors,
        state: DecodeState,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of row 0 and of the candidates' rows.

        Args:
            logits: [n, vocab].
            rows: [n] int64, numbers sequence * T + row, ascending.
            chosen: [n] int64, the tokens of the largest logits.
            tokens: [B, T] int32, the step's rows.
            numbers: of the step's layout.
            state: before the step.

        Returns:
            tokens [n] int64, the chosen ones at the window's other rows, and possible [n] bool; both
            undefined at rows that cannot be accepted, see `draw`.

        Raises:
            InputError: the processor does what it must not.
        """
        histories = Histories(
            text=state.tokens,
            lengths=state.lengths,
            prompt_lengths=self.prompt_lengths,
            samples=self.samples,
            eos_ids=state.eos_ids,
            tokens=tokens,
            parents=numbers.parents,
            first_candidate=numbers.layout.num_window_rows,
        )
        if self._processor is not None:
            logits = _processed(self._processor, logits, rows, histories)
        return draw(
            logits, rows, chosen, histories, self._warpers, self._implementation, self._kept
        )


def _processed(
    processor: LogitsProcessor, logits: torch.Tensor, rows: torch.Tensor, histories: Histories
) -> torch.Tensor:
    """The logits of the rows that are drawn, processed; the others as they are."""
    step_rows = histories.tokens.shape[1]
    numbers, first = rows.tolist(), histories.first_candidate
    is_drawn = [number % step_rows == 0 or number % step_rows >= first for number in numbers]
    drawn = [place for place, is_one in enumerate(is_drawn) if is_one]
    texts = [histories.of_row(numbers[place]) for place in drawn]
    given = logits[drawn]
    processed = processor(given.clone(), texts)
    is_same_kind = isinstance(processed, torch.Tensor) and (
        (processed.shape, processed.dtype, processed.device)
        == (given.shape, given.dtype, given.device)
    )
    if not is_same_kind:
        what = (
            f"{list(processed.shape)} of {processed.dtype} on {processed.device}"
            if isinstance(processed, torch.Tensor)
            else repr(processed)[:80]
        )
        raise InputError(
            f"logits_processor must return logits {list(given.shape)} of {given.dtype} on "
            f"{given.device}, got {what}"
        )
    alone = processor(given[-1:].clone(), [histories.of_row(numbers[drawn[-1]])])
    if not torch.equal(alone[0].nan_to_num(), processed[-1].nan_to_num()):
        raise InputError(
            "logits_processor gave a row other logits when it was called again with that row alone: "
            "it must depend on each row's logits and history, and on nothing else"
        )
    result = logits.clone()
    result[drawn] = processed
    return result
