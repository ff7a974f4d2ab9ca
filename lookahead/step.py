"""One decoding step: look up, fill, forward, verify, harvest, shift, commit.

A step is a sequence of tensor operations on preallocated buffers, batched over sequences. It knows
token ids and nothing of text. Autoregressive decoding is the same step with W = 0 and G = 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch

from lookahead.config import LookaheadConfig
from lookahead.decode_state import DecodeState
from lookahead.drafting.ngram_pool import ORIGINS, NgramPool
from lookahead.drafting.window import Window
from lookahead.kernels.largest_logit import largest_logit
from lookahead.kv_cache import KVCache
from lookahead.layout import LookaheadLayout
from lookahead.layout_tensors import LayoutTensors
from lookahead.models.llama import Llama
from lookahead.verify import Verdict

# What a step does beside the forward pass, by the model's implementation; imported when needed.
BOOKKEEPING = {
    "torch": "lookahead.step_ref",
    "triton": "lookahead.step_triton",
    "numba": "lookahead.step_numba",
}


class StepOutput(NamedTuple):
    """What a step emitted.

    Attributes:
        emitted: [B, D] int64; the first counts[b] are new tokens of sequence b, the rest undefined.
        counts: [B] int64; 0 for a sequence that was finished before.
        finished: [B] bool, after the step.
        finite: [B] bool, whether the logits that were used are finite.
        logits: [B, D, vocab] those that each emitted token is the choice of; None unless asked for.
    """

    emitted: torch.Tensor
    counts: torch.Tensor
    finished: torch.Tensor
    finite: torch.Tensor
    logits: torch.Tensor | None


@dataclass(frozen=True)
class StepRecord:
    """One sequence's step as plain numbers, for `trace=`.

    `tokens`, `parents` and `positions` are the live rows; `candidates` and `origins` (of `ORIGINS`)
    what was looked up, most recent first; `accepted` the rows of the winning path that were kept;
    `winner` the candidate they belong to, None if no candidate token was kept.
    """

    length: int
    tokens: list[int]
    parents: list[int]
    positions: list[int]
    candidates: list[list[int]]
    origins: list[str]
    accepted: list[int]
    winner: int | None
    emitted: list[int]


class Step:
    """The decoding step for one (W, N, G) over a model's buffers.

    Attributes:
        fixed_shape: whether every step has rows for G candidates, so that its sequence of operations
            depends on no data and the host need not look at any. Otherwise, where the host can look at
            no cost, rows that hold no candidate are left out.
    """

    def __init__(
        self,
        model: Llama,
        kv_cache: KVCache,
        state: DecodeState,
        config: LookaheadConfig,
        fixed_shape: bool | None = None,
    ) -> None:
        """`fixed_shape` is by default what is faster: False on a CPU, True elsewhere."""
        self.fixed_shape = model.device.type != "cpu" if fixed_shape is None else fixed_shape
        self.model = model
        self.kv_cache = kv_cache
        self.state = state
        self.config = config
        device, batch_size = model.device, state.lengths.shape[0]
        self.window = Window(batch_size, config.window, config.ngram, device)
        self.pool = NgramPool(
            batch_size, model.config.vocab_size, config.guesses, config.ngram, device
        )
        self._bookkeeping = import_module(BOOKKEEPING[model.implementation])
        self._numbers = cache(
            lambda guesses: LayoutTensors(
                LookaheadLayout(config.window, config.ngram, guesses), device
            )
        )
        # All of them now: a step that is captured or timed makes none.
        sizes = [self._numbers(guesses).layout for guesses in self._guess_counts()]
        model.prepare(
            [batch_size * layout.num_rows for layout in sizes],
            [batch_size * len(layout.logit_rows) for layout in sizes],
        )

    @torch.inference_mode()
    def start(self, sequence: int, prompt: list[int], limit: int, eos_ids: tuple[int, ...]) -> None:
        """Begin a request: reset one sequence's text, window and pool.

        The prompt is, or will be, in the cache up to its last token.
        """
        ids = torch.tensor(prompt, device=self.model.device)
        self.state.start(sequence, ids, limit, eos_ids)
        self.window.start(sequence, prompt, self.config.seed)
        self.pool.clear(sequence)
        if self.config.prompt_ngrams and self.config.guesses:
            self._bookkeeping.insert_prompt(self.state, self.pool, sequence, len(prompt))

    @torch.inference_mode()
    def run(
        self,
        trace: Callable[[StepRecord], None] | None = None,
        keep_logits: bool = False,
        longest: int | None = None,
    ) -> StepOutput:
        """Run one step of every unfinished sequence; `trace` is given each one's record.

        `longest` is what no committed length is above; it bounds the work and changes no bit.
        """
        kv_cache = self.kv_cache if longest is None else self.kv_cache.up_to(longest)
        state = self.state
        current = state.current
        candidates, origins, live = self.pool.look_up(current)
        live = live.masked_fill(state.finished, 0)
        numbers = self._numbers(self._guesses_to_run(live))
        layout = numbers.layout
        tokens = self._fill(layout, current, candidates)
        positions = state.lengths.unsqueeze(1) + numbers.depths
        live_rows = layout.num_window_rows + live * layout.levels
        live_rows = live_rows.masked_fill(state.finished, 0)
        hidden = self.model.forward(tokens, positions, layout, kv_cache, state.lengths, live_rows)
        logits = self.model.logits(hidden.index_select(1, numbers.logit_rows))
        chosen, finite = largest_logit(logits, self.model.implementation)
        next_tokens = chosen.index_select(1, numbers.last_level_places)
        judgement = self._bookkeeping.judge(state, numbers, tokens, chosen, finite, live)
        verdict, counts = judgement.verdict, judgement.counts
        kept_logits = None
        if keep_logits:
            places = numbers.logit_places[verdict.rows].unsqueeze(2)
            kept_logits = logits.gather(1, places.expand(-1, -1, logits.shape[2]))
        output = StepOutput(
            verdict.emitted, counts, judgement.finished, judgement.finite, kept_logits
        )
        if trace is not None:
            self._record(trace, layout, tokens, positions, live, origins, verdict, output)
        self.kv_cache.commit(verdict.rows, counts, state.lengths)
        self._bookkeeping.learn(state, self.window, self.pool, judgement, next_tokens)
        return output

    @property
    def path_rows(self) -> int:
        """D, the most tokens that a step emits for a sequence."""
        return self._numbers(self.config.guesses).paths.shape[1]

    def _guess_counts(self) -> range:
        """All that `_guesses_to_run` may say."""
        most = self.config.guesses
        return range(most, most + 1) if self.fixed_shape else range(most + 1)

    def _guesses_to_run(self, live: torch.Tensor) -> int:
        """Candidates a step has rows for."""
        return self.config.guesses if self.fixed_shape else int(live.max())

    def _fill(
        self, layout: LookaheadLayout, current: torch.Tensor, candidates: torch.Tensor
    ) -> torch.Tensor:
        """Row tokens [B, T] int32, in the layout's order."""
        first = self.window.tokens.flatten(1) if layout.window else current.unsqueeze(1)
        return torch.cat([first, candidates[:, : layout.guesses].flatten(1)], dim=1)

    def _record(
        self,
        trace: Callable[[StepRecord], None],
        layout: LookaheadLayout,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        live: torch.Tensor,
        origins: torch.Tensor,
        verdict: Verdict,
        output: StepOutput,
    ) -> None:
        for sequence, is_finished in enumerate(self.state.finished.tolist()):
            if is_finished:
                continue
            guesses, count = int(live[sequence]), int(output.counts[sequence])
            num_rows = layout.num_window_rows + guesses * layout.levels
            rows = tokens[sequence, :num_rows].tolist()
            trace(
                StepRecord(
                    length=int(self.state.lengths[sequence]),
                    tokens=rows,
                    parents=list(layout.parents[:num_rows]),
                    positions=positions[sequence, :num_rows].tolist(),
                    candidates=[
                        [rows[layout.candidate_row(guess, depth)] for depth in range(layout.levels)]
                        for guess in range(guesses)
                    ],
                    origins=[ORIGINS[origin] for origin in origins[sequence, :guesses].tolist()],
                    accepted=verdict.rows[sequence, :count].tolist(),
                    winner=int(verdict.winner[sequence]) if count > 1 else None,
                    emitted=output.emitted[sequence, :count].tolist(),
                )
            )
