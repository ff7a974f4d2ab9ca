"""Rotary frequencies and tables against transformers and against hand-made numbers."""

import math
from typing import Any

import pytest
import torch

from lookahead.config import RopeConfig
from lookahead.models.rope import inverse_frequencies, rope_tables

LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# theta, head_dim, scaling: published models, then small ones whose blend holds several pairs
MODELS: dict[str, tuple[float, int, dict[str, Any] | None]] = {
    "Llama 2": (10000.0, 128, None),
    "SmolLM2": (100000.0, 64, None),
    "CodeLlama": (1000000.0, 128, None),
    "head_dim 80": (10000.0, 80, None),
    "Llama 3.1": (500000.0, 128, LLAMA_3_1),
    "Llama 3.2": (500000.0, 64, {**LLAMA_3_1, "factor": 32.0}),
    "short context": (10000.0, 96, {**LLAMA_3_1, "original_max_position_embeddings": 64}),
    "wide blend": (
        10000.0,
        32,
        {**LLAMA_3_1, "low_freq_factor": 0.5, "high_freq_factor": 50.0, "factor": 3.5},
    ),
}
# Beyond the original context of each; neighbours at every scale.
POSITIONS = (0, 1, 2, 63, 64, 65, 1000, 8191, 8192, 8193, 40000, 131071)


def rope_config(theta: float, scaling: dict[str, Any] | None) -> RopeConfig:
    return RopeConfig(theta=theta, **(scaling or {}))


def theirs(theta: float, head_dim: int, scaling: dict[str, Any] | None) -> Any:
    """transformers' own rotary embedding of such a model."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    config = transformers.LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters=rope,
    )
    return config, LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("model", MODELS)
def test_frequencies_are_those_of_transformers(model):
    theta, head_dim, scaling = MODELS[model]
    config, embedding = theirs(theta, head_dim, scaling)
    actual = inverse_frequencies(rope_config(theta, scaling), head_dim)
    assert actual.shape == (head_dim // 2,)
    assert actual.dtype == torch.float32
    if scaling is None:
        assert torch.equal(actual, embedding.inv_freq)
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert attention_factor == 1.0
    # the blend is the same formula with its divisions elsewhere: two units in the last place
    torch.testing.assert_close(actual, expected, rtol=2.4e-7, atol=0)
    plain = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    kept, stretched = actual == plain, actual == plain / scaling["factor"]
    assert kept.any()
    assert stretched.any()
    assert not (kept | stretched).all()
    assert torch.equal(actual[kept | stretched], expected[kept | stretched])


@pytest.mark.parametrize("model", MODELS)
def test_tables_are_those_of_transformers(model):
    theta, head_dim, scaling = MODELS[model]
    _, embedding = theirs(theta, head_dim, scaling)
    rope = rope_config(theta, scaling)
    for dtype in (torch.float32, torch.float64):
        cos, sin = rope_tables(rope, head_dim, 131072, dtype, torch.device("cpu"))
        assert cos.shape == sin.shape == (131072, head_dim // 2)
        assert cos.dtype == sin.dtype == dtype
        positions = torch.tensor([POSITIONS])
        expected = embedding(torch.zeros(1, dtype=dtype), positions)
        # a frequency that differs in its last places turns a far position by so much more
        moved = (inverse_frequencies(rope, head_dim) - embedding.inv_freq).abs()
        allowed = torch.tensor(POSITIONS).unsqueeze(1) * moved * 2 + 1e-7
        for actual, whole in zip((cos, sin), expected, strict=True):
            half = whole[0, :, : head_dim // 2]
            assert torch.equal(half, whole[0, :, head_dim // 2 :])
            assert ((actual[list(POSITIONS)] - half).abs() <= allowed).all()


def test_llama3_by_hand():
    # theta 16, head_dim 8: 1, 1/2, 1/4, 1/8 radians a token, 2 pi x 1, 2, 4, 8 tokens a turn. In 48
    # tokens that is 7.6, 3.8, 1.9 and 0.95 turns: kept above 4, divided by 8 below 1, blended between.
    rope = rope_config(16.0, {**LLAMA_3_1, "original_max_position_embeddings": 48})
    blend = [(48 / (4 * math.pi) - 1) / 3, (48 / (8 * math.pi) - 1) / 3]
    expected = [
        1.0,
        blend[0] / 2 + (1 - blend[0]) / 2 / 8,
        blend[1] / 4 + (1 - blend[1]) / 4 / 8,
        1 / 8 / 8,
    ]
    actual = inverse_frequencies(rope, 8)
    assert actual.tolist() == pytest.approx(expected, rel=1e-6)
    cos, sin = rope_tables(rope, 8, 100, torch.float64, torch.device("cpu"))
    for position in (0, 1, 47, 48, 99):
        angles = [position * frequency for frequency in expected]
        assert cos[position].tolist() == pytest.approx(list(map(math.cos, angles)), abs=1e-5)
        assert sin[position].tolist() == pytest.approx(list(map(math.sin, angles)), abs=1e-5)


def test_angles_are_rounded_to_float32_whatever_the_dtype():
    rope = RopeConfig(theta=10000.0)
    cos, sin = rope_tables(rope, 4, 50001, torch.float64, torch.device("cpu"))
    angles = torch.tensor([[50000.0]]) * inverse_frequencies(rope, 4)
    assert torch.equal(cos[50000:], angles.cos().double())
    assert torch.equal(sin[50000:], angles.sin().double())
    short_cos, short_sin = rope_tables(rope, 4, 7, torch.float64, torch.device("cpu"))
    assert torch.equal(short_cos, cos[:7])
    assert torch.equal(short_sin, sin[:7])
