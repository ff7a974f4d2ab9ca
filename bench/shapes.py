"""Engines of a known model's shape with random weights, made on the spot and on the device.

What such a model writes means nothing; what its steps cost is what the real one's cost. Knows shapes
and no files: ids go in and out, and no text.
"""

from collections.abc import Sequence

import torch

from lookahead import Engine
from lookahead.config import ModelConfig, RopeConfig
from lookahead.detokenizer import ByteRule, Decoding, IncrementalDetokenizer
from lookahead.devices import choose_implementation, refuse_out_of_memory
from lookahead.models.llama import Llama
from lookahead.models.weights import LlamaWeights
from lookahead.prefill import CHUNK_ROWS

SEED = 0
SPREAD = 0.02


def _shape(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    heads: tuple[int, int, int],
    positions: int,
    theta: float,
    is_tied: bool = False,
) -> ModelConfig:
    num_q_heads, num_kv_heads, head_dim = heads
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=theta),
        tie_word_embeddings=is_tied,
    )


SHAPES = {
    "llama-2-7b": _shape(32000, 4096, 11008, 32, (32, 32, 128), 4096, 1e4),
    "llama-3-8b": _shape(128256, 4096, 14336, 32, (32, 8, 128), 8192, 5e5),
    "smollm2-135m": _shape(49152, 576, 1536, 30, (9, 3, 64), 8192, 1e5, is_tied=True),
    "tiny": _shape(256, 32, 64, 2, (4, 2, 8), 4096, 1e4),
}


class SilentTokenizer:
    """A tokenizer whose ids have no text."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def decode(self, ids: Sequence[int]) -> str:
        """No text."""
        return ""

    def detokenizer(self) -> IncrementalDetokenizer:
        """Gives no text."""
        return IncrementalDetokenizer(Decoding(lambda token: None, ByteRule.SEQUENCE, strip_left=0))


def random_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
    exact: bool = True,
) -> Llama:
    """Random weights, always the same ones. Raises InputError where they do not fit into memory."""
    implementation = choose_implementation("auto", device, dtype)
    with refuse_out_of_memory(f"a model of {config.num_layers} layers", device):
        weights = LlamaWeights.empty(config, dtype, device)
        generator = torch.Generator(device).manual_seed(SEED)
        for target in weights.targets(config).values():
            if target.dim() == 1:
                target.fill_(1.0)
            else:
                target.normal_(0.0, SPREAD, generator=generator)
        return Llama(config, weights, num_positions, implementation, exact)


def random_engine(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_length: int,
    step_rows: int,
    exact: bool = True,
) -> Engine:
    """An engine of random weights with room for so many tokens and rows a step."""
    model = random_model(config, dtype, device, max_length + max(step_rows, CHUNK_ROWS), exact)
    with refuse_out_of_memory(f"a context of {max_length} tokens", device):
        tokenizer = SilentTokenizer(config.vocab_size)
        return Engine(model, tokenizer, max_length=max_length, max_step_rows=step_rows)
