"""From a checkpoint directory to a model and its tokenizer, on the device that was asked for."""

from pathlib import Path
from typing import NamedTuple

import torch

from lookahead.config import ModelConfig, check_whole
from lookahead.devices import choose_device, choose_dtype, choose_implementation
from lookahead.errors import InputError
from lookahead.kernels.checks import check_can_run
from lookahead.models.checkpoint_config import read_model_config
from lookahead.models.llama import Llama
from lookahead.models.loader import load_weights
from lookahead.tokenizer import Tokenizer

DEFAULT_MAX_LENGTH = 4096


class Where(NamedTuple):
    """Where and in what precision a model runs, and by which implementation of the kernels."""

    device: torch.device
    dtype: torch.dtype
    implementation: str

    @classmethod
    def choose(cls, device: str, dtype: str, implementation: str) -> "Where":
        """What these names mean here, "auto" among them. Raises InputError for what cannot be had."""
        chosen_device = choose_device(device)
        chosen_dtype = choose_dtype(dtype, chosen_device)
        implementation = choose_implementation(implementation, chosen_device, chosen_dtype)
        try:
            check_can_run(implementation, chosen_device, chosen_dtype)
        except ValueError as error:
            raise InputError(str(error)) from error
        return cls(chosen_device, chosen_dtype, implementation)


def read_checkpoint(path: Path, max_length: int | None) -> tuple[ModelConfig, Tokenizer, int]:
    """All but the weights, and `max_length` or what it is by default. Raises InputError where they do
    not fit together."""
    config = read_model_config(path)
    limit = config.max_position_embeddings
    if max_length is None:
        max_length = min(DEFAULT_MAX_LENGTH, limit)
    check_whole("max_length", max_length, least=2)
    if max_length > limit:
        raise InputError(f"max_length {max_length} is more than the {limit} positions of the model")
    tokenizer = Tokenizer.load(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"{path}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, expected fewer than "
            f"the vocab_size {config.vocab_size} of config.json"
        )
    return config, tokenizer, max_length


def load_model(
    path: Path, config: ModelConfig, where: Where, num_positions: int, exact: bool
) -> Llama:
    """The model for rows at positions 0..num_positions-1."""
    weights = load_weights(path, config, where.dtype, where.device)
    return Llama(config, weights, num_positions, where.implementation, exact)
