"""One request and its answer so far: ids in, text out, when and why it ends, what it cost.

Knows nothing of how ids come about, nor of other requests.
"""

from typing import NamedTuple

from lookahead.config import LookaheadConfig
from lookahead.detokenizer import IncrementalDetokenizer
from lookahead.devices import dtype_name
from lookahead.models.llama import Llama
from lookahead.request import Request
from lookahead.results import Chunk, Result, TokenLogprob
from lookahead.stops import StopText


class Kept(NamedTuple):
    """How many of a request's first tokens are where its sequence left them: their keys and values in
    the cache, their n-grams in the pool."""

    in_cache: int = 0
    in_pool: int = 0


class Answer:
    """What a request has come to.

    Attributes:
        request: what was asked.
        limit: length of the whole text, prompt included, at which it ends.
        kept: what its sequence has of it before it begins; nothing, unless set until then.
        is_prefilled, prefilled_tokens: whether the prompt is in the cache, and how many of its tokens
            had to go through the model for that.
        logprobs: of all tokens taken so far, if they were asked for.
        steps, rows, prefill_seconds, decode_seconds: what it took; steps and their seconds are shared
            with the other requests of a batch.
    """

    def __init__(
        self, request: Request, detokenizer: IncrementalDetokenizer, max_length: int
    ) -> None:
        self.request = request
        self.limit = min(len(request.token_ids) + request.max_new_tokens, max_length)
        self.kept = Kept()
        self.is_prefilled = False
        self.prefilled_tokens = 0
        self.logprobs: list[TokenLogprob] = []
        self.steps = 0
        self.rows = 0
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self._text = StopText(detokenizer, request.stops)
        self._taken: list[int] = []
        self._finish_reason: str | None = None

    @property
    def is_done(self) -> bool:
        return self._finish_reason is not None

    @property
    def text(self) -> str:
        """Text released so far."""
        return self._text.text

    @property
    def num_tokens(self) -> int:
        """New tokens released so far."""
        return len(self._text.token_ids)

    @property
    def committed_ids(self) -> list[int]:
        """Ids of prompt and answer, from the first on, whose keys and values are in the cache for
        certain: all but the last one, which no step has begun from yet. What a stop string took back
        is among them."""
        ids = self.request.token_ids
        return [*ids, *self._taken][:-1] if self.is_prefilled else ids[: self.kept.in_cache]

    def take(self, ids: list[int], is_last: bool) -> Chunk:
        """Take a step's ids, at least one; `is_last` where it ended the text. Returns what is released,
        which may be nothing."""
        self._taken += ids
        end_id = ids[-1] if is_last and ids[-1] in self.request.eos_ids else None
        text, released = self._text.push(ids if end_id is None else ids[:-1])
        if is_last or self._text.stopped:
            rest, last = self._finish(self._reason(end_id), end_id)
            text, released = text + rest, released + last
        return Chunk(text, released)

    def interrupt(self) -> None:
        """End it here, if it has not ended by itself."""
        if not self.is_done:
            self._finish("interrupted", None)

    def _reason(self, end_id: int | None) -> str:
        if end_id is not None:
            return "eos"
        return "length" if len(self._taken) >= self.request.max_new_tokens else "context"

    def _finish(self, reason: str, end_id: int | None) -> tuple[str, list[int]]:
        """Release what is held back and settle why the request ended."""
        text, ids = self._text.finish(end_id)
        self._finish_reason = "stop" if self._text.stopped else reason
        return text, ids

    def result(self, model: Llama, config: LookaheadConfig, choice: str) -> Result:
        """The request so far, decoded by this model with this (W, N, G), chosen for that reason;
        `finish_reason` is "interrupted" until it has ended by itself."""
        request, new_tokens = self.request, self.num_tokens
        return Result(
            prompt=request.prompt,
            text=self._text.text,
            token_ids=list(self._text.token_ids),
            prompt_tokens=len(request.token_ids),
            new_tokens=new_tokens,
            steps=self.steps,
            tokens_per_step=new_tokens / self.steps if self.steps else 0.0,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            tokens_per_second=new_tokens / self.decode_seconds if self.steps else 0.0,
            finish_reason=self._finish_reason or "interrupted",
            mode=request.mode,
            device=str(model.device),
            dtype=dtype_name(model.dtype),
            window=config.window,
            ngram=config.ngram,
            guesses=config.guesses,
            choice=choice,
            adaptive=config.adaptive,
            rows_per_step=self.rows / self.steps if self.steps else 0.0,
            seed=request.seed,
            sample=request.sample,
            exact=model.inexact_reason is None,
            inexact_reason=model.inexact_reason,
            row_block=model.row_block,
            logprobs=None if request.logprobs is None else self.logprobs[:new_tokens],
        )
