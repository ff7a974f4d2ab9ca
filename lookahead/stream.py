"""One request from prompt to end, a step at a time: ids in, chunks of text out, figures at the end.

Knows when a request is over and what it cost. Does not check what was asked for (`engine.py` does).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lookahead.detokenizer import IncrementalDetokenizer
from lookahead.devices import dtype_name
from lookahead.errors import InputError
from lookahead.prefill import prefill
from lookahead.results import Chunk, Result
from lookahead.step import Step, StepRecord
from lookahead.stops import StopText

# Called with each step's logits [count, vocab]: those that its tokens are the choices of.
OnLogits = Callable[[torch.Tensor], None]


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


class Stream:
    """Iterator over a request's chunks, one a step; `result` tells what was emitted so far.

    `close()`, or leaving a `with` block, ends it early.
    """

    def __init__(
        self,
        step: Step,
        detokenizer: IncrementalDetokenizer,
        request: Request,
        trace: Callable[[StepRecord], None] | None,
        on_logits: OnLogits | None,
    ) -> None:
        self._step = step
        self._request = request
        self._trace = trace
        self._on_logits = on_logits
        self._text = StopText(detokenizer, request.stops)
        self._limit = min(len(request.token_ids) + request.max_new_tokens, step.kv_cache.max_length)
        self._started = False
        self._finish_reason: str | None = None
        self._steps = 0
        self._prefill_seconds = 0.0
        self._decode_seconds = 0.0

    def __iter__(self) -> "Stream":
        return self

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the request here, if it has not ended by itself."""
        if not self.is_done:
            self._finish("interrupted", None)

    def run_to_end(self) -> Result:
        """Read every chunk that is left."""
        with self:
            for _ in self:
                pass
        return self.result

    @property
    def is_done(self) -> bool:
        return self._finish_reason is not None

    def __next__(self) -> Chunk:
        try:
            while not self.is_done:
                if not self._started:
                    self._start()
                text, ids = self._advance()
                if text or ids:
                    return Chunk(text, ids)
        except BaseException:
            self.close()  # whatever went wrong, the engine is free for the next request
            raise
        raise StopIteration

    @torch.inference_mode()
    def _start(self) -> None:
        began = time.perf_counter()
        ids, step = self._request.token_ids, self._step
        step.start(0, ids, self._limit, self._request.eos_ids)
        prefill(step.model, step.kv_cache.sequence(0), step.state.tokens[0, : len(ids) - 1])
        self._prefill_seconds = time.perf_counter() - began
        self._started = True

    def _advance(self) -> tuple[str, list[int]]:
        """Run one step; return the text and ids it releases."""
        began = time.perf_counter()
        output = self._step.run(self._trace, keep_logits=self._on_logits is not None)
        count, is_finished, is_finite = torch.stack(
            [output.counts[0], output.finished[0].long(), output.finite[0].long()]
        ).tolist()
        ids = output.emitted[0, :count].tolist()
        self._decode_seconds += time.perf_counter() - began
        self._steps += 1
        if not is_finite:
            dtype = dtype_name(self._step.model.dtype)
            raise InputError(
                f"the model's logits are not finite after {len(self._text.token_ids)} new tokens: its "
                f"weights hold NaN or infinity, or overflow in {dtype}; check the checkpoint or take "
                "another dtype"
            )
        if self._on_logits is not None:
            assert output.logits is not None
            self._on_logits(output.logits[0, :count])
        end_id = ids.pop() if is_finished and ids[-1] in self._request.eos_ids else None
        text, released = self._text.push(ids)
        if is_finished or self._text.stopped:
            rest, last = self._finish(self._reason(end_id), end_id)
            return text + rest, released + last
        return text, released

    def _reason(self, end_id: int | None) -> str:
        if end_id is not None:
            return "eos"
        emitted = int(self._step.state.lengths[0]) + 1 - len(self._request.token_ids)
        return "length" if emitted >= self._request.max_new_tokens else "context"

    def _finish(self, reason: str, end_id: int | None) -> tuple[str, list[int]]:
        """Release what is held back and settle why the request ended."""
        text, ids = self._text.finish(end_id)
        self._finish_reason = "stop" if self._text.stopped else reason
        return text, ids

    @property
    def result(self) -> Result:
        """The request so far; `finish_reason` is "interrupted" until it has ended by itself."""
        request, model, config = self._request, self._step.model, self._step.config
        new_tokens = len(self._text.token_ids)
        return Result(
            prompt=request.prompt,
            text=self._text.text,
            token_ids=list(self._text.token_ids),
            prompt_tokens=len(request.token_ids),
            new_tokens=new_tokens,
            steps=self._steps,
            tokens_per_step=new_tokens / self._steps if self._steps else 0.0,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            tokens_per_second=new_tokens / self._decode_seconds if self._steps else 0.0,
            finish_reason=self._finish_reason or "interrupted",
            mode=request.mode,
            device=str(model.device),
            dtype=dtype_name(model.dtype),
            window=config.window,
            ngram=config.ngram,
            guesses=config.guesses,
            seed=request.seed,
            exact=model.inexact_reason is None,
            inexact_reason=model.inexact_reason,
            row_block=model.row_block,
        )
