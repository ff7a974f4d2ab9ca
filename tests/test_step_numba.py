"""The compiled part of a step against the tensor operations that specify it, step by step."""

import pytest
from step_pairs import SHAPES, check_not_finite, check_pair


@pytest.mark.parametrize("shape", SHAPES)
def test_both_do_the_same(shape):
    check_pair("numba", shape, range(6))


def test_logits_that_are_not_finite_are_told_only_where_they_are_used():
    check_not_finite("numba")
