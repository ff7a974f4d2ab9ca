"""Options that command lines with an engine share: which checkpoint, where, and by which (W, N, G).

Imports the engine only when one is asked for: wrong options are told at once, and Ctrl-C finds its
handler while torch loads.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lookahead.config import (
    DEFAULT_STEP_ROWS,
    DTYPE_NAMES,
    MODES,
    LookaheadConfig,
    SamplingConfig,
    check_whole,
)
from lookahead.models.checkpoint_config import read_model_config
from lookahead.request import check_rows, check_vocabulary
from lookahead.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lookahead.engine import Engine


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What `load_engine` reads."""
    add = parser.add_argument
    add("--ckpt", required=True, metavar="PATH", help="checkpoint directory")
    add("--device", default="auto", metavar="auto|cpu|cuda[:i]")
    add("--dtype", default="auto", metavar="|".join(("auto", *DTYPE_NAMES)))
    add("--max-length", type=int, metavar="COUNT", help="tokens of prompt and answer together")


def check_before_loading(
    options: argparse.Namespace,
    sampling: SamplingConfig,
    logprobs: int | None = None,
    ignore_eos: bool = False,
    needs_chat: bool = False,
) -> None:
    """Raise InputError for what the checkpoint's small files already tell cannot be: reading weights
    takes long."""
    path = Path(options.ckpt)
    config = read_model_config(path)
    if options.max_length is not None:
        check_whole("max_length", options.max_length, least=2)
    check_vocabulary(sampling, logprobs, ignore_eos, config)
    given = lookahead_of(options, None)
    names = ("window", "ngram", "guesses")
    if options.mode == "lookahead" and all(getattr(options, name) is not None for name in names):
        check_rows(given, DEFAULT_STEP_ROWS)
    if needs_chat:
        Tokenizer.load(path).require_chat_template()


def load_engine(options: argparse.Namespace, batch_size: int = 1) -> Engine:
    """The engine that was asked for. Raises InputError for one that cannot be had."""
    from lookahead.engine import Engine

    return Engine.load(
        options.ckpt,
        device=options.device,
        dtype=options.dtype,
        max_length=options.max_length,
        batch_size=batch_size,
    )


def add_lookahead_options(parser: argparse.ArgumentParser) -> None:
    """What `lookahead_of` reads, but for the seed; window, ngram and guesses are the paper's W, N and
    G."""
    add = parser.add_argument
    add("--mode", choices=MODES, default="lookahead")
    add("--window", type=int, metavar="W", help="columns of the lookahead window")
    add("--ngram", type=int, metavar="N", help="tokens of an n-gram, its key included")
    add("--guesses", type=int, metavar="G", help="candidates verified in a step")
    add("--no-prompt-ngrams", action="store_true", help="start with an empty n-gram pool")


def lookahead_of(
    options: argparse.Namespace, engine: Engine | None, num_prompts: int = 1
) -> LookaheadConfig:
    """What was given of (W, N, G) with the rest of the default; the one that is tuned for so many
    prompts where nothing was. Without an engine, to check what was given. Raises InputError for what
    cannot be."""
    given = {
        name: getattr(options, name)
        for name in ("window", "ngram", "guesses")
        if getattr(options, name) is not None
    }
    if engine is None:
        default = LookaheadConfig()
    elif given or options.mode == "autoregressive":
        default = engine.default_lookahead()
    else:
        default = engine.tuning_for(num_prompts).config
    prompt_ngrams = not options.no_prompt_ngrams
    return replace(default, prompt_ngrams=prompt_ngrams, seed=options.seed, **given)
