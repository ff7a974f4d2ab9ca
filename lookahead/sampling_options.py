"""How a token is chosen, as options of a command line."""

import argparse
import math

from lookahead.config import SamplingConfig
from lookahead.errors import InputError


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """All of `SamplingConfig`."""
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy, the default")
    add("--top-k", type=int, metavar="K", help="draw from the K most probable tokens")
    add("--top-p", type=float, metavar="P", help="from the fewest whose probabilities sum to P")
    add("--min-p", type=float, metavar="P", help="from those of at least P times the largest")
    add("--repetition-penalty", type=float, metavar="R", help="1 is none; of prompt and answer")
    add("--presence-penalty", type=float, metavar="R", help="0 is none; of the answer")
    add("--frequency-penalty", type=float, metavar="R", help="0 is none; of the answer")
    add(
        "--logit-bias",
        action="append",
        default=[],
        metavar="ID=BIAS",
        help="added to a token's logit; may repeat",
    )
    add(
        "--ban-token",
        action="append",
        type=int,
        default=[],
        metavar="ID",
        help="never choose this token; may repeat",
    )
    add("--min-new-tokens", type=int, default=0, metavar="COUNT", help="no end before so many")
    add("--seed", type=int, default=0, metavar="SEED", help="the text depends on it if T is not 0")


def sampling_of(options: argparse.Namespace) -> SamplingConfig:
    """What was asked for. Raises InputError for what is no sampling."""
    return SamplingConfig(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=tuple(_bias(text) for text in options.logit_bias),
        banned_tokens=tuple(options.ban_token),
        min_new_tokens=options.min_new_tokens,
        seed=options.seed,
    )


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        pair = int(token), float(value)
    except ValueError:
        pair = -1, math.nan
    if pair[0] < 0 or math.isnan(pair[1]):
        raise InputError(f"--logit-bias must be a token id, = and a number, got {text!r:.80}")
    return pair
