"""A checkpoint directory so small that loading it takes no time: random weights, byte-level tokenizer.

The model writes a few letters and spaces only, so that a character is a token and text is plain.
"""

import json
from pathlib import Path
from typing import Any

from oracles.naive_llama import random_checkpoint
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from vocabularies import write_json

WRITTEN = " abcdefgh"
END = "<|end|>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}a:"


def write_tiny_checkpoint(
    directory: Path,
    *,
    seed: int = 1,
    max_position_embeddings: int = 512,
    eos_token_id: int | list[int] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """Write the checkpoint; by default nothing that the model writes is an end-of-text id."""
    tokenizer = byte_tokenizer()
    weights, config = tiny_model(seed, max_position_embeddings)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    parameters = {name: weight.float() for name, weight in weights.items()}
    save_file(parameters, directory / "model.safetensors")
    config["eos_token_id"] = tokenizer.token_to_id(END)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    write_json(directory / "config.json", config)
    write_json(directory / "tokenizer_config.json", settings)
    if eos_token_id is not None:
        write_json(directory / "generation_config.json", {"eos_token_id": eos_token_id})
    return directory


def tiny_model(
    seed: int = 1, max_position_embeddings: int = 512
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and configuration, before an end-of-text id is set."""
    tokenizer = byte_tokenizer()
    weights, config = random_checkpoint(
        seed,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=max_position_embeddings,
    )
    written = [tokenizer.encode(character).ids[0] for character in WRITTEN]
    silent = [token for token in range(tokenizer.get_vocab_size()) if token not in written]
    weights["lm_head.weight"][silent] = 0
    return weights, config


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and one that ends a text. It adds nothing to a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    return tokenizer


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **changes})
