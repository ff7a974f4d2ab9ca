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
from lookahead.drafting.ngram_pool import NgramPool
from lookahead.drafting.window import Window
from lookahead.kernels.largest_logit import largest_logit
from lookahead.kv_cache import KVCache
from lookahead.layout import LookaheadLayout
from lookahead.models.llama import Llama
from lookahead.verify import Verdict, verify

# Where an n-gram was seen last; the pool stores the index.
ORIGINS = ("prompt", "window", "output")
PROMPT, WINDOW, OUTPUT = range(3)

# Prompt n-grams are inserted this many at a time: one insertion's work grows with the square.
INSERT_ITEMS = 32


class DecodeState:
    """The text of each sequence and how far it is.

    Attributes:
        tokens: [B, max_length + spare] int32, prompt and emitted; what follows the text is undefined.
        lengths: [B] int32, committed length L; the current token stands at index L.
        limits: [B] int32, text length (prompt and new tokens) at which decoding ends.
        finished: [B] bool.
    """

    def __init__(self, batch_size: int, max_length: int, spare: int, device: torch.device) -> None:
        self.tokens = torch.zeros(
            (batch_size, max_length + spare), dtype=torch.int32, device=device
        )
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.limits = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.finished = torch.ones(batch_size, dtype=torch.bool, device=device)

    @property
    def current(self) -> torch.Tensor:
        """[B] int32, the current token of each sequence."""
        return self.tokens.gather(1, self.lengths.long().unsqueeze(1)).squeeze(1)

    def start(self, sequence: int, prompt: torch.Tensor, limit: int) -> None:
        """Begin a request whose prompt ([P] int) is, or will be, committed up to its last token."""
        self.tokens[sequence, : prompt.shape[0]] = prompt
        self.lengths[sequence] = prompt.shape[0] - 1
        self.limits[sequence] = limit
        self.finished[sequence] = False


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


class _Plan:
    """A layout and what a step needs of it as tensors on the device."""

    def __init__(self, layout: LookaheadLayout, device: torch.device) -> None:
        self.layout = layout
        self.depths = torch.tensor(layout.depths, dtype=torch.int32, device=device)
        self.logit_rows = torch.tensor(layout.logit_rows, device=device)
        self.paths = torch.tensor(layout.candidate_paths, device=device)
        # Row number -> its place among the rows with logits.
        self.logit_places = torch.zeros(layout.num_rows, dtype=torch.int64, device=device)
        self.logit_places[self.logit_rows] = torch.arange(len(self.logit_rows), device=device)
        last_level = torch.tensor(layout.last_level_rows, dtype=torch.int64, device=device)
        self.last_level_places = self.logit_places[last_level]


