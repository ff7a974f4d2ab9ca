"""Rotary tables: cosine and sine of each position's angles, for rope types default and llama3.

Angles are the float32 product of a float32 frequency and the position, as in the published models'
own code: the weights were trained with these roundings. Knows nothing of how rows are rotated
(`kernels/rope_write.py`).
"""

import math

import torch

from lookahead.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32: radians per position of each pair of elements."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.rope_type == "default":
        return frequencies
    # llama3 (Llama 3.1): short wavelengths stay, long ones are stretched by `factor`, those between
    # the two bounds blend linearly in the number of turns within the original context.
    turns = rope.original_max_position_embeddings / (2 * math.pi / frequencies)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(turns < rope.low_freq_factor, frequencies / rope.factor, blended)
    return torch.where(turns > rope.high_freq_factor, frequencies, stretched)


def rope_tables(
    rope: RopeConfig,
    head_dim: int,
    num_positions: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, each [num_positions, head_dim / 2] of `dtype`, computed in float32."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)
