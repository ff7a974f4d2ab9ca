"""What a step does before and after the forward pass, and how that is done with tensor operations.

Before it candidates are looked up and, once it is known which rows there are, rows are filled; after it
what the model chose is settled. Knows nothing of how rows are chosen nor of who reads what was emitted.
"""

from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch

from lookahead.decode_state import DecodeState
from lookahead.drafting.ngram_pool import NgramPool
from lookahead.drafting.window import Window
from lookahead.kv_cache import KVCache
from lookahead.layout import LookaheadLayout
from lookahead.layout_tensors import LayoutTensors
from lookahead.step_output import StepOutput


class StepRows(NamedTuple):
    """The rows of a step; n are those whose logits are computed.

    Attributes:
        numbers: of their layout.
        given: what `Llama.choose` is given.
        tokens, positions: [B, T] int.
        live: [B] int, candidates that are run; 0 for a finished sequence.
        live_rows: [B] int, rows from this number on are dead; 0 for a finished sequence.
        places: [B, K] int64, which of the n each row with logits is, any for a dead one; None where n
            is B * K, in that order.
    """

    numbers: LayoutTensors
    given: tuple[Any, ...]
    tokens: torch.Tensor
    positions: torch.Tensor
    live: torch.Tensor
    live_rows: torch.Tensor
    places: torch.Tensor | None

    @property
    def wanted(self) -> torch.Tensor:
        """[n] int64, the rows whose logits are computed, of all sequences counted on."""
        return self.given[6]


class StepWork(Protocol):
    """A step in three parts, called in this order; what they return holds until the next step."""

    def insert_prompt(self, sequence: int, num_tokens: int, in_pool: int) -> None:
        """Insert the n-grams of one sequence's text, so far a prompt of `num_tokens`, but for those
        within its first `in_pool` tokens."""

    def look_up(self, by_context: bool) -> None:
        """Find each running sequence's candidates, those that fit their context first if
        `by_context`."""

    def most_found(self) -> int:
        """The most candidates of a sequence; looks at data."""

    def matches(self) -> list[list[int]]:
        """For each running sequence how well each candidate fits its context; looks at data."""

    def fill(self, numbers: LayoutTensors, has_window: bool, longest: int | None) -> StepRows:
        """The rows, with the window's or without; no committed length is above `longest`."""

    def settle(
        self,
        rows: StepRows,
        chosen: torch.Tensor,
        finite: torch.Tensor,
        largest: torch.Tensor,
    ) -> StepOutput:
        """Judge, commit and learn from the tokens [n] int64 that are chosen at the rows with logits,
        whether that could be done, [n] bool, and the tokens [n] int64 of the largest logits, which the
        window's n-grams end with."""


class TensorWork:
    """A sequence of tensor operations; where the shape is fixed, none whose shape depends on data.

    `judge`, `learn` and the rest of a module stand in for the longest of them.
    """

    def __init__(
        self,
        operations: ModuleType,
        state: DecodeState,
        window: Window,
        pool: NgramPool,
        kv_cache: KVCache,
        fixed_shape: bool,
    ) -> None:
        """`operations` is `step_ref` or one like it; where the shape is not fixed, rows that hold no
        candidate get no logits."""
        self._operations = operations
        self._state, self._window, self._pool = state, window, pool
        self._kv_cache = kv_cache
        self._fixed_shape = fixed_shape
        batch, levels = window.tokens.shape[:2]
        self._no_window = Window(batch, 0, levels + 1, window.tokens.device)
        self._matches: torch.Tensor | None = None

    def insert_prompt(self, sequence: int, num_tokens: int, in_pool: int) -> None:
        """See `StepWork`."""
        self._operations.insert_prompt(self._state, self._pool, sequence, num_tokens, in_pool)

    def look_up(self, by_context: bool) -> None:
        """See `StepWork`."""
        state = self._state
        self._current = state.current
        self._candidates, self._origins, found = self._pool.look_up(self._current)
        self._found = found.masked_fill(state.finished, 0)
        self._matches = None
        if by_context:
            self._candidates, self._origins, self._matches = self._operations.order_by_context(
                self._pool,
                state.tokens,
                state.lengths,
                self._candidates,
                self._origins,
                self._found,
            )

    def most_found(self) -> int:
        """See `StepWork`."""
        return int(self._found.max())

    def matches(self) -> list[list[int]]:
        """See `StepWork`."""
        assert self._matches is not None, "look_up was to order by context"
        over = self._state.finished.tolist()
        rows = zip(self._matches.tolist(), self._found.tolist(), over, strict=True)
        return [row[:count] for row, count, is_over in rows if not is_over]

    def fill(self, numbers: LayoutTensors, has_window: bool, longest: int | None) -> StepRows:
        """See `StepWork`."""
        layout, found = numbers.layout, self._found
        kv_cache = self._kv_cache if longest is None else self._kv_cache.up_to(longest)
        self._window_run = self._window if has_window else self._no_window
        live = found if layout.guesses == self._pool.guesses else found.clamp(max=layout.guesses)
        tokens = self._tokens(layout)
        lengths = self._state.lengths
        positions = lengths.unsqueeze(1) + numbers.depths
        live_rows = layout.num_window_rows + live * layout.levels
        live_rows = live_rows.masked_fill(self._state.finished, 0)
        wanted, places = self._rows_to_choose_at(numbers, live_rows)
        given = (tokens, positions, layout, kv_cache, lengths, live_rows, wanted)
        return StepRows(numbers, given, tokens, positions, live, live_rows, places)

    def settle(
        self,
        rows: StepRows,
        chosen: torch.Tensor,
        finite: torch.Tensor,
        largest: torch.Tensor,
    ) -> StepOutput:
        """See `StepWork`."""
        numbers, batch = rows.numbers, len(rows.live)
        chosen, finite, largest = (
            each.view(batch, -1) if rows.places is None else each[rows.places]
            for each in (chosen, finite, largest)
        )
        next_tokens = largest.index_select(1, numbers.last_level_places)
        judgement = self._operations.judge(
            self._state, numbers, rows.tokens, chosen, finite, rows.live
        )
        verdict, counts = judgement.verdict, judgement.counts
        self._kv_cache.commit(verdict.rows, counts, self._state.lengths)
        self._operations.learn(self._state, self._window_run, self._pool, judgement, next_tokens)
        return StepOutput(
            verdict.emitted, counts, judgement.finished, judgement.finite, None, self._candidates,
            self._origins, self._found, verdict.winner, rows.live_rows, self._matches, verdict.rows,
        )  # fmt: skip

    def _tokens(self, layout: LookaheadLayout) -> torch.Tensor:
        """Row tokens [B, T] int32, in the layout's order."""
        first = self._window.tokens.flatten(1) if layout.window else self._current.unsqueeze(1)
        chosen = self._candidates[:, : layout.guesses, : layout.levels]
        return torch.cat([first, chosen.flatten(1)], dim=1)

    def _rows_to_choose_at(
        self, numbers: LayoutTensors, live_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[n] int64, the rows with logits, of all sequences counted on; where the shape is not fixed
        only those that are live. And their places, see `StepRows`."""
        if len(live_rows) == 1:
            return numbers.logit_rows, None
        sequences = torch.arange(len(live_rows), device=live_rows.device).unsqueeze(1)
        rows = (numbers.layout.num_rows * sequences + numbers.logit_rows).flatten()
        if self._fixed_shape:
            return rows, None
        is_live = numbers.logit_rows < live_rows.unsqueeze(1)
        places = is_live.flatten().cumsum(0).view(is_live.shape) - 1
        return rows[is_live.flatten()], places.clamp(min=0)
