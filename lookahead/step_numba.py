"""What a step does beside the forward pass, on a CPU: three compiled calls on buffers that stay.

A step's weights drive everything else out of the processor's caches, so that each operation of the host
takes many times as long as alone; what can be made once is. `TensorWork` is the specification; tests
compare the two after every step.
"""

from typing import NamedTuple

import numpy as np
import torch

from lookahead.decode_state import DecodeState
from lookahead.drafting.context import CONTEXT
from lookahead.drafting.ngram_pool import OUTPUT, PROMPT, WINDOW, NgramPool
from lookahead.drafting.window import Window
from lookahead.kernels.commit_rows_numba import bits_of
from lookahead.kernels.simd_types import TAGS
from lookahead.kv_cache import KVCache
from lookahead.layout_tensors import LayoutTensors
from lookahead.step_draft_numba import fill, look_up
from lookahead.step_numbers import NUM_COUNTS, NumberPacking
from lookahead.step_output import StepOutput
from lookahead.step_settle_numba import insert_prompt, settle
from lookahead.step_work import StepRows

# Tensors whose arrays are kept.
MOST_ARRAYS = 256


class _Buffers(NamedTuple):
    """Of the steps of one layout, with the window or without.

    Attributes:
        filling, settling: arguments of `fill` and of `settle`, but for what comes from elsewhere.
        wanted: [B * K] int64, see `fill`.
        rows: by how many rows have logits.
        outputs: by whether candidates are ordered by context.
    """

    filling: tuple
    settling: tuple
    wanted: torch.Tensor
    rows: dict[int, StepRows]
    every_row: StepRows
    outputs: dict[bool, StepOutput]


