"""A GGUF file to a checkpoint directory: `python -m lookahead.import_gguf FILE OUT_DIR`.

Knows how a checkpoint is written: the Hugging Face layout of files, all of it or nothing. Weights
become float32 with exactly the values that dequantising gives. Knows nothing of running a model, and
nothing that runs one needs it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from tokenizers import Tokenizer
from tqdm import tqdm

from lookahead.command_line import Parser
from lookahead.errors import InputError
from lookahead.gguf_config import read_config, refuse_unsupported
from lookahead.gguf_file import open_gguf, read_metadata
from lookahead.gguf_tokenizer import read_special_ids, read_tokenizer, read_tokenizer_config
from lookahead.gguf_weights import Weight, find_weights, weight_values

if TYPE_CHECKING:  # gguf is an optional extra
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderTensor

SHARD_BYTES = 2_000_000_000


@dataclass(frozen=True)
class Checkpoint:
    """What is to be written: weights and where they come from, tokenizer, JSON files by name."""

    weights: list[tuple[Weight, ReaderTensor]]
    tokenizer: Tokenizer
    json_files: dict[str, dict[str, Any]]


def import_gguf(file: Path, out_dir: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the model in `file` as a checkpoint to `out_dir`, which must be new or empty.

    Raises InputError for anything wrong with either; then, as after an interrupt, nothing is left
    behind. Holds at most `shard_bytes` of weights in memory, or one tensor where that is more.
    """
    out_dir = Path(out_dir).resolve()
    try:
        free = not out_dir.exists() or (out_dir.is_dir() and not any(out_dir.iterdir()))
    except OSError as error:
        raise InputError(f"{out_dir} cannot be used: {error.strerror}; name a new one") from error
    if not free:
        raise InputError(f"{out_dir} exists and is not an empty directory; name a new one")
    try:
        checkpoint = _checkpoint(open_gguf(Path(file)))
        _write(checkpoint, out_dir, shard_bytes)
    except InputError as error:
        raise InputError(f"cannot import {file}: {error}") from error


def _checkpoint(reader: GGUFReader) -> Checkpoint:
    """Check everything but the weights' values, so that what can fail fails before writing."""
    metadata = read_metadata(reader)
    refuse_unsupported(metadata)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = read_config(metadata, tensors)
    weights = find_weights(config, tensors)
    special_ids = read_special_ids(metadata, config["vocab_size"])
    end_ids = [special_ids[name] for name in ("eos", "eot", "eom") if name in special_ids]
    generation = {
        "bos_token_id": special_ids.get("bos"),
        "eos_token_id": list(dict.fromkeys(end_ids)) or None,
        "pad_token_id": special_ids.get("pad"),
    }
    config |= {**generation, "eos_token_id": special_ids.get("eos")}
    json_files = {
        "tokenizer_config.json": read_tokenizer_config(metadata, special_ids),
        "generation_config.json": generation,
        "config.json": config,
    }
    return Checkpoint(weights, read_tokenizer(metadata, special_ids), json_files)


def _write(checkpoint: Checkpoint, out_dir: Path, shard_bytes: int) -> None:
    """Write next to `out_dir`, then rename. config.json, which loading needs, is written last."""
    scratch = out_dir.with_name(f".{out_dir.name}.partial-{os.getpid()}")
    try:
        scratch.mkdir(parents=True)
        _require_space(checkpoint, scratch)
        # Not by the library's own `save`, which raises bare Exception when the disk is full.
        tokenizer = checkpoint.tokenizer.to_str(pretty=True)
        (scratch / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        _write_weights(checkpoint.weights, scratch, shard_bytes)
        for name, content in checkpoint.json_files.items():
            _write_json(scratch / name, content)
        scratch.replace(out_dir)
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)):
            raise InputError(f"{out_dir} cannot be written: {error}") from error
        raise


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def _bytes(weight: Weight) -> int:
    return 4 * math.prod(weight.shape)


def _require_space(checkpoint: Checkpoint, directory: Path) -> None:
    needed = sum(_bytes(weight) for weight, _ in checkpoint.weights)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise InputError(f"the float32 weights need {needed:,} bytes of disk, {free:,} are free")


def _write_weights(
    weights: list[tuple[Weight, ReaderTensor]], directory: Path, shard_bytes: int
) -> None:
    from safetensors.numpy import save_file

    shards: list[list[tuple[Weight, ReaderTensor]]] = [[]]
    for entry in weights:
        filled = sum(_bytes(weight) for weight, _ in shards[-1])
        if shards[-1] and filled + _bytes(entry[0]) > shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    weight_map = {}
    # disable=None: a bar on a terminal, nothing elsewhere
    with tqdm(total=len(weights), desc="importing", unit="tensor", disable=None) as progress:
        for number, shard in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            if len(shards) == 1:
                name = "model.safetensors"
            values = {}
            for weight, tensor in shard:
                values[weight.name] = weight_values(weight, tensor)
                weight_map[weight.name] = name
                progress.update()
            save_file(values, directory / name, metadata={"format": "pt"})
            # The library makes files that only their owner can read.
            shutil.copymode(directory / "tokenizer.json", directory / name)
    if len(shards) > 1:
        total = sum(_bytes(weight) for weight, _ in weights)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(directory / "model.safetensors.index.json", index)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m lookahead.import_gguf",
        description="Turn a GGUF file of the llama architecture into a checkpoint directory.",
    )
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument(
        "out_dir", type=Path, help="the directory to make, which must not exist yet"
    )
    try:
        options = parser.parse_args(arguments)
        import_gguf(options.file, options.out_dir)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"wrote {options.out_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
