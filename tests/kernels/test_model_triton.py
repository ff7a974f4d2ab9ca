"""Whole models through the Triton kernels in the interpreter: the ids are those of the torch path."""

from pathlib import Path

import pytest
import torch
from oracles.naive_llama import random_checkpoint
from tiny_models import build_engine, build_llama

from lookahead.config import LookaheadConfig
from lookahead.engine import Engine

pytest.importorskip("triton", reason="Triton is not available for this platform")

SMOLLM2 = Path(__file__).parents[2] / "checkpoints" / "smollm2-135m-instruct"
PROMPT = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 3, 1, 4]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("mode", ["lookahead", "autoregressive"])
def test_a_tiny_model_writes_what_it_writes_through_torch(mode):
    checkpoint = random_checkpoint(1, vocab_size=8, head_dim=16)
    results = [
        build_engine(build_llama(checkpoint, torch.float32, implementation=name)).generate(
            PROMPT, max_new_tokens=16, mode=mode, lookahead=LookaheadConfig(3, 4, 2)
        )
        for name in ("triton", "torch")
    ]
    assert results[0].token_ids == results[1].token_ids
    assert results[0].steps == results[1].steps
    assert results[0].new_tokens == 16


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lookahead", "autoregressive"])
def test_smollm2_writes_what_it_writes_through_torch(mode):
    if not SMOLLM2.is_dir():
        pytest.skip("no SmolLM2 checkpoint: `make test` makes it")
    results = []
    for name in ("triton", "torch"):
        engine = Engine.load(
            SMOLLM2, device="cpu", dtype="float32", max_length=128, implementation=name
        )
        results.append(
            engine.generate(
                "def is_prime(n):",
                max_new_tokens=16,
                mode=mode,
                lookahead=LookaheadConfig(2, 3, 2),
            )
        )
    assert results[0].token_ids == results[1].token_ids
    assert results[0].new_tokens == 16
