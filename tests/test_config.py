"""Configurations: what is valid, and how the rest is refused."""

import math

import pytest

from lookahead.config import AUTOREGRESSIVE, LookaheadConfig, SamplingConfig
from lookahead.errors import InputError

TOP = 2**64 - 1
BIAS = "logit_bias must be pairs of a token id and a number below infinity"


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
        ({"temperature": math.nan}, "temperature must be a finite number of at least 0, got nan"),
        ({"temperature": math.inf}, "temperature must be a finite number of at least 0, got inf"),
        ({"temperature": -0.5}, "temperature must be a finite number of at least 0, got -0.5"),
        ({"temperature": "0"}, "temperature must be a finite number of at least 0, got '0'"),
        ({"temperature": True}, "temperature must be a finite number of at least 0, got True"),
        ({"top_k": -1}, "top_k must be a whole number of at least 0, got -1"),
        ({"top_k": 2.5}, "top_k must be a whole number of at least 0, got 2.5"),
        ({"top_p": 0}, "top_p must be a finite number above 0 and at most 1, got 0"),
        ({"top_p": 1.01}, "top_p must be a finite number above 0 and at most 1, got 1.01"),
        ({"min_p": -0.1}, "min_p must be a finite number from 0 to 1, got -0.1"),
        ({"min_p": math.nan}, "min_p must be a finite number from 0 to 1, got nan"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a finite number above 0, got 0"),
        ({"repetition_penalty": -1}, "repetition_penalty must be a finite number above 0, got -1"),
        ({"presence_penalty": math.inf}, "presence_penalty must be a finite number, got inf"),
        ({"frequency_penalty": "a"}, "frequency_penalty must be a finite number, got 'a'"),
        ({"min_new_tokens": -1}, "min_new_tokens must be a whole number of at least 0, got -1"),
        (
            {"banned_tokens": (-1,)},
            "banned_tokens: a token id must be a whole number of at least 0",
        ),
        ({"banned_tokens": "12"}, "banned_tokens must be token ids, got '12'"),
        ({"banned_tokens": 5}, "banned_tokens must be token ids, got 5"),
        ({"logit_bias": ((1, math.nan),)}, f"{BIAS}, got nan for token 1"),
        ({"logit_bias": {1: math.inf}}, f"{BIAS}, got inf for token 1"),
        ({"logit_bias": ((1, 0.5), (1, 0.6))}, f"{BIAS}, each id once, got ((1, 0.5), (1, 0.6))"),
        ({"logit_bias": 3}, f"{BIAS}, got 3"),
        ({"logit_bias": {1: "2"}}, f"{BIAS}, got {{1: '2'}}"),
        (
            {"logit_bias": {5: 1e39}},
            "logit_bias of token 5 must be at most 1e+30 in size, got 1e+39",
        ),
        ({"logit_bias": {5: -3e38}}, "logit_bias of token 5 must be at most 1e+30 in size"),
        ({"logit_bias": {5: 10**400}}, f"{BIAS}, got {{5: 1000"),
        ({"temperature": 4e38}, "temperature must be at most 1e+30 in size, got 4e+38"),
        ({"temperature": 10**400}, "temperature must be at most 1e+30 in size, got 1000"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty must be a finite number above 0"),
        ({"frequency_penalty": 1e39}, "frequency_penalty must be at most 1e+30 in size, got 1e+39"),
        ({"presence_penalty": -1e39}, "presence_penalty must be at most 1e+30 in size, got -1e+39"),
        ({"logit_bias": {1.5: 2.0}}, "logit_bias: a token id must be a whole number of at least 0"),
        ({"seed": -1}, f"seed must be a whole number from 0 to {TOP}, got -1"),
    ],
)
def test_sampling_refuses(fields, said):
    with pytest.raises(InputError) as caught:
        SamplingConfig(**fields)
    assert str(caught.value).startswith(said)


def test_biases_and_bans_are_kept_in_order_of_ids():
    config = SamplingConfig(logit_bias={7: 1, 2: -math.inf}, banned_tokens=[9, 3, 9])
    assert config.logit_bias == ((2, -math.inf), (7, 1.0))
    assert config.banned_tokens == (3, 9)
    assert hash(config) == hash(
        SamplingConfig(logit_bias=((2, -math.inf), (7, 1)), banned_tokens=(3, 9))
    )


@pytest.mark.parametrize(
    ("fields", "is_plain"),
    [
        ({}, True),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3}, True),  # the largest stays
        ({"repetition_penalty": 1.0, "presence_penalty": 0.0}, True),
        ({"temperature": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": -0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"logit_bias": {1: 1}}, False),
        ({"banned_tokens": [1]}, False),
        ({"min_new_tokens": 1}, False),
    ],
)
def test_what_is_plain_greedy_decoding(fields, is_plain):
    assert SamplingConfig(**fields).is_plain is is_plain
