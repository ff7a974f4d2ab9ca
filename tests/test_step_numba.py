"""The compiled part of a step against the tensor operations that specify it, step by step."""

import pytest
from step_pairs import SHAPES, check_not_finite, check_pair, check_prompt_in_parts

from lookahead import step_numba, step_ref


@pytest.mark.parametrize("shape", SHAPES)
def test_both_do_the_same(shape):
    check_pair("numba", shape, range(6))


def test_logits_that_are_not_finite_are_told_only_where_they_are_used():
    check_not_finite("numba")


@pytest.mark.parametrize("bookkeeping", [step_ref, step_numba])
def test_a_prompt_of_which_a_part_is_in_the_pool(bookkeeping):
    check_prompt_in_parts(bookkeeping)
