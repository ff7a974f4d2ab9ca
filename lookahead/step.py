"""One decoding step: look up, fill, forward, verify, harvest, shift, commit.

A step is a sequence of tensor operations on preallocated buffers, batched over sequences. It knows
token ids and nothing of text. Autoregressive decoding is the same step with W = 0 and G = 0.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module

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
from lookahead.step_numbers import NumberPacking
from lookahead.step_output import StepOutput, StepRecord
from lookahead.step_work import StepRows, StepWork, TensorWork

# Operations that a step does beside the forward pass, by the model's implementation; imported when
# needed. Numba's is one compiled function a part instead.
OPERATIONS = {"torch": "lookahead.step_ref", "triton": "lookahead.step_triton"}


class Step:
    """The decoding step for one (W, N, G) over a model's buffers.

    Attributes:
        fixed_shape: whether every step has rows for G candidates, so that its sequence of operations
            depends on no data and the host need not look at any. Otherwise, where the host can look at
            no cost, rows that hold no candidate are left out.
        packing: how what a step tells travels to the host.
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
        self._numbers = cache(lambda shape: LayoutTensors(self._layout(shape), device))
        self.packing = NumberPacking(config, self.path_rows)
        self._work = self._new_work()
        # All of them now: a step that is captured or timed makes none.
        sizes = [self._numbers(shape).layout for shape in self.shapes]
        model.prepare(
            [batch_size * layout.num_rows for layout in sizes],
            [batch_size * len(layout.logit_rows) for layout in sizes],
        )

    def _new_work(self) -> StepWork:
        parts = (self.state, self.window, self.pool, self.kv_cache)
        if self.model.implementation == "numba":
            from lookahead.step_numba import CompiledWork

            return CompiledWork(*parts, self.packing)
        operations = import_module(OPERATIONS[self.model.implementation])
        return TensorWork(operations, *parts, self.fixed_shape)

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
            self._work.insert_prompt(sequence, len(prompt), in_pool)

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
        `longest` is what no committed length is above; it bounds the work and changes no bit. The
        output holds until the next step.
        """
        work = self._work
        work.look_up(by_context=budget is not None and not self.fixed_shape)
        shape = shape or self._choose_shape(budget)
        rows = work.fill(self._numbers(shape), shape.window, longest)
        logits, largest, finite = self.model.choose(*rows.given)
        chosen = largest
        if self.sampler.is_needed:
            chosen, possible = self.sampler.choose(
                logits, rows.wanted, largest, rows.tokens, rows.numbers, self.state
            )
            finite = finite & possible
        output = work.settle(rows, chosen, finite, largest)
        if keep_logits:
            output = output._replace(logits=_kept_logits(logits, rows, output))
        if trace is not None:
            _record(trace, rows, output)
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

    def _choose_shape(self, budget: RowBudget | None) -> StepShape:
        if not self.fixed_shape:
            if budget is None:
                return self._full(self._work.most_found())
            return budget.choose(self._work.matches())
        if budget is None:
            return self.shapes[0]
        # As for a host that sees no candidate: there may be all.
        running = self.state.finished.tolist().count(False)
        return budget.choose([[0] * self.config.guesses] * running)

    def _layout(self, shape: StepShape) -> LookaheadLayout:
        window = self.config.window if shape.window else 0
        return LookaheadLayout(window, shape.depth + 1, shape.guesses)


def _kept_logits(logits: torch.Tensor, rows: StepRows, output: StepOutput) -> torch.Tensor:
    """[B, D, vocab], those at the rows of the winning paths."""
    places = rows.numbers.logit_places[output.path]
    if rows.places is None:
        of_sequence = logits.view(len(rows.live), -1, logits.shape[1])
        return of_sequence.gather(1, places.unsqueeze(2).expand(-1, -1, logits.shape[1]))
    return logits[rows.places.gather(1, places)]


def _record(trace: Callable[[StepRecord], None], rows: StepRows, output: StepOutput) -> None:
    layout = rows.numbers.layout
    for sequence, num_rows in enumerate(rows.live_rows.tolist()):
        if num_rows == 0:  # finished before
            continue
        guesses, count = int(rows.live[sequence]), int(output.counts[sequence])
        tokens = rows.tokens[sequence, :num_rows].tolist()
        positions = rows.positions[sequence, :num_rows].tolist()
        origins = output.origins[sequence, :guesses].tolist()
        trace(
            StepRecord(
                sequence=sequence,
                length=positions[0],
                tokens=tokens,
                parents=list(layout.parents[:num_rows]),
                positions=positions,
                candidates=[
                    [tokens[layout.candidate_row(guess, depth)] for depth in range(layout.levels)]
                    for guess in range(guesses)
                ],
                origins=[ORIGINS[origin] for origin in origins],
                accepted=output.path[sequence, :count].tolist(),
                winner=int(output.winner[sequence]) if count > 1 else None,
                emitted=output.emitted[sequence, :count].tolist(),
            )
        )
