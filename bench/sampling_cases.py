"""What `sampling.py` times: draws from logits like a model's, of one row or of all rows of a step.

Knows nothing of time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import timing
import torch

from lookahead import Engine
from lookahead.config import SamplingConfig
from lookahead.decode_state import DecodeState
from lookahead.devices import dtype_name
from lookahead.errors import InputError
from lookahead.layout import LookaheadLayout
from lookahead.layout_tensors import LayoutTensors
from lookahead.sampling import Sampler

VOCABULARIES = (49152, 128256)
HISTORY = 1000  # tokens before the current step's, of which so many are new:
NEW_TOKENS = 700
# (W, N, G) of one row, and of the current token with four candidates of three tokens.
SHAPES = ((0, 2, 0), (0, 4, 4))
MOST_ROWS = max(LookaheadLayout.count_rows(*shape) for shape in SHAPES)
# How random logits fall with a token's rank, as those of SmolLM2-135M: by this slope against the rank's
# logarithm, and with this deviation.
SLOPE, DEVIATION = 2.0, 1.0

WARPERS = {
    "temperature": SamplingConfig(temperature=0.8),
    "top-k 50": SamplingConfig(temperature=0.8, top_k=50),
    "top-p 0.95": SamplingConfig(temperature=0.8, top_p=0.95),
    "min-p 0.05": SamplingConfig(temperature=0.8, min_p=0.05),
    "penalties": SamplingConfig(
        temperature=0.8, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1
    ),
    "all": SamplingConfig(
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
    ),
}


@dataclass(frozen=True)
class Source:
    """Where logits come from: a name, logits [MOST_ROWS, vocab], and the text before them."""

    name: str
    logits: torch.Tensor
    text: torch.Tensor


def random_source(vocab_size: int, dtype: torch.dtype, device: torch.device) -> Source:
    """Every row has other ranks of its tokens, and noise on top."""
    draws = torch.Generator().manual_seed(vocab_size)
    ranks = [1 + torch.randperm(vocab_size, generator=draws) for _ in range(MOST_ROWS)]
    falling = -SLOPE * torch.log(torch.stack(ranks).float())
    logits = falling + DEVIATION * torch.randn(falling.shape, generator=draws)
    # As in a text, some tokens come often and most never.
    text = torch.multinomial(1 / ranks[0], HISTORY, replacement=True, generator=draws)
    return Source("random", logits.to(dtype).to(device), text.to(device))


def model_source(ckpt: Path, dtype: torch.dtype, device: torch.device) -> Source:
    """A model's own behind the benchmarks' prompts, one after the other."""
    engine = Engine.load(
        ckpt,
        device=str(device),
        dtype=dtype_name(dtype),
        max_length=HISTORY + MOST_ROWS,
    )
    ids: list[int] = []
    for prompt in timing.read_prompts(timing.DEFAULT_PROMPTS):
        ids += prompt.token_ids(engine.tokenizer)
    if len(ids) < HISTORY:
        raise InputError(f"--ckpt: the prompts are {len(ids)} tokens, expected at least {HISTORY}")
    rows: list[torch.Tensor] = []
    engine.stream(
        ids[:HISTORY],
        max_new_tokens=MOST_ROWS,
        mode="autoregressive",
        ignore_eos=True,
        on_logits=lambda logits: rows.append(logits.clone()),
    ).run_to_end()
    text = torch.tensor(ids[:HISTORY], device=device)
    return Source(ckpt.resolve().name, torch.cat(rows), text)


class Draw:
    """One call: a step's draws, with one setting of the warpers."""

    def __init__(
        self, source: Source, shape: tuple[int, int, int], name: str, implementation: str
    ) -> None:
        """`name` is one of `WARPERS`, `implementation` that of `draw`."""
        layout = LookaheadLayout(*shape)
        self.source, self.name, self.num_rows = source, name, layout.num_rows
        device, vocab_size = source.logits.device, source.logits.shape[1]
        self._sampler = Sampler(1, vocab_size, device, implementation)
        self._sampler.use(WARPERS[name])
        self._sampler.start(0, HISTORY - NEW_TOKENS, sample=0)
        self._state = DecodeState(1, HISTORY, self.num_rows, 1, device)
        self._state.start(0, source.text, HISTORY + MOST_ROWS, ())
        self._numbers = LayoutTensors(layout, device)
        self._logits = source.logits[: self.num_rows].clone()
        self._rows = torch.arange(self.num_rows, device=device)
        self._chosen = self._logits.float().argmax(1)
        self.tokens = torch.zeros((1, self.num_rows), dtype=torch.int32, device=device)
        self.tokens[0, 0] = source.text[-1]
        for _ in range(max(layout.depths)):  # each time one level more is reached
            self.tokens[0, 1:] = self()[self._numbers.parents[1:]].int()

    def __call__(self) -> torch.Tensor:
        """[rows] int64, the drawn tokens."""
        return self._sampler.choose(
            self._logits, self._rows, self._chosen, self.tokens, self._numbers, self._state
        )[0]

    @property
    def is_reached(self) -> bool:
        """Whether every row's token is the one that is drawn at its parent."""
        drawn = self()[self._numbers.parents[1:]]
        return torch.equal(drawn, self.tokens[0, 1:].long())


def draws(sources: list[Source], implementation: str) -> Iterator[Draw]:
    for source in sources:
        for shape in SHAPES:
            for name in WARPERS:
                yield Draw(source, shape, name, implementation)
