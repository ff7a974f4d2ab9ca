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
from lookahead.kv_cache import KVCache
from lookahead.layout import LookaheadLayout
from lookahead.layout_tensors import LayoutTensors
from lookahead.models.llama import Llama
from lookahead.row_budget import RowBudget, StepShape, fixed_shapes
from lookahead.sampling import Sampler
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
        candidates, origins, found: [B, G, N-1], [B, G] and [B], what was looked up and how many, run or
            not.
        winner: [B], the candidate that was accepted, if any of its tokens was.
        rows: [B], rows that were run.
        matches: [B, G] int64, how well each candidate fits its context; None if that was not looked at.
    """

    emitted: torch.Tensor
    counts: torch.Tensor
    finished: torch.Tensor
    finite: torch.Tensor
    logits: torch.Tensor | None
    candidates: torch.Tensor
    origins: torch.Tensor
    found: torch.Tensor
    winner: torch.Tensor
    rows: torch.Tensor
    matches: torch.Tensor | None


@dataclass(frozen=True)
class StepRecord:
    """One sequence's step as plain numbers, for `trace=`.

    `sequence` is its place in the batch, or the number of its prompt; `tokens`, `parents` and
    `positions` are the live rows; `candidates` and `origins` (of `ORIGINS`) what was looked up, most
    recent first; `accepted` the rows of the winning path that were kept; `winner` the candidate they
    belong to, None if no candidate token was kept.
    """

    sequence: int
    length: int
    tokens: list[int]
    parents: list[int]
    positions: list[int]
    candidates: list[list[int]]
    origins: list[str]
    accepted: list[int]
    winner: int | None
    emitted: list[int]


class _ChosenRows(NamedTuple):
    """`rows` [n] are the rows, of all sequences counted on, whose logits are computed; `places` [B, K]
    which of these belongs to each row with logits, any for a dead one; None where all are computed."""

    rows: torch.Tensor
    places: torch.Tensor | None


class Step:
    """The decoding step for one (W, N, G) over a model's buffers.

    Attributes:
        fixed_shape: whether every step has rows for G candidates, so that its sequence of operations
            depends on no data and the host need not look at any. Otherwise, where the host can look at
            no cost, rows that hold no candidate are left out.
        sampler: how tokens are chosen; greedily until it is told otherwise.
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
        self.sampler = Sampler(batch_size, model.config.vocab_size, device, model.implementation)
        self._bookkeeping = import_module(BOOKKEEPING[model.implementation])
        self._no_window = Window(batch_size, 0, config.ngram, device)
        self._numbers = cache(lambda shape: LayoutTensors(self._layout(shape), device))
        # All of them now: a step that is captured or timed makes none.
        sizes = [self._numbers(shape).layout for shape in self.shapes]
        model.prepare(
            [batch_size * layout.num_rows for layout in sizes],
            [batch_size * len(layout.logit_rows) for layout in sizes],
        )

    @torch.inference_mode()
    def start(
        self,
        sequence: int,
        prompt: list[int],
        limit: int,
        eos_ids: tuple[int, ...],
        in_pool: int = 0,
    ) -> None:
        """Begin a request: reset one sequence's text, window and pool.

        The prompt is, or will be, in the cache up to its last token. Where its first `in_pool` tokens
        begin the text that the sequence had before, the pool stays, and what is new goes into it.
        """
        ids = torch.tensor(prompt, device=self.model.device)
        self.state.start(sequence, ids, limit, eos_ids)
        self.window.start(sequence, prompt, self.config.seed)
        if not in_pool:
            self.pool.clear(sequence)
        if self.config.prompt_ngrams and self.config.guesses:
            self._bookkeeping.insert_prompt(self.state, self.pool, sequence, len(prompt), in_pool)

    @torch.inference_mode()
    def run(
        self,
        trace: Callable[[StepRecord], None] | None = None,
        keep_logits: bool = False,
        budget: RowBudget | None = None,
        shape: StepShape | None = None,
        longest: int | None = None,
    ) -> StepOutput:
        """Run one step of every unfinished sequence; `trace` is given each one's record.

        `shape` tells which rows there are, or `budget` chooses them; without either they are all run.
        `longest` is what no committed length is above; it bounds the work and changes no bit.
        """
        kv_cache = self.kv_cache if longest is None else self.kv_cache.up_to(longest)
        state = self.state
        current = state.current
        candidates, origins, found = self.pool.look_up(current)
        found = found.masked_fill(state.finished, 0)
        matches = None
        if budget is not None and not self.fixed_shape:
            candidates, origins, matches = self._bookkeeping.order_by_context(
                self.pool, state.tokens, state.lengths, candidates, origins, found
            )
        shape = shape or self._choose_shape(found, matches, budget)
        numbers = self._numbers(shape)
        layout, window = numbers.layout, self.window if shape.window else self._no_window
        live = found if shape.guesses == self.config.guesses else found.clamp(max=shape.guesses)
        tokens = self._fill(layout, current, candidates)
        positions = state.lengths.unsqueeze(1) + numbers.depths
        live_rows = layout.num_window_rows + live * layout.levels
        live_rows = live_rows.masked_fill(state.finished, 0)
        used = self._rows_to_choose_at(numbers, live_rows)
        logits, largest, finite_ones = self.model.choose(
            tokens, positions, layout, kv_cache, state.lengths, live_rows, used.rows
        )
        drawn = largest
        if self.sampler.is_needed:
            drawn, possible = self.sampler.choose(
                logits, used.rows, largest, tokens, numbers, state
            )
            finite_ones = finite_ones & possible
        harvested, chosen, finite = (
            each.view(len(live), -1) if used.places is None else each[used.places]
            for each in (largest, drawn, finite_ones)
        )
        next_tokens = harvested.index_select(1, numbers.last_level_places)
        judgement = self._bookkeeping.judge(state, numbers, tokens, chosen, finite, live)
        verdict, counts = judgement.verdict, judgement.counts
        kept_logits = None
        if keep_logits:
            places = numbers.logit_places[verdict.rows]
            if used.places is None:
                of_sequence = logits.view(len(live), -1, logits.shape[1])
                index = places.unsqueeze(2).expand(-1, -1, logits.shape[1])
                kept_logits = of_sequence.gather(1, index)
            else:
                kept_logits = logits[used.places.gather(1, places)]
        output = StepOutput(
            verdict.emitted, counts, judgement.finished, judgement.finite, kept_logits, candidates,
            origins, found, verdict.winner, live_rows, matches,
        )  # fmt: skip
        if trace is not None:
            self._record(trace, layout, tokens, positions, live, origins, verdict, output)
        self.kv_cache.commit(verdict.rows, counts, state.lengths)
        self._bookkeeping.learn(state, window, self.pool, judgement, next_tokens)
        return output

    @property
    def path_rows(self) -> int:
        """D, the most tokens that a step emits for a sequence."""
        return self._numbers(self._full(self.config.guesses)).paths.shape[1]

    @property
    def shapes(self) -> list[StepShape]:
        """Shapes of a step without a budget; where the shape is fixed, the first is that of a step
        without a budget, and the others those that a budget chooses among."""
        if not self.fixed_shape:
            return [self._full(guesses) for guesses in range(self.config.guesses + 1)]
        shapes = fixed_shapes(self.config)
        return shapes if self.config.adaptive else shapes[:1]

    def _full(self, guesses: int) -> StepShape:
        return StepShape(self.config.window > 0, guesses, self.config.ngram - 1)

    def _choose_shape(
        self, found: torch.Tensor, matches: torch.Tensor | None, budget: RowBudget | None
    ) -> StepShape:
        if budget is None:
            return self.shapes[0] if self.fixed_shape else self._full(int(found.max()))
        is_over, counts = self.state.finished.tolist(), found.tolist()
        if matches is None:  # as for a host that sees no candidate: there may be all
            return budget.choose([[0] * self.config.guesses] * is_over.count(False))
        rows = zip(matches.tolist(), counts, is_over, strict=True)
        return budget.choose([row[:count] for row, count, is_out in rows if not is_out])

    def _layout(self, shape: StepShape) -> LookaheadLayout:
        window = self.config.window if shape.window else 0
        return LookaheadLayout(window, shape.depth + 1, shape.guesses)

    def _rows_to_choose_at(self, numbers: LayoutTensors, live_rows: torch.Tensor) -> "_ChosenRows":
        """The rows with logits; where the shape is not fixed only those that are live."""
        if len(live_rows) == 1:
            return _ChosenRows(numbers.logit_rows, None)
        sequences = torch.arange(len(live_rows), device=live_rows.device).unsqueeze(1)
        rows = (numbers.layout.num_rows * sequences + numbers.logit_rows).flatten()
        if self.fixed_shape:
            return _ChosenRows(rows, None)
        is_live = numbers.logit_rows < live_rows.unsqueeze(1)
        places = is_live.flatten().cumsum(0).view(is_live.shape) - 1
        return _ChosenRows(rows[is_live.flatten()], places.clamp(min=0))

    def _fill(
        self, layout: LookaheadLayout, current: torch.Tensor, candidates: torch.Tensor
    ) -> torch.Tensor:
        """Row tokens [B, T] int32, in the layout's order."""
        first = self.window.tokens.flatten(1) if layout.window else current.unsqueeze(1)
        chosen = candidates[:, : layout.guesses, : layout.levels]
        return torch.cat([first, chosen.flatten(1)], dim=1)

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
                    sequence=sequence,
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