class Step:
    """The decoding step for one (W, N, G) over a model's buffers."""

    def __init__(
        self, model: Llama, kv_cache: KVCache, state: DecodeState, config: LookaheadConfig
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.state = state
        self.config = config
        device, batch_size = model.device, state.lengths.shape[0]
        self.window = Window(batch_size, config.window, config.ngram, device)
        self.pool = NgramPool(
            batch_size, model.config.vocab_size, config.guesses, config.ngram, device
        )
        self.eos_ids = torch.empty(0, dtype=torch.int64, device=device)
        # Imported where it is used, for Numba may not be there.
        self._compiled = (
            import_module("lookahead.step_numba") if model.implementation == "numba" else None
        )
        self._plan = cache(
            lambda guesses: _Plan(LookaheadLayout(config.window, config.ngram, guesses), device)
        )
        sizes = [LookaheadLayout(config.window, config.ngram, n) for n in self._guess_counts()]
        model.prepare(
            [batch_size * layout.num_rows for layout in sizes],
            [batch_size * len(layout.logit_rows) for layout in sizes],
        )

    @torch.inference_mode()
    def start(self, sequence: int, prompt: list[int], limit: int, eos_ids: tuple[int, ...]) -> None:
        """Begin a request: reset one sequence's text, window and pool.

        The prompt is, or will be, in the cache up to its last token. All sequences share `eos_ids`.
        """
        device = self.model.device
        self.eos_ids = torch.tensor(eos_ids, dtype=torch.int64, device=device)
        self.state.start(sequence, torch.tensor(prompt, device=device), limit)
        self.window.start(sequence, prompt, self.config.seed)
        self.pool.clear(sequence)
        if self.config.prompt_ngrams and self.config.guesses:
            self._insert_prompt(sequence, len(prompt))

    @torch.inference_mode()
    def run(
        self, trace: Callable[[StepRecord], None] | None = None, keep_logits: bool = False
    ) -> StepOutput:
        """Run one step of every unfinished sequence; `trace` is given each one's record."""
        state = self.state
        current = state.current
        candidates, origins, live = self.pool.look_up(current)
        live = live.masked_fill(state.finished, 0)
        plan = self._plan(self._guesses_to_run(live))
        layout = plan.layout
        tokens = self._fill(layout, current, candidates)
        positions = state.lengths.unsqueeze(1) + plan.depths
        live_rows = layout.num_window_rows + live * layout.levels
        live_rows = live_rows.masked_fill(state.finished, 0)
        hidden = self.model.forward(
            tokens, positions, layout, self.kv_cache, state.lengths, live_rows
        )
        logits = self.model.logits(hidden.index_select(1, plan.logit_rows))
        chosen, is_finite = largest_logit(logits, self.model.implementation)
        next_tokens = chosen.index_select(1, plan.last_level_places)
        given = (tokens, chosen, is_finite, plan, live)
        verdict, counts, finished, finite = self._judge(*given)
        kept_logits = None
        if keep_logits:
            places = plan.logit_places[verdict.rows].unsqueeze(2)
            kept_logits = logits.gather(1, places.expand(-1, -1, logits.shape[2]))
        output = StepOutput(verdict.emitted, counts, finished, finite, kept_logits)
        if trace is not None:
            self._record(trace, layout, tokens, positions, live, origins, verdict, output)
        self.kv_cache.commit(verdict.rows, counts, state.lengths)
        self._learn(verdict, counts, next_tokens)
        state.finished.copy_(finished)
        return output

    def _judge(
        self,
        tokens: torch.Tensor,
        chosen: torch.Tensor,
        is_finite: torch.Tensor,
        plan: _Plan,
        live: torch.Tensor,
    ) -> tuple[Verdict, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The verdict on the rows, how many tokens each sequence emits [B], whether it is finished then
        [B], and whether the logits that were used are finite [B]; `chosen` and `is_finite` are those
        of the rows with logits."""
        state = self.state
        if self._compiled is not None:
            return self._compiled.judge(
                tokens, chosen, is_finite, plan.logit_places, plan.paths, live, state.lengths,
                state.limits, state.finished, self.eos_ids,
            )  # fmt: skip
        choices = chosen.new_zeros(tokens.shape)
        choices[:, plan.logit_rows] = chosen
        verdict = verify(tokens, choices, plan.paths, live)
        counts, finished = self._cut(verdict)
        kept = torch.arange(verdict.rows.shape[1], device=tokens.device) < counts.unsqueeze(1)
        used = is_finite.gather(1, plan.logit_places[verdict.rows])
        return verdict, counts, finished, (used | ~kept).all(1)

    def _learn(self, verdict: Verdict, counts: torch.Tensor, next_tokens: torch.Tensor) -> None:
        """Append the emitted tokens to the text, insert n-grams, shift the window; `next_tokens` [B, W]
        follow its last level."""
        state = self.state
        if self._compiled is not None:
            origins = (WINDOW, OUTPUT)
            self._compiled.learn(
                state.tokens, state.lengths, verdict, counts, next_tokens, self.window, self.pool,
                origins,
            )  # fmt: skip
            return
        offsets = torch.arange(verdict.rows.shape[1], device=counts.device)
        kept = offsets < counts.unsqueeze(1)
        text_index = state.lengths.unsqueeze(1) + 1 + offsets
        state.tokens.scatter_(1, text_index, verdict.emitted.to(torch.int32))
        self._draft(next_tokens, text_index, kept)
        state.lengths += counts.to(torch.int32)
        if self.config.window:
            self.window.shift(next_tokens, state.current)

    def _guess_counts(self) -> range:
        """All that `_guesses_to_run` may say."""
        most = self.config.guesses
        return range(most + 1) if self.model.device.type == "cpu" else range(most, most + 1)

    def _guesses_to_run(self, live: torch.Tensor) -> int:
        """Candidates a step has rows for. On a CPU, where the host can look at no cost, rows that hold
        no candidate are left out; elsewhere the shape does not depend on data."""
        return int(live.max()) if live.device.type == "cpu" else self.config.guesses

    def _fill(
        self, layout: LookaheadLayout, current: torch.Tensor, candidates: torch.Tensor
    ) -> torch.Tensor:
        """Row tokens [B, T] int32, in the layout's order."""
        first = self.window.tokens.flatten(1) if layout.window else current.unsqueeze(1)
        return torch.cat([first, candidates[:, : layout.guesses].flatten(1)], dim=1)

    def _cut(self, verdict: Verdict) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts of emitted tokens [B] and finished [B]: cut behind the first end-of-text id, and at
        the limit."""
        state = self.state
        offsets = torch.arange(verdict.emitted.shape[1], device=verdict.emitted.device)
        is_eos = (verdict.emitted.unsqueeze(2) == self.eos_ids).any(2)
        behind_eos = is_eos.cumsum(1) - is_eos.long() > 0
        room = state.limits - state.lengths - 1
        most = torch.minimum(verdict.counts, room)
        kept = offsets < most.unsqueeze(1)
        kept &= ~behind_eos & ~state.finished.unsqueeze(1)
        counts = kept.sum(1)
        return counts, state.finished | (kept & is_eos).any(1) | (counts >= room)

    def _draft(
        self, next_tokens: torch.Tensor, text_index: torch.Tensor, kept: torch.Tensor
    ) -> None:
        """Insert what the step taught into the pool: first the window's n-grams, then the text's.

        `next_tokens` [B, W] follow the last level; the emitted tokens, where `kept`, stand at
        `text_index` [B, D] of the text.
        """
        if not self.config.guesses:
            return
        starts = text_index - (self.config.ngram - 1)
        keys, grams = self._text_ngrams(starts)
        valid = kept & (starts >= 0)
        origins = torch.full((keys.shape[1],), OUTPUT, device=keys.device)
        if self.config.window:
            window_keys, window_grams, window_valid = self.window.harvest(next_tokens)
            keys = torch.cat([window_keys, keys], dim=1)
            grams = torch.cat([window_grams, grams], dim=1)
            valid = torch.cat([window_valid, valid], dim=1)
            origins = torch.cat([origins.new_full((window_keys.shape[1],), WINDOW), origins])
        self.pool.insert(keys, grams, origins, valid)

    def _text_ngrams(self, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, M] and continuations [B, M, N-1] of the text's n-grams that start at `starts`
        ([B, M] int; those below 0 give something meaningless)."""
        index = starts.unsqueeze(2) + torch.arange(self.config.ngram, device=starts.device)
        ngrams = self.state.tokens.gather(1, index.clamp(min=0).flatten(1)).view(index.shape)
        return ngrams[:, :, 0], ngrams[:, :, 1:]

    def _insert_prompt(self, sequence: int, num_tokens: int) -> None:
        """Insert the n-grams of one sequence's prompt, in order."""
        batch_size, device = self.state.lengths.shape[0], self.model.device
        num_ngrams = num_tokens - self.config.ngram + 1
        for first in range(0, num_ngrams, INSERT_ITEMS):
            starts = torch.arange(first, first + INSERT_ITEMS, device=device)
            starts = starts.expand(batch_size, -1)
            keys, grams = self._text_ngrams(starts.clamp(max=num_ngrams - 1))
            valid = starts < num_ngrams
            valid = valid & (torch.arange(batch_size, device=device) == sequence).unsqueeze(1)
            self.pool.insert(keys, grams, torch.full_like(starts[0], PROMPT), valid)

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
