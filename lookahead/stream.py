"""One request step by step: a batch of one, without its number."""

from collections.abc import Callable

import torch

from lookahead.answer import Answer
from lookahead.batch import Batch
from lookahead.batch import OnLogits as BatchLogits
from lookahead.results import Chunk, Result

# Called with each step's logits [count, vocab]: those that its tokens are the choices of.
OnLogits = Callable[[torch.Tensor], None]


def numbered(on_logits: OnLogits | None) -> BatchLogits | None:
    """The same callable for a batch of one."""
    if on_logits is None or not callable(on_logits):  # the batch refuses what is neither
        return on_logits
    return lambda _, logits: on_logits(logits)


class Stream:
    """Iterator over a request's chunks, one a step; `result` tells what was emitted so far.

    `close()`, or leaving a `with` block, ends it early.

    Attributes:
        batch: the batch of one that runs it.
    """

    def __init__(self, batch: Batch) -> None:
        """`batch` holds one request."""
        self.batch = batch

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Chunk:
        return next(self.batch)[1]

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the request here, if it has not ended by itself."""
        self.batch.close()

    def run_to_end(self) -> Result:
        """Read every chunk that is left."""
        return self.batch.run_to_end()[0]

    @property
    def is_done(self) -> bool:
        return self.batch.is_done

    @property
    def answer(self) -> Answer:
        """The request and what it has come to."""
        return self.batch.answers[0]

    @property
    def result(self) -> Result:
        """The request so far; `finish_reason` is "interrupted" until it has ended by itself."""
        return self.batch.results[0]
