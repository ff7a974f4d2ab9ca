"""Names and types of what a request may be asked with, for every method that passes it on.

`Engine.batch` says what each means and what it is by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from lookahead.batch import OnLogits, Trace
from lookahead.config import LookaheadConfig, SamplingConfig
from lookahead.sampling import LogitsProcessor


class DecodingOptions(TypedDict, total=False):
    """Keyword arguments of a request, whatever its mode and whoever follows its steps."""

    max_new_tokens: int
    lookahead: LookaheadConfig | None
    sampling: SamplingConfig | None
    stop: Sequence[str]
    ignore_eos: bool
    logprobs: int | None
    logits_processor: LogitsProcessor | None


class RequestOptions(DecodingOptions, total=False):
    """Keyword arguments of a request."""

    mode: str
    trace: Trace | None


class BatchOptions(RequestOptions, total=False):
    """Keyword arguments of a batch of requests."""

    on_logits: OnLogits | None
    num_samples: int