class CompiledWork:
    """See `StepWork`. The buffers of state, window, pool and cache stay those that they are."""

    def __init__(
        self,
        state: DecodeState,
        window: Window,
        pool: NgramPool,
        kv_cache: KVCache,
        packing: NumberPacking,
    ) -> None:
        batch, levels = window.tokens.shape[:2]
        no_window = Window(batch, 0, levels + 1, window.tokens.device)
        self._windows = {
            has_window: (each.tokens.numpy(), each.steps.numpy())
            for has_window, each in ((True, window), (False, no_window))
        }
        self._state = state
        self._kv_cache = kv_cache
        self._kept: dict = {}
        self._text = (state.tokens.numpy(), state.lengths.numpy(), state.finished.numpy())
        self._pool = (pool.entries.numpy(), pool.origins.numpy(), pool.counts.numpy())
        shape = (batch, pool.guesses)
        self._found = (
            torch.zeros((*shape, pool.continuation), dtype=torch.int32),
            torch.zeros(shape, dtype=torch.int8),
            torch.zeros(batch, dtype=torch.int32),
            torch.zeros(shape, dtype=torch.int64),
        )
        self._candidates, self._origins, self._counts, self._matches = (
            each.numpy() for each in self._found
        )
        fits, marks = np.zeros((2, pool.guesses), dtype=np.int64)
        self._looking_up = (*self._text, *self._pool)
        self._looked_up = (
            self._candidates, self._origins, self._counts, self._matches, fits, marks,
        )  # fmt: skip
        self._arrays: dict[int, tuple[torch.Tensor, np.ndarray]] = {}
        self._by_context = False
        self._gram = np.zeros(levels, dtype=np.int32)
        self._packed = torch.zeros((batch, packing.size), dtype=torch.int64)
        self._observed = packing.observed
        self._buffers: dict[tuple[LayoutTensors, bool], _Buffers] = {}
        self._buffers_run: _Buffers

    def insert_prompt(self, sequence: int, num_tokens: int, in_pool: int) -> None:
        """See `StepWork`."""
        of_sequence = (each[sequence] for each in (*self._pool, self._text[0]))
        size = len(self._gram)
        insert_prompt(*of_sequence, max(in_pool - size, 0), num_tokens - size, PROMPT)

    def look_up(self, by_context: bool) -> None:
        """See `StepWork`."""
        self._by_context = by_context
        look_up(*self._looking_up, CONTEXT if by_context else 0, *self._looked_up)

    def most_found(self) -> int:
        """See `StepWork`."""
        return max(self._counts.tolist())

    def matches(self) -> list[list[int]]:
        """See `StepWork`."""
        counts, over = self._counts.tolist(), self._text[2].tolist()
        rows = zip(self._matches.tolist(), counts, over, strict=True)
        return [row[:count] for row, count, is_over in rows if not is_over]

    def fill(self, numbers: LayoutTensors, has_window: bool, longest: int | None) -> StepRows:
        """See `StepWork`; attention's work follows the lengths whatever is `longest`."""
        buffers = self._buffers.get((numbers, has_window))
        if buffers is None:
            buffers = self._buffers[numbers, has_window] = self._new_buffers(numbers, has_window)
        self._buffers_run = buffers
        count = fill(*buffers.filling)
        rows = buffers.rows.get(count)
        if rows is None:
            every_row = buffers.every_row
            given = (*every_row.given, buffers.wanted[:count], self._kept)
            rows = buffers.rows[count] = every_row._replace(given=given)
        return rows

    def settle(
        self,
        rows: StepRows,
        chosen: torch.Tensor,
        finite: torch.Tensor,
        largest: torch.Tensor,
    ) -> StepOutput:
        """See `StepWork`."""
        before, after = self._buffers_run.settling
        settle(*before, *map(self._array, (chosen, finite, largest)), *after)
        return self._buffers_run.outputs[self._by_context]

    def _array(self, tensor: torch.Tensor) -> np.ndarray:
        """The tensor's array; of one that is given again and again it is not made anew."""
        seen = self._arrays.get(id(tensor))
        if seen is None:
            if len(self._arrays) > MOST_ARRAYS:  # they are others each time
                self._arrays.clear()
            seen = self._arrays[id(tensor)] = (tensor, tensor.numpy())
        return seen[1]

    def _new_buffers(self, numbers: LayoutTensors, has_window: bool) -> _Buffers:
        layout, batch = numbers.layout, len(self._counts)
        num_logits = len(layout.logit_rows)
        state = self._state

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype)

        tokens, positions = zeros(2, batch, layout.num_rows)
        committed, live, live_rows = zeros(3, batch)
        wanted, places = zeros(batch * num_logits), zeros(batch, num_logits)
        path, emitted = zeros(2, batch, numbers.paths.shape[1])
        counts, winners = zeros(2, batch)
        ends, are_finite = zeros(2, batch, dtype=torch.bool)
        window, steps = self._windows[has_window and layout.window > 0]

        def arrays(*tensors: torch.Tensor) -> tuple[np.ndarray, ...]:
            return tuple(tensor.numpy() for tensor in tensors)

        filling = (
            *self._text, window, self._candidates, self._counts,
            *arrays(numbers.depths, numbers.logit_rows), layout.guesses, layout.levels,
            *arrays(tokens, positions, committed, live, live_rows, wanted, places),
        )  # fmt: skip
        text, lengths, finished = self._text
        before = (TAGS[self._kv_cache.data.dtype], self._kv_cache.row_start, tokens.numpy())
        after = (
            *arrays(
                places, numbers.logit_places, numbers.last_level_places, numbers.paths, live, live_rows
            ),
            text, lengths, state.limits.numpy(), finished, state.eos_ids.numpy(),
            bits_of(self._kv_cache.data), window, steps, *self._pool, self._candidates,
            self._origins, self._counts, self._matches,
            *arrays(path, emitted, counts, winners, ends, are_finite), self._gram,
            self._packed.numpy(), NUM_COUNTS, self._observed, WINDOW, OUTPUT,
        )  # fmt: skip
        candidates, origins, found, matches = self._found
        given = (tokens, positions, layout, self._kv_cache, committed, live_rows)
        output = StepOutput(
            emitted, counts, ends, are_finite, None, candidates, origins, found, winners, live_rows,
            matches, path, self._packed,
        )  # fmt: skip
        return _Buffers(
            filling,
            (before, after),
            wanted,
            {},
            StepRows(numbers, given, tokens, positions, live, live_rows, places),
            {True: output, False: output._replace(matches=None)},
        )
