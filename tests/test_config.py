"""Configurations: what is valid, and how the rest is refused."""

import math

import pytest

from lookahead.config import AUTOREGRESSIVE, LookaheadConfig, SamplingConfig
from lookahead.errors import InputError

TOP = 2**64 - 1


def test_the_smallest_and_the_largest_values():
    assert LookaheadConfig(window=0, ngram=2, guesses=0, seed=TOP).seed == TOP
    assert SamplingConfig(temperature=0, seed=TOP).seed == TOP
    assert (AUTOREGRESSIVE.window, AUTOREGRESSIVE.guesses) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"window": -1}, "window must be a whole number of at least 0, got -1"),
        ({"window": True}, "window must be a whole number of at least 0, got True"),
        ({"window": 3.0}, "window must be a whole number of at least 0, got 3.0"),
        ({"window": "3"}, "window must be a whole number of at least 0, got '3'"),
        ({"ngram": 1}, "ngram must be a whole number of at least 2, got 1"),
        ({"guesses": -1}, "guesses must be a whole number of at least 0, got -1"),
        ({"seed": -1}, f"seed must be a whole number from 0 to {TOP}, got -1"),
        ({"seed": TOP + 1}, f"seed must be a whole number from 0 to {TOP}, got {TOP + 1}"),
    ],
)
def test_lookahead_refuses(fields, said):
    with pytest.raises(InputError) as caught:
        LookaheadConfig(**fields)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": math.nan}, "temperature must be a number of at least 0, got nan"),
        ({"temperature": math.inf}, "temperature must be a number of at least 0, got inf"),
        ({"temperature": -0.5}, "temperature must be a number of at least 0, got -0.5"),
        ({"temperature": 0.5}, "temperature 0.5 asks for sampling, which does not exist yet"),
        ({"top_k": 0}, "top_k 0 asks for sampling, which does not exist yet"),
        ({"seed": -1}, f"seed must be a whole number from 0 to {TOP}, got -1"),
    ],
)
def test_sampling_refuses(fields, said):
    with pytest.raises(InputError) as caught:
        SamplingConfig(**fields)
    assert str(caught.value).startswith(said)
