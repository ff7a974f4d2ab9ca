"""The compiled part of a step against the tensor operations that specify it, step by step."""

import pytest
import torch
from step_pairs import SHAPES, check_not_finite, check_pair, check_prompt_in_parts

from lookahead import step_ref
from lookahead.config import LookaheadConfig
from lookahead.drafting.window import Window
from lookahead.kv_cache import KVCache
from lookahead.step_numba import CompiledWork
from lookahead.step_numbers import NumberPacking

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", SHAPES)
def test_both_do_the_same(shape):
    check_pair("numba", shape, range(6))


def test_logits_that_are_not_finite_are_told_only_where_they_are_used():
    check_not_finite("numba")


def compiled_insert_prompt(state, pool, sequence, num_tokens, in_pool):
    """Of the compiled work over these buffers."""
    batch, window = len(state.lengths), Window(len(state.lengths), 0, pool.continuation + 1, CPU)
    cache = KVCache(torch.zeros(1, 2, batch, 1, 4, 8), 2)
    packing = NumberPacking(LookaheadConfig(0, pool.continuation + 1, pool.guesses), 4)
    work = CompiledWork(state, window, pool, cache, packing)
    work.insert_prompt(sequence, num_tokens, in_pool)


@pytest.mark.parametrize("insert_prompt", [step_ref.insert_prompt, compiled_insert_prompt])
def test_a_prompt_of_which_a_part_is_in_the_pool(insert_prompt):
    check_prompt_in_parts(insert_prompt)
